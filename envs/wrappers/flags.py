"""Wrappers around every environment that follow from flags."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from appo.envs.config import EnvConfig
from appo.envs.outcome import reward_of, truth_of, truths_of
from appo.envs.spaces import Space, num_agents_of
from appo.envs.spec import SINGLE_KEY, FloatArray
from appo.envs.wrappers.joined import JoinedVectors, joined_space
from appo.envs.wrappers.vector_wrapper import AnyVectorWrapper
from appo.utils.errors import UsageError

PREVIOUS_KEY = "previous_step"


def as_flags_ask(env: gymnasium.Env[Any, Any], config: EnvConfig) -> gymnasium.Env[Any, Any]:
    """Wrap an environment for `--clip_actions`, `--no_done_at_end` and `--observe_previous`.

    Raises:
        UsageError: the environment has several agents, or has an observation key with the name of the added key.
    """
    if not config.clip_actions:
        env = gymnasium.Wrapper(env)
        env.action_space = unbounded(env.action_space)
    if config.no_done_at_end:
        env = NeverTerminates(env)
    if config.observe_previous != "none":
        if num_agents_of(env):
            raise UsageError(f"--observe_previous={config.observe_previous}: {config.env} has several agents")
        plain = not isinstance(env.observation_space, spaces.Dict)
        env = PreviousStep(env, config.observe_previous)
        # Read by encoders of their own, what is seen and what was done would only add up in a network without a memory.
        return JoinedVectors(env) if plain and joined_space(env.observation_space) else env
    return env


def vector_as_flags_ask(env: VectorEnv[Any, Any, Any], config: EnvConfig) -> VectorEnv[Any, Any, Any]:
    """Wrap a vector of environments for `--clip_actions` and `--no_done_at_end`."""
    if not config.clip_actions:
        env = AnyVectorWrapper(env)
        env.single_action_space = unbounded(env.single_action_space)
        env.action_space = batch_space(env.single_action_space, env.num_envs)
    return VectorNeverTerminates(env) if config.no_done_at_end else env


def unbounded(space: Space) -> Space:
    """Return the space without bounds of real numbers; choices and bits keep theirs."""
    if isinstance(space, spaces.Dict):
        # Pairs keep the order of the keys, which is that of flat masks; from a dict, gymnasium would sort them.
        return spaces.Dict([(key, unbounded(part)) for key, part in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([unbounded(part) for part in space.spaces])
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return spaces.Box(-np.inf, np.inf, space.shape, space.dtype.type)
    return space


class NeverTerminates(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces every termination by a truncation.

    An agent, of several, without an observation at the end stays terminated: nothing is left to bootstrap from.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._num_agents = num_agents_of(env)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the environment, and change the ends."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        name = type(self.unwrapped).__name__
        if not self._num_agents:
            ended = truth_of(name, "terminated", terminated), truth_of(name, "truncated", truncated)
            return observation, reward, False, any(ended), info
        both: Any = (("terminated", terminated), ("truncated", truncated))  # of each agent, or said once for all
        over, cut = (
            [truth_of(name, key, flag) for flag in (flags if np.ndim(flags) else [flags] * self._num_agents)]
            for key, flags in both
        )
        shown = [one is not None for one in observation]
        lost = [ends and not seen for ends, seen in zip(over, shown, strict=True)]
        kept = [(ends and seen) or late for ends, late, seen in zip(over, cut, shown, strict=True)]
        return observation, reward, lost, kept, info


class VectorNeverTerminates(AnyVectorWrapper):
    """Replaces every termination by a truncation."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the vector, and change the ends."""
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        name, count = type(self.unwrapped).__name__, self.num_envs
        ended = truths_of(name, "terminated", terminated, count) | truths_of(name, "truncated", truncated, count)
        return observation, reward, np.zeros_like(ended), ended, infos


class PreviousStep(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the action and the reward of the last step, as a vector, to the observation.

    Raises:
        UsageError: the observation already has a key with the name.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], shown: str) -> None:
        super().__init__(env)
        own = env.observation_space
        self._is_dict = isinstance(own, spaces.Dict)
        self._action, self._reward = shown in ("action", "both"), shown in ("reward", "both")
        self._size = spaces.flatdim(env.action_space) * self._action + self._reward
        parts: dict[str, Space] = dict(own.spaces) if isinstance(own, spaces.Dict) else {SINGLE_KEY: own}
        if PREVIOUS_KEY in parts:
            raise UsageError(f"--observe_previous={shown}: the environment shows {PREVIOUS_KEY} itself")
        parts[PREVIOUS_KEY] = spaces.Box(-np.inf, np.inf, (self._size,), np.float32)
        self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the first observation, with zeros for the last step."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._beside(observation, np.zeros(self._size, np.float32)), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return the observation after the step, with the step itself."""
        # A copy, and made before: an environment may scale its action in place.
        taken = np.array(spaces.flatten(self.env.action_space, action)) if self._action else ()
        observation, reward, terminated, truncated, info = self.env.step(action)
        paid = [reward_of(type(self.unwrapped).__name__, "a step", reward, self.env)] if self._reward else []
        return self._beside(observation, np.array([*taken, *paid], np.float32)), reward, terminated, truncated, info

    def _beside(self, observation: Any, numbers: FloatArray) -> dict[str, Any]:
        return {**(observation if self._is_dict else {SINGLE_KEY: observation}), PREVIOUS_KEY: numbers}
