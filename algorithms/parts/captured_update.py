"""An optimizer step that a device captures and repeats."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch

log = logging.getLogger(__name__)

Update = Callable[[Batch], Tensor]

WARM_UPS = 3


class CapturedUpdate:
    """Captures `update` once per shape of minibatch and repeats the capture.

    The first steps of each shape run uncaptured, while libraries and Adam's state are set up. The last of them is
    strict, so a model that waits for the device is found before a capture fails half-way. Without capture, a warning is
    logged and all steps run uncaptured.

    Numbers that are not tensors, such as coefficients of the loss, are frozen by the capture; a change needs another
    capture, see `Tune`.

    Args:
        update: trains on a minibatch [T, B] and returns value targets [T, B]; works in place on persistent tensors.
        device: device of the capture.
    """

    def __init__(self, update: Update, device: Device) -> None:
        self._update, self._device = update, device
        self._steps: dict[tuple[int, ...], _Capture] = {}
        self._seen: dict[tuple[int, ...], int] = {}
        self._capturable = True

    def __call__(self, batch: Batch) -> Tensor:
        """Train on the minibatch; return value targets in new memory."""
        shape = tuple(batch.valid.shape)
        if shape not in self._steps and self._capturable:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            try:
                if self._seen[shape] == WARM_UPS:
                    with self._device.strict():
                        return self._update(batch)
                if self._seen[shape] > WARM_UPS:
                    self._steps[shape] = _Capture(self._update, batch, self._device)
            except RuntimeError as error:
                self._capturable = False
                log.warning("the optimizer step cannot be captured and runs as it is: %s", error)
        step = self._steps.get(shape)
        return step(batch) if step else self._update(batch)


class _Capture:
    def __init__(self, update: Update, batch: Batch, device: Device) -> None:
        self.inputs = batch.copy()
        self.target = torch.empty_like(batch.reward)

        def run() -> None:
            self.target.copy_(update(self.inputs))

        self.run = device.capture(run)

    def __call__(self, batch: Batch) -> Tensor:
        for mine, theirs in zip(self.inputs.tensors(), batch.tensors(), strict=True):
            mine.copy_(theirs)
        self.run()
        return self.target.clone()
