"""Classes behind `--algo=module:Class`: what is no algorithm is refused in one line that names the missing members."""

import ast
import re
from collections import Counter
from dataclasses import dataclass
from inspect import getfile
from pathlib import Path

import pytest

from appo.algorithms.run.algorithms import ALGORITHMS, find_algorithm
from appo.algorithms.runtime.algorithm import Algorithm
from appo.utils.errors import UsageError
from appo.utils.flags import flag, flags_of, same_flag

MODULE = '''
from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.parts.algorithm import ActorCriticAlgorithm
from appo.algorithms.runtime.algorithm import Algorithm

class Lookalike:
    """Has the members of an algorithm that are called most, and is no subclass of one."""

for member in (
    "name flags metrics panel recorded make_model make_policy make_source make_learner fields workers needs_actors"
    " synchronous replays values streams explores find_spec variant"
).split():
    setattr(Lookalike, member, getattr(APPO, member))

class Empty(Algorithm):
    pass

class Nameless(ActorCriticAlgorithm):
    flags, metrics = APPO.flags, {}
    def learner_class(self): ...

class Whole(Algorithm):
    name, flags, metrics = "Whole", APPO.flags, {}
    def recorded(self, spec): ...
    def make_model(self, context): ...
    def make_policy(self, context, flat): ...
    def make_source(self, context, trajectories, sampling, device): ...
    def make_learner(self, context, flat, device): ...

class Raising(Whole):
    def __init__(self): raise ValueError("no")

function = print
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "algorithms_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "algorithms_of_a_user"


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("Lookalike", "is no algorithm: it is no subclass of appo.algorithms.runtime.algorithm.Algorithm"),
        ("function", "is no algorithm: it is no subclass of appo.algorithms.runtime.algorithm.Algorithm"),
        (
            "Empty",
            "is no algorithm: it has no name, flags, metrics, make_learner, make_model, make_policy, make_source,"
            " recorded",
        ),
        ("Nameless", "is no algorithm: it has no name"),
        ("Raising", "failed: ValueError: no"),
        ("Missing", "failed: AttributeError: module 'algorithms_of_a_user' has no attribute 'Missing'"),
    ],
)
def test_what_is_no_algorithm_is_refused_in_one_line(module: str, kind: str, refusal: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(f'--algo={module}:{kind} {refusal}')}$"):
        find_algorithm(f"{module}:{kind}")


def test_an_algorithm_has_five_methods_to_write(module: str) -> None:
    found = find_algorithm(f"{module}:Whole")
    assert found.variant(None) is found
    assert Algorithm.__abstractmethods__ == {
        "recorded", "make_model", "make_policy", "make_source", "make_learner",
    }  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_of_ours_has_its_name(name: str) -> None:
    assert find_algorithm(name).name == name


def test_a_flag_of_several_algorithms_is_declared_once() -> None:
    files = {getfile(cls) for algo in ALGORITHMS for cls in find_algorithm(algo).flags.__mro__[:-1]}
    declared = Counter(
        node.target.id
        for file in files
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Name) and node.value.func.id == "flag"
    )
    assert declared["gamma"] == declared["learning_rate"] == declared["value_loss_coeff"] == 1
    learning = {name for algo in ALGORITHMS for name in flags_of(find_algorithm(algo).flags)}
    assert {name for name in learning if declared[name] != 1} == set()


def test_another_default_is_a_value_and_no_second_declaration() -> None:
    @dataclass(frozen=True)
    class One:
        rate: float = flag(0.5, "size of a step", minimum=0, mutation="scale")
        names: dict[str, object] = flag({"a": 1}, "names")

    @dataclass(frozen=True)
    class Other:
        rate: float = same_flag(One, "rate", default=0.25)
        named: float = same_flag(One, "rate", "size of another step", mutation=None)
        names: dict[str, object] = same_flag(One, "names")

    one, other = flags_of(One), flags_of(Other)
    assert Other() == Other(0.25, 0.5, {"a": 1})
    assert (other["rate"].help, other["rate"].minimum, other["rate"].mutation) == ("size of a step", 0, "scale")
    assert (other["named"].help, other["named"].minimum, other["named"].mutation) == ("size of another step", 0, None)
    assert other["names"] == one["names"]
