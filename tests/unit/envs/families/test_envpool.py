"""envpool's pools, whose every row is what a pool of one environment shows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from appo.algorithms.playing.video import natural_steps_per_second
from appo.envs.config import EnvConfig
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import make_group, make_single
from appo.envs.spec import GroupEnv, ObservationSpec, step_row
from appo.envs.vectors.gym_vector import GymVector
from appo.utils.errors import UsageError
from tests.unit.envs.rollouts import Rollout, collect

pytest.importorskip("envpool")


def group_of(env: str, vectorization: str, num_envs: int = 2, **flags: Any) -> GroupEnv:
    config = EnvConfig(env=env, env_vectorization=vectorization, decorrelate_envs_on_one_worker=False, **flags)
    group = make_group(config, num_envs)
    assert isinstance(group, GymVector if vectorization == "native" else PythonLoop)
    return group


def pushes(obs: dict[str, np.ndarray]) -> np.ndarray:
    """Keeps a pole up for a while."""
    return (obs["obs"][:, 2] > 0).astype(np.int32)[:, None]


def joints(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.tanh(obs["obs"][:, :6]).astype(np.float32)


def played(group: GroupEnv, num_steps: int, policy: Callable[[Any], np.ndarray], seed: int = 5) -> Rollout:
    """The environments of a pool count their seeds on from the first."""
    rollout = collect(group, num_steps, list(range(seed, seed + group.num_rows)), policy)
    group.close()
    return rollout


@pytest.mark.parametrize(
    ("env", "flags", "policy"),
    [
        ("envpool:CartPole-v1", {}, pushes),
        ("envpool:CartPole-v1", {"horizon": 12}, pushes),
        ("envpool:CheetahRun-v1", {"horizon": 12}, joints),
    ],
)
def test_an_end_is_followed_by_a_step_that_only_resets(env: str, flags: dict[str, int], policy: Any) -> None:
    """Our loop, which resets single environments so, and the pool, which does it in C++, show the same."""
    pool, loop = (played(group_of(env, by, **flags), 150, policy) for by in ("native", "python"))
    for name in ("first", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(pool, name), getattr(loop, name), err_msg=name)
    np.testing.assert_array_equal(pool.obs["obs"], loop.obs["obs"])
    assert pool.done.any(0).all()
    np.testing.assert_array_equal(pool.first[2:], pool.done[:-1])
    assert not pool.reward[1:][pool.done[:-1]].any()
    if flags:
        assert np.flatnonzero(pool.truncated[:, 0])[:2].tolist() == [11, 24]
    else:
        assert pool.terminated.sum() == pool.done.sum() > 4


@pytest.mark.parametrize("by", ["native", "python"])
def test_games_tell_the_lives_that_are_left(by: str) -> None:
    group = group_of("envpool:Breakout-v5", by, num_envs=1, env_kwargs={"use_fire_reset": True})
    lives = list[int]()
    row = replace(step_row(group.spec, 1), lives=np.zeros(1, np.int32))
    group.reset([5], row.obs)
    for _ in range(60):
        group.step(np.full((1, 1), 2, np.int32), row)
        assert row.lives is not None
        lives += row.lives.tolist()
    group.close()
    assert lives[0] == 5
    assert lives[-1] < 5
    assert lives == sorted(lives, reverse=True)


def test_a_seed_repeats_the_games_and_another_one_does_not() -> None:
    group = group_of("envpool:CartPole-v1", "native")
    one, again, other = (collect(group, 60, [seed, 0], pushes) for seed in (5, 5, 6))
    group.close()
    np.testing.assert_array_equal(one.obs["obs"], again.obs["obs"])
    assert not np.array_equal(one.obs["obs"], other.obs["obs"])
    np.testing.assert_array_equal(one.obs["obs"][0, 1], other.obs["obs"][0, 0])


@pytest.mark.parametrize("by", ["native", "python"])
def test_games_count_frames_and_follow_the_flags(by: str) -> None:
    group = group_of("envpool:Pong-v5", by, env_frameskip=2, env_framestack=3, horizon=7)
    assert group.spec.observations == {"obs": ObservationSpec((3, 84, 84), "uint8")}
    assert (group.spec.frames_per_step, group.spec.same_step) == (2, False)
    rollout = played(group, 10, lambda obs: np.zeros((2, 1), np.int32))
    assert (rollout.num_frames == 2).all()
    assert np.flatnonzero(rollout.truncated[:, 0]).tolist() == [6]


def test_a_single_game_can_be_drawn() -> None:
    env = make_single(EnvConfig(env="envpool:Pong-v5"), "rgb_array")
    assert natural_steps_per_second(env) == 15
    env.reset(seed=1)
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((210, 160, 3), np.uint8)
    env.close()


@pytest.mark.parametrize(
    ("env", "mode", "text"),
    [
        ("envpool:CheetahRun-v1", "rgb_array", "envpool:CheetahRun-v1 opens no window: --no_render plays it$"),
        ("envpool:Pong-v5", "human", "--no_render plays it, --save_video films it$"),
    ],
)
def test_what_cannot_be_drawn_is_not_tried(env: str, mode: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_single(EnvConfig(env=env), mode)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (EnvConfig(env="envpool:Pongg-v5"), r"envpool has no environment Pongg-v5; did you mean Pong-v5"),
        (EnvConfig(env="envpool:"), "envpool has no environment without a name"),
        (EnvConfig(env="envpool:CartPole-v1", env_frameskip=2), "--env_frameskip=2: envpool:CartPole-v1 cannot do"),
        (EnvConfig(env="envpool:CartPole-v1", env_framestack=2), "--env_framestack=2: envpool:CartPole-v1 cannot do"),
        (EnvConfig(env="envpool:CartPole-v1", env_kwargs={"seed": 2}), "--env_kwargs seed: envpool:CartPole-v1 gets"),
        (EnvConfig(env="envpool:CartPole-v1", env_kwargs={"sead": 2}), r"refuses its arguments \(--env_kwargs\)"),
    ],
)
@pytest.mark.parametrize("by", ["native", "python"])
def test_what_a_pool_cannot_do_is_one_line(config: EnvConfig, text: str, by: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_group(replace(config, env_vectorization=by), 2)
