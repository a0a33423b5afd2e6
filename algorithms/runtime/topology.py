"""How many of everything exist, and which worker lives in which process: pure arithmetic, no process."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from algorithms.runtime.messages import (
    MAIN,
    ActionRequest,
    ActionsReady,
    Address,
    Adopt,
    Message,
    OpponentTable,
    SaveState,
    SetHyperparameters,
    ShapeRewards,
    SlotReleased,
    TrajectoryReady,
)
from utils.errors import UsageError

Placement = Literal["central", "local", "serial"]

_address = cache(Address)  # every message asks for one


@dataclass(frozen=True)
class Topology:
    """Counts and places. Groups and slots are numbered through the whole run.

    Attributes:
        placement: where policies act: own processes, inside the actors, or everything in main.
        num_actors: actor workers.
        groups_per_actor: environment groups of one actor, stepped in turn.
        slots_per_group: trajectory slots owned by one group.
        num_policies: members of the population, a learner each.
        policy_workers_per_policy: inference processes of one policy (`central` only).
        rows: agents of one group.
        rollout: steps of a trajectory.
        colocated: whether policy workers live with their policy's learner (`central` only).
        num_past: places for past versions, which act and have no learner.
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

    @property
    def num_acting(self) -> int:
        """Policies that act: those that learn, then the places of past versions."""
        return self.num_policies + self.num_past

    @property
    def num_groups(self) -> int:
        """All groups of the run."""
        return self.num_actors * self.groups_per_actor

    @property
    def num_slots(self) -> int:
        """All slots of the run."""
        return self.num_groups * self.slots_per_group

    def groups_of(self, actor: int) -> range:
        """The groups an actor steps."""
        return range(actor * self.groups_per_actor, (actor + 1) * self.groups_per_actor)

    def slots_of(self, group: int) -> range:
        """The slots a group owns."""
        return range(group * self.slots_per_group, (group + 1) * self.slots_per_group)

    def actor_of_slot(self, slot: int) -> int:
        """The actor whose group owns the slot."""
        return slot // (self.slots_per_group * self.groups_per_actor)

    def policy_worker_of(self, policy: int, group: int) -> Address:
        """The one policy worker that acts for this policy in this group, so recurrent state has one home."""
        if self.placement == "central":
            learns = policy < self.num_policies
            return _address("policy_worker", policy, group % self.policy_workers_per_policy if learns else 0)
        return _address("policy_worker", policy, group // self.groups_per_actor)

    def processes(self) -> dict[str, tuple[Address, ...]]:
        """The workers of every process, in the order in which processes are started."""
        policies, acting = range(self.num_policies), range(self.num_acting)
        learners = [Address("learner", p) for p in policies]
        actors = [Address("actor", a) for a in range(self.num_actors)]
        local = {a: [Address("policy_worker", p, a.index) for p in acting] for a in actors}
        if self.placement == "serial":
            return {"main": tuple(actors + [w for a in actors for w in local[a]] + learners)}
        places: dict[str, tuple[Address, ...]] = {str(learner): (learner,) for learner in learners}
        if self.placement == "central":
            members = {
                p: [Address("policy_worker", p, m) for m in range(self.policy_workers_per_policy)] for p in policies
            }
            past = tuple(Address("policy_worker", p) for p in acting[self.num_policies :])
            if self.colocated:
                places = {str(learner): (learner, *members[learner.index]) for learner in learners}
                places[str(learners[0])] += past
            else:
                places |= {str(member): (member,) for p in policies for member in members[p]}
                places |= {str(past[0]): past} if past else {}  # one process for all of them
            return places | {str(actor): (actor,) for actor in actors}
        return places | {str(actor): (actor, *local[actor]) for actor in actors}

    def address_of(self, message: Message) -> Address:
        """The worker that must receive the message."""
        match message:
            case ActionRequest(policy, group):
                return self.policy_worker_of(policy, group)
            case ActionsReady(_, group):
                return _address("actor", group // self.groups_per_actor)
            case SlotReleased(_, slot):
                return _address("actor", self.actor_of_slot(slot))
            case ShapeRewards(actor) | OpponentTable(actor):
                return _address("actor", actor)
            case TrajectoryReady(policy) | SaveState(policy) | SetHyperparameters(policy) | Adopt(policy):
                return _address("learner", policy)
            case _:
                return MAIN


def slots_per_group(*, minimum: int, waiting_batches: int, batch_columns: int, rows: int, groups: int) -> int:
    """Slots a group needs so that `waiting_batches` macro batches can wait while one is written.

    The batch that is trained has been copied out of its slots.

    Args:
        minimum: lower bound set by the user.
        waiting_batches: 0 makes the run synchronous: every slot is handed over before training starts.
        batch_columns: columns of a macro batch.
        rows: columns of one slot.
        groups: groups that share the work.
    """
    batch_slots = -(-batch_columns // rows)
    if not waiting_batches:
        return -(-batch_slots // groups)
    return max(minimum, 1 + -(-waiting_batches * batch_slots // groups))


def check_slots(*, slots: int, rows: int, groups: int, batch_columns: int) -> None:
    """Refuse a plan whose slots together can never fill a macro batch.

    Raises:
        UsageError: with the numbers.
    """
    columns = slots * groups * rows
    if columns < batch_columns:
        raise UsageError(
            f"{groups} groups x {slots} slots x {rows} rows hold {columns} trajectories, but a batch needs "
            f"{batch_columns}: raise --min_traj_buffers_per_worker or lower --batch_size"
        )
