"""highway-env as it is played here."""

import numpy as np
import pytest

from appo.algorithms.playing.video import make_drawn
from appo.envs.config import EnvConfig
from appo.envs.make import make_group
from appo.envs.spec import ObservationSpec
from appo.envs.wrappers import natural_steps_per_second
from tests.unit.envs.rollouts import collect

pytest.importorskip("highway_env")


def test_it_is_drawn_where_there_is_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = make_drawn(EnvConfig(env="highway-fast-v0"))
    assert natural_steps_per_second(env) == 2
    env.reset(seed=1)
    first = env.render()
    env.step(1)
    second = env.render()
    env.close()
    assert first.shape == second.shape == (150, 600, 3)
    assert first.any()
    assert not np.array_equal(first, second)


def test_the_flags_are_followed() -> None:
    config = EnvConfig(env="highway-fast-v0", env_frameskip=2, env_framestack=3, horizon=2)
    group = make_group(config, 1)
    assert group.spec.observations == {"obs": ObservationSpec((3, 5, 5), "float32")}
    rollout = collect(group, 3, [1], lambda obs: np.ones((1, 1), np.int32))
    group.close()
    assert np.flatnonzero(rollout.done).tolist() == [1]
    assert rollout.num_frames[:2].tolist() == [[2], [2]]
