"""Publication of weights: a device copies them to the ring while training goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from appo.algorithms.runtime.devices import Device, Event
from appo.algorithms.runtime.memory.weights import WeightRing


class Publisher:
    """Publishes a vector that lives on a device. On the host that is done at once.

    One publication is under way at a time. When a newer version comes meanwhile, it follows; versions in between are
    never seen by anybody.

    Args:
        ring: where weights are published.
        flat: [P] the weights; whenever a method is called, they are those of the version published last.
        device: where they live.
    """

    def __init__(self, ring: WeightRing, flat: Tensor, device: Device) -> None:
        self.ring, self.flat = ring, flat
        self.wanted = self.started = 0
        self._event: Event | None = None
        self._stream = device.side_stream()
        # Training changes the weights while they are copied out; the host's copy is done before it goes on.
        self._snapshot = flat if device.is_host else torch.empty_like(flat)

    @property
    def busy(self) -> bool:
        """Return whether a version has not reached the ring."""
        return self._event is not None or self.wanted > self.started

    def publish(self, version: int) -> None:
        """Publish the weights, which are those of `version` now, as soon as possible."""
        self.wanted = version
        self.poll()

    def poll(self) -> None:
        """Get on with publishing."""
        self._finish()
        if self._event is None and self.wanted > self.started:
            self._start()
            self._finish()

    def flush(self) -> None:
        """Wait until the newest version is published."""
        while self.busy:
            if self._event is not None:
                self._event.synchronize()
            self.poll()

    def _start(self) -> None:
        self.started = self.wanted
        target = torch.from_numpy(self.ring.begin(self.started))
        if self._snapshot is not self.flat:
            self._snapshot.copy_(self.flat)
        self._stream.follow()
        with self._stream.active():
            target.copy_(self._snapshot, non_blocking=True)
        self._event = self._stream.mark()

    def _finish(self) -> None:
        if self._event is not None and self._event.query():
            self._event = None
            self.ring.commit(self.started)
