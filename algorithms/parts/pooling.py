"""Sums over the ranks of several learners: gradient, metrics and moments of a batch that each rank holds a part of."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from appo.algorithms.ops.normalization import Moments


class Ranks(Protocol):
    """The learners of one policy, each with a part of every batch."""

    def add_up(self, x: Tensor) -> None:
        """Replace a tensor by its sum over all ranks, equal in every bit on each rank."""


def pool_gradients(ranks: Ranks, gradients: Sequence[Tensor], values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Set gradients [P] to the means over the valid steps of all ranks, in one sum with everything else.

    Args:
        ranks: all learners.
        gradients: each [P], mean over the valid steps of this rank; 0 without a valid step.
        values: [K] metrics, means over the same steps.
        count: scalar, number of these steps.

    Returns:
        Valid steps of all ranks, scalar, and the metrics [K] as means over these steps. A number that is not finite on
        one rank is not finite on all.
    """
    dtype = gradients[0].dtype
    count = count.to(dtype)
    own = torch.where(count > 0, values.to(dtype) * count, 0.0)
    total = torch.cat((*(gradient * count for gradient in gradients), own, count.view(1)))
    ranks.add_up(total)
    total[:-1] /= total[-1].clamp(min=1)
    *means, own, count = total.split_with_sizes([*map(len, gradients), len(own), 1])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean)
    return count.squeeze(0), own


def pool_moments(ranks: Ranks, moments: Sequence[Moments], centers: Sequence[Tensor]) -> list[Moments]:
    """Return the moments of the samples of all ranks together.

    Counts, sums and squares add up; moments do not. Sums of distances from a center near the mean keep the digits.

    Args:
        ranks: all learners.
        moments: moments of the samples of this rank.
        centers: for each, a mean [*] that all ranks have, such as the mean so far.
    """
    parts: list[Tensor] = []
    for own, center in zip(moments, centers, strict=True):
        distance = own.mean - center
        parts += [own.count, own.count * distance, own.m2 + own.count * distance.square()]
    total = torch.cat([part.reshape(-1) for part in parts])
    ranks.add_up(total)
    pieces = total.split_with_sizes([part.numel() for part in parts])
    sums = iter([piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])
    pooled = []
    for count, distance, squares, center in zip(sums, sums, sums, centers, strict=False):
        mean = distance / count.clamp(min=1)
        pooled.append(Moments(count, center + mean, (squares - count * mean.square()).clamp(min=0)))
    return pooled


def pool_mean_and_std(ranks: Ranks, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return `losses.masked_mean_and_std` over the valid steps of all ranks.

    Args:
        ranks: all learners.
        x: [T, B].
        valid: [T, B] bool.
    """
    own = x.detach().double().masked_fill(~valid, 0.0)
    total = torch.stack((valid.sum().double(), own.sum(), own.square().sum()))
    ranks.add_up(total)
    count, mean, squares = total[0], *(total[1:] / total[0].clamp(min=1)).unbind()
    return mean.to(x.dtype), (squares - mean.square()).clamp(min=0).sqrt().masked_fill(count == 0, 0.0).to(x.dtype)


def pool_mean(ranks: Ranks, value: Tensor, count: Tensor) -> Tensor:
    """Return the mean over the steps of all ranks from the mean over `count` steps of this rank, scalars."""
    total = torch.stack((torch.where(count > 0, value.detach().double() * count, 0.0), count.double()))
    ranks.add_up(total)
    return (total[0] / total[1].clamp(min=1)).to(value.dtype)
