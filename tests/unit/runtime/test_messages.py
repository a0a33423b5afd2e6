"""Every message has a receiver, and the documentation says who it is."""

from pathlib import Path
from typing import Any

from appo.algorithms.runtime import messages
from appo.algorithms.runtime.messages import ALL, Address, Wake
from appo.algorithms.runtime.roles import ACTOR, LEARNER, MAIN, POLICY_WORKER
from appo.algorithms.runtime.topology import Topology

BOOK = Topology("central", 1, 1, 1, num_policies=1, policy_workers_per_policy=1, rows=1, rollout=1).address_book()
NAMES_IT = Wake(Address("worker in the message"))
PAGE = Path(messages.__file__).with_name("README.md")

RUNTIME = {role.name: role for role in (MAIN, ACTOR, POLICY_WORKER, LEARNER)}  # algorithms may have added theirs


KINDS = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, tuple)}


def receiver(kind: Any) -> Address:
    return BOOK.address_of(NAMES_IT if kind is Wake else kind(*[0] * len(kind._fields)))


def test_every_message_has_a_receiver() -> None:
    assert len(KINDS) > 20
    assert {receiver(kind).role for kind in KINDS} == {*RUNTIME, ALL.role, NAMES_IT.address.role}
