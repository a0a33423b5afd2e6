"""Masks from the method `action_masks` of an environment."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from appo.envs.masks import METHOD
from appo.envs.spaces import num_agents_of, shown_mask
from appo.envs.spec import MASK_KEY
from appo.envs.wrappers.vector_wrapper import AnyVectorWrapper


class MasksOfMethod(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts the result of the environment's method `action_masks` into infos; for several agents, a mask per agent.

    An info with a mask keeps the mask.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode, with a first mask."""
        return self._with_masks(self.env.reset(seed=seed, **({"options": options} if options else {})))

    def step(self, action: Any) -> Any:
        """Step the environment, and put the next mask into the info; after an end the method may fail."""
        result = self.env.step(action)
        try:
            return self._with_masks(result)
        except Exception:
            if not (len(result) == 5 and np.all(np.asarray(result[2]) | np.asarray(result[3]))):
                raise
            return result  # no action follows

    def _with_masks(self, result: Any) -> Any:
        if not isinstance(result, tuple) or len(result) < 2 or not isinstance(result[-1], list | tuple | Mapping):
            return result  # what reads it says what is wrong
        *others, info = result
        masks = self.env.get_wrapper_attr(METHOD)()
        if not (count := num_agents_of(self.env)):
            return (*others, {MASK_KEY: masks, **info})
        infos = [info] * count if isinstance(info, Mapping) else info
        return (*others, [{MASK_KEY: mask, **one} for mask, one in zip(masks, infos, strict=True)])


class VectorMasksOfMethod(AnyVectorWrapper):
    """Puts the results of the method `action_masks` of a vector, or of each environment in the vector, into infos."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin episodes, with their first masks."""
        observation, infos = self.env.reset(seed=seed, options=options)
        return observation, self._with_masks(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the vector, and put the next masks into infos."""
        *others, infos = self.env.step(actions)
        return (*others, self._with_masks(infos))

    def _with_masks(self, infos: Any) -> Any:
        own = getattr(self.unwrapped, METHOD, None)
        masks = own() if own is not None else list(self.unwrapped.call(METHOD))  # type: ignore[attr-defined]
        return {MASK_KEY: masks, **infos} if isinstance(infos, Mapping) else infos


def with_masks_of_method(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Wrap an environment with a method for masks, unless observations contain the mask."""
    if not (env.has_wrapper_attr(METHOD) and callable(env.get_wrapper_attr(METHOD))):
        return env
    return env if shown_mask(env.observation_space) else MasksOfMethod(env)


def with_masks_of_methods(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Wrap a vector with a method for masks; gymnasium's own vectors if the environments have the method."""
    of_each = False
    if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        first = env.unwrapped.envs[0] if isinstance(env.unwrapped, SyncVectorEnv) else env.unwrapped.env_fns[0]()
        of_each = first.has_wrapper_attr(METHOD) and callable(first.get_wrapper_attr(METHOD))
        if isinstance(env.unwrapped, AsyncVectorEnv):
            first.close()
    has = of_each or callable(getattr(env.unwrapped, METHOD, None))
    return VectorMasksOfMethod(env) if has and not shown_mask(env.single_observation_space) else env
