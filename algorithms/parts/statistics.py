"""Running statistics of observations and returns, kept by the learner in float64 and published with the weights."""

import math
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from appo.algorithms.models.actor_critic import ActingNetwork, ActorCritic
from appo.algorithms.ops.normalization import Moments, inv_std, merge, merge_batch, std
from appo.algorithms.parts.pooling import Ranks, pool_moments
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.learner_state import Vector

# Returns grow while a policy learns; statistics of all that ever was would lag far behind. The oldest samples fade.
# So do those of advantages.
RETURN_MEMORY_SAMPLES = 100_000

# Float64 statistics of all images would cost as much as a tenth of training on them.
IMAGES_PER_BATCH = 64

# Added to the variance of a pixel, whose range is 1. Most pixels hardly ever change; divided by their own deviation,
# a ball that passes, or a black frame, would be all the network sees.
IMAGE_VARIANCE = 1 / 100

# Added to the variance of a number: metres in a task of micrometres are normalized, the rounding errors of a simulator
# are not. The clip limits a number that changes for the first time.
NUMBER_VARIANCE = 1e-12


STATISTICS = "statistics"
"""Name of their vector in a state."""


def faded(moments: Moments) -> Moments:
    """Return moments that weigh no more than `RETURN_MEMORY_SAMPLES`."""
    fade = (RETURN_MEMORY_SAMPLES / moments.count.clamp(min=1)).clamp(max=1.0)
    return Moments(moments.count * fade, moments.mean, moments.m2 * fade)


def image_stride(steps: int, columns: int) -> int:
    """Return the distance of the images that count, in rows of flattened fields [T * B].

    A distance that shares a divisor with the number of columns would find images in some columns only, in every batch.
    """
    stride = -(-steps * columns // IMAGES_PER_BATCH)
    while math.gcd(stride, columns) > 1:
        stride += 1
    return stride


class RunningStatistics:
    """Moments of every normalized observation and of the returns.

    With `normalize_returns` the critic predicts in units of the returns' standard deviation.

    Attributes:
        ranks: learners whose batches count together; None for a single learner.
    """

    ranks: Ranks | None = None

    def __init__(self, model: ActingNetwork, normalize_returns: bool) -> None:
        self.model, self.normalize_returns = model, normalize_returns
        device = next(model.parameters()).device
        self.observation = {
            key: Moments.empty(tuple(cast(Tensor, scaling.mean).shape), device)
            for key, scaling in zip(model.keys, model.scalings, strict=True)
            if key in model.normalized_keys
        }
        self.returns = Moments.empty((), device)
        self._gathered: tuple[dict[str, Moments], Moments] | None = None

    def update(self, batch: Batch, targets: list[tuple[Tensor, Tensor]]) -> None:
        """Take in a trained batch, see `gather`, and set the model's buffers."""
        self.gather(batch, targets)
        self.apply()

    @torch.no_grad()
    def gather(self, batch: Batch, targets: list[tuple[Tensor, Tensor]]) -> None:
        """Take in a part of a batch, each valid step once (a few images only); `settle` makes it effective.

        Values that are not finite are left out: the optimizer skips such a step, and a mean would never recover.

        Args:
            batch: [T, B] batch.
            targets: value targets and validity of the minibatches of one pass, each [T, B'].
        """
        observation, returns = self._gathered or self._begin()
        valid = batch.valid.flatten()
        for key, moments in observation.items():
            x, usable = batch.obs[key][:-1].flatten(0, 1), valid
            if x.dtype == torch.uint8:
                stride = image_stride(*batch.valid.shape)
                x, usable = x[::stride], valid[::stride]
            else:
                usable = valid & x.reshape(len(x), -1).isfinite().all(dim=1)
            observation[key] = merge_batch(moments, x, usable)
        for target, mask in targets:
            returns = merge_batch(returns, target.flatten(), (mask & target.isfinite()).flatten())
        self._gathered = observation, returns

    def apply(self) -> None:
        """Set the statistics, and the model's buffers, to the gathered values."""
        self.settle()
        self._set_buffers()

    @torch.no_grad()
    def settle(self) -> None:
        """Set the statistics to the gathered values; the model's buffers stay unchanged."""
        assert self._gathered is not None
        observation, returns = self._gathered
        if self.ranks:
            before = [*self.observation.values(), self.returns]
            pooled = pool_moments(self.ranks, [*observation.values(), returns], [moments.mean for moments in before])
            *others, returns = (merge(own, new) for own, new in zip(before, pooled, strict=True))
            observation = dict(zip(observation, others, strict=True))
        self.observation, self.returns, self._gathered = observation, faded(returns), None

    def _begin(self) -> tuple[dict[str, Moments], Moments]:
        """Return the moments that the next values are merged into: of all so far, with several ranks of none."""
        if not self.ranks:
            return dict(self.observation), self.returns
        empty = {key: Moments.empty(tuple(own.mean.shape), own.mean.device) for key, own in self.observation.items()}
        return empty, Moments.empty((), self.returns.mean.device)

    def merge(self, array: NDArray[np.float64]) -> None:
        """Take in another process's `to_array`, and set the model's buffers (ValueError: wrong length)."""
        others = RunningStatistics(self.model, self.normalize_returns)
        others.load_array(array)
        for key, moments in others.observation.items():
            self.observation[key] = merge(self.observation[key], moments)
        self.returns = faded(merge(self.returns, others.returns))
        self._set_buffers()

    def drop(self) -> None:
        """Forget gathered values that are not applied."""
        self._gathered = None

    def to_array(self) -> NDArray[np.float64]:
        """All moments as one vector."""
        moments = [*self.observation.values(), self.returns]
        return torch.cat([t.reshape(-1) for m in moments for t in (m.count, m.mean, m.m2)]).cpu().numpy()

    @property
    def vector(self) -> Vector:
        """Layout of the statistics in a state."""
        return Vector(self.to_array().size, "float64", inherited=True)

    def load_array(self, array: NDArray[np.float64]) -> None:
        """Reverse `to_array`; the model's buffers are part of its weights (ValueError: wrong length)."""
        if array.shape != self.to_array().shape:
            raise ValueError(f"the state has {array.size} statistics, the model {self.to_array().size}")
        place = 0

        def next_part(like: Tensor) -> Tensor:
            nonlocal place
            part = torch.from_numpy(array[place : place + like.numel()].copy()).reshape(like.shape)
            place += like.numel()
            return part.to(like.device)

        for key, m in self.observation.items():
            self.observation[key] = Moments(next_part(m.count), next_part(m.mean), next_part(m.m2))
        m = self.returns
        self.returns = Moments(next_part(m.count), next_part(m.mean), next_part(m.m2))

    def _set_buffers(self) -> None:
        for key, moments in self.observation.items():
            scale = self.model.scaling_of(key).scale  # what is added to the variance is meant for scaled observations
            mean = moments.mean.float()
            least: float | Tensor = (IMAGE_VARIANCE if mean.dim() == 3 else NUMBER_VARIANCE) * scale**2
            if mean.dim() == 3 and scale == 1.0:  # floats need not be pixels; a range r has variances up to r**2 / 4
                widest = 4 * (moments.m2 / moments.count.clamp(min=1)).max()
                least = IMAGE_VARIANCE * widest.clamp(NUMBER_VARIANCE, 1.0)
            # Nor are the last digits of a float32 far from 0.
            rounding = (moments.mean * torch.finfo(mean.dtype).eps).square()
            self.model.set_observation_statistics(key, mean, inv_std(moments, least + rounding))
        if self.normalize_returns:
            assert isinstance(self.model, ActorCritic)
            mean = self.returns.mean.float()
            # In units of less than float32 tells apart at the mean, the layer of the values could overflow.
            unit = torch.maximum(std(self.returns), mean.abs() * torch.finfo(mean.dtype).eps)
            self.model.set_return_statistics(mean, unit)
