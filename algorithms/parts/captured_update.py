"""The optimizer step as a graph that a device replays, on minibatches copied into fixed memory."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch

Update = Callable[[Batch], Tensor]

WARM_UPS = 3
"""Uncaptured steps per shape of minibatch."""

log = logging.getLogger(__name__)


class CapturedUpdate:
    """Does the work of `update`, by one captured graph per shape of minibatch.

    The first `WARM_UPS` steps of each shape run uncaptured, while libraries initialize and tensors are allocated. The
    last warm-up step is strict: a model that waits for the device fails there, and not in the middle of a capture. If
    a capture is impossible, one warning is logged and all steps run uncaptured.

    A graph contains the numbers at the time of the capture, such as coefficients of the loss. New numbers need a new
    `CapturedUpdate`.

    Args:
        update: function that trains on a minibatch [T, B] in place, and returns a tensor of the shape [T, B].
        device: device that captures the update.
        generator: generator used in `update` beside the default one.
    """

    def __init__(self, update: Update, device: Device, generator: torch.Generator | None = None) -> None:
        self._update, self._device, self._generator = update, device, generator
        self._steps: dict[tuple[int, ...], _Step] = {}
        self._seen: dict[tuple[int, ...], int] = {}
        self._capturable = True

    def __call__(self, batch: Batch) -> Tensor:
        """Train on the minibatch; return the result of `update`, [T, B], in new memory."""
        shape = tuple(batch.valid.shape)
        if shape not in self._steps and self._capturable:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            try:
                if self._seen[shape] == WARM_UPS:
                    with self._device.strict():
                        return self._update(batch)
                if self._seen[shape] > WARM_UPS:
                    self._steps[shape] = _Step(self._update, batch, self._device, self._generator)
            except RuntimeError as error:
                self._capturable = False
                log.warning("the optimizer step cannot be captured and runs as it is: %s", error)
        step = self._steps.get(shape)
        return step(batch) if step else self._update(batch)


class _Step:
    """A captured update, with the batch that the graph reads."""

    def __init__(self, update: Update, batch: Batch, device: Device, generator: torch.Generator | None) -> None:
        self.inputs = batch.copy()
        self.result = torch.empty_like(batch.reward)

        def run() -> None:
            self.result.copy_(update(self.inputs))

        self.run = device.capture(run, generator)

    def __call__(self, batch: Batch) -> Tensor:
        for mine, theirs in zip(self.inputs.tensors(), batch.tensors(), strict=True):
            mine.copy_(theirs)
        self.run()
        return self.result.clone()
