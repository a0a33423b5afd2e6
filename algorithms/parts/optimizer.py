"""Adam over one vector of weights, with a schedule of the learning rate. No function waits for the device."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule, split
from appo.algorithms.parts.config import OptimizerConfig
from appo.algorithms.parts.flat_optimizer import FlatOptimizer
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import StateLayout, Vector

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_of(flat: FlatModule, config: OptimizerConfig, rate: str = "learning_rate") -> "FlatAdam":
    """Make Adam, with the learning rate of a flag, for all parameters; their gradients become views of one vector."""
    optimizer = FlatAdam(flat.flat[: flat.num_parameters], config, rate)
    for parameter, view in zip(flat.module.parameters(), split(optimizer.gradient, flat.parameter_table), strict=True):
        parameter.grad = view
    return optimizer


class FlatAdam(FlatOptimizer):
    """Fused Adam on all weights at once, with clipping; harmful steps are skipped.

    Attributes:
        sum_kl: sum of the KL divergences of steps, scalar on the device; a learner sets the sum to 0.
    """

    def __init__(self, weights: Tensor, config: OptimizerConfig, rate: str = "learning_rate") -> None:
        super().__init__(weights, config, MOMENTS, rate)
        self._mean, self._mean_square = self._means
        self._steps, self.sum_kl = (torch.zeros_like(self.learning_rate) for _ in range(2))
        self._kl = weights.new_zeros(2)  # of an epoch: sum, and number of minibatches; for adaptive schedules

    def step(self, learnable: Tensor, is_finite: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the clipped gradient; return the norm before clipping, and 1.0 if the step was lost, as scalars.

        Args:
            learnable: scalar bool; without a valid step the gradient is 0, and momentum alone must not move weights:
                the step is skipped, but not lost.
            is_finite: scalar bool; the gradient of a loss that is not finite can be finite, because clamps stop NaN.
            kl: scalar, mean KL divergence of the minibatch, for adaptive schedules.
        """
        norm = torch.linalg.vector_norm(self.gradient)
        if self.config.max_grad_norm:
            self.gradient.mul_((self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        # Fused Adam leaves weights and moments alone where this is 1; multiplying by 0 would make NaN of them.
        finite = norm.isfinite() & is_finite
        skipped, lost = (~(finite & learnable)).float(), (~finite).float()
        self._adam(skipped)
        self.skipped_in_a_row.add_(lost).mul_(skipped)
        self.empty.add_(skipped).sub_(lost)
        self.count(kl, skipped)
        return norm, lost

    def count(self, kl: Tensor, skipped: Tensor | None = None) -> None:
        """Count the KL divergence of a minibatch, with or without a step; a skipped step must not adapt the rate."""
        self.sum_kl += kl
        if self.config.lr_schedule.startswith("kl_adaptive"):
            one = torch.stack((kl, torch.ones_like(kl)))
            self._kl += one if skipped is None else one.masked_fill(skipped > 0, 0.0)

    def _adam(self, skipped: Tensor) -> None:
        """Make one step of Kingma and Ba 2015, arXiv:1412.6980, like `torch.optim.Adam(fused=True)`.

        The kernel is called directly, because an optimizer of torch.optim imports torch's compiler, which takes more
        than a second of every start.
        """
        c = self.config
        self._steps += 1
        torch._fused_adam_(
            [self.weights],
            [self.gradient],
            [self._mean],
            [self._mean_square],
            [],
            [self._steps],
            lr=self.learning_rate,
            beta1=c.adam_beta1,
            beta2=c.adam_beta2,
            weight_decay=0.0,
            eps=c.adam_eps,
            amsgrad=False,
            maximize=False,
            found_inf=skipped,
        )
        self._steps -= skipped

    def drop(self) -> None:
        """Forget the KL divergences of an unfinished epoch."""
        self._kl.zero_()
        self.sum_kl.zero_()

    def adapt(self, *, end_of_epoch: bool) -> None:
        """Keep the mean KL divergence of a minibatch, or of an epoch, within a factor 2 of its threshold."""
        schedule, threshold = self.config.lr_schedule, self.config.lr_schedule_kl_threshold
        per_epoch = schedule == "kl_adaptive_epoch"
        if per_epoch and not end_of_epoch:
            return
        if schedule.startswith("kl_adaptive"):
            kl = self._kl[0] / self._kl[1]  # NaN without a minibatch: no comparison is true, and the rate stays
            factor = torch.where(kl > 2 * threshold, 1 / 1.5, torch.where(kl < 0.5 * threshold, 1.5, 1.0))
            self.learning_rate.mul_(factor).clamp_(self.config.lr_adaptive_min, self.config.lr_adaptive_max)
        self._kl.zero_()

    def layout(self, num_weights: int, others: Mapping[str, Vector]) -> StateLayout:
        """Return the layout of a state with P weights, both moments and other vectors."""
        layout = super().layout(num_weights, others)
        return replace(layout, numbers={"adam_steps": 0.0, **layout.numbers})

    def moments(self) -> Tensor:
        """Return first and second moments, [2, P], not copied; zero before the first step."""
        return self._means

    @property
    def steps(self) -> Tensor:
        """Return the number of steps made, [1], not copied."""
        return self._steps.view(1)

    def meta(self) -> dict[str, float]:
        """Return steps made, and the values of `FlatOptimizer`."""
        return {"adam_steps": float(self._steps), **super().meta()}

    def restore(self, vectors: Mapping[str, Array], meta: dict[str, Any]) -> None:
        """Continue from `save` and `meta`; flags decide a constant or linear rate."""
        self._load(vectors)
        self._kl.zero_()  # of an epoch that another state has begun
        self._steps.fill_(meta["adam_steps"])
        if self.config.lr_schedule.startswith("kl_adaptive"):
            self.learning_rate.fill_(meta["learning_rate"])


class GradientSum:
    """Adds gradients of the parts of a minibatch, weighted by valid steps, and their metrics.

    The sum is in float64: float32 would round at every addition, and the result would depend on the number of parts.

    Args:
        gradient: [P] float32 target of `backward`.
        maximum: name of the metric that is a maximum; the rest are means over valid steps.
    """

    def __init__(self, gradient: Tensor, maximum: str) -> None:
        self._gradient, self._maximum = gradient, maximum
        self._sum = torch.zeros_like(gradient, dtype=torch.float64)
        self.clear()

    def clear(self) -> None:
        """Forget all parts."""
        self._sum.zero_()
        self._names: tuple[str, ...] = ()
        self._metrics, self.num_valid, self._largest = self._sum.new_zeros(3).unbind()

    def add(self, valid: Tensor, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Differentiate a part."""
        self._gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        weight = valid.sum().double()
        self._sum += self._gradient.double() * weight
        self._names = (*metrics,)
        self._metrics = self._metrics + torch.stack((*metrics.values(),)).detach().double() * weight
        self._largest = torch.maximum(self._largest, metrics[self._maximum].detach().double())
        self.num_valid = self.num_valid + weight

    def finish(self) -> dict[str, Tensor]:
        """Set the gradient to the mean over the valid steps of all parts; return the metrics of all."""
        count = self.num_valid.clamp(min=1)
        self._gradient.copy_(self._sum / count)
        metrics = dict(zip(self._names, (self._metrics / count).float().unbind(), strict=True))
        return metrics | {self._maximum: self._largest.float()}
