"""How single environments are made, with frame skip and frame stack for those that offer neither."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import FrameStackObservation, TransformObservation

from appo.envs.config import EnvConfig
from appo.envs.conversion import require_info
from appo.envs.infos import FRAMES_KEY, InfoReader
from appo.envs.masks import METHOD, AllowedActions
from appo.envs.outcome import reward_of, truth_of, truths_of
from appo.envs.spaces import Space, frames_per_step, num_agents_of, shown_mask
from appo.envs.spec import MASK_KEY, SINGLE_KEY, FloatArray, is_channels_first
from appo.utils.errors import UsageError

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
        self._allowed = AllowedActions(env.observation_space, env.action_space)
        self._infos = InfoReader(type(env.unwrapped).__name__)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The last observation, the sum of the rewards, and the last info."""
        name, total, frames = type(self.unwrapped).__name__, 0.0, 0
        for _ in range(self.times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            require_info(name, "step", info)
            total += reward_of(name, "a repeated step", reward, self.env)
            frames += self._infos.frames(info, 1)
            terminated, truncated = truth_of(name, "terminated", terminated), truth_of(name, "truncated", truncated)
            if terminated or truncated or not self._allowed(action, observation, info):
                break
        return observation, total, terminated, truncated, {**info, FRAMES_KEY: frames}


def stack_frames(env: gymnasium.Env[Any, Any], count: int) -> gymnasium.Env[Any, Any]:
    """Show the last `count` observations at once; an episode starts with copies of its first one.

    Images are stacked as further channels, vectors end to end.

    Raises:
        UsageError: the observation is no single array.
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


# Several vectors of numbers shown as one: a single encoder then reads them together, and faster.


def joined_space(space: Space) -> spaces.Box | None:
    """The space of all numbers of a Dict end to end; None for one that holds anything but vectors of floats."""
    if not isinstance(space, spaces.Dict) or shown_mask(space) or not space.spaces:
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


# What flags ask of every environment, whoever has made it.


if TYPE_CHECKING:
    AnyVectorWrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    AnyVectorWrapper = VectorWrapper  # has other parameters in other versions

PREVIOUS_KEY = "previous_step"


def as_flags_ask(env: gymnasium.Env[Any, Any], config: EnvConfig) -> gymnasium.Env[Any, Any]:
    """Wrap an environment as `--clip_actions`, `--no_done_at_end` and `--observe_previous` say.

    Raises:
        UsageError: it has several agents, or shows something by the name of what was to be added.
    """
    if not config.clip_actions:
        env = FreeActions(env)
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
    """Wrap a vector of environments as `--clip_actions` and `--no_done_at_end` say."""
    if not config.clip_actions:
        env = FreeVectorActions(env)
    return VectorNeverTerminates(env) if config.no_done_at_end else env


def unbounded(space: Space) -> Space:
    """The space with no bounds on real numbers; choices and bits keep theirs."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: unbounded(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([unbounded(part) for part in space.spaces])
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return spaces.Box(-np.inf, np.inf, space.shape, space.dtype.type)
    return space


class FreeActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Shows no bounds of actions, so that none is clipped."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = unbounded(env.action_space)


class FreeVectorActions(AnyVectorWrapper):
    """Shows no bounds of actions, so that none is clipped."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.single_action_space = unbounded(env.single_action_space)
        self.action_space = batch_space(self.single_action_space, env.num_envs)


class NeverTerminates(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says of every end that it is one of patience: what terminates is truncated.

    One of several agents that shows nothing at its end stays terminated: there is nothing to bootstrap from.
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
        both: Any = (terminated, truncated)  # of each agent, or said once for all
        over, cut = (flags if np.ndim(flags) else [flags] * self._num_agents for flags in both)
        shown = [one is not None for one in observation]
        over, cut = (
            [truth_of(name, "terminated", one) for one in over],
            [truth_of(name, "truncated", one) for one in cut],
        )
        lost = [ends and not seen for ends, seen in zip(over, shown, strict=True)]
        kept = [(ends or late) and seen for ends, late, seen in zip(over, cut, shown, strict=True)]
        return observation, reward, lost, [one or late for one, late in zip(kept, cut, strict=True)], info


class VectorNeverTerminates(AnyVectorWrapper):
    """Says of every end that it is one of patience: what terminates is truncated."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the vector, and change the ends."""
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        name, count = type(self.unwrapped).__name__, self.num_envs
        ended = truths_of(name, "terminated", terminated, count) | truths_of(name, "truncated", truncated, count)
        return observation, reward, np.zeros_like(ended), ended, infos


class PreviousStep(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Shows the action and the reward of the last step, as numbers side by side, beside what the environment shows.

    Args:
        env: of one agent.
        shown: what is added: action, reward or both.

    Raises:
        UsageError: the environment shows something by that name.
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
        observation, reward, terminated, truncated, info = self.env.step(action)
        taken = spaces.flatten(self.env.action_space, action) if self._action else ()
        paid = [reward_of(type(self.unwrapped).__name__, "a step", reward, self.env)] if self._reward else []
        numbers = np.array([*taken, *paid], np.float32)
        return self._beside(observation, numbers), reward, terminated, truncated, info

    def _beside(self, observation: Any, numbers: FloatArray) -> dict[str, Any]:
        return {**(observation if self._is_dict else {SINGLE_KEY: observation}), PREVIOUS_KEY: numbers}


class MasksOfMethod(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts into infos what the environment's method `action_masks` returns, of several agents a mask for each.

    An info that holds a mask itself keeps it.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode, with its first mask."""
        return self._with_masks(self.env.reset(seed=seed, **({"options": options} if options else {})))

    def step(self, action: Any) -> Any:
        """Step the environment, and put the next mask into the info."""
        return self._with_masks(self.env.step(action))

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
    """Puts into infos what the method `action_masks` of a vector, or of each of its environments, returns."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin episodes, with their first masks."""
        observation, infos = self.env.reset(seed=seed, options=options)
        return observation, self._with_masks(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the vector, and put the next masks into its infos."""
        *others, infos = self.env.step(actions)
        return (*others, self._with_masks(infos))

    def _with_masks(self, infos: Any) -> Any:
        own = getattr(self.unwrapped, METHOD, None)
        masks = own() if own is not None else list(self.unwrapped.call(METHOD))  # type: ignore[attr-defined]
        return {MASK_KEY: masks, **infos} if isinstance(infos, Mapping) else infos


def with_masks_of_method(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Let the masks of an environment that has a method for them stand in its infos, unless it shows them."""
    if not (env.has_wrapper_attr(METHOD) and callable(env.get_wrapper_attr(METHOD))):
        return env
    return env if shown_mask(env.observation_space) else MasksOfMethod(env)


def with_masks_of_methods(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Let the masks of a vector with such a method stand in its infos; gymnasium's own ask their environments."""
    of_each = False
    if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        first = env.unwrapped.envs[0] if isinstance(env.unwrapped, SyncVectorEnv) else env.unwrapped.env_fns[0]()
        of_each = first.has_wrapper_attr(METHOD) and callable(first.get_wrapper_attr(METHOD))
        if isinstance(env.unwrapped, AsyncVectorEnv):
            first.close()
    has = of_each or callable(getattr(env.unwrapped, METHOD, None))
    return VectorMasksOfMethod(env) if has and not shown_mask(env.single_observation_space) else env


def natural_steps_per_second(env: gymnasium.Env[Any, Any]) -> float:
    """Return how many steps a game makes per second of its own time, by its metadata and its frame skip."""
    registered = getattr(env.unwrapped, "spec", None)
    if str(getattr(registered, "entry_point", "")).startswith("ale_py"):
        rate = ATARI_FRAMES_PER_SECOND
    else:
        rate = float(env.metadata.get("render_fps") or DEFAULT_FRAMES_PER_SECOND)
    repeats = math.prod(layer.times for layer in layers(env) if isinstance(layer, RepeatAction))
    return rate / (frames_per_step(env) * repeats)


def layers(env: Any) -> Iterator[Any]:
    """Yield the wrappers of an environment, outermost first, and then the environment."""
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("env")


# Statistics by which an environment normalizes what it returns: part of the policy, and in no checkpoint.


STATISTICS = {  # by the names of gymnasium, baselines, SB3
    **dict.fromkeys(("obs_rms", "observation_rms", "ob_rms"), "obs"),
    **dict.fromkeys(("return_rms", "ret_rms", "reward_rms", "rew_rms"), "reward"),
}


def own_normalization(env: Any) -> tuple[str, ...]:
    """Return a line about wrappers that normalize by running statistics of their own; none where there are none."""
    found = {
        type(layer).__name__: own
        for layer in _held(env, set())
        if (own := {name for name, value in vars(layer).items() if value is not None}.intersection(STATISTICS))
    }
    if not found:
        return ()
    shows, pays = (
        any(kind == STATISTICS[name] for own in found.values() for name in own) for kind in ("obs", "reward")
    )
    paid = ", and returns are of normalized rewards" * pays
    helps = ["--normalize_input=True"] * shows
    helps += ["--normalize_returns=True (where the algorithm lacks it: --reward_scale)"] * pays
    line = (
        f"the environment normalizes by statistics of its own ({', '.join(found)}): every copy of it"
        f" begins with fresh ones, no checkpoint keeps them{paid}; leave that out, and give {' and '.join(helps)}"
    )
    return (line,)


def _held(env: Any, known: set[int]) -> Iterator[Any]:
    """Yield an environment and those that it holds as attributes, of lists only the first one."""
    if id(env) in known or not hasattr(env, "__dict__"):
        return
    known.add(id(env))
    yield env
    for value in list(vars(env).values()):
        one = value[0] if isinstance(value, list | tuple) and value else value
        if callable(getattr(one, "step", None)) and callable(getattr(one, "reset", None)):
            yield from _held(one, known)
