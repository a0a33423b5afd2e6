"""What gymnasium's spaces mean for memory and models: which of them can be learned from and acted in, and how."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from gymnasium import spaces

from envs.spec import MASK_KEY, SINGLE_KEY, ActionPart, ActionSpec, EnvSpec, ObservationSpec
from utils.errors import SpaceMismatch, UsageError

Space = spaces.Space[Any]


def spec_of(
    observation_space: Space,
    action_space: Space,
    *,
    num_agents: int = 1,
    frames_per_step: int = 1,
    same_step: bool = False,
    mask_in_info: bool = False,
) -> EnvSpec:
    """Describe the spaces of one agent; a mask that comes in `info` counts only where the observation has none.

    Raises:
        UsageError: a space cannot be learned from or acted in; names the space and the reason.
    """
    observations = observation_specs(observation_space)
    action = _action_spec(action_space)
    num_choices = sum(part.size for part in action.parts if part.kind == "categorical")
    mask_in_info = mask_in_info and MASK_KEY not in observations
    if mask_in_info:
        observations[MASK_KEY] = ObservationSpec((num_choices,), "uint8")
    mask = observations.get(MASK_KEY)
    if mask is not None and (not num_choices or prod(mask.shape) != num_choices):
        raise UsageError(f"observation key {MASK_KEY} has {prod(mask.shape)} entries for {num_choices} action choices")
    return EnvSpec(
        observations, action, num_agents, frames_per_step, same_step, num_choices if mask else 0, mask_in_info
    )


def require_spec(name: str, spec: EnvSpec, observation_space: Space, action_space: Space) -> None:
    """Check that an environment is like the first one, after which memory and models were made.

    Raises:
        SpaceMismatch: it is not.
    """
    found = spec_of(observation_space, action_space, mask_in_info=spec.mask_in_info)
    for what, own, first in (
        ("observations", found.observations, spec.observations), ("actions", found.action, spec.action)
    ):  # fmt: skip
        if own != first:
            raise SpaceMismatch(f"{name}: its {what} have another space than those of the first one that was made")


def observation_specs(space: Space) -> dict[str, ObservationSpec]:
    """How the observations of a space are stored, by key.

    Raises:
        UsageError: a leaf of the space cannot be learned from, or there is none.
    """
    observations = {key: _observation_spec(key, leaf) for key, leaf in flat_observation_spaces(space)}
    if not observations:
        raise UsageError(f"unsupported observation space {space}: it holds no key")
    return observations


def frames_per_step(env: object) -> int:
    """Simulator frames behind one step, for the families that count them (Atari, VizDoom); 1 for all others."""
    unwrapped = getattr(env, "unwrapped", env)
    if isinstance(said := getattr(unwrapped, "frames_per_step", None), int):
        return said
    registered = getattr(unwrapped, "spec", None)
    if not str(getattr(registered, "entry_point", "")).startswith(("ale_py", "vizdoom")):
        return 1
    while env is not None:  # the outermost wrapper that skips frames decides
        if isinstance(skip := getattr(env, "__dict__", {}).get("frame_skip"), int):
            return skip
        env = getattr(env, "__dict__", {}).get("env")
    skip = getattr(registered, "kwargs", {}).get("frameskip")
    return skip if isinstance(skip, int) else 1  # a pair is a random skip: its mean would be a guess


def num_agents_of(env: Any) -> int:
    """Agents of an environment that speaks in lists, an entry per agent; 0 for one that does not.

    It says so by its `num_agents` above 1, or by `is_multiagent`, which decides where it is said.

    Raises:
        UsageError: it has several agents and does not say how many.
    """
    unwrapped = getattr(env, "unwrapped", env)
    said, count = getattr(unwrapped, "is_multiagent", None), getattr(unwrapped, "num_agents", None)
    known = int(count) if isinstance(count, int | np.integer) and not isinstance(count, bool) else 0
    if not (known > 1 if said is None else said):
        return 0
    if known < 1:
        raise UsageError(f"{type(unwrapped).__name__}.num_agents must be the number of its agents, got {count!r}")
    return known


def flat_observation_spaces(space: Space) -> list[tuple[str, Space]]:
    """Leaves of an observation space with their keys, in the order of the space.

    Raises:
        UsageError: two leaves get one key ("a.b" next to "b" inside "a").
    """
    leaves = list(_leaves("", space))
    keys = [key for key, _ in leaves]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(f"unsupported observation space: two entries are both called {twice}")
    return leaves


def children(space: Space) -> list[tuple[str | int, Space]] | None:
    """The parts of a Dict or Tuple by key or index; None for a leaf."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return list(enumerate(space.spaces))
    return None


def flat_action_spaces(space: Space) -> list[Space]:
    """Leaves of an action space in the order in which their values are stored."""
    parts = children(space)
    return [space] if parts is None else [leaf for _, part in parts for leaf in flat_action_spaces(part)]


def choices_of(space: spaces.Discrete | spaces.MultiDiscrete) -> list[tuple[int, int]]:
    """Number of choices and first choice of every component."""
    if isinstance(space, spaces.Discrete):
        return [(int(space.n), int(space.start))]
    sizes, starts = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
    return list(zip(sizes, starts, strict=True))


def _leaves(prefix: str, space: Space) -> list[tuple[str, Space]]:
    parts = children(space)
    if parts is None:
        return [(prefix or SINGLE_KEY, space)]
    return [leaf for key, part in parts for leaf in _leaves(f"{prefix}.{key}" if prefix else str(key), part)]


def _observation_spec(key: str, space: Space) -> ObservationSpec:
    match space:
        case spaces.Box() | spaces.MultiBinary() if key == MASK_KEY:
            return ObservationSpec(space.shape, "uint8")
        case spaces.Box() if space.dtype == np.uint8:
            return ObservationSpec(space.shape, "uint8", high=max(1, int(space.high.max(initial=0))))
        case spaces.Box():
            return ObservationSpec(space.shape, "float32")
        case spaces.MultiBinary():
            return ObservationSpec(space.shape, "uint8", high=1)
        case spaces.Discrete() | spaces.MultiDiscrete():  # one-hot: the size of a choice carries no order
            return ObservationSpec((sum(size for size, _ in choices_of(space)),), "uint8", high=1)
        case _:
            raise UsageError(f"unsupported observation space {described(space)} (key {key}): {_refusal(space)}")


def _action_spec(space: Space) -> ActionSpec:
    parts: list[ActionPart] = []
    low: list[float] = []
    high: list[float] = []
    for leaf in flat_action_spaces(space):
        parts += _action_parts(leaf)
        if isinstance(leaf, spaces.Box):
            low += [float(bound) for bound in leaf.low.reshape(-1)]
            high += [float(bound) for bound in leaf.high.reshape(-1)]
    if not sum(part.num_values for part in parts):
        raise UsageError(f"unsupported action space {space}: it leaves nothing to choose")
    return ActionSpec(tuple(parts), tuple(low) if low else None, tuple(high) if high else None)


def _action_parts(space: Space) -> list[ActionPart]:
    match space:
        case spaces.Discrete() | spaces.MultiDiscrete():
            return [ActionPart("categorical", size) for size, _ in choices_of(space)]
        case spaces.MultiBinary():
            return [ActionPart("bernoulli", prod(space.shape))]
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return [ActionPart("gaussian", prod(space.shape))]
        case spaces.Box():
            raise UsageError(
                f"unsupported action space {described(space)}: a Box of {space.dtype} is neither continuous nor "
                "a choice; MultiDiscrete is supported"
            )
        case _:
            raise UsageError(f"unsupported action space {described(space)}: {_refusal(space)}")


_REASONS: Mapping[type[Space], str] = {
    spaces.Text: "text has no fixed size",
    spaces.Sequence: "its length varies from step to step",
    spaces.Graph: "its size varies from step to step",
    spaces.OneOf: "its parts exclude each other",
}


def _refusal(space: Space) -> str:
    for kind, reason in _REASONS.items():
        if isinstance(space, kind):
            return reason
    return "only Box, Discrete, MultiDiscrete, MultiBinary and Dict or Tuple of them work"


def described(space: Space) -> str:
    """The space in one line: a Text prints its whole alphabet, a large Box its bounds."""
    text = " ".join(str(space).split())
    return text if len(text) <= 80 else type(space).__name__
