"""Batches filled from slots: columns are copied out of slots, and slots are released at once."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered, Feedback
from appo.algorithms.runtime.learning.staging import Staging, staging_for
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.ownership import columns_used, note_columns_used
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady


class ColumnBatches(BatchSource):
    """Fills batches of one policy with whole columns of slots, each used once.

    Args:
        staging: memory of the batches, with the source of the columns.
        policy: policy whose steps count.
        columns: trajectories of a macro batch.
        max_policy_lag: lag, in versions, from which a column is discarded; the oldest valid step of a column decides.
        hold: release slots only after training (synchronous runs of a single policy).
        num_policies: policies of the run; a column without a step of `policy` is skipped.
        rounds: take slots in rounds, one slot of every group in the order of the groups, and release whole rounds
            (lockstep, with one slot for each group); otherwise first in, first out.
    """

    staged_samples = 0

    def __init__(
        self,
        staging: Staging,
        policy: int,
        columns: int,
        max_policy_lag: int,
        hold: bool,
        num_policies: int,
        *,
        rounds: bool = False,
    ) -> None:
        self.staging, self.trajectories, self.policy, self.num_columns = staging, staging.trajectories, policy, columns
        self.max_policy_lag, self.num_policies, self.rounds = max_policy_lag, num_policies, rounds
        self.hold = rounds or (hold and num_policies == 1)
        self.queue: deque[TrajectoryReady] = deque()
        self.held: list[TrajectoryReady] = []
        self.filled, self._next_columns = 0, columns
        self.staged_samples = self.queued_samples = 0
        self.discarded = self.released = self.trajectories_seen = 0
        self._entered = Entered()
        self.staging.allocate(columns)

    def add(self, message: TrajectoryReady) -> None:
        """Queue a slot; a message of an earlier hand-over is dropped."""
        if message.sequence == self.trajectories.sequence[message.slot]:
            self.queue.append(message)
            self.trajectories_seen += 1
            unused = self._mine(message.slot)[:, columns_used(self.trajectories, message) :]  # by a dead learner
            self.queued_samples += int(np.count_nonzero(unused))
        if self.rounds:
            self.queue = deque(sorted(self.queue))

    def resize(self, columns: int) -> None:
        """Set the number of columns, from the next batch on."""
        self._next_columns = columns

    def weights_replaced(self) -> None:
        """Discard the columns in the unfinished batch."""
        self.discarded += self.staged_samples
        self.filled = self.staged_samples = 0

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Copy waiting columns into the batch until the batch is full; release slots without unused columns."""
        yield from self._release_free()
        if not self.filled and self._next_columns != self.num_columns:
            self.num_columns = self._next_columns
            self.staging.allocate(self.num_columns)
        num_rows = self.trajectories.valid.shape[2]
        while self.queue and self.filled < self.num_columns:
            message = self.queue[0]
            start = columns_used(self.trajectories, message)
            mine = self._mine(message.slot)[:, start:]
            acted = np.where(mine, self.trajectories.policy_version[message.slot, :, start:], version)
            is_fresh = version - acted.min(axis=0) < self.max_policy_lag  # no step is too old
            fresh = (is_fresh & mine.any(axis=0)).nonzero()[0] + start
            room = self.num_columns - self.filled
            end = int(fresh[room]) if len(fresh) > room else num_rows
            staged = self._copy(message.slot, fresh[:room])
            used = int(np.count_nonzero(mine[:, : end - start]))
            self.discarded += used - staged
            self.queued_samples -= used
            note_columns_used(self.trajectories, message, end)
            if end < num_rows:
                return
            self.queue.popleft()
            if self.hold:
                self.held.append(message)
            else:
                self.staging.give_back(message)
                yield from self._release_free()
        if self.filled < self.num_columns and len(self.held) == len(self.trajectories.owner):
            # With every slot of the run held, no slot could arrive: as many are released as fill the batch. Further
            # slots would bring columns for the next batch, acted by older weights. A round is released as a whole.
            count = len(self.held) if self.rounds else -(-(self.num_columns - self.filled) // num_rows)
            for message in self.held[:count]:
                self.staging.give_back(message)
            self.held = self.held[count:]
            yield from self._release_free()

    def take(self) -> Batch | None:
        """Return a full batch whose copies have arrived, else None; `staging` limits the life of the memory."""
        if self.filled < self.num_columns:
            return None
        batch = self.staging.take()
        if batch is not None:
            valid, num_frames = self.staging.counted()
            self._entered = Entered(self.staged_samples, int(num_frames[valid].sum()))
            self.filled = self.staged_samples = 0
        return batch

    def blank(self) -> Batch:
        """Return a batch of zeros on the host."""
        fields = {name: staging_for(array, self.num_columns) for name, array in self.staging.sources.items()}
        return Batch.of({name: torch.from_numpy(array) for name, array in fields.items()})

    def entered(self) -> Entered:
        """Return the steps of the batch, once."""
        entered, self._entered = self._entered, Entered()
        return entered

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased]:
        """Release the slots held during training; a round is released after its last slot is used up."""
        if self.rounds and self.queue:
            return
        for message in self.held:
            self.staging.give_back(message)
        self.held = []
        yield from self._release_free()

    @property
    def waiting(self) -> int:
        """Return the number of slots not used up or still read; a late batch counts, a partial round does not."""
        complete = not self.rounds or len(self.queue) + len(self.held) == len(self.trajectories.owner)
        arriving = self.staging.on_their_way + (self.staging.late and self.filled == self.num_columns)
        return arriving + (len(self.queue) if complete else 0)

    def counts(self) -> BatchCounts:
        """Return the counts of the trajectories by their fate."""
        in_flight = self.staged_samples + self.queued_samples
        held = len(self.queue) + len(self.held) + self.staging.on_their_way
        return BatchCounts(self.trajectories_seen, self.released, self.discarded, in_flight, held)

    def _mine(self, slot: int) -> Array:
        """Return the valid steps of this policy, [T, R]."""
        return self.trajectories.valid_of(slot, self.policy if self.num_policies > 1 else None)

    def _copy(self, slot: int, columns: Array) -> int:
        """Copy columns of a slot to the end of the batch; return the number of valid steps copied."""
        if not len(columns):
            return 0
        whole = columns[-1] - columns[0] + 1 == len(columns)
        index: Any = slice(int(columns[0]), int(columns[-1]) + 1) if whole else columns
        mine = self._mine(slot)[:, index]
        self.staging.copy(slot, index, self.filled, mine)
        self.filled += len(columns)
        samples = int(np.count_nonzero(mine))
        self.staged_samples += samples
        return samples

    def _release_free(self) -> Iterator[SlotReleased]:
        for message in self.staging.given_back():
            self.released += 1
            yield SlotReleased(self.policy, message.slot, message.sequence)
