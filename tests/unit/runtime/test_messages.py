"""Every message has a receiver, and the documentation says who it is."""

import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from appo.algorithms.runtime import messages
from appo.algorithms.runtime.messages import ALL, RECEIVERS, Address, AddressBook, Message, Wake, check_receivers, to
from appo.algorithms.runtime.roles import ACTOR, LEARNER, MAIN, POLICY_WORKER
from appo.algorithms.runtime.topology import Topology

BOOK = Topology("central", 1, 1, 1, num_policies=1, policy_workers_per_policy=1, rows=1, rollout=1).address_book()
NAMES_IT = Wake(Address("worker in the message"))
PAGE = Path(messages.__file__).with_name("README.md")

RUNTIME = {role.name: role for role in (MAIN, ACTOR, POLICY_WORKER, LEARNER)}  # algorithms may have added theirs


def receiver(kind: Any) -> Address:
    return BOOK.address_of(NAMES_IT if kind is Wake else kind(*[0] * len(kind._fields)))


def test_every_message_has_a_receiver() -> None:
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, tuple)}
    assert set(RECEIVERS) == kinds == set(get_args(Message))
    assert {receiver(kind).role for kind in kinds} == {*RUNTIME, ALL.role, NAMES_IT.address.role}


def test_a_message_without_a_receiver_is_refused() -> None:
    class Forgotten(NamedTuple):
        policy: int

    class Addressed(NamedTuple):
        policy: int

    with pytest.raises(TypeError, match=r"without a receiver, which @to names: Forgotten$"):
        check_receivers({"Forgotten": Forgotten, "Address": Address, "number": 3} | vars(messages))
    try:
        assert to(AddressBook.learner)(Addressed) is Addressed
        check_receivers({"Addressed": Addressed} | vars(messages))
        assert BOOK.address_of(Addressed(0)) == Address("learner", 0)  # type: ignore[arg-type]
    finally:
        del RECEIVERS[Addressed]


@pytest.mark.parametrize("kind", ["ActionRequest", "CopyWeights", "TimeReport", "Stop"])
def test_the_module_cannot_be_imported_when_one_is_forgotten(kind: str) -> None:
    source = Path(messages.__file__).read_text()
    forgetful, count = re.subn(rf"@to\(.*\)\n(class {kind}\()", r"\1", source)
    assert count == 1
    with pytest.raises(TypeError, match=f"names: {kind}$"):
        exec(compile(forgetful, "messages", "exec"), {"__name__": messages.__name__})


def test_the_page_of_the_runtime_says_who_receives_what() -> None:
    text = PAGE.read_text().split("## Messages\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (`.+?) \| .+ \|$", text, re.MULTILINE)
    said = {(role, name) for role, names in rows for name in re.findall(r"`(\w+)`", names)}
    singular = {name: role.singular for name, role in RUNTIME.items()} | {ALL.role: "all"}
    singular[NAMES_IT.address.role] = NAMES_IT.address.role
    assert said == {(singular[receiver(kind).role], kind.__name__) for kind in RECEIVERS}
