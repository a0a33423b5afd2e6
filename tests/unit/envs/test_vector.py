from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import TransformReward

from appo.envs.config import EnvConfig
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import make_alone, make_first, make_group
from appo.envs.spec import GroupEnv
from appo.envs.toys.toy import Corridor, Counter, CounterVector, counter_length, counter_step
from appo.envs.vectors.autoreset import FIRST_ENDS
from appo.envs.vectors.gym_vector import GymVector
from appo.utils.errors import EnvironmentFailure, NotFinite, SpaceMismatch, UsageError
from tests.patience import HANG_SECONDS
from tests.unit.envs.rollouts import Rollout, collect

MODES = list(AutoresetMode)
SEEDS = [10, 11, 12, 13, 14]


@pytest.fixture(autouse=True)
def _as_long_as_the_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.envs.vectors.gym_vector.SETTLING_SECONDS", float(HANG_SECONDS))


def counter_vector(mode: AutoresetMode, num_envs: int = 5) -> GymVector:
    return GymVector(lambda: CounterVector(num_envs, mode), name="Counter")


def sync_counters(mode: AutoresetMode, num_envs: int = 5) -> GymVector:
    return GymVector(lambda: SyncVectorEnv([Counter] * num_envs, copy=False, autoreset_mode=mode), name="Counter")


def from_observation(obs: dict[str, np.ndarray]) -> np.ndarray:
    return ((obs["obs"][:, 0] + obs["obs"][:, 2]) % 4).astype(np.int32)[:, None]


Transition = tuple[float, ...]


def transitions(rollout: Rollout, row: int) -> list[Transition]:
    """Every valid step of a row: observation, action, reward, flags, observation reached. Modes must agree on these."""
    found: list[Transition] = []
    for t in range(len(rollout.reward)):
        ended_in_step = bool(rollout.has_final.size and rollout.done[t, row] and rollout.final_obs)
        if rollout.first[t + 1, row] and not ended_in_step:
            continue  # the reset step of NEXT_STEP
        reached = rollout.final_obs["obs"][t, row] if ended_in_step else rollout.obs["obs"][t + 1, row]
        flags = (rollout.terminated[t, row], rollout.truncated[t, row])
        now = rollout.obs["obs"][t, row]
        found.append((*now, *rollout.action[t, row], rollout.reward[t, row], *flags, *reached))
    return found


@pytest.mark.parametrize("make", [counter_vector, sync_counters])
@pytest.mark.parametrize("mode", MODES)
def test_all_modes_show_the_transitions_of_the_python_loop(make: Any, mode: AutoresetMode) -> None:
    loop = PythonLoop([Counter] * 5, name="Counter")
    expected, got = collect(loop, 60, SEEDS, from_observation), collect(make(mode), 50, SEEDS, from_observation)
    for row in range(5):
        long, short = transitions(expected, row), transitions(got, row)
        shared = min(len(long), len(short))
        assert shared > 35
        assert short[:shared] == long[:shared]


@pytest.mark.parametrize("make", [counter_vector, sync_counters])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_same_step_contract(make: Any, mode: AutoresetMode) -> None:
    group = make(mode)
    assert group.spec.same_step
    rollout = collect(group, 50, SEEDS, from_observation)
    np.testing.assert_array_equal(rollout.first[1:], rollout.done)
    np.testing.assert_array_equal(rollout.has_final, rollout.truncated)
    assert (rollout.obs["obs"][1:][rollout.done][:, 2] == 0).all()
    final = rollout.final_obs["obs"][rollout.truncated]
    assert len(final) > 10
    assert all(obs[2] == counter_length(int(obs[0]), int(obs[1])) for obs in final)


@pytest.mark.parametrize("make", [counter_vector, sync_counters])
def test_next_step_is_passed_on_as_it_is(make: Any) -> None:
    group = make(AutoresetMode.NEXT_STEP)
    assert not group.spec.same_step
    rollout = collect(group, 50, SEEDS, from_observation)
    expected = collect(PythonLoop([Counter] * 5, name="Counter"), 50, SEEDS, from_observation)
    for name in ("first", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))
    np.testing.assert_array_equal(rollout.obs["obs"], expected.obs["obs"])


@pytest.mark.parametrize("make", [counter_vector, sync_counters])
@pytest.mark.parametrize("mode", MODES)
def test_each_episode_is_reported_once(make: Any, mode: AutoresetMode) -> None:
    rollout = collect(make(mode), 50, SEEDS, from_observation)
    assert [(t, stats.row) for t, stats in rollout.episodes] == [tuple(pair) for pair in np.argwhere(rollout.done)]
    for t, stats in rollout.episodes:
        length = int(stats.stats["length"])
        assert stats.stats["true_reward"] == rollout.reward[t - length + 1 : t + 1, stats.row].sum()
        assert set(stats.stats) == {"length", "true_reward"}


@pytest.mark.parametrize("mode", MODES)
def test_reset_starts_over_and_takes_one_seed_per_env(mode: AutoresetMode) -> None:
    group = sync_counters(mode)
    collect(group, 9, SEEDS, from_observation)
    rollout = collect(group, 3, [5, 9, 2, 7, 1], from_observation)
    assert rollout.obs["obs"][0].tolist() == [[seed, 0, 0, 0] for seed in (5, 9, 2, 7, 1)]
    assert rollout.reward[0, 1] == counter_step(9, 0, 0, rollout.action[0, 1, 0]).reward
    with pytest.raises(ValueError, match="expected 5 seeds, got 1"):
        group.reset([1], {})


@pytest.mark.parametrize("mode", MODES)
def test_discrete_observations_in_all_modes(mode: AutoresetMode) -> None:
    corridors = [lambda: Corridor(length=3, max_steps=4)] * 2

    def right_or_left(obs: dict[str, np.ndarray]) -> np.ndarray:
        return np.array([[1], [0]], np.int32)

    group = GymVector(lambda: SyncVectorEnv(corridors, autoreset_mode=mode), name="Corridor")
    rollout = collect(group, 12, [0, 1], right_or_left)
    assert (rollout.obs["obs"].sum(-1) == 1).all()
    assert rollout.terminated[:, 0].sum() == (4 if mode is AutoresetMode.NEXT_STEP else 6)
    assert rollout.truncated[:, 1].sum() == (2 if mode is AutoresetMode.NEXT_STEP else 3)
    if mode is not AutoresetMode.NEXT_STEP:
        np.testing.assert_array_equal(rollout.final_obs["obs"][3, 1], [1, 0, 0])


class OneInfo(CounterVector):
    """Tells everything in one dict, which a reset empties."""

    told: ClassVar[dict[str, Any]] = {}

    def reset(self, **kwargs: Any) -> tuple:
        observation, _ = super().reset(**kwargs)
        self.told.clear()
        return observation, self.told

    def step(self, actions: np.ndarray) -> tuple:
        *outcome, infos = super().step(actions)
        self.told.clear()
        self.told.update(infos)
        return (*outcome, self.told)


def test_episodes_are_reported_that_a_reset_of_ours_takes_out_of_the_infos() -> None:
    group = GymVector(lambda: OneInfo(5, AutoresetMode.DISABLED), name="OneInfo")
    told = collect(group, 50, SEEDS, from_observation).episodes
    assert told == collect(counter_vector(AutoresetMode.DISABLED), 50, SEEDS, from_observation).episodes
    assert len(told) > 20


class DictEnv(gymnasium.Env):
    observation_space = spaces.Dict({"x": spaces.Box(0.0, 99.0, (2,), np.float64), "n": spaces.Discrete(9)})
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,), np.float32)])
    count = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.count = 0
        return self._observation(), {}

    def step(self, action: tuple) -> tuple:
        assert self.action_space.contains(action)
        self.count += 1
        return self._observation(), 1, False, self.count == 3, {}

    def _observation(self) -> dict:
        return {"x": np.full(2, float(self.count)), "n": self.count}


@pytest.mark.parametrize("mode", MODES)
def test_dict_observations_and_tuple_actions(mode: AutoresetMode) -> None:
    group = GymVector(lambda: SyncVectorEnv([DictEnv] * 2, autoreset_mode=mode), name="DictEnv")
    rollout = collect(group, 8, [0, 1], lambda obs: np.array([[0, 5.0], [1, -5.0]], np.float32))
    done = rollout.truncated[:, 0]
    if mode is AutoresetMode.NEXT_STEP:
        assert np.flatnonzero(done).tolist() == [2, 6]
        reached = {key: array[1:][done] for key, array in rollout.obs.items()}
    else:
        assert np.flatnonzero(done).tolist() == [2, 5]
        reached = {key: array[done] for key, array in rollout.final_obs.items()}
    assert (reached["x"] == 3).all()
    assert (reached["n"].argmax(-1) == 3).all()


class OneBuffer(gymnasium.Env):
    """Shows its step, from 10 on, in the only arrays that it has; cut after three steps."""

    observation_space: spaces.Space = spaces.Dict({"x": spaces.Box(0.0, 99.0, (2,), np.float32)})
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.shown = {"x": np.zeros(2, np.float32)}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.shown["x"][:] = 10
        return self.shown, {}

    def step(self, action: int) -> tuple:
        self.shown["x"] += 1
        return self.shown, 1.0, False, bool(self.shown["x"][0] == 13), {}


class OneArray(OneBuffer):
    """The same, of a single array."""

    observation_space = OneBuffer.observation_space["x"]  # type: ignore[index]

    def reset(self, **arguments: Any) -> tuple:
        return super().reset(**arguments)[0]["x"], {}

    def step(self, action: int) -> tuple:
        shown, *others = super().step(action)
        return shown["x"], *others


@pytest.mark.parametrize("kind", [OneBuffer, OneArray])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_last_observations_of_environments_with_one_buffer_are_true(mode: AutoresetMode, kind: Any) -> None:
    def make() -> Any:
        return TransformReward(SyncVectorEnv([kind] * 2, autoreset_mode=mode), lambda reward: reward)

    rollout = collect(GymVector(make, name="OneBuffer"), 8, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
    ((key, final),), ((_, shown),) = rollout.final_obs.items(), rollout.obs.items()
    assert key == ("x" if kind is OneBuffer else "obs")
    assert np.flatnonzero(rollout.truncated[:, 0]).tolist() == [2, 5]
    assert (final[rollout.truncated] == 13).all()
    assert (shown[1:][rollout.truncated] == 10).all()


class VectorStub(VectorEnv):
    """A vector of two rows that answers as told."""

    def __init__(self, metadata: dict, *answers: tuple):
        self.num_envs = 2
        self.metadata = metadata
        self.single_observation_space = spaces.Box(0, 255, (1,), np.uint8)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.action_space = batch_space(self.single_action_space, 2)
        self._answers = list(answers)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        assert seed is None or isinstance(seed, int)  # ours has no list
        return np.zeros((2, 1), np.uint8), {}

    def step(self, actions: np.ndarray) -> tuple:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def zeros(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.zeros((2, 1), np.int32)


def answer(reward: object = (0.0, 0.0), terminated: object = (0, 0), truncated: object = (0, 0), **infos: Any) -> tuple:
    observation = np.array([[5], [6]], np.uint8)
    return observation, np.array(reward), np.array(terminated, bool), np.array(truncated, bool), infos


def with_ends(terminated: object = (0, 0), truncated: object = (0, 0)) -> tuple:
    """An answer whose ends are of any type."""
    return (*answer()[:2], np.array(terminated), np.array(truncated), {})


SAME = {"autoreset_mode": AutoresetMode.SAME_STEP}
NEXT = {"autoreset_mode": AutoresetMode.NEXT_STEP}


def run_stub(metadata: dict, *answers: tuple) -> Rollout:
    return collect(GymVector(lambda: VectorStub(metadata, *answers), name="Stub"), len(answers), [0, 1], zeros)


def test_dense_final_observations_without_a_mask_are_taken_for_ended_rows_only() -> None:
    dense = np.array([[41], [99]], np.uint8)
    rollout = run_stub(SAME, answer(truncated=(1, 0), final_obs=dense))
    assert rollout.final_obs["obs"][0].tolist() == [[41], [77]]
    assert rollout.has_final.tolist() == [[True, False]]
    assert rollout.obs["obs"][1].tolist() == [[5], [6]]


def test_a_terminated_row_needs_no_final_observation_but_a_truncated_one_does() -> None:
    rollout = run_stub(SAME, answer(terminated=(1, 1)))
    assert not rollout.has_final.any()
    with pytest.raises(EnvironmentFailure, match="truncated and infos hold no final_obs"):
        run_stub(SAME, answer(truncated=(1, 0)))
    partial = np.array([None, np.array([3], np.uint8)], object)
    with pytest.raises(EnvironmentFailure, match="final_obs of truncated env 0 is missing"):
        run_stub(SAME, answer(truncated=(1, 1), final_obs=partial))


@pytest.mark.parametrize("metadata", [SAME, NEXT])
def test_both_flags_mean_terminated(metadata: dict) -> None:
    rollout = run_stub(metadata, answer(terminated=(1, 0), truncated=(1, 0)))
    assert (rollout.terminated.tolist(), rollout.truncated.any()) == ([[True, False]], False)
    assert not rollout.has_final.any() or metadata is NEXT


def test_the_reset_step_of_next_step_has_neither_reward_nor_end() -> None:
    rollout = run_stub(NEXT, answer((1, 0), (0, 0), (1, 0)), answer((0, 4)), answer((3, 4)))
    assert rollout.reward.tolist() == [[1, 0], [0, 4], [3, 4]]
    assert rollout.truncated.tolist() == [[True, False], [False, False], [False, False]]
    assert not rollout.terminated.any()
    assert rollout.first.tolist() == [[True, True], [False, False], [True, False], [False, False]]
    for odd in (answer((3, 4)), answer(terminated=(1, 0)), answer(truncated=(1, 0)), answer((-1e-3, 0))):
        with pytest.raises(UsageError, match=r"Stub: env 0 got a reward, or ended, in the step after an end"):
            run_stub(NEXT, answer(truncated=(1, 0)), odd)


@pytest.mark.parametrize("metadata", [{}, {"autoreset_mode": None}, {"autoreset_mode": "sometimes"}])
def test_missing_metadata_is_taken_for_next_step_with_a_warning(metadata: dict) -> None:
    with pytest.warns(UserWarning, match="assuming NEXT_STEP"):
        group = GymVector(lambda: VectorStub(metadata), name="Stub")
    assert not group.spec.same_step


def test_metadata_may_be_the_value_of_the_mode() -> None:
    assert GymVector(lambda: VectorStub({"autoreset_mode": "SameStep"}), name="Stub").spec.same_step


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ValueError("bad\nluck"), "Stub raised ValueError: bad luck"),
        (SystemExit(2), "Stub raised SystemExit: 2"),
        ((np.zeros((2, 2), np.uint8), *answer()[1:]), "observation key obs: expected shape (1,), got shape (2,)"),
        ((np.zeros((3, 1), np.uint8), *answer()[1:]), "key obs: expected shape (2, 1), got shape (3, 1)"),
        ((np.zeros((1, 1), np.uint8), *answer()[1:]), "key obs: expected shape (2, 1), got shape (1, 1)"),
        ((np.zeros((), np.uint8), *answer()[1:]), "key obs: expected shape (2, 1), got shape ()"),
        ((np.zeros((2, 1)), *answer()[1:]), "fits uint8, got float64"),
        (
            (*answer()[:4], None),
            "Stub: step must return (observation, reward, terminated, truncated, info) with a dict",
        ),
        (answer(reward=(0.0,)), "reward: expected shape (2,), got (1,)"),
        (answer(terminated=(0, 0, 0)), "terminated: expected shape (2,), got (3,)"),
        (answer(reward=("a", "b")), "Stub: reward: expected numbers, got <U1 (['a', 'b'])"),
        (answer(reward=(0.0, None)), "Stub: reward: expected numbers, got object ([0.0, None])"),
        (
            answer(reward=((1.0, 2.0), (3.0, 4.0))),
            "got (2, 2); several objectives must be weighed into one number, by a",
        ),
        (answer(reward=((1.0,), (3.0,))), "got (2, 1); its one entry is the number that is expected"),
        (
            answer(reward=np.array([0.0, -1e200])),
            "Stub: env 1: reward is -1e+200, and float32, which keeps rewards, ends at 3.4e+38: make it smaller",
        ),
        (with_ends(terminated=("False", "")), "Stub: terminated: expected bools, got <U5 (['False', ''])"),
        (with_ends(truncated=(None, False)), "Stub: truncated: expected bools, got object ([None, False])"),
        (with_ends(terminated=(0, np.nan)), "Stub: step returned nan as terminated of env 1: it must be True or False"),
        (with_ends(truncated=(2, 0)), "Stub: step returned 2 as truncated of env 0: it must be True or False"),
        (with_ends(truncated={"__all__": False}), "Stub: truncated: expected shape (2,), got ()"),
        (answer(reward=(0.0, -np.inf)), "Stub: env 1: reward is not finite: -inf"),
    ],
)
def test_misbehaviour_is_one_line(bad: object, words: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        run_stub(NEXT, answer(), bad)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_reset_without_infos_is_refused() -> None:
    class Silent(VectorStub):
        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
            return np.zeros((2, 1), np.uint8), None

    with pytest.raises(SpaceMismatch, match=r"Stub: reset must return \(observation, info\) with a dict as info"):
        collect(GymVector(lambda: Silent(NEXT), name="Stub"), 1, [0, 1], zeros)


def test_a_failing_constructor_is_one_line() -> None:
    def fail() -> VectorEnv:
        raise RuntimeError("no rom")

    with pytest.raises(EnvironmentFailure, match="Stub raised RuntimeError: no rom"):
        GymVector(fail, name="Stub")


class Close(VectorStub):
    def close(self, **kwargs: Any) -> None:
        raise RuntimeError("stuck")


def test_close_warns_once_of_a_failure() -> None:
    group = GymVector(lambda: Close(NEXT), name="Stub")
    with pytest.warns(UserWarning, match="Stub raised RuntimeError in close: stuck"):
        group.close()
    group.close()


class CartPoleDisabled(CartPoleVectorEnv):
    """Gymnasium's numpy CartPole takes no notice of a reset mask."""

    metadata = {**CartPoleVectorEnv.metadata, "autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012


def test_a_vector_that_resets_all_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="resets rows outside the mask"):
        GymVector(lambda: CartPoleDisabled(4), name="CartPole")


def test_a_single_row_or_constant_observations_cannot_be_refused() -> None:
    assert GymVector(lambda: CartPoleDisabled(1), name="CartPole").spec.same_step


class NotANumber(Counter):
    """Shows NaN in the step in which its fourth environment, seeded with 13, ends its first episode."""

    def _observation(self, action: int) -> np.ndarray:
        observation = super()._observation(action)
        if observation[0] == 13 and observation[2] == counter_length(13, 0):
            observation[3] = np.nan
        return observation


@pytest.mark.parametrize("mode", MODES)
def test_observations_that_are_not_finite_are_refused(mode: AutoresetMode) -> None:
    """Also final ones."""
    group = GymVector(lambda: SyncVectorEnv([NotANumber] * 5, autoreset_mode=mode), name="NaN")
    with pytest.raises(NotFinite, match=r"NaN: env 3: observation key obs is not finite: nan at \[3\]"):
        collect(group, 40, SEEDS, from_observation)


def balance(obs: dict[str, np.ndarray]) -> np.ndarray:
    """Keeps the pole up for a few hundred steps."""
    return (obs["obs"][:, 2] + obs["obs"][:, 3] > 0).astype(np.int32)[:, None]


def cart_poles(kind: str) -> GroupEnv:
    singles = [lambda: TimeLimit(gymnasium.make("CartPole-v1").unwrapped, 60)] * 6
    if kind == "python":
        return PythonLoop(singles, name="CartPole")
    if kind == "native":
        return GymVector(lambda: gymnasium.make_vec("CartPole-v1", 6, max_episode_steps=60), name="CartPole")
    return GymVector(lambda: SyncVectorEnv(singles, autoreset_mode=AutoresetMode(kind)), name="CartPole")


@pytest.mark.parametrize("kind", ["python", "native", "NextStep", "SameStep", "Disabled"])
def test_cart_pole_every_way(kind: str) -> None:
    rng = np.random.default_rng(0)

    def policy(obs: dict[str, np.ndarray]) -> np.ndarray:
        action = balance(obs)
        action[:3, 0] = rng.integers(2, size=3)  # the upper half falls, the lower half runs into the limit
        return action

    group = cart_poles(kind)
    rollout = collect(group, 200, list(range(6)), policy)
    assert rollout.terminated[:, :3].any()
    assert rollout.truncated[:, 3:].sum() >= 9
    assert not (rollout.terminated & rollout.truncated).any()
    starts = rollout.obs["obs"][rollout.first]
    assert (np.abs(starts) <= 0.05).all()
    reached = rollout.final_obs["obs"] if group.spec.same_step else rollout.obs["obs"][1:]
    fallen = reached[rollout.terminated]
    assert ((np.abs(fallen[:, 0]) > 2.4) | (np.abs(fallen[:, 2]) > 12 * np.pi / 180)).all()
    assert (np.abs(reached[rollout.truncated][:, 2]) < 12 * np.pi / 180).all()
    valid = np.ones_like(rollout.done) if group.spec.same_step else ~rollout.first[1:]
    np.testing.assert_array_equal(rollout.reward, valid.astype(np.float32))
    group.close()


def test_dense_frames_of_a_vector_are_taken_as_they_are() -> None:
    frames = np.array([3, 8])
    rollout = run_stub(SAME, answer(num_frames=frames), answer(terminated=(1, 0), num_frames=frames + 1), answer())
    assert rollout.num_frames.tolist() == [[3, 8], [4, 9], [1, 1]]
    with pytest.raises(SpaceMismatch, match=r"info key num_frames: expected the whole number .*, got 1\.5"):
        run_stub(NEXT, answer(num_frames=np.array([1.5, 2.0])))


class Many(gymnasium.Env):
    """Shows a Tuple and takes a Dict; the action is shown back."""

    observation_space = spaces.Tuple([spaces.MultiBinary(2), spaces.Dict({"n": spaces.MultiDiscrete([3, 3])})])
    action_space = spaces.Dict({"pick": spaces.MultiDiscrete([3, 3]), "bits": spaces.MultiBinary(2)})

    def __init__(self) -> None:
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.count = 0
        return (np.zeros(2, np.int8), {"n": np.zeros(2, np.int64)}), {}

    def step(self, action: dict) -> tuple:
        assert self.action_space.contains(action)
        self.count += 1
        return (action["bits"], {"n": action["pick"]}), 0.0, False, self.count == 3, {}


@pytest.mark.parametrize("kind", ["python", *(mode.value for mode in MODES)])
def test_tuple_observations_and_dict_actions(kind: str) -> None:
    if kind == "python":
        group: GroupEnv = PythonLoop([Many] * 2, name="Many")
    else:
        group = GymVector(lambda: SyncVectorEnv([Many] * 2, autoreset_mode=AutoresetMode(kind)), name="Many")
    rng = np.random.default_rng(0)
    # in the order of the space: bits, pick
    rollout = collect(group, 20, [0, 1], lambda obs: np.stack([rng.integers(n, size=2) for n in (2, 2, 3, 3)], 1))
    assert rollout.action.dtype == np.int32
    going = ~rollout.first[1:]
    np.testing.assert_array_equal(rollout.obs["0"][1:][going], rollout.action[going][:, :2])
    picked = rollout.obs["1.n"][1:][going].reshape(-1, 2, 3)
    np.testing.assert_array_equal(picked.argmax(-1), rollout.action[going][:, 2:])
    assert (picked.sum(-1) == 1).all()
    if group.spec.same_step:
        ended = rollout.truncated
        np.testing.assert_array_equal(rollout.final_obs["0"][ended], rollout.action[ended][:, :2])


@pytest.mark.parametrize("kind", [bool, np.int8, np.int64, np.uint8, np.float32, object])
def test_ends_of_vectors_may_be_truths_or_zeros_and_ones(kind: type) -> None:
    ends = np.array([0, 1], kind) if kind is not object else [False, True]
    rollout = run_stub(NEXT, answer(), (*answer(reward=(1.0, 2.0))[:2], ends, np.zeros(2, np.int8), {}), answer())
    assert rollout.terminated.tolist() == [[False, False], [False, True], [False, False]]
    assert not rollout.truncated.any()
    assert rollout.reward.tolist() == [[0, 0], [1, 2], [0, 0]]


# --- vectors that do something else than they declare


class Endless(VectorEnv):
    """Shows A, pays 0, then shows B and pays 1 a step for ever, but is cut off after `num_steps`.

    Args:
        does: how it goes on after an end, or `Terminates` in the same step.
        declares: how it says that it does; None: nothing.
        final: the key of infos under which final observations are; None: they are nowhere.
        blind: shows B always.
    """

    def __init__(
        self, num_envs: int = 3, does: str = "SameStep", declares: str | None = None, final: str | None = "final_obs",
        terminates: bool = False, blind: bool = False, num_steps: int = 4,
    ):  # fmt: skip
        self.num_envs, self.num_steps, self.blind = num_envs, num_steps, blind
        self.mode, self.final, self.terminates = AutoresetMode(does), final, terminates
        self.metadata = {"autoreset_mode": declares} if declares else {}
        self.single_observation_space, self.single_action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.time, self.ended = np.zeros(num_envs, int), np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.time[mask] = 0
        if options is None:
            self.time -= np.arange(self.num_envs) % 2  # they do not end together
        self.ended[mask] = False
        return self._shown(), {}

    def step(self, actions: np.ndarray) -> tuple:
        resets = self.ended & (self.mode is AutoresetMode.NEXT_STEP)
        reward = (self._shown()[:, 1] if not self.blind else np.ones(self.num_envs)) * ~resets
        self.time = np.where(resets, 0, self.time + 1)
        self.ended = self.time == self.num_steps
        shown, infos = self._shown(), {}
        if self.mode is AutoresetMode.SAME_STEP and self.ended.any():
            infos = self._told(shown)
            self.time[self.ended] = 0
        over = self.ended.copy()
        flags = (over, over & False) if self.terminates else (over & False, over)
        return self._shown(), reward, *flags, infos

    def _shown(self) -> np.ndarray:
        return np.stack([self.time <= 0, self.time > 0], 1).astype(np.float32)[:, :: -1 if self.blind else 1]

    def _told(self, shown: np.ndarray) -> dict[str, Any]:
        if self.final is None:
            return {}
        if self.final == "dense":
            return {"final_obs": shown}
        rows = [row.copy() if over else None for row, over in zip(shown, self.ended, strict=True)]
        told = np.empty(self.num_envs, object)
        told[:] = rows
        last = [{"true_reward": 3.0} if over else None for over in self.ended]
        return {self.final: told, f"_{self.final}": self.ended.copy(), "final_info": np.array(last, object)}


ENDLESS = f"{__name__}:Endless"


def endless(num_envs: int = 3, **kwargs: Any) -> GroupEnv:
    group = make_group(EnvConfig(env=ENDLESS, env_kwargs=kwargs), num_envs)
    assert isinstance(group, GymVector)
    group.settle_mode()
    return group


def test_a_vector_of_one_is_looked_at_by_whoever_makes_it_first() -> None:
    config = EnvConfig(env=ENDLESS)
    for make in (make_first, make_alone):
        with pytest.warns(UserWarning, match="assuming NEXT_STEP"):
            assert make(config).spec.same_step


def nothing(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.zeros((len(obs["obs"]), 1), np.int32)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("final", ["final_obs", "final_observation", "dense"])
def test_an_undeclared_vector_with_final_observations_is_taken_as_what_it_is(final: str, num_envs: int) -> None:
    declared = endless(num_envs, declares="SameStep")
    with pytest.warns(UserWarning, match="assuming NEXT_STEP"):
        group = endless(num_envs, final=final)
    [note] = group.spec.notes
    assert note.startswith(
        f"{ENDLESS} has no metadata['autoreset_mode']; by final_obs in its infos, it is taken as Sam"
    )
    assert declared.spec == replace(group.spec, notes=())
    worker = make_group(EnvConfig(env=ENDLESS, env_kwargs={"final": final}), num_envs, spec=group.spec)  # says nothing
    seeds = list(range(num_envs))
    expected, *others = (collect(one, 20, seeds, nothing) for one in (declared, group, worker))
    assert expected.truncated[:, 0].nonzero()[0].tolist() == [3, 7, 11, 15, 19]
    assert expected.reward[:8, 0].tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
    assert expected.final_obs["obs"][expected.truncated].tolist() == [[0, 1]] * expected.truncated.sum()
    assert expected.obs["obs"][1:][expected.truncated].tolist() == [[1, 0]] * expected.truncated.sum()
    for found in others:
        for name in ("reward", "first", "terminated", "truncated", "has_final"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        np.testing.assert_array_equal(found.obs["obs"], expected.obs["obs"])
        np.testing.assert_array_equal(found.final_obs["obs"], expected.final_obs["obs"])
        if final != "dense":
            assert {stats.stats["true_reward"] for _, stats in found.episodes} == {3.0}
            assert len(found.episodes) == expected.truncated.sum()


def test_equal_observations_prove_the_same_step_together_with_a_reward_after_the_end() -> None:
    with pytest.warns(UserWarning, match="assuming NEXT_STEP"):
        assert endless(blind=True, num_steps=1).spec.same_step


def test_an_undeclared_vector_of_the_next_step_stays_one_and_says_so() -> None:
    with pytest.warns(UserWarning, match="assuming NEXT_STEP"):
        group = endless(does="NextStep")
    assert not group.spec.same_step
    assert group.spec.notes == (
        f"{ENDLESS} has no metadata['autoreset_mode']; without any other sign, it is taken as NextStep"
        " (docs/own_env.md)",
    )


REWARDED = "env 0 got a reward, or ended, in the step after an end"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"final": None, "num_steps": 1}, f"{REWARDED}, which must only reset it, and it has no metadata"),
        ({"final": None, "blind": True}, REWARDED),
        ({"final": None, "blind": True, "terminates": True}, REWARDED),
        ({"declares": "NextStep"}, "infos hold another final_obs than what is shown at an end"),
        ({"declares": "NextStep", "final": "dense"}, "autoreset_mode'] is NextStep: it must declare what it does"),
        ({"declares": "NextStep", "final": None, "num_steps": 1}, REWARDED),
        ({"declares": "Disabled"}, "infos hold another final_obs than what is shown at an end"),
        ({"declares": "Disabled", "terminates": True, "final": "final_observation"}, "is Disabled: it must declare"),
        ({"does": "NextStep", "declares": "SameStep", "terminates": True}, "the next one begins a step later"),
    ],
)
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.filterwarnings("ignore:.*assuming NEXT_STEP")
def test_a_vector_that_does_something_else_is_refused_at_the_start(
    kwargs: dict[str, Any], words: str, num_envs: int
) -> None:
    with pytest.raises(UsageError) as caught:
        endless(num_envs, **kwargs)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{ENDLESS}: ")
    assert str(caught.value).endswith("it must declare what it does (docs/own_env.md)")


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.filterwarnings("ignore:.*assuming NEXT_STEP")
def test_what_ended_rows_show_gives_a_vector_away_that_says_nothing_and_pays_nothing_at_first(num_envs: int) -> None:
    for terminates in (False, True):
        with pytest.raises(UsageError, match="what it shows at an end is the first observation of the next episode"):
            endless(num_envs, final=None, terminates=terminates)
        assert not endless(num_envs, does="NextStep", final=None, terminates=terminates).spec.same_step


class Bandit(VectorEnv):
    """Shows a new context at each reset, and again with the reward of the only step; the next step resets alone."""

    def __init__(self, num_envs: int = 3) -> None:
        self.num_envs, self.metadata, self.resets, self.ended = num_envs, {}, 0, np.zeros(num_envs, bool)
        self.single_observation_space, self.single_action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.random, self.context = np.random.default_rng(0), np.zeros((num_envs, 2), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.ended[:] = False
        return self._draw(), {}

    def step(self, actions: np.ndarray) -> tuple:
        shown = self._draw() if self.ended[0] else self.context.copy()
        self.ended = ~self.ended
        return shown, self.ended.astype(np.float32), self.ended.copy(), np.zeros(self.num_envs, bool), {}

    def _draw(self) -> np.ndarray:
        self.context = self.random.random((self.num_envs, 2), np.float32)
        return self.context.copy()


@pytest.mark.parametrize("num_envs", [1, 8, 20])
def test_an_undeclared_vector_may_show_one_observation_in_a_whole_episode(num_envs: int) -> None:
    """Until a second reset, observations at ends equal first observations."""
    with pytest.warns(UserWarning, match="assuming NEXT_STEP"):
        group = make_group(EnvConfig(env=f"{__name__}:Bandit"), num_envs)
    assert isinstance(group, GymVector)
    group.settle_mode()
    assert not group.spec.same_step
    assert group.ends.count >= 2 * FIRST_ENDS
    rollout = collect(group, 4, list(range(num_envs)), nothing)
    assert rollout.terminated[:, 0].tolist() == [True, False, True, False]


class Stream(gymnasium.Env):
    """Goes on where it was at a reset, so that it shows first what it has shown last; pays 2 a step of 3."""

    observation_space, action_space = spaces.Box(0.0, 1e6, (1,), np.float32), spaces.Discrete(2)
    time = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.end = self.time + 3
        return np.full(1, self.time, np.float32), {}

    def step(self, action: int) -> tuple:
        self.time += 1
        return np.full(1, self.time, np.float32), 2.0, False, self.time == self.end, {}


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", MODES)
def test_vectors_of_gymnasium_are_taken_whatever_they_show_and_pay(mode: AutoresetMode, kind: Any) -> None:
    for wrap in (lambda env: env, lambda env: TransformReward(env, lambda reward: reward + 1)):
        group = GymVector(lambda wrap=wrap: wrap(kind([Stream] * 3, autoreset_mode=mode)), name="Stream")  # type: ignore[misc]
        group.settle_mode()
        rollout = collect(group, 30, [0, 1, 2], nothing)
        group.close()
        valid = np.ones_like(rollout.done) if group.spec.same_step else ~rollout.first[1:]
        assert set(rollout.reward[valid]) == {rollout.reward[0, 0]}
        assert not rollout.reward[~valid].any()
        assert rollout.truncated.sum() == 3 * (10 if group.spec.same_step else 7)


def test_a_vector_of_the_next_step_that_declares_the_same_one_lacks_final_observations() -> None:
    with pytest.raises(EnvironmentFailure, match=r"truncated and infos hold no final_obs \(SAME_STEP\)"):
        endless(does="NextStep", declares="SameStep")


@pytest.mark.parametrize("final", [None, "final_obs"])
@pytest.mark.parametrize("mode", MODES)
def test_a_vector_that_does_what_it_declares_is_taken(mode: AutoresetMode, final: str | None) -> None:
    terminates = final is None
    group = endless(does=mode.value, declares=mode.value, final=final, terminates=terminates)
    rollout = collect(group, 20, [0, 1, 2], nothing)
    valid = np.ones_like(rollout.done) if group.spec.same_step else ~rollout.first[1:]
    assert rollout.reward[valid].mean() == pytest.approx(3 / 4, abs=0.05)
    assert (rollout.terminated if terminates else rollout.truncated).any()
    assert group.spec.notes == ()
