"""All messages of a run, each with the receiver. Arrays never travel in messages: they lie in the arena.

Requests and replies contain (group, slot, step, generation), hand-overs a slot sequence. A receiver drops outdated
messages, so answering or releasing twice is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from appo.algorithms.runtime.roles import MAIN, ROLES, WRITER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appo.algorithms.runtime.roles import Role

KEY = "traits"
"""Name of the traits in the plain state of a learner."""


@dataclass(frozen=True)
class PolicyTraits:
    """The hyperparameters of a policy. A checkpoint contains traits and weights in one piece, so both always match.

    Attributes:
        hyperparameters: learning flag -> value, for the flags in which policies differ.
        reward_shaping: coefficients of the environment's rewards; {}: the environment has no coefficients.
        changes: number of main's decisions about the policy; an order has the next number.
        adoptions: number of times that the weights of another policy replaced the weights.
        decided_env_steps: env steps of the policy at the last decision.
    """

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    reward_shaping: Mapping[str, Any] = field(default_factory=dict)
    changes: int = 0
    adoptions: int = 0
    decided_env_steps: int = 0

    def plain(self) -> dict[str, Any]:
        """Return the traits as plain values for JSON."""
        return asdict(self)

    @classmethod
    def in_state(cls, meta: Mapping[str, Any]) -> Self | None:
        """Return the traits in a learner's plain state, checked by `plain_state`; None without a population."""
        return cls(**meta[KEY]) if KEY in meta else None


@dataclass(frozen=True)
class Address:
    """The role and the number of a worker. `member` distinguishes the policy workers of one policy."""

    role: str
    index: int = 0
    member: int = 0

    def __str__(self) -> str:
        return self.facts.worker.format(index=self.index, member=self.member)  # such as policy_worker_0.1

    @property
    def facts(self) -> Role:
        """Return the entry of the role in `ROLES`."""
        return ROLES[self.role]


MAIN_ADDRESS = Address(MAIN.name)

WRITER_ADDRESS = Address(WRITER.name)

ALL = Address("all")
"""All workers of the process that receives the message."""


@dataclass(frozen=True)
class AddressBook:
    """All addresses in a run, by the numbers in messages. Made once, by `Topology.address_book`, for speed.

    Attributes:
        actors: number -> actor, or the bridge.
        actors_of_groups: group -> actor that steps the group, or the bridge.
        actors_of_slots: slot -> actor whose group owns the slot, or the bridge.
        learners: policy -> learner.
        policy_workers: policy -> group -> policy worker.
        takers: policy -> slot -> workers that take trajectories: the learner, or workers of a role of the algorithm.
            `TrajectoryReady.taker` is the index.
    """

    actors: Mapping[int, Address]
    actors_of_groups: Mapping[int, Address]
    actors_of_slots: Mapping[int, Address]
    learners: Mapping[int, Address]
    policy_workers: Mapping[int, Mapping[int, Address]]
    takers: Mapping[int, Mapping[int, Sequence[Address]]]

    def address_of(self, message: Message) -> Address:
        """Return the receiver of the message."""
        find = RECEIVERS.get(type(message))
        return MAIN_ADDRESS if find is None else find(message, self)


class ActionRequest(NamedTuple):
    """Row `step` of the slot holds observations; act in the rows of `policy`.

    A step equal to the rollout length requests only the values of final observations.
    """

    policy: int
    group: int
    slot: int
    step: int
    generation: int


class ActionsReady(NamedTuple):
    """The rows of `policy` at the step of the slot hold actions."""

    policy: int
    group: int
    slot: int
    step: int
    generation: int


class SlotReleased(NamedTuple):
    """The learner of `policy` no longer needs the slot."""

    policy: int
    slot: int
    sequence: int


class ShapeRewards(NamedTuple):
    """Reward agents under `policy` by the coefficients `shaping` from now on."""

    actor: int
    policy: int
    shaping: Mapping[str, Any]


class OpponentTable(NamedTuple):
    """Draw past versions by this table from now on: slots (policy numbers), versions and probabilities.

    Every group answers with `OpponentsReleased` when no agent of the group plays in another slot. Numbers rise.
    """

    actor: int
    number: int
    slots: tuple[int, ...]
    versions: tuple[int, ...]  # in each slot, as the env steps that the version had learned from
    probabilities: tuple[float, ...]


class TrajectoryReady(NamedTuple):
    """The slot holds whole trajectories, some by `policy`."""

    policy: int
    slot: int
    sequence: int
    generation: int
    taker: int = 0  # index among several workers that take trajectories


class SaveState(NamedTuple):
    """Write the state block now, and answer with `StateSaved`."""

    policy: int


class SetHyperparameters(NamedTuple):
    """Learn with the traits from the next batch on, and answer with `TraitsSet`. A repeated order changes nothing."""

    policy: int
    traits: PolicyTraits


class CopyWeights(NamedTuple):
    """Continue from the latest state of the policy `source`, with the traits, and answer with `TraitsSet`."""

    policy: int
    traits: PolicyTraits
    source: int


class ReplaceWeights(NamedTuple):
    """Continue with the weights in the file, [P] float32 in the order of the model's table; remove the file."""

    policy: int
    path: str


class WorkerReady(NamedTuple):
    """The process is up: environments are reset, weights are published."""

    process: str


class WorkerFailed(NamedTuple):
    """The process ends because of an error."""

    process: str
    exit_code: int
    summary: str
    traceback: str
    lasting: bool = False  # a replacement would fail too


class EpisodesDone(NamedTuple):
    """Episodes that ended in one group since the last report, one array element each."""

    policy: NDArray  # type: ignore[type-arg]  # [E] int32
    episode_return: NDArray  # type: ignore[type-arg]  # [E] float64, unscaled and unclipped
    length: NDArray  # type: ignore[type-arg]  # [E] int64, env steps
    stats: tuple[tuple[int, dict[str, float]], ...]  # (policy, extra statistics of the env) for episodes that have some
    exploring: NDArray | None = None  # type: ignore[type-arg]  # [E] bool, of rows that explore much; None: there are none


class MatchResults(NamedTuple):
    """Games against past versions that ended in one group since the last report."""

    version: NDArray  # type: ignore[type-arg]  # [G] int64, as `OpponentTable.versions`
    difference: NDArray  # type: ignore[type-arg]  # [G] float64, mean return of the learner's agents minus the others'
    past_steps: int  # valid steps that past versions have taken


class OpponentsReleased(NamedTuple):
    """No agent of the group plays in a seat that the `OpponentTable` of the number, or an earlier table, leaves out."""

    group: int
    number: int


class VersionDue(NamedTuple):
    """The state block of the learner holds a state to keep as a past version."""


LARGEST = ("_max", "reproduction_error")
"""Ends of names of metrics that are the largest of all updates, not their mean."""


class LearnerReport(NamedTuple):
    """Totals and recent averages of one learner; the totals never decrease within a run."""

    policy: int
    version: int
    totals: dict[str, int]  # env_steps, samples, lost (trained on in vain), updates, batches, and as `BatchCounts`
    metrics: dict[str, float]  # TensorBoard tag -> mean since the last report, or see `LARGEST`


class StateSaved(NamedTuple):
    """The state block of the policy holds its state."""

    policy: int


class WorkerRetires(NamedTuple):
    """The worker has handed over all trajectories, and must be replaced."""

    worker: str
    reason: str


class TraitsSet(NamedTuple):
    """The learner of `policy` has the traits, and the state block holds traits and weights.

    After a `CopyWeights`, `taken_env_steps` are the env steps of the copied state.
    """

    policy: int
    traits: PolicyTraits
    version: int
    taken_env_steps: int | None = None


class WorkerRestarted(NamedTuple):
    """A process has replaced a process that died; sent by main to main."""

    process: str
    cause: str
    retired: bool = False  # the replaced process had sent `WorkerRetires`


class WorkerReport(NamedTuple):
    """Totals of one actor worker, which never decrease within a run; other workers report only warnings."""

    worker: str
    totals: dict[str, int]  # collected, reset_rows, trajectories, sent, released, rebuilds, episodes
    raised: tuple[str, ...] = ()  # warnings for the user, each followed by the traceback if there is any


class OutputReport(NamedTuple):
    """Totals of the writer of a dataset since the start."""

    totals: dict[str, int]  # episodes, steps, parts, dropped_episodes, dropped_steps


class TimeReport(NamedTuple):
    """The time that a process has spent since the start; with equal `started`, no number ever decreases."""

    process: str
    role: str  # of its first worker
    started: int  # monotonic ns
    seconds: dict[str, float]  # wall time by phase (utils/timing.py); the sum is the time since the start
    cpu_seconds: dict[str, float]  # CPU time by phase, including other threads and child processes
    collected: int  # valid steps taken by its environments
    trained: int  # samples trained on


class Wake(NamedTuple):
    """The worker must look at the arena: the sender only rings the doorbell of the worker's process."""

    address: Address


class Begin(NamedTuple):
    """Every worker is up: start stepping."""


class Stop(NamedTuple):
    """Send the last reports and end."""


Message = (
    ActionRequest
    | ActionsReady
    | SlotReleased
    | ShapeRewards
    | OpponentTable
    | TrajectoryReady
    | SaveState
    | SetHyperparameters
    | CopyWeights
    | ReplaceWeights
    | Wake
    | Begin
    | Stop
    | WorkerReady
    | WorkerFailed
    | WorkerRetires
    | WorkerRestarted
    | WorkerReport
    | OutputReport
    | TimeReport
    | EpisodesDone
    | MatchResults
    | OpponentsReleased
    | VersionDue
    | LearnerReport
    | StateSaved
    | TraitsSet
)
"""A message: a named tuple of this module."""

Receiver = Callable[[Any, AddressBook], Address]
RECEIVERS: Mapping[type, Receiver] = {
    ActionRequest: lambda message, book: book.policy_workers[message.policy][message.group],
    ActionsReady: lambda message, book: book.actors_of_groups[message.group],
    SlotReleased: lambda message, book: book.actors_of_slots[message.slot],
    TrajectoryReady: lambda message, book: book.takers[message.policy][message.slot][message.taker],
    **dict.fromkeys((ShapeRewards, OpponentTable), lambda message, book: book.actors[message.actor]),
    **dict.fromkeys(
        (SaveState, SetHyperparameters, CopyWeights, ReplaceWeights),
        lambda message, book: book.learners[message.policy],
    ),
    Wake: lambda message, book: message.address,
    **dict.fromkeys((Begin, Stop), lambda message, book: ALL),
}
"""Kind of a message to workers -> function from a message to its receiver; main receives all other messages."""


class Worker(Protocol):
    """A plain object that handles messages and works in between."""

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a message; quick."""
        ...

    def pending(self) -> bool:
        """Return whether there is work."""
        ...

    def work(self) -> Iterator[Message]:
        """Do one unit of the work."""
        ...
