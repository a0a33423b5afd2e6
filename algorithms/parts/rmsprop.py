"""RMSProp over one vector of weights, with clipping; harmful steps are skipped."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from appo.algorithms.parts.config import OptimizerConfig
from appo.algorithms.parts.flat_optimizer import FlatOptimizer
from appo.algorithms.runtime.memory.arena import Array

SQUARES = "square_avg"
"""State vector with the running mean of squared gradients."""


class FlatRMSProp(FlatOptimizer):
    """RMSProp without momentum on all weights at once, as Mnih et al. share it among actors.

        g <- alpha g + (1 - alpha) d^2,    w <- w - rate d / sqrt(g + eps)

    Source: Mnih et al. 2016, arXiv:1602.01783, eq. 8 and 9; Tieleman and Hinton 2012, lecture 6.5 of Coursera.
    """

    config: Any  # `OptimizerConfig` with `rmsprop_alpha` and `rmsprop_eps`

    def __init__(self, weights: Tensor, config: OptimizerConfig) -> None:
        super().__init__(weights, config, (SQUARES,))
        (self._squares,) = self._means
        self._scratch = torch.empty_like(weights)

    def step(self, learnable: Tensor, is_finite: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the clipped gradient; return the norm before clipping, and 1.0 if the step was lost, as scalars.

        Args:
            learnable: scalar bool; without a valid step the gradient is 0, and the step is skipped, but not lost.
            is_finite: scalar bool; the gradient of a loss that is not finite can be finite.
            kl: unused here; other optimizers adapt their rate.
        """
        c, norm = self.config, torch.linalg.vector_norm(self.gradient)
        if not bool(norm.isfinite() & is_finite):
            self.skipped_in_a_row += 1
            return norm, torch.ones(())
        if not learnable:
            self.empty += 1
            return norm, torch.zeros(())
        if c.max_grad_norm:
            self.gradient.mul_((c.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._squares.mul_(c.rmsprop_alpha).addcmul_(self.gradient, self.gradient, value=1 - c.rmsprop_alpha)
        root = torch.add(self._squares, c.rmsprop_eps, out=self._scratch).sqrt_()
        self.weights.addcdiv_(self.gradient, root, value=-float(self.learning_rate))
        self.skipped_in_a_row.zero_()
        return norm, torch.zeros(())

    def restore(self, vectors: Mapping[str, Array], meta: dict[str, Any]) -> None:
        """Continue from the vectors of `save`; flags decide the rate."""
        self._load(vectors)
