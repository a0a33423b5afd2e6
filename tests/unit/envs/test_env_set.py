import logging
import traceback

import numpy as np
import pytest

from appo.envs.loop.env_set import IN_A_ROW, PERIOD_STEPS, EnvSet, FailureRule, OnFailure
from appo.envs.loop.python_loop import PythonLoop
from appo.utils.errors import EnvironmentFailure, NotFinite, SpaceMismatch
from tests.unit.envs.mortal import SPEC, Mortal, Mortals
from tests.unit.envs.rollouts import Rollout, collect


def played(*factories: Mortals, steps: int = 9, most: int = 10) -> tuple[PythonLoop, Rollout]:
    loop = PythonLoop(list(factories), name="Mortal", spec=SPEC, on_failure=OnFailure(most))
    zeros = np.zeros((len(factories), 1), np.int32)
    return loop, collect(loop, steps, list(range(7, 7 + len(factories))), lambda obs: zeros)


def column(rollout: Rollout, row: int) -> dict[str, list]:
    return {
        "obs": rollout.obs["obs"][:, row].astype(int).tolist(),
        "first": rollout.first[:, row].astype(int).tolist(),
        "reward": rollout.reward[:, row].tolist(),
        "terminated": np.flatnonzero(rollout.terminated[:, row]).tolist(),
    }


FAILED_IN_STEP_2 = {
    "obs": [[0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 0, 0], *([1, 0, s] for s in range(1, 6)), [1, 1, 0]],
    "first": [1, 0, 0, 1, 0, 0, 0, 0, 0, 1],
    "reward": [1, 2, 0, 11, 12, 13, 14, 15, 0],
    "terminated": [7],
}


@pytest.mark.usefixtures("workers_sigint")
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), MemoryError(), OSError(5)])
def test_a_step_that_fails_only_begins_an_episode_of_an_environment_made_again(error: BaseException) -> None:
    lone = played(Mortals({}), Mortals({}))[1]
    mortals = Mortals({(0, "step", 3): error})
    loop, rollout = played(Mortals({}), mortals, Mortals({}))
    assert column(rollout, 1) == FAILED_IN_STEP_2
    assert not rollout.truncated.any()
    for other in (0, 2):
        assert column(rollout, other) == column(lone, 0)
    assert loop.rebuilds == 1
    assert [mortal.calls["close"] for mortal in mortals.made] == [1, 0]
    loop.close()
    assert [mortal.calls["close"] for mortal in mortals.made] == [1, 1]


def test_a_reset_that_fails_takes_no_longer_than_one_that_does_not() -> None:
    loop, rollout = played(Mortals({(0, "reset", 2): ValueError("no")}))
    assert column(rollout, 0) == {
        "obs": [*([0, 0, s] for s in range(6)), *([1, 0, s] for s in range(4))],
        "first": [1, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        "reward": [1, 2, 3, 4, 5, 0, 11, 12, 13],
        "terminated": [4],
    }
    assert loop.rebuilds == 1


def test_a_first_reset_may_fail_too() -> None:
    mortals = Mortals({(0, "reset", 1): ValueError("no"), (1, "init", 1): ValueError("again")})
    loop, rollout = played(Mortals({}), mortals, steps=2)
    assert column(rollout, 1)["obs"] == [[2, 0, 0], [2, 0, 1], [2, 0, 2]]
    assert (loop.rebuilds, mortals.attempts) == (1, 3)


SEEN, NAN = np.array([0, 0, 3], np.float32), float("nan")


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's only word on a number too large for float32
@pytest.mark.parametrize(
    "odd",
    [
        (SEEN, NAN, False, False, {}),
        (SEEN, -np.inf, False, False, {}),
        (SEEN, 1e39, False, False, {}),
        (np.array([0, NAN, 3], np.float32), 3.0, False, False, {}),
        (np.array([0, 0, np.inf]), 3.0, False, False, {}),
        (np.array([NAN, 0, 0], np.float32), NAN, True, False, {"true_reward": 3.0}),
    ],
)
def test_a_step_that_is_not_finite_has_failed(odd: tuple) -> None:
    loop, rollout = played(Mortals({}), Mortals({(0, "step", 3): odd}))
    assert column(rollout, 1) == FAILED_IN_STEP_2
    assert (loop.rebuilds, rollout.episodes) == (1, [])


def test_a_reset_that_is_not_finite_has_failed() -> None:
    bad = (np.full(3, NAN, np.float32), {})
    rollout = played(Mortals({(0, "reset", 2): bad, (1, "reset", 1): bad}))[1]
    assert column(rollout, 0)["obs"][5:8] == [[0, 0, 5], [2, 0, 0], [2, 0, 1]]
    assert rollout.first[:7, 0].tolist() == [True] + [False] * 5 + [True]
    with pytest.raises(NotFinite, match=r"Mortal: env 1: observation key obs is not finite: nan at \[0\]"):
        played(Mortals({}), Mortals({(life, "reset", 1): bad for life in range(9)}))


def test_without_the_wish_what_is_not_finite_is_raised() -> None:
    with pytest.raises(NotFinite, match="Mortal: env 0: reward is not finite: nan"):
        played(Mortals({(0, "step", 1): (SEEN, NAN, False, False, {})}), most=0)


@pytest.mark.filterwarnings("ignore:overflow")
def test_huge_numbers_are_finite() -> None:
    """Also where their squares are not."""
    huge = (np.array([0, 3e38, -3e38], np.float32), 3e38, False, False, {})
    rollout = played(Mortals({(0, "step", 3): huge}), most=0)[1]
    assert rollout.reward[2, 0] == np.float32(3e38)


def test_seeds_of_environments_made_again_are_new_and_repeat() -> None:
    def seeds(seed: int) -> list[int]:
        mortals = Mortals({(0, "step", 1): ValueError("no"), (1, "step", 4): ValueError("no")})
        loop = PythonLoop([mortals], name="Mortal", spec=SPEC, on_failure=OnFailure(10))
        collect(loop, 5, [seed], lambda obs: np.zeros((1, 1), np.int32))
        return [mortal.seeds[0] for mortal in mortals.made]

    assert seeds(7) == seeds(7)
    assert len({*seeds(7), *seeds(8)}) == 6
    assert all(0 <= seed < 2**31 for seed in seeds(7))


@pytest.mark.parametrize("place", ["step", "reset", "init"])
def test_one_that_fails_without_a_step_in_between_is_given_up(place: str) -> None:
    errors = [ValueError(f"no {life}") for life in range(6)]
    plan = {(life, place, 1): error for life, error in enumerate(errors) if life or place != "init"}
    mortals = Mortals(plan | {(0, "step", 1): errors[0]})
    with pytest.raises(EnvironmentFailure, match="Mortal raised ValueError: no 2") as caught:
        played(Mortals({}), mortals)
    assert caught.value.__cause__ is errors[2]
    assert mortals.attempts == IN_A_ROW
    assert "another exception" not in "".join(traceback.format_exception(caught.value.__cause__))


def test_one_that_fails_too_often_is_given_up() -> None:
    mortals = Mortals({(life, "step", 4): ValueError("no") for life in range(9)})
    with pytest.raises(EnvironmentFailure):
        played(mortals, steps=100, most=5)
    assert mortals.attempts == 6


def test_without_the_wish_nothing_is_made_again() -> None:
    mortals = Mortals({(0, "step", 3): ValueError("no")})
    with pytest.raises(EnvironmentFailure, match="no"):
        played(mortals, most=0)
    assert mortals.attempts == 1


def test_what_another_one_would_repeat_is_raised_at_once() -> None:
    mortals = Mortals({(0, "step", 3): (np.zeros(4, np.float32), 0.0, False, False, {})})
    with pytest.raises(SpaceMismatch, match="expected shape"):
        played(mortals)
    assert mortals.attempts == 1


def test_one_made_again_must_have_the_same_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    mortals = Mortals({(0, "step", 3): ValueError("no")})
    loop = PythonLoop([mortals], name="Mortal", spec=SPEC, on_failure=OnFailure(10))
    monkeypatch.setattr(Mortal, "observation_space", Mortal.action_space)
    with pytest.raises(SpaceMismatch, match="env 0 has other spaces than before"):
        collect(loop, 3, [0], lambda obs: np.zeros((1, 1), np.int32))


def test_a_failure_to_close_is_a_warning() -> None:
    mortals = Mortals({(0, "step", 3): ValueError("no"), (0, "close", 1): SystemExit("stuck")})
    with pytest.warns(UserWarning, match="Mortal raised SystemExit in close: stuck"):
        rollout = played(mortals)[1]
    assert column(rollout, 0) == FAILED_IN_STEP_2


def test_the_log_says_why_once_in_a_while(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 50.0
    monkeypatch.setattr("appo.envs.loop.env_set.time.monotonic", lambda: now)
    mortals = Mortals({(life, "step", 2): ValueError(f"no\n{life}") for life in range(4)})
    loop = PythonLoop([Mortals({}), mortals], name="Mortal", spec=SPEC, on_failure=OnFailure(10))
    with caplog.at_level(logging.WARNING):
        collect(loop, 7, [0, 0], lambda obs: np.zeros((2, 1), np.int32))
        now += 11.0
        collect(loop, 2, [0, 0], lambda obs: np.zeros((2, 1), np.int32))
    assert [record.message for record in caplog.records] == [
        "env 1 is made again: Mortal raised ValueError: no 0",
        "env 1 is made again: Mortal raised ValueError: no 3 (2 more since the last such line)",
    ]


def test_the_first_cause_is_shown_though_an_earlier_failure_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 50.0
    monkeypatch.setattr("appo.envs.loop.env_set.time.monotonic", lambda: now)
    envs = EnvSet([Mortals({})], "Mortal", OnFailure(10))
    failure = EnvironmentFailure("Mortal raised ValueError: no")
    failure.__cause__ = ValueError("no")
    shown = []
    for one in (EnvironmentFailure("Mortal observed NaN"), failure, failure):
        with caplog.at_level(logging.WARNING):
            envs.begin_anew(0, one)
        now += 11.0
        shown.append(caplog.records[-1].exc_info)
    assert [one and one[1] for one in shown] == [None, failure.__cause__, None]
    envs.close()


def judged(most: int, *steps: int) -> list[bool]:
    rule = FailureRule(most)
    return [rule.forgives(0, step) for step in steps]


def test_the_rule_of_failures() -> None:
    assert judged(0, 5) == [False]
    assert judged(2, 100, 200, 300) == [True, True, False]
    assert judged(2, 100, 200, 100 + PERIOD_STEPS) == [True, True, True]
    assert judged(2, 100, 200, 99 + PERIOD_STEPS) == [True, True, False]
    assert judged(10, 5, 5, 5) == [True, True, False]
    assert judged(10, 5, 6, 7) == [True, True, False]
    assert judged(10, 5, 5, 7, 8, 9) == [True, True, True, True, False]
    assert judged(10, *range(0, 100_000, 100)) == [True] * 1000
    assert judged(10, *range(0, 1000, 99)) == [True] * 10 + [False]
    rule = FailureRule(1)
    assert [rule.forgives(index, 5) for index in (0, 1, 2)] == [True] * 3
