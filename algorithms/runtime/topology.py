"""Topology of a run: all counts, and the process of every worker. Pure arithmetic, no process."""

from dataclasses import dataclass
from typing import Literal

from appo.algorithms.runtime.messages import MAIN_ADDRESS, WRITER_ADDRESS, Address, AddressBook
from appo.algorithms.runtime.roles import ACTOR, BRIDGE, LEARNER, POLICY_WORKER, Role
from appo.utils.errors import UsageError

Placement = Literal["central", "local", "serial"]


@dataclass(frozen=True)
class Topology:
    """Counts and places. Groups and slots are numbered through the whole run.

    Attributes:
        placement: where policies act: in their own processes, inside the actors, or everything in main.
        num_actors: actor workers; 0: only learners run.
        groups_per_actor: environment groups of one actor, stepped in turn.
        slots_per_group: trajectory slots owned by one group.
        num_policies: members of the population, a learner each.
        policy_workers_per_policy: inference processes of one policy (`central` only).
        rows: agents of one group.
        rollout: steps of a trajectory.
        colocated: whether policy workers share the process of their policy's learner (`central` only).
        num_past: policies for past versions, which act and have no learner.
        writes: whether a writer stores played steps in a dataset.
        further: roles of the algorithm, each with the role of its hosts, see `Algorithm.workers`.
        apart: roles of the algorithm with their own processes, and the number of processes, see `Algorithm.processes`.
        bridged: groups, after the groups of the actors, whose slots a bridge fills with trajectories of other machines.
        is_remote: whether the learners are on another machine; an uplink takes the trajectories in their place.
    """

    placement: Placement
    num_actors: int
    groups_per_actor: int
    slots_per_group: int
    num_policies: int
    policy_workers_per_policy: int
    rows: int
    rollout: int
    colocated: bool = False
    num_past: int = 0
    writes: bool = False
    further: tuple[tuple[Role, Role], ...] = ()
    apart: tuple[tuple[Role, int], ...] = ()
    bridged: int = 0
    is_remote: bool = False

    @property
    def num_acting(self) -> int:
        """Count acting policies: learning policies, then past versions."""
        return self.num_policies + self.num_past

    @property
    def num_groups(self) -> int:
        """Count all groups of the run."""
        return self.num_actors * self.groups_per_actor + self.bridged

    @property
    def acting_rows(self) -> int:
        """Count the rows of the actors on this machine."""
        return self.num_actors * self.groups_per_actor * self.rows

    @property
    def fillers(self) -> list[Address]:
        """Return the workers that own slots, by number: actors, then the bridge, if any."""
        actors = [Address(ACTOR.name, actor) for actor in range(self.num_actors)]
        return actors + [Address(BRIDGE.name, self.num_actors)] * (self.bridged > 0)

    @property
    def num_slots(self) -> int:
        """Count all slots of the run."""
        return self.num_groups * self.slots_per_group

    def groups_of(self, filler: int) -> range:
        """Return the groups of an actor, or of the bridge."""
        start = filler * self.groups_per_actor
        return range(start, self.num_groups if filler == self.num_actors else start + self.groups_per_actor)

    def slots_of(self, group: int) -> range:
        """Return the slots of a group."""
        return range(group * self.slots_per_group, (group + 1) * self.slots_per_group)

    def filler_of_group(self, group: int) -> int:
        """Return the number of the actor, or of the bridge, with the group."""
        return min(group // self.groups_per_actor, self.num_actors)

    def filler_of_slot(self, slot: int) -> int:
        """Return the number of the actor, or of the bridge, whose group owns the slot."""
        return self.filler_of_group(slot // self.slots_per_group)

    def policy_worker_of(self, policy: int, group: int) -> Address:
        """Return the only policy worker for this policy in this group: recurrent state has one home."""
        if self.placement == "central":
            learns = policy < self.num_policies
            return Address(POLICY_WORKER.name, policy, group % self.policy_workers_per_policy if learns else 0)
        return Address(POLICY_WORKER.name, policy, group // self.groups_per_actor)

    def beside(self, worker: Address) -> tuple[Address, ...]:
        """Return the algorithm's workers in a worker's process: one per role and learning policy beside an actor.

        Beside a worker of one policy, the result has one worker per role, for this policy.
        """
        is_actor = worker.role == ACTOR.name
        of_policies = range(self.num_policies) if is_actor else [worker.index]
        member = worker.index if is_actor else worker.member
        return tuple(
            Address(role.name, policy, member)
            for role, host in self.further
            if host.name == worker.role
            for policy in of_policies
            if policy < self.num_policies
        )

    def processes(self) -> dict[str, tuple[Address, ...]]:
        """Return the workers of every process, in the order of the starts of processes."""
        places = self._of_the_runtime()
        if self.writes and self.placement == "serial":
            places = {name: (*workers, WRITER_ADDRESS) for name, workers in places.items()}
        elif self.writes:
            places |= {str(WRITER_ADDRESS): (WRITER_ADDRESS,)}
        if self.apart:  # after the learners
            learners = {name: workers for name, workers in places.items() if workers[0].role == LEARNER.name}
            places = learners | {str(one): (one,) for one in self.workers_apart()} | places
        if not self.further:
            return places
        return {name: (*ws, *(one for worker in ws for one in self.beside(worker))) for name, ws in places.items()}

    def workers_apart(self) -> list[Address]:
        """Return the algorithm's workers with their own processes, in the order of their numbers."""
        return [
            Address(role.name, p, m)
            for role, count in self.apart
            for p in range(self.num_policies)
            for m in range(count)
        ]

    @property
    def num_takers(self) -> int:
        """Count the processes that share the trajectories of a policy; 0: the trajectories go elsewhere.

        The uplink of a remote run counts.
        """
        return self.is_remote + sum(count for role, count in self.apart if role.takes_trajectories)

    def started(self) -> dict[str, tuple[Address, ...]]:
        """Return the workers of every process that a run starts: in a remote run, of all processes but learners."""
        return {n: ws for n, ws in self.processes().items() if not (self.is_remote and ws[0].role == LEARNER.name)}

    def _of_the_runtime(self) -> dict[str, tuple[Address, ...]]:
        policies, acting = range(self.num_policies), range(self.num_acting if self.num_actors else 0)
        learners = [Address(LEARNER.name, p) for p in policies]
        actors = [Address(ACTOR.name, a) for a in range(self.num_actors)]
        local = {a: [Address(POLICY_WORKER.name, p, a.index) for p in acting] for a in actors}
        if self.placement == "serial":
            return {str(MAIN_ADDRESS): tuple(actors + [w for a in actors for w in local[a]] + learners)}
        workers_of: dict[str, tuple[Address, ...]] = {str(learner): (learner,) for learner in learners}
        if self.placement == "central" and self.num_actors:
            members = {
                p: [Address(POLICY_WORKER.name, p, m) for m in range(self.policy_workers_per_policy)] for p in policies
            }
            past = tuple(Address(POLICY_WORKER.name, p) for p in acting[self.num_policies :])
            if self.colocated:
                workers_of = {str(learner): (learner, *members[learner.index]) for learner in learners}
                workers_of[str(learners[0])] += past
            else:
                workers_of |= {str(member): (member,) for p in policies for member in members[p]}
                workers_of |= {str(past[0]): past} if past else {}  # one process for all past versions
            return workers_of | {str(filler): (filler,) for filler in self.fillers}
        return workers_of | {str(filler): (filler, *local.get(filler, ())) for filler in self.fillers}

    def address_book(self) -> AddressBook:
        """Return the receivers of messages, as a table, because every message is looked up."""
        fillers = self.fillers
        groups = range(self.num_groups)
        return AddressBook(
            actors=dict(enumerate(fillers)),
            actors_of_groups={group: fillers[self.filler_of_group(group)] for group in groups},
            actors_of_slots={slot: fillers[self.filler_of_slot(slot)] for slot in range(self.num_slots)},
            learners={policy: Address(LEARNER.name, policy) for policy in range(self.num_policies)},
            policy_workers={
                policy: {group: self.policy_worker_of(policy, group) for group in groups}
                for policy in range(self.num_acting)
            },
            takers={
                policy: {slot: self._takers(policy, slot) for slot in range(self.num_slots)}
                for policy in range(self.num_policies)
            },
        )

    def _takers(self, policy: int, slot: int) -> tuple[Address, ...]:
        """Return the possible receivers of a slot for a policy."""
        apart = tuple(one for one in self.workers_apart() if one.facts.takes_trajectories and one.index == policy)
        if apart:
            return apart
        beside = self.beside(self.fillers[self.filler_of_slot(slot)]) if self.further else ()
        takers = [one for one in beside if one.facts.takes_trajectories and one.index == policy]
        return (takers[0] if takers else Address(LEARNER.name, policy),)


def slots_per_group(*, minimum: int, waiting_batches: int, batch_columns: int, rows: int, groups: int) -> int:
    """Return slots per group, enough for `waiting_batches` macro batches to wait while another is written.

    The batch in training has been copied out of its slots.

    Args:
        minimum: lower bound by the user.
        waiting_batches: macro batches that may wait; 0: a synchronous run, with every slot handed over before training.
        batch_columns: columns of a macro batch.
        rows: columns of one slot.
        groups: groups of the run.
    """
    batch_slots = -(-batch_columns // rows)
    if not waiting_batches:
        return -(-batch_slots // groups)
    return max(minimum, 1 + -(-waiting_batches * batch_slots // groups))


def check_slots(*, slots: int, rows: int, groups: int, batch_columns: int) -> None:
    """Refuse a plan whose slots together can never fill a macro batch (UsageError: too few slots; with the numbers)."""
    columns = slots * groups * rows
    if columns < batch_columns:
        raise UsageError(
            f"{groups} groups x {slots} slots x {rows} rows hold {columns} trajectories, but a batch needs "
            f"{batch_columns}: raise --min_traj_buffers_per_worker or lower --batch_size"
        )
