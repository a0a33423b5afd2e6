"""Adam over one vector of weights, and its learning rate over time. Nothing here waits for the device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule, split
from appo.algorithms.parts.config import OptimizerConfig
from appo.algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import WEIGHTS, StateLayout, Vector

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_of(flat: FlatModule, config: OptimizerConfig) -> "FlatAdam":
    """Make Adam for all parameters of a module; their gradients become views of its one vector."""
    optimizer = FlatAdam(flat.flat[: flat.num_parameters], config)
    views = split(optimizer.gradient, flat.parameter_table)
    for parameter, view in zip(flat.module.parameters(), views, strict=True):
        parameter.grad = view
    return optimizer


class FlatAdam:
    """Fused Adam on all weights at once, with clipping; a step that would do harm is skipped.

    Args:
        weights: [P] the vector to train, in place.
        config: the learning flags.

    Attributes:
        gradient: [P] the vector that `backward` adds to.
        learning_rate: scalar on the device.
        skipped_in_a_row: steps since the last that was not skipped, scalar on the device.
    """

    def __init__(self, weights: Tensor, config: OptimizerConfig) -> None:
        self.config, self.weights = config, weights
        self.gradient, self._moments = torch.zeros_like(weights), weights.new_zeros(2, len(weights))
        self._mean, self._mean_square = self._moments
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=weights.device)
        self._steps, self._kl, self.skipped_in_a_row = (torch.zeros_like(self.learning_rate) for _ in range(3))

    def configure(self, config: OptimizerConfig) -> None:
        """Follow other flags from now on; a rate that a schedule has set stays unless theirs is another one."""
        if config.learning_rate != self.config.learning_rate:
            self.learning_rate.fill_(config.learning_rate)
        self.config = config

    def follow(self, progress: float) -> None:
        """Set the rate of the linear schedule, when this share of the training budget is used up, in [0, 1]."""
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(self.config.learning_rate * max(0.0, 1.0 - progress))

    def descend(self, loss: Tensor, learnable: Tensor) -> None:
        """Make one step down a loss, a scalar with gradient; `learnable` as in `step`."""
        self.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.step(learnable, torch.zeros_like(self._kl))

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
        self._adam(skipped)
        self.skipped_in_a_row.add_(1.0).mul_(skipped)
        self._kl += kl
        return norm, skipped

    def _adam(self, skipped: Tensor) -> None:
        """One step of Kingma and Ba 2015, arXiv:1412.6980, as `torch.optim.Adam(fused=True)` makes it.

        The kernel is called as it is, because making an optimizer of torch.optim imports its compiler, more than a
        second of every start.
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

    def layout(self, num_weights: int, others: Mapping[str, Vector]) -> StateLayout:
        """Return the layout of a state with P weights, both moments and other vectors."""
        moments = {name: Vector(num_weights) for name in MOMENTS}
        vectors = {WEIGHTS: Vector(num_weights, inherited=True), **moments, **others}
        return StateLayout(vectors, {"adam_steps": 0.0, "learning_rate": self.config.learning_rate})

    def save(self, vectors: Mapping[str, Array]) -> None:
        """Put the moments into vectors [P] by name, with zeros for what is no parameter."""
        for name, moment in zip(MOMENTS, self._moments, strict=True):
            vectors[name][: len(moment)] = moment.cpu().numpy()
            vectors[name][len(moment) :] = 0

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return moments and steps themselves by name, for what a learner names `further` of a second optimizer."""
        named = dict(zip(MOMENTS, self._moments, strict=True)) | {"adam_steps": self._steps.view(1)}
        return {f"{prefix}{name}": tensor for name, tensor in named.items()}

    def moments(self) -> Tensor:
        """First and second moments, [2, P], themselves and no copy; zero before the first step."""
        return self._moments

    def meta(self) -> dict[str, float]:
        """Steps made and skipped in a row and the learning rate, as plain values."""
        steps, rate = float(self._steps), float(self.learning_rate)
        return {"adam_steps": steps, "learning_rate": rate, SKIPPED_IN_A_ROW: float(self.skipped_in_a_row)}

    def restore(self, vectors: Mapping[str, Array], meta: dict[str, Any]) -> None:
        """Continue from what `save` and `meta` gave; a constant or linear rate is the flags' business."""
        self.skipped_in_a_row.zero_()
        self._steps.fill_(meta["adam_steps"])
        for name, moment in zip(MOMENTS, self._moments, strict=True):
            moment.copy_(torch.from_numpy(vectors[name][: len(moment)]))
        if self.config.lr_schedule.startswith("kl_adaptive"):
            self.learning_rate.fill_(meta["learning_rate"])


class GradientSum:
    """Adds up the gradients of the parts of a minibatch, each weighted by its valid steps, and their metrics.

    The sum is kept in float64: in float32 every addition would round, and the number of parts would show.

    Args:
        gradient: [P] float32 vector that `backward` adds to.
        maximum: name of the metric that is a maximum; all others are means over valid steps.

    Attributes:
        num_valid: valid steps so far, scalar.
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
        """Differentiate a part.

        Args:
            valid: its steps.
            loss: mean over its valid steps, with a graph that ends at the gradient.
            metrics: name -> scalar, the same names for every part.
        """
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
