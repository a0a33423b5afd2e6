"""Adam over one vector of weights, and its learning rate over time. Nothing here waits for the device."""

from typing import Any

import torch
from torch import Tensor, nn

from algorithms.appo.config import LearningConfig


class FlatAdam:
    """Fused Adam on all weights at once, with clipping; a step that would do harm is skipped.

    Args:
        weights: [P] the vector to train, in place.
        config: the learning flags.

    Attributes:
        gradient: [P] the vector that `backward` adds to.
        learning_rate: scalar on the device.
    """

    def __init__(self, weights: Tensor, config: LearningConfig) -> None:
        self.config = config
        self.weights = nn.Parameter(weights, requires_grad=True)
        self.gradient = torch.zeros_like(weights)
        self.weights.grad = self.gradient
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=weights.device)
        self._kl = torch.zeros_like(self.learning_rate)
        self._adam = torch.optim.Adam(
            [self.weights],
            lr=self.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def follow(self, progress: float) -> None:
        """Set the rate of the linear schedule, when this share of the training budget is used up, in [0, 1]."""
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(self.config.learning_rate * max(0.0, 1.0 - progress))

    def step(self, learnable: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the gradient, clipped; its norm before, and 1.0 if the step was skipped, as scalars.

        Args:
            learnable: scalar bool; without a valid step the gradient is 0, and momentum alone must not move weights;
                with a loss that is not finite the gradient can still be, as clamps stop NaN.
            kl: scalar, mean KL divergence of the minibatch, for adaptive schedules.
        """
        norm = torch.linalg.vector_norm(self.gradient)
        if self.config.max_grad_norm:
            self.gradient.mul_((self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        # Fused Adam leaves weights and moments alone where this is 1; multiplying by 0 would make NaN of them.
        skipped = (~(norm.isfinite() & learnable)).float()
        self._adam.found_inf = skipped  # type: ignore[attr-defined]
        self._adam.step()
        self._kl += kl
        return norm, skipped

    def adapt(self, *, end_of_epoch: bool, minibatches: int) -> None:
        """Keep the mean KL divergence of a minibatch, or of an epoch, within a factor 2 of its threshold."""
        schedule, threshold = self.config.lr_schedule, self.config.lr_schedule_kl_threshold
        per_epoch = schedule == "kl_adaptive_epoch"
        if per_epoch and not end_of_epoch:
            return
        if schedule.startswith("kl_adaptive"):
            kl = self._kl / (minibatches if per_epoch else 1)
            factor = torch.where(kl > 2 * threshold, 1 / 1.5, torch.where(kl < 0.5 * threshold, 1.5, 1.0))
            self.learning_rate.mul_(factor).clamp_(self.config.lr_adaptive_min, self.config.lr_adaptive_max)
        self._kl.zero_()

    def moments(self) -> Tensor:
        """First and second moments, [2, P]; zero before the first step."""
        state = self._adam.state[self.weights]
        if not state:
            return torch.zeros(2, len(self.gradient), device=self.gradient.device)
        return torch.stack((state["exp_avg"], state["exp_avg_sq"]))

    def meta(self) -> dict[str, float]:
        """Steps made and the learning rate, as plain values."""
        state = self._adam.state[self.weights]
        return {"adam_steps": float(state["step"]) if state else 0.0, "learning_rate": float(self.learning_rate)}

    def restore(self, moments: Tensor, meta: dict[str, Any]) -> None:
        """Continue from moments [2, P] and `meta`; a constant or linear rate is the flags' business."""
        self._adam.state.clear()
        if meta["adam_steps"]:
            self._adam.state[self.weights] = {
                "step": torch.tensor(meta["adam_steps"], dtype=torch.float32, device=moments.device),
                "exp_avg": moments[0].clone(),
                "exp_avg_sq": moments[1].clone(),
            }
        if self.config.lr_schedule.startswith("kl_adaptive"):
            self.learning_rate.fill_(meta["learning_rate"])
