"""Publication of weights: a device copies them to the ring while training goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from appo.algorithms.runtime.devices import Device, DeviceEvent
from appo.algorithms.runtime.memory.weights import WeightRing


class Publisher:
    """Publishes a vector on a device; on the host at once, elsewhere by a copy during training.

    One publication is in progress at a time. The newest version requested meanwhile follows; versions in between are
    skipped.

    Args:
        flat: weights [P]; at every call of a method, the weights of the version published last.
    """

    def __init__(self, ring: WeightRing, flat: Tensor, device: Device) -> None:
        self.ring, self.flat = ring, flat
        self.wanted = self.started = 0
        self._event: DeviceEvent | None = None
        self._stream = device.side_stream()
        # Training changes the weights during the copy; on the host the copy ends before training continues.
        self._snapshot = flat if device.is_host else torch.empty_like(flat)

    @property
    def busy(self) -> bool:
        """Return whether a version has not reached the ring."""
        return self._event is not None or self.wanted > self.started

    def publish(self, version: int) -> None:
        """Publish the present weights as `version`, as soon as possible."""
        self.wanted = version
        self.poll()

    def poll(self) -> None:
        """Finish a publication whose copy has arrived, and start the next."""
        self._finish()
        if self._event is None and self.wanted > self.started:
            self.started = self.wanted
            target = torch.from_numpy(self.ring.begin(self.started))
            if self._snapshot is not self.flat:
                self._snapshot.copy_(self.flat)
            self._stream.follow()
            with self._stream.active():
                target.copy_(self._snapshot, non_blocking=True)
            self._event = self._stream.mark()
            self._finish()

    def flush(self) -> None:
        """Wait until the newest version is published."""
        while self.busy:
            if self._event is not None:
                self._event.synchronize()
            self.poll()

    def _finish(self) -> None:
        if self._event is not None and self._event.query():
            self._event = None
            self.ring.commit(self.started)
