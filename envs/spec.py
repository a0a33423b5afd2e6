"""The spec of an environment, of what it shows and accepts, and the unit that an actor steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]

SINGLE_KEY = "obs"
"""The key of an observation space that is no Dict."""

MASK_KEY = "action_mask"
"""The key of a Dict observation, or else of `info`, that says which categorical choices are allowed now."""

TEAM_RETURN = "team_return"
"""The statistic of an environment of several agents, when all have ended: the returns of all of them together."""


class ActionPart(NamedTuple):
    """One independent factor of the action distribution.

    categorical: `size` choices, 1 action value, `size` logits.
    bins: as categorical; the choices are numbers that the environment takes, and no mask covers them.
    bernoulli: `size` bits, `size` action values, `size` logits.
    gaussian: `size` dimensions, `size` action values, 2 * `size` logits (means, then log standard deviations).
    tanh_gaussian: as gaussian; what is stored is squashed by tanh before it is scaled.
    """

    kind: Literal["categorical", "bins", "bernoulli", "gaussian", "tanh_gaussian"]
    size: int

    @property
    def is_real(self) -> bool:
        """Whether its values are real numbers."""
        return self.kind in ("gaussian", "tanh_gaussian")

    @property
    def num_values(self) -> int:
        """Action values this part takes."""
        return 1 if self.kind in ("categorical", "bins") else self.size

    @property
    def num_logits(self) -> int:
        """Outputs of the policy this part needs."""
        return 2 * self.size if self.is_real else self.size


@dataclass(frozen=True)
class ObservationSpec:
    """One observation array of one row, as it is stored.

    Attributes:
        shape: Of the array.
        dtype: A numpy name, `uint8` or `float32`.
        high: The largest value of bytes, by which models divide them: 255 for most images, 1 for one-hot vectors.
        frames: How many frames flags have stacked into an image.
    """

    shape: tuple[int, ...]
    dtype: str
    high: int = 255
    frames: int = field(default=1, compare=False)


@dataclass(frozen=True)
class ActionSpec:
    """The parts of an action in the order in which their values are stored.

    Attributes:
        parts: At least one factor.
        low, high: Flattened bounds of all real numbers and bins as they are stored (may be infinite); None where there
            are none.
        scale, shift: Of each of those numbers: what the environment takes is `shift + scale * stored`, where a
            squashed one counts as its tanh; None: what is stored.
    """

    parts: tuple[ActionPart, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None

    @property
    def is_real(self) -> tuple[bool, ...]:
        """Which of the A stored values are real numbers."""
        return tuple(part.is_real for part in self.parts for _ in range(part.num_values))

    @property
    def is_bounded(self) -> tuple[bool, ...]:
        """Which of the A stored values have an entry in the bounds: real numbers and bins."""
        return tuple(part.is_real or part.kind == "bins" for part in self.parts for _ in range(part.num_values))

    @property
    def bins(self) -> int | None:
        """The number of bins of a number; None where numbers are none."""
        return next((part.size for part in self.parts if part.kind == "bins"), None)

    @property
    def is_squashed(self) -> tuple[bool, ...]:
        """Which of the A stored values are squashed by tanh."""
        return tuple(part.kind == "tanh_gaussian" for part in self.parts for _ in range(part.num_values))

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
        return "float32" if any(part.is_real for part in self.parts) else "int32"


@dataclass(frozen=True)
class EnvSpec:
    """Everything that memory, models and actors need to know about an environment.

    Attributes:
        observations: By key; a space that is no Dict or Tuple has the single key "obs", nested keys are joined by ".".
        action: What one agent chooses per step.
        num_agents: Rows per env, the agents of one env side by side.
        frames_per_step: Frame skip: simulator frames behind one step, unless the env says so of every step.
        same_step: The observation after a done is already the next episode's first one (`final_value` is needed).
        action_mask: M, the number of choices the key "action_mask" covers; 0 when there is no such key.
        mask_in_info: The mask comes in `info` and not in the observation; it is stored as an observation either way.
        mask_source: Where the mask comes from, in words; empty where there is none.
        reward_shaping: Coefficients of the rewards that can be set, see `reward_shaping.py`; {}: there are none.
        agents: Which agents are which rows, in one line for people; empty for one agent.
        one_per_process: A second one cannot be made in a process that has one; None: that is being tried.
        notes: Lines for people about what the environment does and does not say.
    """

    observations: dict[str, ObservationSpec]
    action: ActionSpec
    num_agents: int = 1
    frames_per_step: int = 1
    same_step: bool = False
    action_mask: int = 0
    mask_in_info: bool = False
    reward_shaping: dict[str, Any] = field(default_factory=dict)
    agents: str = ""
    one_per_process: bool | None = False
    notes: tuple[str, ...] = ()
    mask_source: str = field(default="", compare=False)


class EpisodeStats(NamedTuple):
    """Figures that an environment reported about an episode that ended now, in that row."""

    row: int
    stats: dict[str, float]


@dataclass(slots=True)
class StepRow:
    """Numpy views straight into a slot, for one step of a group of R rows; the environment writes in place.

    Attributes:
        obs: [R, *] per key, of step t+1.
        first: [R] bool of step t+1: this observation starts an episode, or the agent took no part in step t.
        reward: [R] float32 of step t, raw as the environment gave it.
        terminated, truncated: [R] bool of step t, never both.
        num_frames: [R] int32 of step t: simulator frames behind it; holds `frames_per_step` unless the env says more.
        final_obs: [R, *] per key, SAME_STEP only (else empty): true final observation of the rows that ended.
        has_final: [R] bool, SAME_STEP only (else None): set for rows truncated now, cleared for all others.
        logical_end: [R] bool, `--soft_horizon` only (else None): the episode ends in the statistics and goes on; set by
            the group, not by the environment.
    """

    obs: dict[str, Array]
    first: BoolArray
    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    num_frames: IntArray
    final_obs: dict[str, Array] = field(default_factory=dict)
    has_final: BoolArray | None = None
    logical_end: BoolArray | None = None


class GroupEnv(Protocol):
    """The environments of one group: the unit an actor steps.

    `rebuilds` counts the envs that failed and were made again. `cut` says of which rows [R] the last reset has shown
    an observation from the middle of an episode, and `said` the keys of infos that mean something here and were found.
    """

    spec: EnvSpec
    num_rows: int
    cut: BoolArray
    said: set[str]

    @property
    def rebuilds(self) -> int:
        """Environments made again so far."""

    def reset(self, seeds: Sequence[int], obs: dict[str, Array]) -> None:
        """Write the first observations [R, *], one seed per env."""

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Take one step with action [R, A] as stored; most steps return an empty tuple."""

    def close(self) -> None:
        """Release what the environments hold; calling it twice is harmless."""


def is_channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image of three dimensions is [C,H,W] rather than [H,W,C].

    The smaller of the first and the last dimension holds the channels; on a tie the first does.
    """
    return shape[0] <= shape[2]


def row_name(row: int, num_agents: int) -> str:
    """Return the name of a row in messages.

    >>> row_name(5, 1), row_name(5, 3)
    ('env 5', 'env 1, agent 2')
    """
    env, agent = divmod(row, num_agents)
    return f"env {env}, agent {agent}" if num_agents > 1 else f"env {env}"
