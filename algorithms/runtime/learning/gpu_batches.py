"""Batches in device memory: slots are copied to the device on arrival, during the training of the batch before."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from appo.algorithms.runtime.devices import REACHED, Device, DeviceEvent
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.staging import Staging, staging_for
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import TrajectoryReady

COUNTED = ("valid", "num_frames", "policy_version")
"""Small fields, counted before training on a batch; they stay on the host until then."""

BUFFERS = 2


class DeviceStaging(Staging):
    """Memory for batches on a device.

    A slot is uploaded as a whole, in one copy per field, and the device picks the columns. The slot is free after the
    event behind its copies. Memory has room for two batches: one is filled during the training on the other. Uploads
    into a batch wait, on the device, for the training on that batch.
    """

    late = True

    def __init__(self, trajectories: Trajectories, device: Device) -> None:
        super().__init__(trajectories)
        self.device, self.stream = device, device.side_stream()
        self._slots = {name: torch.from_numpy(a) for name, a in self.sources.items() if name not in COUNTED}
        self._uploads: deque[tuple[DeviceEvent, TrajectoryReady]] = deque()
        self._uploaded, self._current = REACHED, 0
        self.buffers: list[dict[str, Tensor]] = []

    def allocate(self, columns: int) -> None:
        """Allocate memory for batches of this size: counted fields on the host, the others twice on the device."""
        self.stream.lead()  # copies into earlier buffers must not reach memory allocated in their place
        self.buffers = [{} for _ in range(BUFFERS)]
        for buffer in self.buffers:
            for name, slots in self._slots.items():  # [S, steps, R, ...] -> [steps, columns, ...]
                shape = (slots.shape[1], columns, *slots.shape[3:])
                buffer[name] = torch.zeros(shape, dtype=slots.dtype, device=self.device.name)
        self._uploaded, self._current = REACHED, 0
        self.counts = {name: staging_for(self.sources[name], columns) for name in COUNTED}
        self.stream.follow()  # the buffers exist before the copies into them

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Issue the copies of columns of a slot to `start`."""
        super().copy(slot, index, start, mine)
        end = start + mine.shape[1]
        with self.stream.active():
            there = index if isinstance(index, slice) else self.device.send(torch.from_numpy(index))
            for name, target in self.buffers[self._current].items():
                target[:, start:end].copy_(self._slots[name][slot].to(self.device.name, non_blocking=True)[:, there])
        self._uploaded = self.stream.mark()

    def take(self) -> Batch | None:
        """Return the batch after its copies have arrived; the batch after the next uses the memory again.

        Counted fields are on the host and overwritten by the next copies, all others are on the device.
        """
        if not self._uploaded.query():
            return None
        self.stream.lead()
        self.stream.follow()  # the training issued last read the buffer filled next
        buffer = self.buffers[self._current]
        self._current = (self._current + 1) % BUFFERS
        return Batch.of({**buffer, **{name: torch.from_numpy(a) for name, a in self.counts.items()}})

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot after issuing its last copy."""
        self._uploads.append((self.stream.mark(), message))

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield the slots with finished copies, in order."""
        while self._uploads and self._uploads[0][0].query():
            yield self._uploads.popleft()[1]

    @property
    def on_their_way(self) -> int:
        """Return the number of slots still read by the device."""
        return len(self._uploads)
