"""highway-env as it is played here."""

from importlib.util import find_spec

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec as Registration

from appo.algorithms.playing.video import make_drawn
from appo.envs import make, names
from appo.envs.config import EnvConfig
from appo.envs.families import highway
from appo.envs.harmless import harmful_arguments
from appo.envs.make import check_name, make_group
from appo.envs.presets import find_name
from appo.envs.spec import ObservationSpec
from appo.envs.wrappers.making import natural_steps_per_second
from appo.utils.errors import UsageError
from tests.unit.envs.rollouts import collect

needs_package = pytest.mark.skipif(find_spec("highway_env") is None, reason="highway-env is not installed")


@needs_package
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


@needs_package
def test_the_flags_are_followed() -> None:
    config = EnvConfig(env="highway-fast-v0", env_frameskip=2, env_framestack=3, horizon=2)
    group = make_group(config, 1)
    assert group.spec.observations == {"obs": ObservationSpec((3, 5, 5), "float32")}
    rollout = collect(group, 3, [1], lambda obs: np.ones((1, 1), np.int32))
    group.close()
    assert np.flatnonzero(rollout.done).tolist() == [1]
    assert rollout.num_frames[:2].tolist() == [[2], [2]]


def test_an_entry_point_decides_that_the_family_makes_an_environment() -> None:
    registration = Registration("highway-fast-v0", entry_point="highway_env.envs:HighwayEnvFast")
    assert make._adapter(registration) == highway


def test_the_name_of_the_family_is_one_of_its_environments_too() -> None:
    assert [find_name(name) for name in ("highway", "highway-v0", "parking-v0")] == [None, "highway", None]


def test_a_stranger_sets_no_road() -> None:
    assert harmful_arguments("highway-v0", {"config": {"other_vehicles_type": "a.b.C"}}) == ["config"]


def test_a_name_without_version_tells_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "find_spec", lambda package: None)
    own = {i: one for i, one in gymnasium.registry.items() if not str(one.entry_point).startswith("highway_env")}
    monkeypatch.setattr(gymnasium, "registry", own)
    with pytest.raises(UsageError) as caught:
        check_name(EnvConfig(env="highway-fast"))
    said = 'highway-env, which is not installed, has environments of such names: pip install "appo[highway]"'
    assert str(caught.value) == f"there is no environment highway-fast; {said}"
