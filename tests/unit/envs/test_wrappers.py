import copy
import pickle
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from gymnasium.wrappers.vector import NormalizeObservation as VectorNormalizeObservation

from appo.algorithms.playing.policy import look_at
from appo.envs.config import EnvConfig
from appo.envs.make import make_group, make_single
from appo.envs.toys.toy import Counter, counter_length, counter_step, register_toys
from appo.envs.wrappers.making import RepeatAction, know_actions_sooner, make_registered, stack_frames
from appo.utils.errors import SpaceMismatch, UsageError
from tests.unit.envs.rollouts import collect


class Numbered(gymnasium.Env[Any, Any]):
    """Shows the number of the step in every entry; ends after `length` steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...], dtype: str = "uint8", length: int = 9):
        high = np.arange(99, 99 + np.prod(shape, dtype=int)).clip(max=255).reshape(shape)
        self.observation_space = spaces.Box(np.zeros(shape, dtype), high.astype(dtype), dtype=np.dtype(dtype).type)
        self.count, self.length = 0, length

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observation(), 1.0, self.count == self.length, False, {"step": self.count}

    def _observation(self) -> Any:
        return np.full(self.observation_space.shape, self.count, self.observation_space.dtype)


# --- the same action again


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_an_action_is_repeated_until_the_episode_ends(times: int) -> None:
    env, plain = RepeatAction(Counter(), times), Counter()
    observation, _ = env.reset(seed=3)
    expected, _ = plain.reset(seed=3)
    for episode in range(4):
        assert observation.tolist() == expected.tolist() == [3, episode, 0, 0]
        left, ended = counter_length(3, episode), False
        while not ended:
            step = counter_length(3, episode) - left
            frames = min(times, left)
            outcomes = [counter_step(3, episode, step + i, 2) for i in range(frames)]
            observation, reward, terminated, truncated, said = env.step(2)
            assert reward == sum(outcome.reward for outcome in outcomes)
            assert (terminated, truncated) == outcomes[-1][1:]
            assert observation.tolist() == [3, episode, step + frames, 2]
            assert said["num_frames"] == frames
            left, ended = left - frames, terminated or truncated
        assert left == 0
        assert said["true_reward"] == sum(
            counter_step(3, episode, step, 2).reward for step in range(counter_length(3, episode))
        )
        observation, _ = env.reset()
        expected, _ = plain.reset()


def test_frames_of_an_env_that_skips_itself_are_summed() -> None:
    env = RepeatAction(RepeatAction(Numbered((1,), length=7), 2), 3)
    env.reset()
    _, reward, ended, _, said = env.step(0)
    assert (reward, ended, said) == (6.0, False, {"step": 6, "num_frames": 6})
    _, reward, ended, _, said = env.step(0)
    assert (reward, ended, said) == (1.0, True, {"step": 7, "num_frames": 1})


def test_a_repeated_step_without_info_is_refused() -> None:
    env = Counter()
    step = env.step
    env.step = lambda action: (*step(action)[:4], None)  # type: ignore[method-assign,assignment,return-value]
    repeated = RepeatAction(env, 2)
    repeated.reset(seed=0)
    with pytest.raises(SpaceMismatch, match=r"Counter: step must return .* with a dict as info"):
        repeated.step(0)


def test_frame_skip_counts_frames_in_any_environment() -> None:
    config = EnvConfig(env="toy/Counter-v0", env_frameskip=4, env_vectorization="python")
    group = make_group(config, 2)
    assert group.spec.frames_per_step == 1
    rollout = collect(group, 30, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
    for row in range(2):
        ends = np.flatnonzero(rollout.done[:, row])
        begin = 0
        for episode, end in enumerate(ends):
            assert rollout.num_frames[begin : end + 1, row].sum() == counter_length(row, episode)
            begin = end + 2
        assert len(ends) >= 5


class Masked(gymnasium.Env[Any, Any]):
    """Never ends. Step k allows what `masks` holds for k, shown in the observation or told in info; all else later."""

    def __init__(self, action_space: spaces.Space, masks: dict[int, Any], *, in_info: bool):
        self.action_space, self.masks, self.in_info, self.count = action_space, masks, in_info, 0
        mask = {} if in_info else {"action_mask": spaces.MultiBinary(5)}
        self.observation_space = spaces.Dict({"count": spaces.Box(0, 99, (1,)), **mask})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._shown()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.count += 1
        observation, said = self._shown()
        return observation, 1.0, False, False, said

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        mask = {"action_mask": self.masks.get(self.count, np.ones(5, np.int8))}
        count = {"count": np.array([self.count], np.float32)}
        return (count, mask) if self.in_info else (count | mask, {"action_mask": np.zeros(5)})


TREE = spaces.Dict({"a": spaces.Discrete(2, start=1), "b": spaces.Tuple((spaces.MultiBinary(2), spaces.Discrete(3)))})


@pytest.mark.parametrize("in_info", [False, True])
@pytest.mark.parametrize(
    ("space", "action", "frames"),
    [  # after steps 2 and 3 the choices 0, then 0 and 4, are forbidden
        (spaces.Discrete(5), 0, [2, 1, 4]),
        (spaces.Discrete(5), 4, [3, 4, 4]),
        (spaces.Discrete(5), 1, [4, 4, 4]),
        (spaces.Discrete(5, start=3), 3, [2, 1, 4]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), [3, 4, 4]),
        (spaces.MultiDiscrete([2, 3]), np.array([0, 1]), [2, 1, 4]),
        (TREE, {"a": 1, "b": (np.zeros(2, np.int8), 1)}, [2, 1, 4]),
        (TREE, {"a": 2, "b": (np.zeros(2, np.int8), 2)}, [3, 4, 4]),
        (TREE, {"a": 2, "b": (np.zeros(2, np.int8), 0)}, [4, 4, 4]),
        (spaces.Box(-1, 1, (5,)), np.zeros(5, np.float32), [4, 4, 4]),  # masks are of choices
        (spaces.Discrete(6), 0, [4, 4, 4]),  # of another size: refused elsewhere
    ],
)
def test_no_action_is_repeated_that_a_mask_forbids(
    in_info: bool, space: spaces.Space, action: Any, frames: list[int]
) -> None:
    masks = {2: np.array([0, 1, 1, 1, 1], np.int8), 3: (np.array([0, 1]), np.array([1, 1, 0]))}
    env = RepeatAction(Masked(space, masks, in_info=in_info), 4)
    env.reset()
    taken = [env.step(action) for _ in frames]
    assert [said["num_frames"] for *_, said in taken] == frames
    assert [reward for _, reward, *_ in taken] == frames
    assert [observation["count"].item() for observation, *_ in taken] == np.cumsum(frames).tolist()


class Forbidding(Masked):
    def __init__(self) -> None:
        super().__init__(
            spaces.Discrete(5), {step: np.array([0, 0, 1, 1, 1], np.int8) for step in range(99)}, in_info=True
        )


def test_a_horizon_counts_actions_though_a_mask_ends_repetitions() -> None:
    env = make_single(EnvConfig(env=f"{__name__}:Forbidding", env_frameskip=4, horizon=3))
    for action in (1, 3):  # one frame, and four
        env.reset()
        assert [env.step(action)[3] for _ in range(3)] == [False, False, True]


# --- several observations at once


@pytest.mark.parametrize(
    ("shape", "stacked"),
    [((3,), (12,)), ((1,), (4,)), ((6, 8), (4, 6, 8)), ((6, 8, 3), (6, 8, 12)), ((3, 6, 8), (12, 6, 8)),
     ((1, 6, 8), (4, 6, 8)), ((6, 8, 1), (6, 8, 4)), ((2, 2, 2, 2), (8, 2, 2, 2))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_frames_are_stacked_oldest_first_as_channels_or_end_to_end(
    shape: tuple[int, ...], stacked: tuple[int, ...], dtype: str
) -> None:
    env = stack_frames(Numbered(shape, dtype), 4)
    assert env.observation_space.shape == stacked
    assert env.observation_space.dtype == dtype
    for _ in range(2):
        seen = [env.reset()[0], *(env.step(0)[0] for _ in range(5))]
        for now, observation in enumerate(seen):
            assert env.observation_space.contains(observation)
            frames = parts(observation, shape)
            assert [set(np.unique(frame)) for frame in frames] == [{max(0, now - ago)} for ago in (3, 2, 1, 0)]


def parts(observation: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    if len(shape) == 2:
        return list(observation)
    return np.split(observation, 4, axis=2 if len(shape) == 3 and shape[0] > shape[2] else 0)


@pytest.mark.parametrize("shape", [(40, 40), (40, 40, 1), (3, 40, 40)])
def test_specs_know_the_frames_that_flags_have_stacked(shape: tuple[int, ...]) -> None:
    config = EnvConfig(env=f"{__name__}:Numbered", env_kwargs={"shape": shape}, env_framestack=5)
    assert make_group(config, 1).spec.observations["obs"].frames == 5
    assert look_at(config)[1].observations["obs"].frames == 5
    assert look_at(config, look_at(config)[0])[1].observations["obs"].frames == 5
    assert make_group(replace(config, env_framestack=None), 1).spec.observations["obs"].frames == 1


def test_bounds_are_stacked_too() -> None:
    env = stack_frames(Numbered((2, 3, 4)), 2)
    plain = Numbered((2, 3, 4)).observation_space
    np.testing.assert_array_equal(env.observation_space.high, np.concatenate([plain.high] * 2))
    np.testing.assert_array_equal(env.observation_space.low, 0)


class Reusing(Numbered):
    """Shows all its observations in one buffer, as simulators written in C do."""

    def _observation(self) -> Any:
        shown = super()._observation()
        self.buffer = vars(self).get("buffer", shown)
        self.buffer[...] = shown
        return self.buffer


@pytest.mark.parametrize("flags", [{}, {"env_frameskip": 2}, {"horizon": 7, "no_done_at_end": True}])
@pytest.mark.parametrize("shape", [(2,), (6, 8), (6, 8, 3), (3, 6, 8), (2, 2, 2, 2)])
def test_frames_of_an_environment_with_one_buffer_are_those_of_one_that_copies(
    shape: tuple[int, ...], flags: dict[str, Any]
) -> None:
    module = f"{__name__}:"
    shown = []
    for name in ("Numbered", "Reusing"):
        kwargs: dict[str, object] = {"shape": shape, "length": 9}
        group = make_group(EnvConfig(env=module + name, env_kwargs=kwargs, env_framestack=3, **flags), 2)
        shown.append(collect(group, 30, [0, 1], lambda obs: np.zeros((2, 1), np.int32)))
    copied, reused = shown
    np.testing.assert_array_equal(reused.obs["obs"], copied.obs["obs"])
    np.testing.assert_array_equal(reused.first, copied.first)
    assert len(np.unique(copied.obs["obs"][2, 0])) == 3  # three frames that differ


def test_one_frame_changes_nothing() -> None:
    env = stack_frames(Numbered((3,)), 1)
    assert env.reset()[0].tolist() == [0, 0, 0]
    assert env.step(0)[0].tolist() == [1, 1, 1]


def test_an_observation_stays_as_it_was_when_the_next_is_shown() -> None:
    env = stack_frames(Numbered((3,)), 2)
    first, _ = env.reset()
    env.step(0)
    assert first.tolist() == [0] * 6


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3), spaces.Dict({"x": spaces.Box(0, 1, (2,))}), spaces.Box(0, 1, ())]
)
def test_what_is_no_single_array_cannot_be_stacked(space: spaces.Space) -> None:
    env = Numbered((3,))
    env.observation_space = space
    with pytest.raises(UsageError, match=r"--env_framestack=3 needs an environment that shows one array"):
        stack_frames(env, 3)


# --- by flags


def test_flags_reach_an_environment_that_knows_none_of_them() -> None:
    config = EnvConfig(env="Pendulum-v1", env_frameskip=3, env_framestack=3, env_vectorization="python")
    group = make_group(config, 1)
    assert group.spec.observations["obs"].shape == (9,)
    rollout = collect(group, 80, [0], lambda obs: np.zeros((1, 1), np.float32))
    assert np.flatnonzero(rollout.truncated[:, 0]).tolist() == [66]  # 200 steps of the environment
    assert rollout.num_frames[:67, 0].tolist() == [3] * 66 + [2]
    obs = rollout.obs["obs"][:, 0].reshape(-1, 3, 3)
    np.testing.assert_array_equal(obs[0], [obs[0, 2]] * 3)
    np.testing.assert_array_equal(obs[1:68, :2], obs[:67, 1:])
    np.testing.assert_array_equal(obs[68], [obs[68, 2]] * 3)
    plain = gymnasium.make("Pendulum-v1")
    plain.reset(seed=0)
    rewards = [float(plain.step(np.zeros(1, np.float32))[1]) for _ in range(200)]
    summed = [sum(rewards[i : i + 3]) for i in range(0, 200, 3)]
    np.testing.assert_allclose(rollout.reward[:67, 0], summed, rtol=1e-6)


@pytest.mark.parametrize("name", ["CartPole-v1", "toy/Corridor-v0"])
def test_a_horizon_truncates(name: str) -> None:
    env = make_single(EnvConfig(env=name, horizon=3))
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_making_an_environment_leaves_out_the_checks() -> None:
    register_toys()
    registration = gymnasium.spec("toy/Target-v0")
    env = make_registered(registration, num_axes=3)
    assert type(env).__name__ == "Target"
    assert env.action_space.shape == (3,)
    assert (registration.order_enforce, registration.disable_env_checker) == (True, False)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(2), spaces.Discrete(3, start=-1), spaces.Discrete(200, start=-100, dtype=np.int16)]
)
def test_choices_are_known_sooner_and_are_the_same(space: spaces.Discrete) -> None:
    env = Numbered((2,))
    env.action_space = space
    values = [*range(-102, 103), True, 0.0, 1.5, "1", None, 2**70, np.int64(1), np.uint8(2), np.array(1), np.array([1])]
    expected = [space.contains(value) for value in values]
    know_actions_sooner(env)
    for known in (space, copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert "contains" in vars(known)
        assert [known.contains(value) for value in values] == expected
        assert [value in known for value in values] == expected
        assert known == spaces.Discrete(space.n, start=space.start, dtype=space.dtype.type)
        assert known.contains(known.sample())


def test_only_plain_choices_are_known_sooner() -> None:
    class Odd(spaces.Discrete):
        def contains(self, x: Any) -> bool:
            return bool(x == 1)

    env = Numbered((2,))
    env.action_space = Odd(2)
    know_actions_sooner(env)
    assert "contains" not in vars(env.action_space)
    assert "contains" in vars(make_single(EnvConfig(env="CartPole-v1")).action_space)


# --- statistics that no checkpoint has


class Scaled(gymnasium.Env[Any, Any]):
    """Holds what it plays under a name of its own, and normalizes rewards without gymnasium's wrapper."""

    def __init__(self, inner: Any = None, **statistics: Any) -> None:
        self._inner = inner or gymnasium.make("CartPole-v1")
        self.observation_space, self.action_space = self._inner.observation_space, self._inner.action_space
        vars(self).update(statistics)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
        return self._inner.reset(seed=seed)  # type: ignore[no-any-return]

    def step(self, action: int) -> Any:
        return self._inner.step(action)


def normalized_rewards() -> Scaled:
    return Scaled(NormalizeReward(gymnasium.make("CartPole-v1")))


def normalized_both() -> Any:
    return NormalizeReward(RepeatAction(NormalizeObservation(gymnasium.make("CartPole-v1")), 2))


class NormalizedVector(VectorNormalizeObservation):
    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs))


HERE = "tests.unit.envs.test_wrappers"
FRESH = "every copy of it begins with fresh ones, no checkpoint keeps them"
INPUT, RETURNS = "--normalize_input=True", "--normalize_returns=True (where the algorithm lacks it: --reward_scale)"


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("CartPole-v1", {}, ""),
        (f"{HERE}:Scaled", {}, ""),
        (f"{HERE}:Scaled", {"obs_rms": None, "return_rms": None}, ""),
        (
            f"{HERE}:normalized_rewards",
            {},
            f"(NormalizeReward): {FRESH}, and returns are of normalized rewards; leave that out, and give {RETURNS}",
        ),
        (
            f"{HERE}:normalized_both",
            {},
            f"(NormalizeReward, NormalizeObservation): {FRESH}, and returns are of normalized rewards; leave that out,"
            f" and give {INPUT} and {RETURNS}",
        ),
        (f"{HERE}:Scaled", {"obs_rms": 1}, f"(Scaled): {FRESH}; leave that out, and give {INPUT}"),
        (
            f"{HERE}:Scaled",
            {"ret_rms": 1},
            f"(Scaled): {FRESH}, and returns are of normalized rewards; leave that out, and give {RETURNS}",
        ),
        (f"{HERE}:NormalizedVector", {}, f"(NormalizedVector): {FRESH}; leave that out, and give {INPUT}"),
    ],
)
def test_statistics_of_the_environment_itself_are_named(name: str, kwargs: dict[str, Any], text: str) -> None:
    group = make_group(EnvConfig(name, env_kwargs=kwargs), 2)
    assert group.spec.notes == ((f"the environment normalizes by statistics of its own {text}",) if text else ())
    group.close()
