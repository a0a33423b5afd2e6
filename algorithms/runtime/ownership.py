"""Who has which slot, as the arena says it: from this a process goes on where another one died in its place.

A slot is handed over and released by messages; a message can die with either end. So the arena says the same, written
before the message is sent: `owner` and `sequence` by the group, `released`, `columns_used` and the counts by learners.
A process that takes a dead one's place repeats every message that may have been lost. Receivers know those that were
not, by the sequence.

A process can be killed between any two stores. What a slot says is always one thing or the other; a count can then be
wrong by what that one store was about.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from algorithms.runtime.messages import SlotReleased, TrajectoryReady
from algorithms.runtime.trajectories import Trajectories


def take_back(trajectories: Trajectories, slots: Sequence[int]) -> list[int]:
    """The slots of a group that are its own, those included whose release nobody has noted."""
    t = trajectories
    for slot in slots:
        for policy in policies_in(int(t.owner[slot])):
            if t.released[slot, policy] == t.sequence[slot]:
                t.owner[slot] &= ~(1 << policy)
    return [slot for slot in slots if not t.owner[slot]]


def handed_over(trajectories: Trajectories, slots: Sequence[int], generation: int) -> Iterator[TrajectoryReady]:
    """Every hand-over of these slots that a learner has not released, once more."""
    for slot in slots:
        for policy in policies_in(int(trajectories.owner[slot])):
            yield TrajectoryReady(policy, slot, int(trajectories.sequence[slot]), generation)


def policies_in(owner: int) -> list[int]:
    """The policies whose bits are set."""
    return [policy for policy in range(owner.bit_length()) if owner >> policy & 1]


def note_columns_used(trajectories: Trajectories, message: TrajectoryReady, columns: int) -> None:
    """The first `columns` columns of a hand-over are in a batch, or discarded; one store says which hand-over it is."""
    rows = trajectories.valid.shape[2]
    trajectories.columns_used[message.slot, message.policy] = message.sequence * (rows + 1) + columns


def columns_used(trajectories: Trajectories, message: TrajectoryReady) -> int:
    """How many columns of a hand-over are used."""
    rows = trajectories.valid.shape[2]
    sequence, columns = divmod(int(trajectories.columns_used[message.slot, message.policy]), rows + 1)
    return columns if sequence == message.sequence else 0


class LearnerLedger:
    """What a learner keeps in the arena about the slots it has, and its counts."""

    NAMES = ("env_steps", "samples", "batches", "updates", "released", "discarded", "staged", "lost")

    def __init__(self, trajectories: Trajectories, policy: int) -> None:
        self.trajectories, self.policy = trajectories, policy
        self._accepted = np.zeros(len(trajectories.sequence), np.int64)

    def accept(self, message: TrajectoryReady) -> bool:
        """Whether a hand-over is current and is seen for the first time."""
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
        """What has been handed over and not released, and what has been released and perhaps not been heard."""
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
        """The counts last kept; all 0 if this learner is the first in its place."""
        return dict(zip(self.NAMES, self.trajectories.learner_counts[self.policy].tolist(), strict=False))
