"""The spec of an environment, and the interface of a group of environments, the unit that an actor steps."""

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
"""The key of an observation space that is neither a Dict nor a Tuple."""

MASK_KEY = "action_mask"
"""The key of a Dict observation, or else of `info`, with the categorical choices that are allowed now."""

TEAM_RETURN = "team_return"
"""The statistic of an environment of several agents, reported when all have ended: the sum of the agents' returns."""


class ActionPart(NamedTuple):
    """One independent factor of the action distribution.

    categorical: `size` choices, 1 action value, `size` logits.
    bins: as categorical; the choices are numbers for the environment, and no mask covers the choices.
    bernoulli: `size` bits, `size` action values, `size` logits.
    gaussian: `size` dimensions, `size` action values, 2 * `size` logits (means, then log standard deviations).
    tanh_gaussian: as gaussian; tanh squashes the stored value before scaling.
    """

    kind: Literal["categorical", "bins", "bernoulli", "gaussian", "tanh_gaussian"]
    size: int

    @property
    def is_real(self) -> bool:
        """Whether the values are real numbers."""
        return self.kind in ("gaussian", "tanh_gaussian")

    @property
    def num_values(self) -> int:
        """Action values of the part."""
        return 1 if self.kind in ("categorical", "bins") else self.size

    @property
    def num_logits(self) -> int:
        """Outputs of the policy for the part."""
        return 2 * self.size if self.is_real else self.size


@dataclass(frozen=True)
class ObservationSpec:
    """One observation array of one row, as stored.

    Attributes:
        shape: shape of the array.
        dtype: numpy name, `uint8` or `float32`.
        high: largest value of bytes, by which models divide: 255 for most images, 1 for one-hot vectors.
        frames: number of frames that flags have stacked into an image.
    """

    shape: tuple[int, ...]
    dtype: str
    high: int = 255
    frames: int = field(default=1, compare=False)


@dataclass(frozen=True)
class ActionSpec:
    """The parts of an action, in the order of the stored values.

    Attributes:
        parts: factors, at least one.
        low, high: flattened bounds of all stored real numbers and bins (may be infinite); None without such numbers.
        scale, shift: factor and offset of each of these numbers: the environment takes `shift + scale * stored`, with
            the tanh of a squashed number; None: the environment takes the stored number.
    """

    parts: tuple[ActionPart, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    shift: tuple[float, ...] | None = None

    @property
    def is_real(self) -> tuple[bool, ...]:
        """Of each of the A stored values: whether the value is a real number."""
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
        """Of each of the A stored values: whether tanh squashes the value."""
        return tuple(part.kind == "tanh_gaussian" for part in self.parts for _ in range(part.num_values))

    @property
    def num_values(self) -> int:
        """A: values of a stored action."""
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
    """Facts about an environment for memory, models and actors.

    Attributes:
        observations: arrays by key; a space that is neither Dict nor Tuple has the single key "obs", and "." joins
            nested keys.
        action: choices of one agent per step.
        num_agents: rows per env; the agents of an env are neighbours.
        frames_per_step: frame skip: simulator frames behind a step, unless the env reports a number with every step.
        same_step: whether the observation after a done is the first of the next episode (`final_value` is needed).
        action_mask: M, number of choices that the key "action_mask" covers; 0 without the key.
        mask_in_info: whether the mask comes in `info`; a mask is stored as an observation in any case.
        mask_source: source of the mask in words; empty without a mask.
        reward_shaping: coefficients of the rewards that can be set, see `loop/reward_shaping.py`; {}: none.
        agents: names of the agents by row, in one line for people; empty for one agent.
        one_per_process: whether a process can make only one of the environments; None: not known yet.
        notes: lines for people about properties of the environment.
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
    """Figures of an episode that ended in this step in a row, as the environment reported them."""

    row: int
    stats: dict[str, float]


@dataclass(slots=True)
class StepRow:
    """Numpy views into a slot, for one step of a group of R rows; the environment writes in place.

    Attributes:
        obs: [R, *] per key, of step t+1.
        first: [R] bool of step t+1: the observation starts an episode, or the agent took no part in step t.
        reward: [R] float32 of step t, raw.
        terminated, truncated: [R] bool of step t, never both.
        num_frames: [R] int32 of step t: simulator frames behind the step; `frames_per_step` if the env reports none.
        final_obs: [R, *] per key, SAME_STEP only (else empty): true final observation of the rows that ended.
        has_final: [R] bool, SAME_STEP only (else None): set for rows truncated now, cleared for all others.
        logical_end: [R] bool, `--soft_horizon` only (else None): the episode ends in the statistics and goes on; the
            group sets the flag, not the environment.
        lives: [R] int32, `--episodic_life` only (else None): lives after step t, as infos report them.
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
    lives: IntArray | None = None


def step_row(spec: EnvSpec, rows: int) -> StepRow:
    """Return memory for the steps of a group of rows, zeros except the frames of a step."""
    obs, final_obs = (
        {key: np.zeros((rows, *one.shape), one.dtype) for key, one in spec.observations.items()} for _ in range(2)
    )
    first, terminated, truncated, has_final = np.zeros((4, rows), np.bool_)
    num_frames = np.full(rows, spec.frames_per_step, np.int32)
    row = StepRow(obs, first, np.zeros(rows, np.float32), terminated, truncated, num_frames)
    if spec.same_step:
        row.final_obs, row.has_final = final_obs, has_final
    return row


class GroupEnv(Protocol):
    """The environments of one group: the unit that an actor steps.

    Attributes:
        rebuilds: number of envs that failed and were made again.
        cut: [R] rows for which the last reset returned an observation from the middle of an episode.
        said: keys of infos with a meaning for the runtime that were found.
    """

    spec: EnvSpec
    num_rows: int
    cut: BoolArray
    said: set[str]

    @property
    def rebuilds(self) -> int:
        """Number of environments made again."""

    def reset(self, seeds: Sequence[int], obs: dict[str, Array]) -> None:
        """Write the first observations [R, *], with a seed per env."""

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Take one step with action [R, A] as stored; most steps return an empty tuple."""

    def close(self) -> None:
        """Release all resources of the environments; a second call does nothing."""


def is_channels_first(shape: tuple[int, ...]) -> bool:
    """Whether an image of three dimensions is [C,H,W] rather than [H,W,C].

    Of three numbers of which two neighbours alone are equal, these two are height and width: a board of 7x7 may have 20
    channels. Else the smaller of the first and the last dimension holds the channels; on a tie the first does.
    """
    if (shape[0] == shape[1]) != (shape[1] == shape[2]):
        return shape[1] == shape[2]
    return shape[0] <= shape[2]


def row_name(row: int, num_agents: int) -> str:
    """Return the name of a row in messages.

    >>> row_name(5, 1), row_name(5, 3)
    ('env 5', 'env 1, agent 2')
    """
    env, agent = divmod(row, num_agents)
    return f"env {env}, agent {agent}" if num_agents > 1 else f"env {env}"
