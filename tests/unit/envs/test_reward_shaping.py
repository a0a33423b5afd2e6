from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest

from appo.envs.loop.env_set import OnFailure
from appo.envs.loop.python_loop import PythonLoop
from appo.utils.errors import EnvironmentFailure, SpaceMismatch


class Paid(gymnasium.Env[Any, Any]):
    """Pays `step` for every step, and fails in the step whose number is `fails`."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, default: object, fails: int = -1) -> None:
        self.default, self.shaping, self.fails, self.steps = default, default, fails, 0

    def get_default_reward_shaping(self) -> object:
        return self.default

    def set_reward_shaping(self, shaping: Mapping[str, Any], agent: int) -> None:
        assert agent == 0
        self.shaping = shaping

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == self.fails:
            raise ValueError("no")
        return np.zeros(1, np.float32), self.shaping["step"], False, False, {}  # type: ignore[index]


def loop_of(*envs: gymnasium.Env[Any, Any], rebuilds: int = 0) -> PythonLoop:
    """The last `rebuilds` environments take the place of those that fail."""
    made = iter(envs)
    return PythonLoop([lambda: next(made)] * (len(envs) - rebuilds), name="Paid", on_failure=OnFailure(rebuilds))


def rewards(loop: PythonLoop, steps: int = 1) -> list[list[float]]:
    from tests.unit.envs.rollouts import collect

    zeros = np.zeros((loop.num_rows, 1), np.int32)
    return collect(loop, steps, [1] * loop.num_rows, lambda obs: zeros).reward.tolist()


def test_coefficients_are_found_and_set_through_wrappers() -> None:
    default = {"step": np.float32(0.5), "deep": {"pair": (1, 2)}}
    envs = [gymnasium.wrappers.TimeLimit(Paid(default), 9) for _ in range(2)]
    loop = loop_of(*envs)
    assert loop.spec.reward_shaping == {"step": 0.5, "deep": {"pair": [1, 2]}}
    loop.shape_rewards(1, {"step": 3.0})
    assert rewards(loop) == [[0.5, 3.0]]


def test_an_environment_made_again_is_told_again() -> None:
    loop = loop_of(Paid({"step": 0.5}, fails=2), Paid({"step": 0.5}), rebuilds=1)
    loop.shape_rewards(0, {"step": 3.0})
    assert rewards(loop, 4) == [[3.0], [0.0], [3.0], [3.0]]


def test_environments_without_coefficients_have_none() -> None:
    assert loop_of(gymnasium.make("CartPole-v1")).spec.reward_shaping == {}


@pytest.mark.parametrize("default", [3.0, {"step": object()}, {"step": float("nan")}, None])
def test_what_is_no_dict_of_numbers_is_refused(default: object) -> None:
    with pytest.raises(SpaceMismatch, match="get_default_reward_shaping must return a dict of finite numbers"):
        loop_of(Paid(default))


def test_what_raises_is_a_failure_of_the_environment() -> None:
    class Broken(Paid):
        def set_reward_shaping(self, shaping: Mapping[str, Any], agent: int) -> None:
            raise KeyError("health")

    loop = loop_of(Broken({"step": 0.5}))
    with pytest.raises(EnvironmentFailure, match="Paid raised KeyError"):
        loop.shape_rewards(0, {"step": 1.0})
