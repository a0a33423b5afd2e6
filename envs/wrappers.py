"""How single environments are made, with frame skip and frame stack for those that offer neither."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.wrappers import FrameStackObservation, TransformObservation

from envs.conversion import require_info
from envs.masks import AllowedActions
from envs.spaces import Space, frames_per_step
from envs.spec import MASK_KEY, FloatArray, is_channels_first
from utils.errors import UsageError

DEFAULT_FRAMES_PER_SECOND = 30.0
ATARI_FRAMES_PER_SECOND = 60.0  # of the console; the metadata of ale-py say 30, half the speed of the game


def make_registered(registration: Registration, **arguments: Any) -> gymnasium.Env[Any, Any]:
    """gymnasium.make without the two wrappers that only check what is checked here anyway, at a cost per step."""
    env: gymnasium.Env[Any, Any] = gymnasium.make(
        replace(registration, order_enforce=False, disable_env_checker=True), **arguments
    )
    return env


def know_actions_sooner(env: gymnasium.Env[Any, Any]) -> None:
    """Let the choices of an environment tell at once whether a Python int, as it is given here, is one of them.

    Environments that assert it at every step, as gymnasium's own do, spend up to a third of the step on it otherwise.
    """
    space = getattr(env.unwrapped, "action_space", None)
    if type(space) is spaces.Discrete:
        low = int(space.start)
        vars(space)["contains"] = partial(_is_choice, space, low, low + int(space.n))


def _is_choice(space: spaces.Discrete, low: int, end: int, x: Any) -> bool:
    return low <= x < end if type(x) is int else type(space).contains(space, x)


class RepeatAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes every action `times` times, or until the episode ends or a mask forbids it; rewards add up.

    `info["num_frames"]` says how many frames that was.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int):
        super().__init__(env)
        self.times = times
        self._allowed = AllowedActions(env.action_space)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The last observation, the sum of the rewards, and the last info."""
        total, frames = 0.0, 0
        for _ in range(self.times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            require_info(type(self.unwrapped).__name__, "step", info)
            total += float(reward)
            frames += info.get("num_frames", 1)
            if terminated or truncated or not self._allowed(action, observation, info):
                break
        return observation, total, terminated, truncated, {**info, "num_frames": frames}


def stack_frames(env: gymnasium.Env[Any, Any], count: int) -> gymnasium.Env[Any, Any]:
    """Show the last `count` observations at once; an episode starts with copies of its first one.

    Images are stacked as further channels, vectors end to end.

    Raises:
        UsageError: the observation is no single array.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Box) or not space.shape:
        raise UsageError(f"--env_framestack={count} needs an environment that shows one array, not {space}")
    axis = 2 if len(space.shape) == 3 and not is_channels_first(space.shape) else 0
    if len(space.shape) == 2:  # an image without channels: the frames are its channels
        return FrameStackObservation(env, count)

    def joined(frames: Any) -> Any:
        return np.concatenate(list(frames), axis=axis)

    stacked = spaces.Box(joined([space.low] * count), joined([space.high] * count), dtype=space.dtype.type)
    return TransformObservation(FrameStackObservation(env, count), joined, stacked)


# Several vectors of numbers shown as one: a single encoder then reads them together, and faster.


def joined_space(space: Space) -> spaces.Box | None:
    """The space of all numbers of a Dict end to end; None for one that holds anything but vectors of floats."""
    if not isinstance(space, spaces.Dict) or MASK_KEY in space.spaces or not space.spaces:
        return None
    leaves = list(space.spaces.values())
    for leaf in leaves:
        if not (isinstance(leaf, spaces.Box) and len(leaf.shape) < 2 and np.issubdtype(leaf.dtype, np.floating)):
            return None
    return spaces.Box(-np.inf, np.inf, (sum(int(np.prod(leaf.shape or ())) for leaf in leaves),), np.float32)


def join_rows(space: spaces.Dict, observation: dict[str, Any]) -> FloatArray:
    """The numbers [R, n] of R observations, in the order of the space."""
    rows = [np.asarray(observation[key]) for key in space.spaces]
    joined: FloatArray = np.concatenate([row.reshape(len(row), -1) for row in rows], axis=1, dtype=np.float32)
    return joined


class JoinedVectors(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows an environment's vectors as one [n].

    Args:
        env: its observation space has a `joined_space`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        joined = joined_space(env.observation_space)
        assert joined is not None
        assert isinstance(env.observation_space, spaces.Dict)
        self.observation_space, self._keys = joined, list(env.observation_space.spaces)

    def observation(self, observation: dict[str, Any]) -> FloatArray:
        """The numbers in the order of the space."""
        joined: FloatArray = np.concatenate([np.ravel(observation[key]) for key in self._keys], dtype=np.float32)
        return joined


def natural_steps_per_second(env: gymnasium.Env[Any, Any]) -> float:
    """Return how many steps a game makes per second of its own time, by its metadata and its frame skip."""
    registered = getattr(env.unwrapped, "spec", None)
    if str(getattr(registered, "entry_point", "")).startswith("ale_py"):
        rate = ATARI_FRAMES_PER_SECOND
    else:
        rate = float(env.metadata.get("render_fps") or DEFAULT_FRAMES_PER_SECOND)
    repeats = math.prod(layer.times for layer in _layers(env) if isinstance(layer, RepeatAction))
    return rate / (frames_per_step(env) * repeats)


def _layers(env: Any) -> Iterator[Any]:
    """Yield the wrappers of an environment, outermost first, and then the environment."""
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("env")
