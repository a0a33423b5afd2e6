"""The terms of the APPO loss, and means over valid steps.

Loss terms are elementwise and know no mask. Two habits keep garbage of invalid rows out of the gradient: clamps stand
before `exp` (the backward pass of a clamp assigns zero, so it stops NaN), and `masked_mean` selects instead of
multiplying.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from appo.algorithms.ops.checks import require_same_shape

RATIO_MIN, RATIO_MAX = 0.05, 20.0
"""Limits of the importance ratio: one stale step must not outweigh a whole batch."""
ADVANTAGE_STD_MIN = 1e-3
"""Advantages that hardly differ are noise: they are not blown up to unit variance."""
SYMMETRIC_KL_MAX = 30.0
"""Limit of the exploration loss: the divergence has no bound when the policy becomes deterministic."""


def clamped_ratio(log_prob: Tensor, behavior_log_prob: Tensor) -> Tensor:
    """Importance ratio pi(a|s) / mu(a|s), limited to [0.05, 20]; its gradient is exactly 0 outside and at NaN.

    The difference is clamped before the `exp`: after it, a ratio that overflowed would have the gradient 0 * inf.

    Args:
        log_prob: [T, B], of the current policy.
        behavior_log_prob: [T, B], of the policy that acted.

    Returns:
        [T, B].

    Raises:
        ValueError: shapes disagree.
    """
    require_same_shape(log_prob=log_prob, behavior_log_prob=behavior_log_prob)
    return (log_prob - behavior_log_prob).clamp(math.log(RATIO_MIN), math.log(RATIO_MAX)).exp()


def ppo_policy_loss(ratio: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """Clipped surrogate of every step, to be minimized.

    The ratio is clipped to [1 / (1 + e), 1 + e], symmetric in the logarithm, instead of the paper's [1 - e, 1 + e].

    Args:
        ratio: [T, B], with gradient; see `clamped_ratio`.
        advantage: [T, B], a constant without any importance weight.
        clip_ratio: e, at least 0.

    Returns:
        [T, B].

    Raises:
        ValueError: shapes disagree.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    require_same_shape(ratio=ratio, advantage=advantage)
    clipped = ratio.clamp(1.0 / (1.0 + clip_ratio), 1.0 + clip_ratio)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def clipped_value_loss(value: Tensor, behavior_value: Tensor, target: Tensor, clip_value: float) -> Tensor:
    """Squared error of every step, without credit for moving further than `clip_value` from the acting value.

    Args:
        value: [T, B], with gradient.
        behavior_value: [T, B], what the acting policy predicted, in the units of `value`.
        target: [T, B], a constant.
        clip_value: largest move that may lower the loss, in the same units; 0 or less = no limit.

    Returns:
        [T, B], the larger of the two squares (no factor 1/2).

    Raises:
        ValueError: shapes disagree.
    """
    require_same_shape(value=value, behavior_value=behavior_value, target=target)
    squared_error = (value - target).square()
    if clip_value <= 0:
        return squared_error
    moved = behavior_value + (value - behavior_value).clamp(-clip_value, clip_value)
    return torch.maximum(squared_error, (moved - target).square())


def symmetric_kl_loss(divergence: Tensor, valid: Tensor) -> Tensor:
    """Exploration loss of `--exploration_loss=symmetric_kl`: mean divergence, at most 30, and 0 if not finite.

    Args:
        divergence: [T, B]; see `ActionDistribution.symmetric_kl_to_uniform`.
        valid: [T, B] bool.

    Returns:
        Scalar, to be minimized.

    Raises:
        ValueError: shapes disagree.
    """
    mean = masked_mean(divergence, valid)
    return zero_invalid(mean, mean.isfinite()).clamp(max=SYMMETRIC_KL_MAX)


def zero_invalid(x: Tensor, valid: Tensor) -> Tensor:
    """Copy of a tensor with zeros where a step is invalid, whatever was there; the gradient there is exactly 0.

    Args:
        x: [T, B, *] of any dtype.
        valid: [T, B] bool; any leading dimensions of `x`.

    Returns:
        [T, B, *], of the dtype of `x`.
    """
    return x.masked_fill(~valid.reshape(valid.shape + (1,) * (x.dim() - valid.dim())), 0)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over valid steps; 0, with gradient 0, when there is none.

    Args:
        x: [T, B]; what stands in invalid rows, NaN and infinity included, has no influence and gets gradient 0.
        valid: [T, B] bool.

    Returns:
        Scalar.

    Raises:
        ValueError: shapes disagree.
    """
    require_same_shape(x=x, valid=valid)
    return zero_invalid(x, valid).sum() / valid.sum().clamp(min=1)


def masked_means(terms: Mapping[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """`masked_mean` of several tensors at once: small batches cost by the operation, not by the element.

    Args:
        terms: name -> tensor [T, B].
        valid: [T, B] bool.

    Returns:
        Name -> scalar.

    Raises:
        ValueError: shapes disagree.
    """
    require_same_shape(valid=valid, **terms)
    means = torch.stack((*terms.values(),)).masked_fill(~valid, 0.0).flatten(1).sum(1) / valid.sum().clamp(min=1)
    return dict(zip(terms, means.unbind(), strict=True))


def masked_mean_and_std(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over valid steps, as constants.

    The deviation is that of the steps themselves (divided by n, not n - 1): a single step has 0, not NaN.

    Args:
        x: [T, B]; what stands in invalid rows has no influence.
        valid: [T, B] bool.

    Returns:
        Two scalars without gradient; both 0 when no step is valid.

    Raises:
        ValueError: shapes disagree.
    """
    require_same_shape(x=x, valid=valid)
    count, invalid = valid.sum().clamp(min=1), ~valid
    x = x.detach().masked_fill(invalid, 0.0)
    mean = x.sum() / count
    squares = (x - mean).double().square_().masked_fill_(invalid, 0.0)  # of numbers beyond 1e19 in float32: infinite
    return mean, (squares.sum() / count).sqrt().to(mean.dtype)


def normalize_advantage(advantage: Tensor, valid: Tensor, mean_and_std: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Advantages of zero mean and unit deviation over the valid steps; 0 at the others.

    Args:
        advantage: [T, B].
        valid: [T, B] bool.
        mean_and_std: two scalars, of the whole minibatch when `advantage` is only a part of it; None = of `advantage`.

    Returns:
        [T, B], (advantage - mean) / max(1e-3, std).

    Raises:
        ValueError: shapes disagree.
    """
    mean, std = masked_mean_and_std(advantage, valid) if mean_and_std is None else mean_and_std
    return zero_invalid((advantage - mean) / std.clamp(min=ADVANTAGE_STD_MIN), valid)
