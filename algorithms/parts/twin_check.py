"""`TwinCheck` decides when a twin, a loss without torch, is compared with torch, and when the twin retires."""

import logging

import torch
from torch import Tensor

COMPARE_EVERY = 500  # steps; a comparison costs about as much as three of them
TOLERANCE = 1e-3
"""Relative to the gradient's length; rounding is a hundredth of the tolerance."""

log = logging.getLogger(__name__)


class TwinCheck:
    """Counts the steps of a twin.

    A single difference may be chance: rounding moves a ratio across its clip, or swaps two equal values. The next step
    is then compared too.
    """

    def __init__(self) -> None:
        self._steps, self._differed = 0, False

    def is_due(self) -> bool:
        """Return whether to compare the next step; called once per step."""
        due = self._differed or self._steps % COMPARE_EVERY == 0
        self._steps += 1
        return due

    def retires(self, mine: Tensor, exact: Tensor, *, same_metrics: bool) -> bool:
        """Return whether gradients [P] differ twice in a row, or metrics differ; a log line reports the retirement."""
        difference = torch.linalg.vector_norm(mine - exact)
        differs = bool(difference > TOLERANCE * torch.linalg.vector_norm(exact))
        retires = not same_metrics or (differs and self._differed)
        self._differed = differs
        if retires:
            log.warning(
                "the loss is not the one that was written out for small networks; torch computes it from here on"
            )
        return retires
