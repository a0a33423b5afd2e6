"""The comparison of a twin, a loss written without torch, with torch's loss."""

import logging

import torch
from torch import Tensor

COMPARE_EVERY = 500  # steps; a comparison costs about as much as three of them
TOLERANCE = 1e-3
"""Largest difference, as a share of the gradient's length: rounding is a hundredth."""

log = logging.getLogger(__name__)


class TwinCheck:
    """Decides which steps of a twin are compared with torch, and when the twin retires.

    A single difference can be chance: a ratio at the edge of the clip, or two equal values that rounding swaps. So the
    next step is compared too.
    """

    def __init__(self) -> None:
        self._steps, self._differed = 0, False

    def is_due(self) -> bool:
        """Return whether the next step is compared; call once per step."""
        due = self._differed or self._steps % COMPARE_EVERY == 0
        self._steps += 1
        return due

    def retires(self, mine: Tensor, exact: Tensor, *, same_metrics: bool) -> bool:
        """Return whether gradients [P] differ twice in a row, or names of metrics differ; log a warning if so."""
        difference = torch.linalg.vector_norm(mine - exact)
        differs = bool(difference > TOLERANCE * torch.linalg.vector_norm(exact))
        retires = not same_metrics or (differs and self._differed)
        self._differed = differs
        if retires:
            log.warning(
                "the loss is not the one that was written out for small networks; torch computes it from here on"
            )
        return retires
