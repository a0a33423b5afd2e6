"""Environments that a program gives as a class or function: how they are named, found and sent."""

import functools
import json
import pickle
import re
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from appo.algorithms.run.folder import new_name, newest_run
from appo.envs import given
from appo.envs.config import EnvConfig
from appo.envs.make import check_name, is_factory, make_single
from appo.envs.presets import find_name
from appo.envs.toys.toy import Corridor
from appo.utils.errors import UsageError

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


def corridor() -> Corridor:
    """A function that any process can import."""
    return Corridor(4)


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
        (corridor, "tests.unit.envs.test_given:corridor"),
    ],
)
def test_names(env: object, name: str) -> None:
    """What can be imported is named by its module, so that any command can find it."""
    assert given.name_of(env, is_factory) == name
    check_name(EnvConfig(env=name))
    assert isinstance(make_single(EnvConfig(env=name)), gymnasium.Env)


def test_what_cannot_be_imported_travels_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvConfig(env=given.name_of(local_class(5), is_factory), env_kwargs={"extra": 2})
    found = in_another_process(config, monkeypatch)
    assert found == config
    env = make_single(found)
    assert type(env.unwrapped).__name__ == "Local"
    assert env.unwrapped.length == 7


def test_flags_without_such_a_class_carry_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    local = local_class(5)
    name = given.name_of(local, is_factory)
    assert b"cloudpickle" not in pickle.dumps(EnvConfig(env="CartPole-v1"))
    assert in_another_process(EnvConfig(env="CartPole-v1"), monkeypatch) == EnvConfig(env="CartPole-v1")
    with pytest.raises(UsageError, match="give it again"):
        given.find(name)


def test_the_newest_class_of_a_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that is run again makes another class of the same name."""
    for length in (3, 6):
        config = EnvConfig(env=given.name_of(local_class(length), is_factory))
        found = in_another_process(config, monkeypatch)
        assert make_single(found).unwrapped.length == length


def test_others_that_are_called_alike_do_not_take_each_others_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run makes what it was given, also in workers that start later; the same object keeps its name."""
    made: list[Callable[[], Corridor]] = [lambda: Corridor(3), lambda: Corridor(5), lambda: Corridor(7)]
    names = [given.name_of(one, is_factory) for one in made]
    assert names == ["<program>:function", "<program>:function#2", "<program>:function#3"]
    assert [given.name_of(one, is_factory) for one in reversed(made)] == names[::-1]
    assert [make_single(EnvConfig(env=name)).unwrapped.length for name in names] == [3, 5, 7]
    contents = [pickle.dumps(EnvConfig(env=name)) for name in names]
    monkeypatch.setattr(given, "_objects", {})
    monkeypatch.setattr(given, "_sent", {})
    assert [make_single(pickle.loads(content)).unwrapped.length for content in contents] == [3, 5, 7]


def test_a_number_is_no_part_of_what_a_run_goes_by(tmp_path: Path) -> None:
    first, second = local_class(3), local_class(4)
    names = [given.name_of(one, is_factory) for one in (first, second)]
    assert names == ["<program>:Local", "<program>:Local#2"]
    assert given.is_again(*names)
    assert given.is_again(*reversed(names))
    assert new_name(tmp_path, names[1]) == "Local_1"
    assert find_name("<program>:CartPole-v1#2") == find_name("<program>:CartPole-v1") == "CartPole"
    assert find_name("<program>:CartPole#2") is find_name("my_module:CartPole") is None  # a class of the user
    with pytest.raises(UsageError, match=r"env=Other to train"):
        given.find("<program>:Other#2")


def test_the_newest_run_of_a_class_is_found_by_the_name_of_its_module(tmp_path: Path) -> None:
    for name, env in (("a", "<program>:Local"), ("b", "<program>:Other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"env": env}))
    assert newest_run(tmp_path, "my_module:Local") == tmp_path / "a"
    with pytest.raises(UsageError, match="no run of my_module:Third"):
        newest_run(tmp_path, "my_module:Third")


def test_a_function_that_env_does_not_take_by_name_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module knows no environments: `--env` refuses such names, as those of a stranger's run."""
    module = ModuleType("knows_none")
    exec("def build():\n    from appo.envs.toys.toy import Corridor\n    return Corridor(6)", module.__dict__)
    module.__spec__ = ModuleSpec("knows_none", None)
    monkeypatch.setitem(sys.modules, "knows_none", module)
    name = given.name_of(module.build, is_factory)
    assert name == "<program>:build"
    assert make_single(EnvConfig(env=name)).unwrapped.length == 6


def test_an_object_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"env=CartPoleEnv\(...\) is an object: give the class, .* such as env=CartPoleEnv"
    ):
        given.name_of(CartPoleEnv(), is_factory)


def test_what_cannot_be_sent_is_one_line_that_says_what_to_do() -> None:
    lock = threading.Lock()

    def build() -> CartPoleEnv:
        assert lock
        return CartPoleEnv()

    name = given.name_of(build, is_factory)
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
        path.relative_to(ROOT) for path, text in sources.items() if re.search(r"given\.take\(|\bimport take\b", text)
    ]
    assert callers == [Path("envs/config.py")]
