"""RMSProp over one vector of weights, with clipping; a step that would do harm is skipped."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from appo.algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import WEIGHTS, StateLayout, Vector

SQUARES = "square_avg"
"""Name of the vector in a state that holds the running mean of squared gradients."""


class RMSPropFlags(Protocol):
    """The flags that RMSProp reads."""

    @property
    def learning_rate(self) -> float:
        """The step size at first."""
        ...

    @property
    def lr_schedule(self) -> str:
        """How the rate changes, constant or linear."""
        ...

    @property
    def rmsprop_alpha(self) -> float:
        """The decay of the mean of squares."""
        ...

    @property
    def rmsprop_eps(self) -> float:
        """Return the number that is added to that mean, under the root."""
        ...

    @property
    def max_grad_norm(self) -> float:
        """The limit of the norm; 0: none."""
        ...


class FlatRMSProp:
    """RMSProp without momentum on all weights at once, as Mnih et al. share it among actors.

        g <- alpha g + (1 - alpha) d^2,    w <- w - rate d / sqrt(g + eps)

    Args:
        weights: [P] the vector to train, in place.
        config: the learning flags.

    Attributes:
        gradient: [P] the vector d.
        learning_rate: scalar.
        skipped_in_a_row: steps since the last that was not skipped, scalar.

    Source: Mnih et al. 2016, arXiv:1602.01783, eq. 8 and 9; Tieleman and Hinton 2012, lecture 6.5 of Coursera.
    """

    def __init__(self, weights: Tensor, config: RMSPropFlags) -> None:
        self.config, self.weights = config, weights
        self.gradient, self._squares = torch.zeros_like(weights), torch.zeros_like(weights)
        self._scratch = torch.empty_like(weights)
        self.learning_rate, self.skipped_in_a_row = torch.tensor(config.learning_rate), torch.zeros(())

    def configure(self, config: RMSPropFlags) -> None:
        """Follow other flags from now on; a rate that a schedule has set stays unless theirs is another one."""
        if config.learning_rate != self.config.learning_rate:
            self.learning_rate.fill_(config.learning_rate)
        self.config = config

    def follow(self, progress: float) -> None:
        """Set the rate of the linear schedule, when this share of the training budget is used up, in [0, 1]."""
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(self.config.learning_rate * max(0.0, 1.0 - progress))

    def step(self, learnable: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the gradient, clipped; its norm before, and 1.0 if the step was skipped, as scalars.

        Args:
            learnable: scalar bool; with a loss that is not finite the gradient can still be.
            kl: is for other optimizers, whose rate it changes.
        """
        c, norm = self.config, torch.linalg.vector_norm(self.gradient)
        if not bool(norm.isfinite() & learnable):
            self.skipped_in_a_row += 1
            return norm, torch.ones(())
        if c.max_grad_norm:
            self.gradient.mul_((c.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._squares.mul_(c.rmsprop_alpha).addcmul_(self.gradient, self.gradient, value=1 - c.rmsprop_alpha)
        root = torch.add(self._squares, c.rmsprop_eps, out=self._scratch).sqrt_()
        self.weights.addcdiv_(self.gradient, root, value=-float(self.learning_rate))
        self.skipped_in_a_row.zero_()
        return norm, torch.zeros(())

    def layout(self, num_weights: int, others: Mapping[str, Vector]) -> StateLayout:
        """Return the layout of a state with P weights, the squares and other vectors."""
        vectors = {WEIGHTS: Vector(num_weights, inherited=True), SQUARES: Vector(num_weights), **others}
        return StateLayout(vectors, {"learning_rate": self.config.learning_rate})

    def save(self, vectors: Mapping[str, Array]) -> None:
        """Put the squares into their vector [P], with zeros for what is no parameter."""
        vectors[SQUARES][: len(self._squares)] = self._squares.numpy()
        vectors[SQUARES][len(self._squares) :] = 0

    def meta(self) -> dict[str, float]:
        """Steps skipped in a row and the learning rate, as plain values."""
        return {"learning_rate": float(self.learning_rate), SKIPPED_IN_A_ROW: float(self.skipped_in_a_row)}

    def restore(self, vectors: Mapping[str, Array], meta: dict[str, Any]) -> None:
        """Continue from what `save` gave; the rate is the flags' business."""
        self.skipped_in_a_row.zero_()
        self._squares.copy_(torch.from_numpy(vectors[SQUARES][: len(self._squares)]))
