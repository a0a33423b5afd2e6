"""The comparison of a twin, a loss written without torch, with torch's loss."""

import logging
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import torch
from torch import Tensor

from appo.utils.logging import SHOWN

COMPARE_EVERY = 500  # steps; a comparison costs about as much as three of them
TOLERANCE = 1e-3
"""Largest difference, as a share of the gradient's length: rounding is a hundredth at the start of a run."""

GROWTH, LARGEST_TOLERANCE = 10.0, 0.1
# Where the critic is nearly exact, advantages are divided by a tiny deviation, and rounding with them: CartPole's
# differences grew from 1e-5 to 1.4e-3 during 13,800 steps.

log = logging.getLogger(__name__)

Found = TypeVar("Found")
"""Metrics of a step, or a tuple that ends with the metrics."""


class TwinCheck:
    """Decides which steps of a twin are compared with torch, and when the twin retires.

    A single difference can be chance: a ratio at the edge of the clip, or two equal values that rounding swaps. So the
    next step is compared too. Rounding can grow during a run; another loss differs from the start, or in a jump. So the
    tolerance is `GROWTH` times the usual difference, within `TOLERANCE` and `LARGEST_TOLERANCE`.
    """

    def __init__(self, file: str) -> None:
        self.file, self._steps, self._differed, self._usual = file, 0, False, 0.0

    def is_due(self) -> bool:
        """Return whether the next step is compared; call once per step."""
        due = self._differed or self._steps % COMPARE_EVERY == 0
        self._steps += 1
        return due

    def compare(self, learner: Any, found: Found, *arguments: Any) -> Found:
        """Return the results of `learner.differentiate`; the twin, whose results are `found`, may retire."""
        gradient: Tensor = learner.optimizer.gradient
        mine = gradient.clone()
        exact: Found = learner.differentiate(*arguments)
        both: tuple[Any, ...] = found, exact
        names = [(one[-1] if isinstance(one, tuple) else one).keys() for one in both]
        if self.retires(mine, gradient, *names):
            learner.quick = None
        return exact

    def retires(self, mine: Tensor, exact: Tensor, names: AbstractSet[str], exact_names: AbstractSet[str]) -> bool:
        """Return whether gradients [P] differ twice in a row, or names of metrics differ; log a warning if so."""
        difference, length = (torch.linalg.vector_norm(x).item() for x in (mine - exact, exact))
        differs = difference > min(max(TOLERANCE, GROWTH * self._usual), LARGEST_TOLERANCE) * length
        if not differs and length > 0:
            self._usual = max(difference / length, 0.9 * self._usual)
        reason = ""
        if differs and self._differed:
            reason = f"the loss is another one than {self.file} computes"
        if gone := names - exact_names:
            reason = f"the loss lacks {', '.join(sorted(gone))}, computed by {self.file}"
        if missing := exact_names - names:
            reason = f"{self.file} does not compute {', '.join(sorted(missing))}"
        self._differed = differs
        if reason:
            log.warning("updates run in torch: %s", reason, extra=SHOWN)
        return bool(reason)
