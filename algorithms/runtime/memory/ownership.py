"""Ownership of slots in shared memory, from which a replacement of a dead process continues.

Messages hand slots over and release them, and a message can be lost with either process. The arena holds the same
facts, stored before the message is sent: groups store `owner` and `sequence`; learners store `released`, `columns_used`
and counts. A replacement process resends every message that may be lost. Receivers ignore duplicates by the sequence.

A process can be killed between any two stores. Every single store leaves the slot in a valid state; a count can then
be wrong by the effect of one store.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady


def take_back(trajectories: Trajectories, slots: Sequence[int]) -> list[int]:
    """Return the slots owned by their group, slots with an unnoted release included."""
    t = trajectories
    for slot in slots:
        for policy in policies_in(int(t.owner[slot])):
            if t.released[slot, policy] == t.sequence[slot]:
                t.owner[slot] &= ~(1 << policy)
    return [slot for slot in slots if not t.owner[slot]]


def handed_over(trajectories: Trajectories, slots: Sequence[int], generation: int) -> Iterator[TrajectoryReady]:
    """Yield again every hand-over of these slots not released by a learner."""
    for slot in slots:
        for policy in policies_in(int(trajectories.owner[slot])):
            sequence, taker = int(trajectories.sequence[slot]), int(trajectories.taker[slot])
            yield TrajectoryReady(policy, slot, sequence, generation, taker)


def policies_in(owner: int) -> list[int]:
    """Return the policies whose bits are set."""
    return [policy for policy in range(owner.bit_length()) if owner >> policy & 1]


def note_columns_used(trajectories: Trajectories, message: TrajectoryReady, columns: int) -> None:
    """Note that the first `columns` columns of a hand-over are used or discarded, in one store with the sequence."""
    rows = trajectories.valid.shape[2]
    trajectories.columns_used[message.slot, message.policy] = message.sequence * (rows + 1) + columns


def columns_used(trajectories: Trajectories, message: TrajectoryReady) -> int:
    """Return the number of used columns of a hand-over."""
    rows = trajectories.valid.shape[2]
    sequence, columns = divmod(int(trajectories.columns_used[message.slot, message.policy]), rows + 1)
    return columns if sequence == message.sequence else 0


class LearnerLedger:
    """A learner's record in the arena: released slots, counts, and the monotonic time at which training began."""

    COUNTS = ("env_steps", "samples", "batches", "updates", "released", "discarded", "staged", "lost", "used")
    NAMES = (*COUNTS, "began_ms")

    def __init__(self, trajectories: Trajectories, policy: int) -> None:
        self.trajectories, self.policy = trajectories, policy
        self._accepted = np.zeros(len(trajectories.sequence), np.int64)

    def accept(self, message: TrajectoryReady) -> bool:
        """Return whether a hand-over is current and new."""
        t, slot, sequence = self.trajectories, message.slot, message.sequence
        current = sequence == t.sequence[slot] and t.released[slot, self.policy] < sequence
        if not current or self._accepted[slot] == sequence:
            return False
        self._accepted[slot] = sequence
        return True

    def release(self, message: SlotReleased) -> None:
        """Note a release before sending the message."""
        self.trajectories.released[message.slot, self.policy] = message.sequence

    def unsettled(self) -> Iterator[TrajectoryReady | SlotReleased]:
        """Yield unreleased hand-overs, and releases whose message may be lost."""
        t, policy = self.trajectories, self.policy
        for slot in np.flatnonzero(t.owner >> policy & 1).tolist():
            sequence = int(t.sequence[slot])
            if t.released[slot, policy] == sequence:
                yield SlotReleased(policy, slot, sequence)
            else:
                yield TrajectoryReady(policy, slot, sequence, 0)

    def note(self, counts: Mapping[str, int]) -> None:
        """Store the counts of `NAMES`."""
        self.trajectories.learner_counts[self.policy, : len(self.NAMES)] = [counts[name] for name in self.NAMES]

    def noted(self) -> dict[str, int]:
        """Return the counts last stored; all 0 for the first learner in this place."""
        return dict(zip(self.NAMES, self.trajectories.learner_counts[self.policy].tolist(), strict=False))


class SlotBoard:
    """A board of hand-overs and releases in the arena, for processes that take trajectories without a queue.

    A killed process cannot leave a lock behind. The process that changes a slot wakes its partner, and the partner
    looks at all slots.

    Args:
        takers: (policy, number) of the workers here that take trajectories.
    """

    def __init__(self, arena: Arena, takers: Sequence[tuple[int, int]], slots: Sequence[int]) -> None:
        names = ("owner", "sequence", "released", "taker")
        self._owner, self._sequence, self._released, self._taker = (arena[f"Trajectories.{name}"] for name in names)
        self.takers, self.slots = tuple(takers), np.array(sorted(slots), np.int64)
        self._seen = np.zeros((len(self.takers), len(self._sequence)), np.int64)

    def handed_over(self) -> Iterator[TrajectoryReady]:
        """Yield new hand-overs to workers here, unless a release is noted."""
        for number, (policy, taker) in enumerate(self.takers):
            sequence = self._sequence.copy()
            mine = (self._owner >> policy & 1 > 0) & (self._taker == taker)
            for slot in np.flatnonzero(mine & (self._released[:, policy] < sequence) & (sequence > self._seen[number])):
                self._seen[number, slot] = sequence[slot]
                yield TrajectoryReady(policy, int(slot), int(sequence[slot]), 0, taker)

    def released(self) -> Iterator[SlotReleased]:
        """Yield releases of slots of actors here that the actors have not taken back."""
        for policy in range(self._released.shape[1]) if len(self.slots) else ():
            is_owned = self._owner[self.slots] >> policy & 1 > 0
            is_released = self._released[self.slots, policy] == self._sequence[self.slots]
            for slot in self.slots[is_owned & is_released].tolist():
                yield SlotReleased(policy, slot, int(self._sequence[slot]))
