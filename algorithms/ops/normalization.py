"""Running statistics of observations and returns, and normalization with them.

Statistics are kept in float64 (a float32 mean stops moving after 2^24 samples) and used in float32. Nothing here
changes its arguments: batches are used for several epochs, and one normalized in place is normalized again by each.

Functions of tensors raise ValueError if shapes disagree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from appo.algorithms.ops.checks import require_shape

VARIANCE_EPS = 1e-5
"""Added to a variance of returns or advantages: one that never changed must not turn its first change into infinity."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of a distribution: enough to merge two samples exactly.

    Attributes:
        count: scalar float64, how many samples.
        mean: [*] float64.
        m2: [*] float64, sum of squared distances from the mean.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> "Moments":
        """Moments of no sample at all."""
        mean, m2 = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2))
        return cls(torch.zeros((), dtype=torch.float64, device=device), mean, m2)


def merge_batch(moments: Moments, x: Tensor, valid: Tensor) -> Moments:
    """Return the moments of all earlier samples and the valid rows of a batch; unchanged without a valid row.

    Args:
        moments: moments of features of shape [*].
        x: [N, *], N may be 0; invalid rows, NaN included, have no influence.
        valid: [N] bool.

    Source: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    require_shape("valid", valid, (None,))
    require_shape("x", x, (valid.shape[0], *moments.mean.shape))
    skipped = ~valid.reshape((-1,) + (1,) * moments.mean.dim())
    x = x.detach().to(torch.float64)
    batch_count = valid.sum().to(torch.float64)
    batch_mean = x.masked_fill(skipped, 0.0).sum(0) / batch_count.clamp(min=1)
    batch_m2 = (x - batch_mean).masked_fill_(skipped, 0.0).square_().sum(0)
    return merge(moments, Moments(batch_count, batch_mean, batch_m2))


def merge(moments: Moments, others: Moments) -> Moments:
    """Moments of two samples together, of features of the same shape; source as `merge_batch`."""
    count = moments.count + others.count
    share = others.count / count.clamp(min=1)
    shift = others.mean - moments.mean
    return Moments(
        count=count,
        mean=moments.mean + shift * share,
        m2=moments.m2 + others.m2 + shift.square() * (moments.count * share),
    )


def std(moments: Moments, eps: float | Tensor = VARIANCE_EPS) -> Tensor:
    """Standard deviation, [*] float32, as sqrt(variance + eps); 1 while nothing has been seen."""
    variance = moments.m2 / moments.count.clamp(min=1)
    return (variance + eps).sqrt().masked_fill(moments.count == 0, 1.0).to(torch.float32)


def inv_std(moments: Moments, eps: float | Tensor = VARIANCE_EPS) -> Tensor:
    """Reciprocal of `std`, [*] float32: normalizing multiplies, which is cheaper than dividing."""
    return std(moments, eps).reciprocal()


def normalize(x: Tensor, mean: Tensor, inv_std: Tensor, clip: float) -> Tensor:
    """Compute (x - mean) * inv_std within [-clip, clip], in new memory, float32.

    Args:
        x: [..., *], never modified.
        mean: [*] float32.
        inv_std: [*] float32.
        clip: limit of the result, in standard deviations; infinity = none.
    """
    # The later operations work in place on the fresh result of the first: fresh memory costs more than arithmetic.
    return x.to(torch.float32).sub(mean).mul_(inv_std).clamp_(-clip, clip)
