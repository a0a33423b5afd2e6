"""Vectors of numbers that are shown as one."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.envs.spec import MASK_KEY
from appo.envs.wrappers.joined import JoinedVectors, join_rows, joined_space

FLOATS = spaces.Dict(
    {
        "speed": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        "angle": spaces.Box(-1.0, 1.0, (3,), np.float32),
        "height": spaces.Box(0.0, 9.0, (), np.float64),
    }
)


def observation(number: float) -> dict[str, Any]:
    return {"height": np.float64(number), "angle": np.full(3, 0.5, np.float32), "speed": np.array([1e-3, -number])}


class Sensors(gymnasium.Env[Any, Any]):
    observation_space, action_space = FLOATS, spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return observation(1.0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return observation(2.0), 0.0, False, False, {}


def test_numbers_come_in_the_order_of_the_space() -> None:
    assert list(FLOATS.spaces) == ["angle", "height", "speed"]
    env = JoinedVectors(Sensors())
    assert env.observation_space == joined_space(FLOATS) == spaces.Box(-np.inf, np.inf, (6,), np.float64)
    for shown, number in ((env.reset()[0], 1.0), (env.step(0)[0], 2.0)):
        assert shown.dtype == np.float64
        np.testing.assert_allclose(shown, [0.5, 0.5, 0.5, number, 1e-3, -number])


def test_rows_are_joined_as_single_observations_are() -> None:
    env = JoinedVectors(Sensors())
    single = [observation(number) for number in (1.0, 4.0)]
    rows = join_rows(FLOATS, {key: np.stack([one[key] for one in single]) for key in FLOATS.spaces})
    assert rows.dtype == np.float64
    np.testing.assert_array_equal(rows, [env.observation(one) for one in single])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0.0, 1.0, (3,)),
        spaces.Dict({}),
        spaces.Dict({**FLOATS.spaces, "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8)}),
        spaces.Dict({**FLOATS.spaces, "map": spaces.Box(0.0, 1.0, (4, 4))}),
        spaces.Dict({**FLOATS.spaces, "count": spaces.Box(0, 9, (2,), np.int64)}),
        spaces.Dict({**FLOATS.spaces, MASK_KEY: spaces.Box(0.0, 1.0, (2,))}),
        spaces.Dict({"inner": FLOATS}),
    ],
)
def test_what_is_more_than_vectors_stays_as_it_is(space: gymnasium.Space[Any]) -> None:
    assert joined_space(space) is None
