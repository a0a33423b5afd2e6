"""Environments that a program gives as a class or function: how they are named, found and sent."""

import functools
import pickle
import re
import threading
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from envs import given
from envs.config import EnvConfig
from envs.make import check_name, make_single
from envs.toys.toy import Corridor
from utils.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "_objects", {})
    monkeypatch.setattr(given, "_sent", {})


def local_class(length: int) -> type[Corridor]:
    """A class that no import finds, as those of notebooks."""

    class Local(Corridor):
        def __init__(self, extra: int = 0) -> None:
            super().__init__(length + extra)

    return Local


def in_another_process(config: EnvConfig, monkeypatch: pytest.MonkeyPatch) -> EnvConfig:
    """The flags as a worker gets them, which knows nothing that was given to main."""
    content = pickle.dumps(config)
    monkeypatch.setattr(given, "_objects", {})
    monkeypatch.setattr(given, "_sent", {})
    found = pickle.loads(content)
    assert isinstance(found, EnvConfig)
    return found


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("CartPole-v1", "CartPole-v1"),
        (CartPoleEnv, "gymnasium.envs.classic_control.cartpole:CartPoleEnv"),
        (local_class(3), "<program>:Local"),
        (lambda length=3: Corridor(length), "<program>:function"),
        (functools.partial(CartPoleEnv, render_mode=None), "<program>:CartPoleEnv"),
    ],
)
def test_names(env: object, name: str) -> None:
    """What can be imported is named by its module, so that any command can find it."""
    assert given.name_of(env) == name
    check_name(EnvConfig(env=name))
    assert isinstance(make_single(EnvConfig(env=name)), gymnasium.Env)


def test_what_cannot_be_imported_travels_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvConfig(env=given.name_of(local_class(5)), env_kwargs={"extra": 2})
    found = in_another_process(config, monkeypatch)
    assert found == config
    env = make_single(found)
    assert type(env.unwrapped).__name__ == "Local"
    assert env.unwrapped.length == 7


def test_flags_without_such_a_class_carry_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    local = local_class(5)
    name = given.name_of(local)
    assert b"cloudpickle" not in pickle.dumps(EnvConfig(env="CartPole-v1"))
    assert in_another_process(EnvConfig(env="CartPole-v1"), monkeypatch) == EnvConfig(env="CartPole-v1")
    with pytest.raises(UsageError, match="give it again"):
        given.find(name)


def test_the_newest_class_of_a_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that is run again makes another class of the same name."""
    for length in (3, 6):
        config = EnvConfig(env=given.name_of(local_class(length)))
        found = in_another_process(config, monkeypatch)
        assert make_single(found).unwrapped.length == length


def test_an_object_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"env=CartPoleEnv\(...\) is an object: give the class, .* such as env=CartPoleEnv"
    ):
        given.name_of(CartPoleEnv())


def test_what_cannot_be_sent_is_one_line_that_says_what_to_do() -> None:
    lock = threading.Lock()

    def build() -> CartPoleEnv:
        assert lock
        return CartPoleEnv()

    name = given.name_of(build)
    with pytest.raises(
        UsageError, match="env=build cannot be sent to worker processes: TypeError: cannot pickle"
    ) as caught:
        given.to_bytes(name)
    assert str(caught.value).endswith('make such things in its constructor, or train with inference="serial"')


def test_a_run_whose_class_is_not_there_says_that_it_is_needed_again() -> None:
    with pytest.raises(UsageError) as caught:
        check_name(EnvConfig(env="<program>:MyEnv"))
    assert str(caught.value) == (
        "the environment of this run was given as a class or function, MyEnv, which no file keeps: give it again, as"
        " env=MyEnv to train or load_policy, or put it into a module and give --env=module:MyEnv"
    )


@pytest.mark.parametrize(
    ("now", "is_again"),
    [("<program>:MyEnv", True), ("mine:MyEnv", True), ("a.b:MyEnv", True), ("mine:Other", False), ("MyEnv-v0", False)],
)
def test_a_class_of_the_same_name_is_that_of_the_run(now: str, is_again: bool) -> None:
    assert given.is_again("<program>:MyEnv", now) == is_again
    assert not given.is_again("mine:MyEnv", now)


def test_nothing_but_the_bytes_of_our_own_parent_is_unpickled() -> None:
    """One file imports cloudpickle, and hands it what it was told by `take`; no file of a run reaches it."""
    sources = {
        path: path.read_text() for part in ("algorithms", "envs", "utils") for path in (ROOT / part).rglob("*.py")
    }
    users = [
        path.relative_to(ROOT) for path, text in sources.items() if re.search(r"\b(import|from) (cloud)?pickle\b", text)
    ]
    assert users == [Path("envs/given.py")]
    callers = [
        path.relative_to(ROOT) for path, text in sources.items() if "given.take(" in text or "import take" in text
    ]
    assert callers == [Path("envs/config.py")]
