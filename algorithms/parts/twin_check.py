"""A twin computes a loss without torch; `TwinCheck` says when it is compared with torch, and when it retires."""

import logging

import torch
from torch import Tensor

COMPARE_EVERY = 500  # steps; a comparison costs about as much as three of them
TOLERANCE = 1e-3
"""Of the gradient's length: rounding is a hundredth of it."""

log = logging.getLogger(__name__)


class TwinCheck:
    """Counts the steps of a twin of a loss.

    A difference can be chance once: a ratio at the edge of its clip, or two values of one size, which rounding puts the
    other way round. So the step after it is compared too.
    """

    def __init__(self) -> None:
        self._steps, self._differed = 0, False

    def is_due(self) -> bool:
        """Return whether the next step is compared; asked once for every step."""
        due = self._differed or self._steps % COMPARE_EVERY == 0
        self._steps += 1
        return due

    def retires(self, mine: Tensor, exact: Tensor, *, same_metrics: bool) -> bool:
        """Return whether gradients [P] differ in two comparisons in a row, or the metrics; a log line reports that."""
        difference = torch.linalg.vector_norm(mine - exact)
        differs = bool(difference > TOLERANCE * torch.linalg.vector_norm(exact))
        retires = not same_metrics or (differs and self._differed)
        self._differed = differs
        if retires:
            log.warning(
                "the loss is not the one that was written out for small networks; torch computes it from here on"
            )
        return retires
