"""Every message of the system, each with its receiver. Bulk arrays never travel: they lie in the arena.

Requests and replies carry (group, slot, step, generation) and hand-overs a slot sequence; a receiver drops what is not
current, so answering or releasing twice is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from appo.algorithms.runtime.roles import MAIN, ROLES, WRITER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appo.algorithms.runtime.roles import Role

# What sets the policies of one run apart.


KEY = "traits"
"""In the plain state of a learner."""


@dataclass(frozen=True)
class PolicyTraits:
    """The hyperparameters that a policy learns with. Saved with its weights, in one piece, so that both are its own.

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
        """Return the traits as JSON holds them."""
        return asdict(self)

    @classmethod
    def in_state(cls, meta: Mapping[str, Any]) -> Self | None:
        """Return the traits in a learner's plain state, checked by `plain_state`; None: it is of no population."""
        return cls(**meta[KEY]) if KEY in meta else None


@dataclass(frozen=True)
class Address:
    """A worker: its role, and which one of that role. `member` tells apart the policy workers of one policy."""

    role: str
    index: int = 0
    member: int = 0

    def __str__(self) -> str:
        return ROLES[self.role].worker_name(self.index, self.member)

    @property
    def facts(self) -> Role:
        """Return the row of its role."""
        return ROLES[self.role]


# Who receives a message.


MAIN_ADDRESS = Address(MAIN.name)

WRITER_ADDRESS = Address(WRITER.name)

ALL = Address("all")
"""Every worker of the process that is sent the message."""


@dataclass(frozen=True)
class AddressBook:
    """The addresses in a run by what messages name. `Topology.address_book` makes it, once, as every message asks.

    Attributes:
        actors: by number.
        actors_of_groups: by group.
        actors_of_slots: by slot.
        learners: by policy.
        policy_workers: by policy and group.
        takers: by policy and slot, who take the trajectories: the learner, unless a role of the algorithm does. Of
            several the message says which.
    """

    actors: Mapping[int, Address]
    actors_of_groups: Mapping[int, Address]
    actors_of_slots: Mapping[int, Address]
    learners: Mapping[int, Address]
    policy_workers: Mapping[int, Mapping[int, Address]]
    takers: Mapping[int, Mapping[int, Sequence[Address]]]

    def address_of(self, message: Message) -> Address:
        """Return the worker that must receive the message."""
        return RECEIVERS[type(message)](self, message)

    def actor(self, message: Any) -> Address:
        """Return the actor whose number is in the message."""
        return self.actors[message.actor]

    def actor_of_group(self, message: Any) -> Address:
        """Return the actor that steps the group in the message."""
        return self.actors_of_groups[message.group]

    def actor_of_slot(self, message: Any) -> Address:
        """Return the actor whose group owns the slot in the message."""
        return self.actors_of_slots[message.slot]

    def learner(self, message: Any) -> Address:
        """Return the learner of the policy in the message."""
        return self.learners[message.policy]

    def taker(self, message: Any) -> Address:
        """Return the worker to which the slot in the message is handed over for the policy in it."""
        taker: Address = self.takers[message.policy][message.slot][message.taker]
        return taker

    def policy_worker(self, message: Any) -> Address:
        """Return the policy worker that acts for the policy in the group, both in the message."""
        return self.policy_workers[message.policy][message.group]

    def named(self, message: Any) -> Address:
        """Return the worker whose address is in the message."""
        address: Address = message.address
        return address

    def main(self, _: Any) -> Address:
        """Return main, whatever the message."""
        return MAIN_ADDRESS

    def everyone(self, _: Any) -> Address:
        """Return all workers of the process, whatever the message."""
        return ALL


RECEIVERS: dict[type, Callable[[AddressBook, Any], Address]] = {}
"""Message class -> what finds its receiver."""

Kind = TypeVar("Kind", bound=type)


def to(receiver: Callable[[AddressBook, Any], Address]) -> Callable[[Kind], Kind]:
    """Return a class decorator that notes who receives the messages of a class."""

    def note(kind: Kind) -> Kind:
        RECEIVERS[kind] = receiver
        return kind

    return note


def check_receivers(namespace: Mapping[str, object]) -> None:
    """Refuse message classes whose receiver nobody has named.

    Args:
        namespace: of a module; every named tuple in it is a message.

    Raises:
        TypeError: there are some; with their names.
    """
    kinds = [kind for kind in namespace.values() if isinstance(kind, type) and issubclass(kind, tuple)]
    if lacking := ", ".join(kind.__name__ for kind in kinds if kind not in RECEIVERS):
        raise TypeError(f"messages without a receiver, which @to names: {lacking}")


# ---- to a policy worker


@to(AddressBook.policy_worker)
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


@to(AddressBook.actor_of_group)
class ActionsReady(NamedTuple):
    """The rows of `policy` at this step of the slot hold actions."""

    policy: int
    group: int
    slot: int
    step: int
    generation: int


@to(AddressBook.actor_of_slot)
class SlotReleased(NamedTuple):
    """The learner of `policy` needs the slot no more."""

    policy: int
    slot: int
    sequence: int


@to(AddressBook.actor)
class ShapeRewards(NamedTuple):
    """An order to reward agents under `policy` by these coefficients from now on."""

    actor: int
    policy: int
    shaping: Mapping[str, Any]


@to(AddressBook.actor)
class OpponentTable(NamedTuple):
    """A table of past versions to draw from now on: their slots (policy numbers) and probabilities.

    Every group answers with `OpponentsReleased` when nobody plays in another slot any more. Numbers rise.
    """

    actor: int
    number: int
    slots: tuple[int, ...]
    versions: tuple[int, ...]  # which version plays in each slot, by the env steps it had learned from
    probabilities: tuple[float, ...]


# ---- to a learner


@to(AddressBook.taker)
class TrajectoryReady(NamedTuple):
    """The slot holds whole trajectories, some of them of `policy`."""

    policy: int
    slot: int
    sequence: int
    generation: int
    taker: int = 0  # which one, where several take trajectories


@to(AddressBook.learner)
class SaveState(NamedTuple):
    """Write the state block now and say so with `StateSaved`."""

    policy: int


@to(AddressBook.learner)
class SetHyperparameters(NamedTuple):
    """Learn with these traits from the next batch on, and say so with `TraitsSet`.

    An order that is known already changes nothing.
    """

    policy: int
    traits: PolicyTraits


@to(AddressBook.learner)
class CopyWeights(NamedTuple):
    """Go on from the latest state of the policy `source`, with these traits, and say so with `TraitsSet`."""

    policy: int
    traits: PolicyTraits
    source: int


@to(AddressBook.learner)
class ReplaceWeights(NamedTuple):
    """Go on with the weights in this file, [P] float32 in the order of the model's table, and then remove it."""

    policy: int
    path: str


# ---- to main


@to(AddressBook.main)
class WorkerReady(NamedTuple):
    """The process is up; its environments are reset, its weights are published."""

    process: str


@to(AddressBook.main)
class WorkerFailed(NamedTuple):
    """The process ends because of this error."""

    process: str
    exit_code: int
    summary: str
    traceback: str
    lasting: bool = False  # another process in its place would only repeat it


@to(AddressBook.main)
class EpisodesDone(NamedTuple):
    """Episodes that ended in one group since its last report, an array element each."""

    policy: NDArray  # type: ignore[type-arg]  # [E] int32
    episode_return: NDArray  # type: ignore[type-arg]  # [E] float64, unscaled and unclipped
    length: NDArray  # type: ignore[type-arg]  # [E] int64, env steps
    stats: tuple[tuple[int, dict[str, float]], ...]  # (policy, extra statistics of the env) for episodes that have some
    exploring: NDArray | None = None  # type: ignore[type-arg]  # [E] bool, of rows that explore much; None: there are none


@to(AddressBook.main)
class MatchResults(NamedTuple):
    """Games against past versions that ended in one group since its last report."""

    version: NDArray  # type: ignore[type-arg]  # [G] int64, as `OpponentTable.versions`
    difference: NDArray  # type: ignore[type-arg]  # [G] float64, mean return of the learner's agents minus the others'
    past_steps: int  # valid steps that past versions have taken


@to(AddressBook.main)
class OpponentsReleased(NamedTuple):
    """Nobody in this group plays in a seat that the `OpponentTable` of that number, or an earlier one, has left out."""

    group: int
    number: int


@to(AddressBook.main)
class VersionDue(NamedTuple):
    """The state block of the policy holds a state that is to be kept as a past version."""

    policy: int


@to(AddressBook.main)
class LearnerReport(NamedTuple):
    """Totals and recent averages of one learner; the totals never decrease within a run."""

    policy: int
    version: int
    totals: dict[str, int]  # env_steps, samples, lost (trained on in vain), updates, batches, and as `BatchCounts`
    metrics: dict[str, float]  # TensorBoard tag -> mean since the last report


@to(AddressBook.main)
class StateSaved(NamedTuple):
    """The state block of the policy holds its state as of `env_steps`."""

    policy: int
    env_steps: int


@to(AddressBook.main)
class WorkerRetires(NamedTuple):
    """The worker has handed over all it had, and wants to be replaced."""

    worker: str
    reason: str


@to(AddressBook.main)
class TraitsSet(NamedTuple):
    """The learner of `policy` has these traits, and its state block holds them with its weights.

    `taken_env_steps` are those behind the state that it took over with an `CopyWeights`.
    """

    policy: int
    traits: PolicyTraits
    version: int
    taken_env_steps: int | None = None


@to(AddressBook.main)
class WorkerRestarted(NamedTuple):
    """A process has been started again in the place of one that died; said by main to itself."""

    process: str
    generation: int
    cause: str
    retired: bool = False  # it had asked for that


@to(AddressBook.main)
class WorkerReport(NamedTuple):
    """Totals of one actor worker, which never decrease within a run; of other workers warnings alone."""

    worker: str
    totals: dict[str, int]  # collected, reset_rows, trajectories, sent, released, rebuilds, episodes
    raised: tuple[str, ...] = ()  # warnings that people are to see, below each its traceback if it has one


@to(AddressBook.main)
class OutputReport(NamedTuple):
    """Totals of the writer of a dataset in this start."""

    totals: dict[str, int]  # episodes, steps, parts, dropped_episodes, dropped_steps


@to(AddressBook.main)
class TimeReport(NamedTuple):
    """The time that a process has spent since it began; with the same `started`, nothing in it ever decreases."""

    process: str
    role: str  # of its first worker
    started: int  # monotonic ns
    seconds: dict[str, float]  # wall time by phase (utils/timing.py); they add up to the time since it began
    cpu_seconds: dict[str, float]  # CPU time by phase, that of other threads and child processes included
    collected: int  # valid steps taken by its environments
    trained: int  # samples trained on


# ---- to whom they name


@to(AddressBook.named)
class Wake(NamedTuple):
    """The arena has changed where the worker looks before it works: only the doorbell of its process is rung."""

    address: Address


# ---- to all


@to(AddressBook.everyone)
class Begin(NamedTuple):
    """Every worker is up: start stepping."""


@to(AddressBook.everyone)
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
    | CopyWeights
    | ReplaceWeights
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
    | OutputReport
    | TimeReport
    | WorkerRetires
    | WorkerRestarted
    | Wake
    | Stop
)

check_receivers(globals())


class Worker(Protocol):
    """A plain object that messages are given to and that has work in between."""

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a message; quick."""
        ...

    def pending(self) -> bool:
        """Return whether there is work."""
        ...

    def work(self) -> Iterator[Message]:
        """Do one unit of the work."""
        ...
