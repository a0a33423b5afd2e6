"""What an environment shows and accepts, and the unit that an actor steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from utils.errors import UsageError

Array = NDArray[np.generic]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]

SINGLE_KEY = "obs"
"""The key of an observation space that is no Dict."""

MASK_KEY = "action_mask"
"""The key of a Dict observation that says which categorical choices are allowed now."""


class ActionPart(NamedTuple):
    """One independent factor of the action distribution.

    categorical: `size` choices, 1 action value, `size` logits.
    bernoulli: `size` bits, `size` action values, `size` logits.
    gaussian: `size` dimensions, `size` action values, 2 * `size` logits (means, then log standard deviations).
    """

    kind: Literal["categorical", "bernoulli", "gaussian"]
    size: int

    @property
    def num_values(self) -> int:
        """Action values this part takes."""
        return 1 if self.kind == "categorical" else self.size

    @property
    def num_logits(self) -> int:
        """Outputs of the policy this part needs."""
        return 2 * self.size if self.kind == "gaussian" else self.size


@dataclass(frozen=True)
class ObservationSpec:
    """One observation array of one row, as it is stored; `dtype` is a numpy name."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ActionSpec:
    """The parts of an action in the order in which their values are stored.

    Attributes:
        parts: At least one factor.
        low, high: Flattened bounds of all gaussian dimensions (may be infinite); None without gaussian part.
    """

    parts: tuple[ActionPart, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    @property
    def num_values(self) -> int:
        """A: values of one stored action."""
        return sum(part.num_values for part in self.parts)

    @property
    def num_logits(self) -> int:
        """L: outputs of the policy."""
        return sum(part.num_logits for part in self.parts)

    @property
    def dtype(self) -> str:
        """Numpy name of the type in which all values of an action are stored."""
        return "float32" if any(part.kind == "gaussian" for part in self.parts) else "int32"


@dataclass(frozen=True)
class EnvSpec:
    """Everything that memory, models and actors need to know about an environment.

    Attributes:
        observations: By key; a space that is no Dict has the single key "obs", nested keys are joined by ".".
        action: What one agent chooses per step.
        num_agents: Rows per env.
        frames_per_step: Frame skip: simulator frames behind one step.
        same_step: The observation after a done is already the next episode's first one (`final_value` is needed).
        action_mask: M, the number of choices the key "action_mask" covers; 0 when there is no such key.
    """

    observations: dict[str, ObservationSpec]
    action: ActionSpec
    num_agents: int = 1
    frames_per_step: int = 1
    same_step: bool = False
    action_mask: int = 0


class EpisodeStats(NamedTuple):
    """What an environment reported about an episode that ended now, in that row."""

    row: int
    stats: dict[str, float]


@dataclass(slots=True)
class StepRow:
    """Numpy views straight into a slot, for one step of a group of R rows; the environment writes in place.

    Attributes:
        obs: [R, *] per key, of step t+1.
        first: [R] bool of step t+1: this observation starts an episode.
        reward: [R] float32 of step t, raw as the environment gave it.
        terminated, truncated: [R] bool of step t, never both.
        final_obs: [R, *] per key, SAME_STEP only (else empty): true final observation of the rows that ended.
        has_final: [R] bool, SAME_STEP only (else None): set for rows truncated now, cleared for all others.
    """

    obs: dict[str, Array]
    first: BoolArray
    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    final_obs: dict[str, Array] = field(default_factory=dict)
    has_final: BoolArray | None = None


class GroupEnv(Protocol):
    """The environments of one group: the unit an actor steps.

    `current_env` is the env being reset or stepped, for "which env hangs" messages (-1: the whole vector).
    """

    spec: EnvSpec
    num_rows: int
    current_env: int

    def reset(self, seeds: Sequence[int], obs: dict[str, Array]) -> None:
        """Write the first observations [R, *], one seed per env."""

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Take one step with action [R, A] as stored; most steps return an empty tuple."""

    def close(self) -> None:
        """Release what the environments hold; calling it twice is harmless."""


def spec_of(
    observation_space: spaces.Space[object],
    action_space: spaces.Space[object],
    *,
    num_agents: int = 1,
    frames_per_step: int = 1,
    same_step: bool = False,
) -> EnvSpec:
    """Describe the spaces of one agent.

    Raises:
        UsageError: a space cannot be learned from or acted in; names the space and the reason.
    """
    observations = observation_specs(observation_space)
    action = _action_spec(action_space)
    mask = observations.get(MASK_KEY)
    num_choices = sum(part.size for part in action.parts if part.kind == "categorical")
    if mask is not None and prod(mask.shape) != num_choices:
        raise UsageError(f"observation key {MASK_KEY} has {prod(mask.shape)} entries for {num_choices} action choices")
    return EnvSpec(observations, action, num_agents, frames_per_step, same_step, num_choices if mask else 0)


def observation_specs(space: spaces.Space[object]) -> dict[str, ObservationSpec]:
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
    registered = getattr(unwrapped, "spec", None)
    if not str(getattr(registered, "id", "")).startswith(("ALE/", "Vizdoom")):
        return 1
    kwargs = getattr(registered, "kwargs", {})
    for skip in (
        getattr(unwrapped, "frame_skip", None),
        getattr(unwrapped, "_frameskip", None),
        kwargs.get("frameskip"),
    ):
        if isinstance(skip, int):  # a pair is a random skip: its mean would be a guess
            return skip
    return 1


def flat_observation_spaces(space: spaces.Space[object]) -> list[tuple[str, spaces.Space[object]]]:
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


def flat_action_spaces(space: spaces.Space[object]) -> list[spaces.Space[object]]:
    """Leaves of an action space in the order in which their values are stored; only Tuples have more than one."""
    if isinstance(space, spaces.Tuple):
        return [leaf for part in space.spaces for leaf in flat_action_spaces(part)]
    return [space]


def _leaves(prefix: str, space: spaces.Space[object]) -> list[tuple[str, spaces.Space[object]]]:
    if not isinstance(space, spaces.Dict):
        return [(prefix or SINGLE_KEY, space)]
    leaves = []
    for key, part in space.spaces.items():
        leaves += _leaves(f"{prefix}.{key}" if prefix else str(key), part)
    return leaves


def _observation_spec(key: str, space: spaces.Space[object]) -> ObservationSpec:
    match space:
        case spaces.Box() | spaces.MultiBinary() if key == MASK_KEY:
            return ObservationSpec(space.shape, "uint8")
        case spaces.Box():
            return ObservationSpec(space.shape, "uint8" if space.dtype == np.uint8 else "float32")
        case spaces.Discrete():
            return ObservationSpec((int(space.n),), "float32")  # one-hot: its size carries no order
        case _:
            raise UsageError(f"unsupported observation space {_described(space)} (key {key}): {_refusal(space)}")


def _action_spec(space: spaces.Space[object]) -> ActionSpec:
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


def _action_parts(space: spaces.Space[object]) -> list[ActionPart]:
    match space:
        case spaces.Discrete():
            return [ActionPart("categorical", int(space.n))]
        case spaces.MultiDiscrete():
            return [ActionPart("categorical", int(choices)) for choices in space.nvec.reshape(-1)]
        case spaces.MultiBinary():
            return [ActionPart("bernoulli", prod(space.shape))]
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return [ActionPart("gaussian", prod(space.shape))]
        case spaces.Box():
            raise UsageError(
                f"unsupported action space {_described(space)}: a Box of {space.dtype} is neither continuous nor "
                "a choice; MultiDiscrete is supported"
            )
        case _:
            raise UsageError(f"unsupported action space {_described(space)}: {_refusal(space)}")


_REASONS: Mapping[type[spaces.Space[Any]], str] = {
    spaces.Text: "text has no fixed size",
    spaces.Sequence: "its length varies from step to step",
    spaces.Graph: "its size varies from step to step",
    spaces.OneOf: "its parts exclude each other",
}


def _refusal(space: spaces.Space[object]) -> str:
    for kind, reason in _REASONS.items():
        if isinstance(space, kind):
            return reason
    return (
        "only Box, Discrete and Dict observations and Box, Discrete, MultiDiscrete, MultiBinary and Tuple actions work"
    )


def _described(space: spaces.Space[object]) -> str:
    """The space in one line: a Text prints its whole alphabet, a large Box its bounds."""
    text = " ".join(str(space).split())
    return text if len(text) <= 80 else type(space).__name__
