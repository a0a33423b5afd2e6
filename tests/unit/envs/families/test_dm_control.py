"""dm_control through shimmy, as it is played here."""

import gymnasium
import numpy as np
import pytest

from appo.envs.config import EnvConfig
from appo.envs.make import make_group, make_single
from appo.envs.spec import ActionPart, ObservationSpec
from tests.unit.envs.rollouts import collect

pytest.importorskip("dm_control")

WALKER = "dm_control/walker-walk-v0"  # one of its sensors shows a single number


def test_all_that_sensors_measure_is_one_vector() -> None:
    env = make_single(EnvConfig(env=WALKER))
    plain = gymnasium.make(WALKER, disable_env_checker=True)
    random = np.random.default_rng(0)
    (shown, _), (expected, _) = env.reset(seed=3), plain.reset(seed=3)
    for _ in range(5):
        numbers = np.concatenate([np.ravel(expected[key]) for key in ("height", "orientations", "velocity")])
        np.testing.assert_array_equal(shown, numbers)
        action = random.uniform(-1, 1, 6)
        shown, reward, *ends, _ = env.step(action)
        expected, expected_reward, *expected_ends, _ = plain.step(action)
        assert (reward, ends) == (expected_reward, expected_ends)
    env.close()
    plain.close()


def test_the_flags_are_followed_and_a_time_limit_is_a_truncation() -> None:
    config = EnvConfig(env=WALKER, env_frameskip=2, env_framestack=3, horizon=4)
    group = make_group(config, 2)
    assert group.spec.observations == {"obs": ObservationSpec((72,), "float32")}
    assert group.spec.action.parts == (ActionPart("gaussian", 6),)
    rollout = collect(group, 6, [1, 2], lambda obs: np.zeros((2, 6), np.float32))
    group.close()
    assert not rollout.terminated.any()
    assert np.flatnonzero(rollout.truncated[:, 0]).tolist() == [3]
    assert rollout.num_frames[:4].tolist() == [[2, 2]] * 4


def test_a_second_of_a_video_is_a_second_of_the_game() -> None:
    env = make_single(EnvConfig(env=WALKER))
    assert env.metadata["render_fps"] == pytest.approx(40)  # steps of 25 ms
    env.close()


def test_the_usual_length_ends_with_a_truncation() -> None:
    group = make_group(EnvConfig(env="dm_control/pendulum-swingup-v0"), 1)
    rollout = collect(group, 1001, [1], lambda obs: np.zeros((1, 1), np.float32))
    group.close()
    assert np.flatnonzero(rollout.truncated).tolist() == [999]
    assert np.flatnonzero(rollout.first).tolist() == [0, 1001]
    assert not rollout.terminated.any()
