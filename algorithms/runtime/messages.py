"""Every message of the system, grouped by the role that receives it. Bulk arrays never travel: they lie in the arena.

Requests and replies carry (group, slot, step, generation) and hand-overs a slot sequence; a receiver drops what is not
current, so answering or releasing twice is harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What sets the policies of one run apart.


KEY = "traits"
"""In the plain state of a learner."""


@dataclass(frozen=True)
class Traits:
    """What a policy learns with. Saved with its weights, in one piece, so that it never has those of another policy.

    Attributes:
        hyperparameters: learning flag -> value, of the flags in which policies differ.
        reward_shaping: coefficients of the environment's rewards; {}: it has none.
        changes: decisions of main about this policy so far; an order has the number that follows.
        adoptions: how often its weights were replaced by those of another policy.
        decided_env_steps: of the policy at the last decision.
    """

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    reward_shaping: Mapping[str, Any] = field(default_factory=dict)
    changes: int = 0
    adoptions: int = 0
    decided_env_steps: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON holds them."""
        return asdict(self)

    @classmethod
    def in_state(cls, meta: Mapping[str, Any]) -> Self | None:
        """Those in the plain state of a learner, as `plain_state` has checked it; None: it is of no population."""
        return cls(**meta[KEY]) if KEY in meta else None


@dataclass(frozen=True)
class Address:
    """A worker: its role, and which one of that role. `member` tells apart the policy workers of one policy."""

    role: str
    index: int = 0
    member: int = 0

    def __str__(self) -> str:
        tail = f".{self.member}" if self.role == "policy_worker" else ""
        return self.role if self.role == "main" else f"{self.role}_{self.index}{tail}"


MAIN = Address("main")

# ---- to a policy worker


class ActionRequest(NamedTuple):
    """Row `step` of the slot holds observations; act for the rows that belong to `policy`.

    A step equal to the rollout length asks for the values of final observations only.
    """

    policy: int
    group: int
    slot: int
    step: int
    generation: int


# ---- to an actor worker


class ActionsReady(NamedTuple):
    """The rows of `policy` at this step of the slot hold actions."""

    policy: int
    group: int
    slot: int
    step: int
    generation: int


class SlotReleased(NamedTuple):
    """The learner of `policy` needs the slot no more."""

    policy: int
    slot: int
    sequence: int


class ShapeRewards(NamedTuple):
    """Whoever plays under `policy` is rewarded by these coefficients from now on."""

    actor: int
    policy: int
    shaping: Mapping[str, Any]


class OpponentTable(NamedTuple):
    """From now on past versions are drawn from these places (policy numbers), with these probabilities.

    Every group answers with `OpponentsReleased` when nobody plays in another place any more. Numbers rise.
    """

    actor: int
    number: int
    places: tuple[int, ...]
    versions: tuple[int, ...]  # which version plays in each place, by the env steps it had learned from
    probabilities: tuple[float, ...]


class Begin(NamedTuple):
    """Every worker is up: start stepping."""


# ---- to a learner


class TrajectoryReady(NamedTuple):
    """The slot holds whole trajectories, some of them of `policy`."""

    policy: int
    slot: int
    sequence: int
    generation: int


class SaveState(NamedTuple):
    """Write the state block now and say so with `StateSaved`."""

    policy: int


class SetHyperparameters(NamedTuple):
    """Learn with these traits from the next batch on, and say so with `TraitsSet`.

    An order that is known already changes nothing.
    """

    policy: int
    traits: Traits


class Adopt(NamedTuple):
    """Go on from the latest state of the policy `source`, with these traits, and say so with `TraitsSet`."""

    policy: int
    traits: Traits
    source: int


# ---- to main


class WorkerReady(NamedTuple):
    """The process is up; its environments are reset, its weights are published."""

    process: str


class WorkerFailed(NamedTuple):
    """The process ends because of this error."""

    process: str
    exit_code: int
    summary: str
    traceback: str
    lasting: bool = False  # another process in its place would only repeat it


class EpisodesDone(NamedTuple):
    """Episodes that ended in one group since its last report, an array element each."""

    policy: NDArray  # type: ignore[type-arg]  # [E] int32
    episode_return: NDArray  # type: ignore[type-arg]  # [E] float64, unscaled and unclipped
    length: NDArray  # type: ignore[type-arg]  # [E] int64, env steps
    stats: tuple[tuple[int, dict[str, float]], ...]  # (policy, extra statistics of the env) for episodes that have some


class MatchResults(NamedTuple):
    """Games against past versions that ended in one group since its last report."""

    version: NDArray  # type: ignore[type-arg]  # [G] int64, as `OpponentTable.versions`
    difference: NDArray  # type: ignore[type-arg]  # [G] float64, mean return of the learner's agents minus the others'
    past_steps: int  # valid steps that past versions have taken


class OpponentsReleased(NamedTuple):
    """Nobody in this group plays in a seat that the `OpponentTable` of that number, or an earlier one, has left out."""

    group: int
    number: int


class VersionDue(NamedTuple):
    """The state block of the policy holds a state that is to be kept as a past version."""

    policy: int


class LearnerReport(NamedTuple):
    """Totals and recent averages of one learner; the totals never decrease within a run."""

    policy: int
    version: int
    totals: dict[str, int]  # env_steps, samples, lost (trained on in vain), updates, batches, and as `BatchCounts`
    metrics: dict[str, float]  # TensorBoard tag -> mean since the last report


class StateSaved(NamedTuple):
    """The state block of the policy holds its state as of `env_steps`."""

    policy: int
    env_steps: int


class WorkerRetires(NamedTuple):
    """The worker has handed over all it had, and wants to be replaced."""

    worker: str
    reason: str


class TraitsSet(NamedTuple):
    """The learner of `policy` has these traits, and its state block holds them with its weights.

    `taken_env_steps` are those behind the state that it took over with an `Adopt`.
    """

    policy: int
    traits: Traits
    version: int
    taken_env_steps: int | None = None


class WorkerRestarted(NamedTuple):
    """A process has been started again in the place of one that died; said by main to itself."""

    process: str
    generation: int
    cause: str
    retired: bool = False  # it had asked for that


class WorkerReport(NamedTuple):
    """Totals of one actor worker; they never decrease within a run."""

    worker: str
    totals: dict[str, int]  # collected, reset_rows, trajectories, sent, released, rebuilds, episodes


class TimeReport(NamedTuple):
    """How a process has spent its time since it began; with the same `started`, nothing in it ever decreases."""

    process: str
    role: str  # of its first worker
    started: int  # monotonic ns
    seconds: dict[str, float]  # wall time by phase (utils/timing.py); they add up to the time since it began
    cpu_seconds: dict[str, float]  # CPU time by phase, that of other threads and child processes included
    collected: int  # valid steps taken by its environments
    trained: int  # samples trained on


# ---- to all


class Stop(NamedTuple):
    """Send the last reports and end."""


Message = (
    ActionRequest
    | ActionsReady
    | SlotReleased
    | ShapeRewards
    | OpponentTable
    | Begin
    | TrajectoryReady
    | SaveState
    | SetHyperparameters
    | Adopt
    | WorkerReady
    | WorkerFailed
    | EpisodesDone
    | MatchResults
    | OpponentsReleased
    | VersionDue
    | LearnerReport
    | StateSaved
    | TraitsSet
    | WorkerReport
    | TimeReport
    | WorkerRetires
    | WorkerRestarted
    | Stop
)


class Worker(Protocol):
    """A plain object that messages are given to and that has work in between."""

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a message; quick."""
        ...

    def pending(self) -> bool:
        """Whether there is work."""
        ...

    def work(self) -> Iterator[Message]:
        """Do one unit of it."""
        ...
