"""Batches in device memory: slots are copied to it as they come, while the batch before is trained on."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.runtime.devices import REACHED, Device, Event
from algorithms.runtime.learning.batches import Batch, BatchCounts, ColumnBatches, Feedback
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.slots import Trajectories
from algorithms.runtime.messages import SlotReleased, TrajectoryReady

COUNTED = ("valid", "num_frames", "policy_version")
"""Fields that are counted before a batch is trained on. They are small and stay on the host until then."""

BUFFERS = 2


class DeviceBatches(ColumnBatches):
    """`ColumnBatches` on a device with a memory of its own.

    A slot is uploaded as a whole, in one copy per field, and its columns are picked there. It is released when the
    device has passed the event behind its copies. There are two batches of memory: one is filled while the other is
    trained on, and uploads into one wait, on the device, for the training that still reads it.

    Args:
        trajectories, policy, columns, max_policy_lag, hold, num_policies: as `ColumnBatches`.
        device: of the batches.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        policy: int,
        columns: int,
        max_policy_lag: int,
        hold: bool,
        num_policies: int,
        device: Device,
    ) -> None:
        self.device, self.stream = device, device.side_stream()
        self._uploads: deque[tuple[Event, TrajectoryReady]] = deque()
        self._uploaded, self._current = REACHED, 0
        super().__init__(trajectories, policy, columns, max_policy_lag, hold, num_policies)

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Upload what waits, and release what has arrived."""
        yield from self._release_uploaded()
        yield from super().fill(version)

    def take(self) -> Batch | None:
        """The batch when all of it has arrived; its memory is used again by the batch after the next.

        What is counted is on the host and overwritten by the next `fill`, the rest on the device.
        """
        if self.filled < self.num_columns or not self._uploaded.query():
            return None
        self._enter()
        self.stream.lead()
        self.stream.follow()  # the buffer that is filled next was read by the training issued last
        buffer = self._buffers[self._current]
        self._current = (self._current + 1) % BUFFERS
        return Batch.of({**buffer, **{name: torch.from_numpy(a) for name, a in self._staging.items()}})

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased]:
        """Release what was held when the device has read it: not all of it need be in a batch that has arrived."""
        held, self.held = self.held, []
        for message in held:
            yield from self._used_up(message)

    @property
    def waiting(self) -> int:
        """Slots that are not used up or not yet uploaded, and a batch that has not arrived."""
        return len(self.queue) + len(self._uploads) + (self.filled == self.num_columns)

    def counts(self) -> BatchCounts:
        """What became of the trajectories."""
        counts = super().counts()
        return counts._replace(held=counts.held + len(self._uploads))

    def _copy(self, slot: int, columns: Array) -> int:
        """Issue the copies of columns to the end of the batch; the valid steps in them."""
        start, samples = self.filled, super()._copy(slot, columns)
        if not len(columns):
            return samples
        whole = columns[-1] - columns[0] + 1 == len(columns)
        with self.stream.active():
            index: Any = slice(int(columns[0]), int(columns[-1]) + 1)
            if not whole:
                index = self.device.send(torch.from_numpy(columns))
            for name, target in self._buffers[self._current].items():
                uploaded = self._slots[name][slot].to(self.device.name, non_blocking=True)
                target[:, start : self.filled].copy_(uploaded[:, index])
        self._uploaded = self.stream.mark()
        return samples

    def _used_up(self, message: TrajectoryReady) -> Iterator[SlotReleased]:
        """Release the slot when what has been issued so far is done."""
        self._uploads.append((self.stream.mark(), message))
        yield from self._release_uploaded()

    def _release_uploaded(self) -> Iterator[SlotReleased]:
        while self._uploads and self._uploads[0][0].query():
            yield self._release(self._uploads.popleft()[1])

    def _allocate(self) -> None:
        """Memory for batches: on the host for what is counted, on the device, twice, for the rest."""
        self.stream.lead()  # what is still copied into earlier buffers must not end up in what takes their place
        uploaded = {name: a for name, a in self._sources.items() if name not in COUNTED}
        self._slots = {name: torch.from_numpy(a) for name, a in uploaded.items()}
        self._buffers = [{name: self._buffer_for(a) for name, a in uploaded.items()} for _ in range(BUFFERS)]
        self._uploaded, self._current = REACHED, 0
        self._staging = {name: self._staging_for(self._sources[name]) for name in COUNTED}
        self.stream.follow()  # the buffers exist before anything is copied into them

    def _buffer_for(self, source: Array) -> Tensor:
        """[steps, columns, ...] on the device for a field [S, steps, R, ...]."""
        shape = (source.shape[1], self.num_columns, *source.shape[3:])
        return torch.zeros(shape, dtype=torch.from_numpy(source[:0]).dtype, device=self.device.name)
