"""Every message of the system, grouped by the role that receives it. Bulk arrays never travel: they lie in the arena.

Requests and replies carry (group, slot, step, generation) and hand-overs a slot sequence; a receiver drops what is not
current, so answering or releasing twice is harmless.
"""

from dataclasses import dataclass
from typing import NamedTuple

from numpy.typing import NDArray


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


class WorkerRestarted(NamedTuple):
    """A process has been started again in the place of one that died; said by main to itself."""

    process: str
    generation: int
    cause: str


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
    | Begin
    | TrajectoryReady
    | SaveState
    | WorkerReady
    | WorkerFailed
    | EpisodesDone
    | LearnerReport
    | StateSaved
    | WorkerReport
    | TimeReport
    | WorkerRestarted
    | Stop
)
