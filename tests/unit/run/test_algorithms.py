"""Classes behind `--algo=module:Class`: what is no algorithm is refused in one line that names the missing members."""

import re
from pathlib import Path

import pytest

from appo.algorithms.run.algorithms import ALGORITHMS, find_algorithm
from appo.algorithms.runtime.algorithm import Algorithm
from appo.utils.errors import UsageError

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
