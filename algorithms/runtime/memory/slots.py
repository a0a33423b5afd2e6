"""The shared memory of trajectories: one declaration per field is its shape, its documentation and its allocation."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import EnvSpec

NUM_COUNTS = 16  # room for the counts of one group or one learner; they share no cache line with the next one's


class Recorded(NamedTuple):
    """A field of every slot that acting fills beside observations, actions, rewards and flags.

    Attributes:
        dims: after the slots: T steps, R rows, F steps that can need a final value (0 unless SAME_STEP), or numbers.
        dtype: a numpy name.
    """

    dims: tuple[str | int, ...]
    dtype: str = "float32"


NOTHING_RECORDED: Mapping[str, Recorded] = {}


def dims(shape: str, dtype: type[Any] | str) -> Any:
    """Declare a shared array by its named dimensions; `dtype` is a numpy type, or names who declares the array.

    "observation" and "action" are declared by the environment, "recorded" by the algorithm.
    """
    return dataclasses.field(metadata={"dims": shape.split(), "dtype": dtype})


def sizes_of(topology: Topology, spec: EnvSpec, rnn_state_size: int, recurrence: int) -> dict[str, int]:
    """Return the size of every named dimension."""
    return {
        "S": topology.num_slots,
        "P": topology.num_policies,
        "C": NUM_COUNTS,
        "T": topology.rollout,
        "T+1": topology.rollout + 1,
        "R": topology.rows,
        "A": spec.action.num_values,
        "H": rnn_state_size,
        "N": topology.rollout // recurrence,  # BPTT segments
        "F": topology.rollout if spec.same_step else 0,  # steps that can need a separate final value
        "G": topology.num_groups,
        "G'": topology.num_groups if spec.same_step else 0,
    }


class SharedArrays:
    """Base of dataclasses whose fields are arena arrays, or dicts of them: by observation key, or by recorded name."""

    @classmethod
    def declare(
        cls, sizes: dict[str, int], spec: EnvSpec, recorded: Mapping[str, Recorded] = NOTHING_RECORDED
    ) -> list[Field]:
        """Return the arena fields of this class; `recorded` are those of the algorithm."""
        fields = []
        for declared in dataclasses.fields(cls):  # type: ignore[arg-type]
            shape = tuple(sizes[d] for d in declared.metadata["dims"])
            name, dtype = f"{cls.__name__}.{declared.name}", declared.metadata["dtype"]
            if dtype == "observation":
                fields += [Field(f"{name}.{key}", shape + o.shape, o.dtype) for key, o in spec.observations.items()]
            elif dtype == "recorded":
                for key, one in recorded.items():
                    of_slot = tuple(d if isinstance(d, int) else sizes[d] for d in one.dims)
                    fields.append(Field(f"{name}.{key}", shape + of_slot, one.dtype))
            else:
                numpy_type = spec.action.dtype if dtype == "action" else dtype
                fields.append(Field(name, shape, np.dtype(numpy_type).name))
        return fields

    @classmethod
    def attach(cls, arena: Arena, spec: EnvSpec, recorded: Mapping[str, Recorded] = NOTHING_RECORDED) -> Self:
        """Return the arrays as laid out in the arena."""
        arrays: dict[str, Any] = {}
        for declared in dataclasses.fields(cls):  # type: ignore[arg-type]
            name = f"{cls.__name__}.{declared.name}"
            if declared.metadata["dtype"] == "observation":
                arrays[declared.name] = {key: arena[f"{name}.{key}"] for key in spec.observations}
            elif declared.metadata["dtype"] == "recorded":
                arrays[declared.name] = {key: arena[f"{name}.{key}"] for key in recorded}
            else:
                arrays[declared.name] = arena[name]
        return cls(**arrays)


@dataclass(frozen=True)
class Trajectories(SharedArrays):
    """Trajectories that actors and policies record and learners read. S slots, T steps, R rows, time-major in a slot.

    Index T holds the real bootstrap observation; it becomes row 0 of the group's next slot. Two signals, neither
    derived from the other: `first` (this observation starts an episode: the model zeroes its state, nothing else
    does) and `valid` (this step was really taken by an active agent in a living env: it masks every loss and
    statistic).
    """

    obs: dict[str, Array] = dims("S T+1 R", "observation")
    first: Array = dims("S T+1 R", np.bool_)
    policy_id: Array = dims("S T+1 R", np.int32)  # redrawn exactly where `first` is true
    valid: Array = dims("S T R", np.bool_)
    reward: Array = dims("S T R", np.float32)  # scaled and clipped
    terminated: Array = dims("S T R", np.bool_)
    truncated: Array = dims("S T R", np.bool_)
    num_frames: Array = dims("S T R", np.int32)  # simulator frames behind the step
    action: Array = dims("S T R A", "action")  # as sampled: neither clipped nor squashed
    recorded: dict[str, Array] = dims("S", "recorded")  # by the policy that acted, for its algorithm
    policy_version: Array = dims("S T R", np.int64)
    rnn_state: Array = dims("S N R H", np.float32)  # before every BPTT segment
    owner: Array = dims("S", np.int64)  # policies that still hold the slot, as bits; 0: its actor's
    sequence: Array = dims("S", np.int64)  # hand-overs of the slot so far
    released: Array = dims("S P", np.int64)  # the last hand-over that the learner of the policy has released
    taker: Array = dims("S", np.int64)  # which of those that take trajectories has the slot, see `Topology.apart`
    columns_used: Array = dims("S P", np.int64)  # of the present hand-over, see `runtime/memory/slots.py`
    continues: Array = dims("S", np.int64)  # the slot whose row T became row 0 of this one; -1: new episodes
    group_counts: Array = dims("G C", np.int64)  # totals of a group, from which its next actor goes on
    learner_counts: Array = dims("P C", np.int64)  # the same of a learner


@dataclass(frozen=True)
class FinalObservations(SharedArrays):
    """True final observations of the rows of a group that ended in its last step; SAME_STEP environments only."""

    final_obs: dict[str, Array] = dims("G' R", "observation")
    has_final: Array = dims("G' R", np.bool_)


# Who has which slot, as the arena says it: from this a process goes on where another one died in its place.
#
# A slot is handed over and released by messages; a message can die with either end. So the arena says the same, written
# before the message is sent: `owner` and `sequence` by the group, `released`, `columns_used` and the counts by
# learners. A process that takes a dead one's place repeats every message that may have been lost. Receivers know those
# that were not, by the sequence.
#
# A process can be killed between any two stores. What a slot says is always one thing or the other; a count can then be
# wrong by what that one store was about.


def take_back(trajectories: Trajectories, slots: Sequence[int]) -> list[int]:
    """Return the slots of a group that are its own, those included whose release nobody has noted."""
    t = trajectories
    for slot in slots:
        for policy in policies_in(int(t.owner[slot])):
            if t.released[slot, policy] == t.sequence[slot]:
                t.owner[slot] &= ~(1 << policy)
    return [slot for slot in slots if not t.owner[slot]]


def handed_over(trajectories: Trajectories, slots: Sequence[int], generation: int) -> Iterator[TrajectoryReady]:
    """Yield every hand-over of these slots that a learner has not released, once more."""
    for slot in slots:
        for policy in policies_in(int(trajectories.owner[slot])):
            sequence, taker = int(trajectories.sequence[slot]), int(trajectories.taker[slot])
            yield TrajectoryReady(policy, slot, sequence, generation, taker)


def policies_in(owner: int) -> list[int]:
    """Return the policies whose bits are set."""
    return [policy for policy in range(owner.bit_length()) if owner >> policy & 1]


def note_columns_used(trajectories: Trajectories, message: TrajectoryReady, columns: int) -> None:
    """Note that the first `columns` columns of a hand-over are in a batch, or discarded; one store names it, too."""
    rows = trajectories.valid.shape[2]
    trajectories.columns_used[message.slot, message.policy] = message.sequence * (rows + 1) + columns


def columns_used(trajectories: Trajectories, message: TrajectoryReady) -> int:
    """Return how many columns of a hand-over are used."""
    rows = trajectories.valid.shape[2]
    sequence, columns = divmod(int(trajectories.columns_used[message.slot, message.policy]), rows + 1)
    return columns if sequence == message.sequence else 0


class LearnerLedger:
    """The ledger that a learner keeps in the arena of the slots it has, and of its counts."""

    NAMES = ("env_steps", "samples", "batches", "updates", "released", "discarded", "staged", "lost", "used")

    def __init__(self, trajectories: Trajectories, policy: int) -> None:
        self.trajectories, self.policy = trajectories, policy
        self._accepted = np.zeros(len(trajectories.sequence), np.int64)

    def accept(self, message: TrajectoryReady) -> bool:
        """Return whether a hand-over is current and is seen for the first time."""
        t, slot, sequence = self.trajectories, message.slot, message.sequence
        current = sequence == t.sequence[slot] and t.released[slot, self.policy] < sequence
        if not current or self._accepted[slot] == sequence:
            return False
        self._accepted[slot] = sequence
        return True

    def release(self, message: SlotReleased) -> None:
        """Note a release before it is sent."""
        self.trajectories.released[message.slot, self.policy] = message.sequence

    def unsettled(self) -> Iterator[TrajectoryReady | SlotReleased]:
        """Yield hand-overs that are not released, and releases that were perhaps not heard."""
        t, policy = self.trajectories, self.policy
        for slot in np.flatnonzero(t.owner >> policy & 1).tolist():
            sequence = int(t.sequence[slot])
            if t.released[slot, policy] == sequence:
                yield SlotReleased(policy, slot, sequence)
            else:
                yield TrajectoryReady(policy, slot, sequence, 0)

    def note(self, counts: Mapping[str, int]) -> None:
        """Keep the counts of `NAMES`."""
        self.trajectories.learner_counts[self.policy, : len(self.NAMES)] = [counts[name] for name in self.NAMES]

    def noted(self) -> dict[str, int]:
        """Return the counts last kept; all 0 if this learner is the first in its place."""
        return dict(zip(self.NAMES, self.trajectories.learner_counts[self.policy].tolist(), strict=False))


class SlotBoard:
    """A board of hand-overs and releases in the arena, for workers in processes of their own that take trajectories.

    Between them and actors there is no queue, so that none can be left locked: who notes something in a slot wakes the
    other one, which looks at all slots.

    Args:
        arena: the shared memory.
        takers: (policy, number) of those that take trajectories here.
        slots: of the actors here.
    """

    def __init__(self, arena: Arena, takers: Sequence[tuple[int, int]], slots: Sequence[int]) -> None:
        names = ("owner", "sequence", "released", "taker")
        self._owner, self._sequence, self._released, self._taker = (arena[f"Trajectories.{name}"] for name in names)
        self.takers, self.slots = tuple(takers), np.array(sorted(slots), np.int64)
        self._seen = np.zeros((len(self.takers), len(self._sequence)), np.int64)

    def handed_over(self) -> Iterator[TrajectoryReady]:
        """Yield the hand-overs to workers here that have not been yielded and of which no release is noted."""
        for number, (policy, taker) in enumerate(self.takers):
            sequence = self._sequence.copy()
            mine = (self._owner >> policy & 1 > 0) & (self._taker == taker)
            for slot in np.flatnonzero(mine & (self._released[:, policy] < sequence) & (sequence > self._seen[number])):
                self._seen[number, slot] = sequence[slot]
                yield TrajectoryReady(policy, int(slot), int(sequence[slot]), 0, taker)

    def released(self) -> Iterator[SlotReleased]:
        """Yield the releases of slots of actors here that they have not taken back."""
        for policy in range(self._released.shape[1]) if len(self.slots) else ():
            is_owned = self._owner[self.slots] >> policy & 1 > 0
            is_released = self._released[self.slots, policy] == self._sequence[self.slots]
            for slot in self.slots[is_owned & is_released].tolist():
                yield SlotReleased(policy, slot, int(self._sequence[slot]))


class Units:
    """A count of work done in a place of an algorithm's own processes, which shows that the process gets on.

    Args:
        arena: the shared memory.
        place: of the worker among `Topology.workers_apart`.
    """

    def __init__(self, arena: Arena, place: int) -> None:
        self._row = arena["units"][place]

    @staticmethod
    def declare(topology: Topology) -> Field:
        """Return the arena field; a row is 128 bytes long so that no two writers share a cache line."""
        return Field("units", (len(topology.workers_apart()), 16), "int64")

    def add(self) -> None:
        """Count one."""
        self._row[0] += 1

    @property
    def count(self) -> int:
        """Return the units of all processes that have been in this place."""
        return int(self._row[0])
