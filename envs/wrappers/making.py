"""How single environments are made, with frame skip and frame stack for environments that offer neither."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.wrappers import FrameStackObservation, TimeLimit, TransformObservation

from appo.envs.config import EnvConfig
from appo.envs.conversion import require_info
from appo.envs.infos import FRAMES_KEY, InfoReader
from appo.envs.masks import AllowedActions
from appo.envs.outcome import reward_of, truth_of
from appo.envs.spaces import frames_per_step, layers
from appo.envs.spec import is_channels_first
from appo.utils.errors import UsageError

DEFAULT_FRAMES_PER_SECOND = 30.0
ATARI_FRAMES_PER_SECOND = 60.0  # of the console; the metadata of ale-py say 30, half the speed of the game


def make_registered(registration: Registration, **arguments: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment without gymnasium's two wrappers that repeat checks of the group, at a cost per step."""
    return gymnasium.make(replace(registration, order_enforce=False, disable_env_checker=True), **arguments)


def know_actions_sooner(env: gymnasium.Env[Any, Any]) -> None:
    """Speed up the test whether a Python int, the type of actions here, is a choice of the environment.

    Environments that assert the choice at every step, as gymnasium's own do, otherwise spend up to a third of a step on
    the test.
    """
    space = getattr(env.unwrapped, "action_space", None)
    if type(space) is spaces.Discrete:
        low = int(space.start)
        vars(space)["contains"] = partial(_is_choice, space, low, low + int(space.n))


def _is_choice(space: spaces.Discrete, low: int, end: int, x: Any) -> bool:
    return low <= x < end if type(x) is int else type(space).contains(space, x)


class RepeatAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes every action `times` times, or until the episode ends or a mask forbids the action; rewards add up.

    `info["num_frames"]` is the number of frames.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int):
        super().__init__(env)
        self.times = times
        self._allowed = AllowedActions(env.observation_space, env.action_space)
        self._infos = InfoReader(type(env.unwrapped).__name__)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The last observation, the sum of the rewards, and the last info."""
        name, total, frames = type(self.unwrapped).__name__, 0.0, 0
        for _ in range(self.times):
            own = copy.deepcopy(action)  # an environment may scale its action in place
            observation, reward, terminated, truncated, info = self.env.step(own)
            require_info(name, "step", info)
            total += reward_of(name, "a repeated step", reward, self.env)
            frames += self._infos.frames(info, 1)
            terminated, truncated = truth_of(name, "terminated", terminated), truth_of(name, "truncated", truncated)
            if terminated or truncated or not self._allowed(action, observation, info):
                break
        return observation, total, terminated, truncated, {**info, FRAMES_KEY: frames}


def stack_frames(env: gymnasium.Env[Any, Any], count: int) -> gymnasium.Env[Any, Any]:
    """Stack the last `count` observations; an episode starts with copies of the first observation.

    Images are stacked as further channels, vectors end to end.

    Raises:
        UsageError: the observation is not a single array.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Box) or not space.shape:
        raise UsageError(f"--env_framestack={count} needs an environment that shows one array, not {space}")
    env = TransformObservation(env, np.array, space)  # a copy: it may write all that it shows into one buffer
    axis = 2 if len(space.shape) == 3 and not is_channels_first(space.shape) else 0
    if len(space.shape) == 2:  # an image without channels: the frames are its channels
        return FrameStackObservation(env, count)

    def joined(frames: Any) -> Any:
        return np.concatenate(list(frames), axis=axis)

    stacked = spaces.Box(joined([space.low] * count), joined([space.high] * count), dtype=space.dtype.type)
    return TransformObservation(FrameStackObservation(env, count), joined, stacked)


def make_with_flags(
    registration: Registration,
    config: EnvConfig,
    arguments: dict[str, Any],
    adapt: Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]] = lambda env: env,
) -> gymnasium.Env[Any, Any]:
    """Make an environment, `adapt` it, and wrap it for `--horizon`, `--env_frameskip` and `--env_framestack`."""
    if config.horizon is not None:
        arguments = arguments | {"max_episode_steps": config.horizon * (config.env_frameskip or 1)}
    env = adapt(make_registered(registration, **arguments))
    if config.env_frameskip is not None:
        env = RepeatAction(env, config.env_frameskip)
        if config.horizon is not None:  # a mask may end a repetition early
            env = TimeLimit(env, config.horizon)
    return env if config.env_framestack is None else stack_frames(env, config.env_framestack)


def natural_steps_per_second(env: gymnasium.Env[Any, Any]) -> float:
    """Return the steps of a game per second of the game's own time, by metadata and frame skip."""
    is_atari = str(getattr(getattr(env.unwrapped, "spec", None), "entry_point", "")).startswith("ale_py")
    rate = ATARI_FRAMES_PER_SECOND if is_atari else float(env.metadata.get("render_fps") or DEFAULT_FRAMES_PER_SECOND)
    repeats = math.prod(layer.times for layer in layers(env) if isinstance(layer, RepeatAction))
    return rate / (frames_per_step(env) * repeats)
