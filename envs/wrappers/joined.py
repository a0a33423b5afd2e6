"""Several vectors of numbers joined to one, which a single encoder reads together, and faster."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from appo.envs.spaces import Space, shown_mask
from appo.envs.spec import Array


def joined_space(space: Space) -> spaces.Box | None:
    """Return the space of all numbers of a Dict end to end; None unless the Dict has only vectors of floats."""
    if not isinstance(space, spaces.Dict) or shown_mask(space) or not space.spaces:
        return None
    leaves = list(space.spaces.values())
    if not all(isinstance(s, spaces.Box) and len(s.shape) < 2 and np.issubdtype(s.dtype, np.floating) for s in leaves):
        return None
    dtype: Any = np.result_type(*(leaf.dtype for leaf in leaves if leaf.dtype is not None))
    return spaces.Box(-np.inf, np.inf, (sum(int(np.prod(leaf.shape or ())) for leaf in leaves),), dtype)


def join_rows(space: spaces.Dict, observation: dict[str, Any]) -> Array:
    """The numbers [R, n] of R observations, in the order of the space."""
    rows = [np.asarray(observation[key]) for key in space.spaces]
    return np.concatenate([row.reshape(len(row), -1) for row in rows], axis=1)


class JoinedVectors(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Joins the vectors of an environment whose observation space has a `joined_space` to one [n]."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        joined = joined_space(env.observation_space)
        assert joined is not None
        assert isinstance(env.observation_space, spaces.Dict)
        self.observation_space, self._keys = joined, list(env.observation_space.spaces)

    def observation(self, observation: dict[str, Any]) -> Array:
        """The numbers in the order of the space."""
        return np.concatenate([np.ravel(observation[key]) for key in self._keys])
