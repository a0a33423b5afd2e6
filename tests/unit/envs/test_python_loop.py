import signal
import warnings
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.envs.loop.env_set import OnFailure
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.spec import ActionPart, ObservationSpec, StepRow
from appo.envs.toys.toy import Counter, Target, counter_length, counter_step
from appo.utils.errors import EnvironmentFailure, SpaceMismatch, UsageError
from appo.utils.timing import ENV, PhaseClock
from tests.unit.envs.rollouts import collect


def counters(num_envs: int, **kwargs: object) -> PythonLoop:
    return PythonLoop([Counter] * num_envs, name="Counter", **kwargs)


def by_row(obs: dict[str, np.ndarray]) -> np.ndarray:
    """An action that differs between rows and steps and follows from the observation."""
    return ((obs["obs"][:, 0] + obs["obs"][:, 2]) % 4).astype(np.int32)[:, None]


def test_counter_is_next_step_to_the_letter() -> None:
    rollout = collect(counters(5), 40, [10, 11, 12, 13, 14], by_row)
    for row in range(5):
        env_id, t, episode = 10 + row, 0, 0
        while t < 40:
            assert rollout.obs["obs"][t, row].tolist() == [env_id, episode, 0, 0]
            assert rollout.first[t, row]
            for step in range(min(counter_length(env_id, episode), 40 - t)):
                action = rollout.action[t, row, 0]
                reward, terminated, truncated = counter_step(env_id, episode, step, action)
                assert rollout.reward[t, row] == reward
                assert (rollout.terminated[t, row], rollout.truncated[t, row]) == (terminated, truncated)
                assert rollout.obs["obs"][t + 1, row].tolist() == [env_id, episode, step + 1, action]
                assert not rollout.first[t + 1, row]
                t += 1
            if t < 40:  # the reset step
                assert rollout.reward[t, row] == 0
                assert not rollout.done[t, row]
                assert rollout.first[t + 1, row]
            t, episode = t + 1, episode + 1
    assert rollout.terminated.any()
    assert rollout.truncated.any()


def test_each_episode_is_reported_once_with_its_statistics() -> None:
    rollout = collect(counters(4), 60, [0, 1, 2, 3], by_row)
    reported = [(t, stats.row) for t, stats in rollout.episodes]
    assert reported == [tuple(pair) for pair in np.argwhere(rollout.done)]
    for t, stats in rollout.episodes:
        length = int(stats.stats["length"])
        assert stats.stats["true_reward"] == rollout.reward[t - length + 1 : t + 1, stats.row].sum()


@pytest.mark.parametrize("decorrelate_steps", [0, 3])  # no episode is that short
def test_it_says_that_it_lives_before_all_that_may_take_long(decorrelate_steps: int) -> None:
    calls: list[None] = []
    on_failure = OnFailure(alive=lambda: calls.append(None))
    loop = counters(3, decorrelate_steps=decorrelate_steps, seed=1, on_failure=on_failure)
    assert len(calls) == 4  # made, and one reset to see what infos hold
    rollout = collect(loop, 20, [10, 11, 12], by_row)
    steps_before = rollout.obs["obs"][0, :, 2].sum()
    assert (steps_before > 0) == (decorrelate_steps > 0)
    assert rollout.done.any()
    assert len(calls) == 7 + steps_before + rollout.first[1:].sum()


def test_the_time_of_resets_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def now() -> int:  # every look at the clock takes a microsecond
        looked_at.append(0)
        return 1000 * len(looked_at)

    clock = PhaseClock(now, lambda: 0)
    monkeypatch.setattr("appo.envs.loop.env_set.clock", clock)
    loop = counters(4)
    clock.restart()
    clock.enter(ENV)
    rollout = collect(loop, 60, [0, 1, 2, 3], by_row)
    assert clock.phase == ENV
    resets = 4 + int(rollout.first[1:].sum())
    assert clock.spent().seconds == pytest.approx(
        {"framework": 1e-6, "env": (resets + 1) * 1e-6, "reset": resets * 1e-6}
    )


def test_steps_without_an_end_report_an_empty_tuple() -> None:
    rollout = collect(PythonLoop([Target], name="Target"), 5, [0], lambda obs: np.zeros((1, 2), np.float32))
    assert rollout.episodes == []


def test_seeds_decide_and_rows_differ() -> None:
    def run(seeds: list[int]) -> np.ndarray:
        loop = PythonLoop([Target] * 2, name="Target")
        return collect(loop, 45, seeds, lambda obs: np.ones((2, 2), np.float32)).obs["obs"]

    np.testing.assert_array_equal(run([1, 2]), run([1, 2]))
    assert not np.array_equal(run([1, 2]), run([1, 3]))
    assert not np.array_equal(run([1, 2])[0, 0], run([1, 2])[0, 1])
    with pytest.raises(ValueError, match="expected 2 seeds, got 1"):
        run([1])


def test_a_second_reset_starts_over() -> None:
    loop = counters(2)
    first = collect(loop, 7, [0, 1], by_row)
    again = collect(loop, 7, [0, 1], by_row)
    np.testing.assert_array_equal(first.obs["obs"], again.obs["obs"])


def test_decorrelation_starts_envs_at_different_seeded_steps() -> None:
    def starts(seed: int) -> np.ndarray:
        loop = counters(32, decorrelate_steps=16, seed=seed)
        obs = {"obs": np.zeros((32, 4), np.float32)}
        loop.reset(range(32), obs)
        return obs["obs"]

    np.testing.assert_array_equal(starts(1), starts(1))
    assert not np.array_equal(starts(1), starts(2))
    total = [sum(counter_length(i, e) for e in range(int(o[1]))) + int(o[2]) for i, o in enumerate(starts(1))]
    assert min(total) >= 0
    assert max(total) < 16
    assert len(set(total)) > 8


def test_after_decorrelation_a_done_on_the_last_step_is_no_open_end() -> None:
    obs = {"obs": np.zeros((64, 4), np.float32)}
    counters(64, decorrelate_steps=12).reset(range(64), obs)
    assert all(observation[2] < counter_length(int(observation[0]), int(observation[1])) for observation in obs["obs"])


class Scripted(gymnasium.Env):
    """Does what a test asks for in its second step."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    outcome: object = None
    on_reset: object = None
    on_close: object = None
    closed = 0

    def __init__(self) -> None:
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> object:
        if isinstance(self.on_reset, BaseException):
            raise self.on_reset
        return self.on_reset if self.on_reset is not None else (np.zeros(2, np.float32), {})

    def step(self, action: int) -> object:
        self.count += 1
        if self.count == 2 and isinstance(self.outcome, BaseException):
            raise self.outcome
        if self.count == 2 and self.outcome is not None:
            return self.outcome
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        Scripted.closed += 1
        if isinstance(self.on_close, BaseException):
            raise self.on_close


def scripted(**attributes: object) -> PythonLoop:
    return PythonLoop([Scripted, type("Twisted", (Scripted,), attributes)], name="Scripted-v0")


def zeros(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.zeros((2, 1), np.int32)


@pytest.mark.usefixtures("workers_sigint")
@pytest.mark.parametrize(
    "error", [ValueError("bad\n  luck"), SystemExit(3), KeyboardInterrupt("x"), OSError(5, "io"), MemoryError()]
)
@pytest.mark.parametrize("where", ["outcome", "on_reset"])
def test_what_an_environment_raises_becomes_one_line_with_its_cause(error: BaseException, where: str) -> None:
    loop = scripted(**{where: error})
    with pytest.raises(EnvironmentFailure) as caught:
        collect(loop, 3, [0, 1], zeros)
    assert str(caught.value) == f"Scripted-v0 raised {type(error).__name__}: {' '.join(str(error).split())}"
    assert caught.value.__cause__ is error


def test_ctrl_c_of_a_user_passes() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        collect(scripted(outcome=KeyboardInterrupt()), 3, [0, 1], zeros)


FINE = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ((np.zeros(3, np.float32), 0.0, False, False, {}), "observation key obs: expected shape (2,), got shape (3,)"),
        ((FINE, 0.0, False, {}), "step must return (observation, reward, terminated, truncated, info)"),
        ((FINE, "much", False, False, {}), "with a number as reward"),
        ((FINE, np.zeros(2), False, False, {}), "with a number as reward"),
        (
            (FINE, 0.0, True, False, {"true_reward": "high"}),
            "info key true_reward: statistics in info must be numbers, got 'high'",
        ),
        ((FINE, 0.0, True, False, None), "truncated, info) with a dict as info"),
        ((FINE, 0.0, False, False, [1]), "truncated, info) with a dict as info"),
    ],
)
def test_malformed_steps_are_refused(outcome: tuple, words: str) -> None:
    with pytest.raises(SpaceMismatch) as caught:
        collect(scripted(outcome=outcome), 3, [0, 1], zeros)
    assert words in str(caught.value)


NUMBER = "Scripted-v0: env 1: a step comes with a number as reward, not with "
SEVERAL = "only environments with is_multiagent = True speak in lists, an entry per agent (docs/multi_agent.md)"
WEIGHED = f"several objectives must be weighed into one number, by a wrapper of yours; of several agents, {SEVERAL}"
KEPT = "and float32, which keeps rewards, ends at 3.4e+38: make it smaller"


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        (None, f"{NUMBER}None"),
        ("1.0", f"{NUMBER}'1.0'"),
        (np.datetime64(0, "s"), f"{NUMBER}np.datetime64('1970-01-01T00:00:00')"),
        (1j, f"{NUMBER}1j"),
        ([], f"{NUMBER}[]"),
        ({"a": 1.0}, f"{NUMBER}a dict of ['a']: agents with names are those of a pettingzoo.ParallelEnv"),
        ([0.5, 1.0], f"{NUMBER}a list of 2: {WEIGHED}"),
        (np.zeros(3), f"{NUMBER}a ndarray of 3: {WEIGHED}"),
        ((1.0,), f"{NUMBER}a tuple of 1: its one entry is the number that is expected"),
        (1e200, f"Scripted-v0: env 1: reward is 1e+200, {KEPT}"),
        (np.float64(-1e39), f"Scripted-v0: env 1: reward is -1e+39, {KEPT}"),
        (10**400, f"Scripted-v0: env 1: reward is of 401 digits, {KEPT}"),
        (float("nan"), "Scripted-v0: env 1: reward is not finite: nan"),
        (np.float32("-inf"), "Scripted-v0: env 1: reward is not finite: -inf"),
    ],
)
def test_rewards_that_are_no_numbers_are_named(reward: object, line: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        collect(scripted(outcome=(FINE, reward, False, False, {})), 3, [0, 1], zeros)
    assert str(caught.value) == line


@pytest.mark.parametrize("reward", [2, True, np.float16(2), np.array(2.0), np.int64(2), 3e38])
def test_rewards_of_any_kind_of_number(reward: Any) -> None:
    rollout = collect(scripted(outcome=(FINE, reward, False, False, {})), 3, [0, 1], zeros)
    assert rollout.reward[:, 1].tolist() == [0, float(np.float32(reward)), 0]


def test_several_agents_in_tuples_are_told_from_several_objectives() -> None:
    pair = {
        "outcome": ((FINE, FINE), [0.0, 1.0], False, False, {}),
        "on_reset": ((FINE, FINE), {}),
        "observation_space": spaces.Tuple([spaces.Box(-1.0, 1.0, (2,))] * 2),
        "action_space": spaces.Tuple([spaces.Discrete(2)] * 2),
        "step": lambda self, action: self.outcome,
    }
    group = PythonLoop([type("Pair", (Scripted,), pair)], name="Pair-v0")
    with pytest.raises(SpaceMismatch) as caught:
        collect(group, 1, [0], lambda obs: np.zeros((1, 2), np.int32))
    assert str(caught.value) == (
        "Pair-v0: env 0: a step comes with a number as reward, not with a list of 2, and its spaces are Tuples of 2: it"
        f" has several agents, and {SEVERAL}, with both spaces those of one agent"
    )


@pytest.mark.parametrize("key", ["terminated", "truncated"])
@pytest.mark.parametrize(
    "flag",
    [
        [False],
        (False,),
        "False",
        "",
        {"__all__": False},
        {},
        float("nan"),
        None,
        2,
        0.5,
        np.array([True]),
        np.array("x"),
    ],
)
def test_ends_that_are_no_truths_are_named(key: str, flag: object) -> None:
    ends = (flag, False) if key == "terminated" else (False, flag)
    with pytest.raises(SpaceMismatch) as caught:
        collect(scripted(outcome=(FINE, 0.0, *ends, {})), 3, [0, 1], zeros)
    assert str(caught.value) == f"Scripted-v0: step returned {flag!r} as {key}: it must be True or False"


@pytest.mark.parametrize("kind", [bool, int, np.bool_, np.int64, np.array, float])
def test_ends_may_be_truths_or_zeros_and_ones(kind: Any) -> None:
    rollout = collect(scripted(outcome=(FINE, 0.0, kind(False), kind(True), {})), 3, [0, 1], zeros)
    assert rollout.truncated[:, 1].tolist() == [False, True, False]
    assert not rollout.terminated.any()


def test_old_style_reset_is_refused_even_where_it_would_unpack() -> None:
    with pytest.raises(SpaceMismatch, match="reset must return"):
        collect(scripted(on_reset=np.zeros(2, np.float32)), 1, [0, 1], zeros)


@pytest.mark.parametrize("info", [None, [{}]])
@pytest.mark.parametrize("action_space", [spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,))])
def test_an_info_of_reset_that_is_no_dict_is_refused(info: object, action_space: spaces.Space) -> None:
    env = type("Odd", (Scripted,), {"on_reset": (FINE, info), "action_space": action_space})
    with pytest.raises(SpaceMismatch) as caught:
        collect(PythonLoop([env], name="Odd-v0"), 1, [0], lambda obs: np.zeros((1, 1), np.float32))
    expected = "reset must return (observation, info) with a dict as info, as gymnasium's environments do"
    assert str(caught.value) == f"Odd-v0: {expected}"


def test_both_flags_mean_terminated() -> None:
    rollout = collect(scripted(outcome=(FINE, 1, np.bool_(True), np.bool_(True), {})), 3, [0, 1], zeros)
    assert rollout.terminated[:, 1].tolist() == [False, True, False]
    assert not rollout.truncated.any()
    assert rollout.first[:, 1].tolist() == [True, False, False, True]


def test_a_failing_constructor_closes_what_was_built() -> None:
    def fail() -> Scripted:
        raise RuntimeError("no display")

    before = Scripted.closed
    with pytest.raises(EnvironmentFailure, match="Scripted-v0 raised RuntimeError: no display"):
        PythonLoop([Scripted, Scripted, fail], name="Scripted-v0")
    assert Scripted.closed == before + 2


def test_unsupported_spaces_are_a_usage_error() -> None:
    odd = type("Odd", (Scripted,), {"observation_space": spaces.Text(5)})
    with pytest.raises(UsageError, match="Text"):
        PythonLoop([odd], name="Odd")


def test_all_envs_of_a_group_must_have_the_same_spaces() -> None:
    with pytest.raises(SpaceMismatch, match="env 1 has other spaces than env 0"):
        scripted(action_space=spaces.Discrete(3))


def test_close_is_harmless_twice_and_warns_of_failures() -> None:
    loop = scripted(on_close=RuntimeError("stuck"))
    with pytest.warns(UserWarning, match="Scripted-v0 raised RuntimeError in close: stuck"):
        loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.close()


def test_pendulum() -> None:
    loop = PythonLoop([lambda: gymnasium.make("Pendulum-v1")] * 3, name="Pendulum-v1")
    assert loop.spec.observations == {"obs": ObservationSpec((3,), "float32")}
    assert loop.spec.action.parts == (ActionPart("gaussian", 1),)
    assert (loop.spec.action.low, loop.spec.action.high) == ((-2.0,), (2.0,))
    rng = np.random.default_rng(0)
    rollout = collect(loop, 410, [0, 1, 2], lambda obs: rng.normal(0, 5, (3, 1)).astype(np.float32))
    assert np.flatnonzero(rollout.truncated[:, 0]).tolist() == [199, 400]  # 200 steps, then one that resets
    assert not rollout.terminated.any()
    assert (rollout.reward[rollout.first[1:]] == 0).all()
    env = gymnasium.make("Pendulum-v1")
    env.reset(seed=1)
    for t in range(200):
        observation, reward, *_ = env.step(np.clip(rollout.action[t, 1], -2, 2))
        np.testing.assert_allclose(rollout.obs["obs"][t + 1, 1], observation, rtol=1e-6)
        assert rollout.reward[t, 1] == pytest.approx(float(reward), rel=1e-6)


def test_only_the_views_given_are_written() -> None:
    loop = counters(2)
    slot = np.full((3, 2, 4), 77, np.float32)
    loop.reset([0, 1], {"obs": slot[0]})
    arrays = SimpleNamespace(reward=np.full((2, 2), 77, np.float32), flag=np.ones((3, 2), np.bool_))
    row = StepRow(
        {"obs": slot[1]}, arrays.flag[0], arrays.reward[0], arrays.flag[1], arrays.flag[2], np.ones(2, np.int32)
    )
    loop.step(np.zeros((2, 1), np.int32), row)
    assert (slot[2] == 77).all()
    assert (arrays.reward[1] == 77).all()
    assert not arrays.flag.any()
    assert slot[1, :, 2].tolist() == [1, 1]
