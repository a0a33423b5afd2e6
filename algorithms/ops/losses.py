"""The terms of the APPO loss, and means over valid steps.

Loss terms are elementwise and know no mask. Two habits keep garbage of invalid rows out of the gradient: clamps stand
before `exp` (the backward pass of a clamp assigns zero, so it stops NaN), and `masked_mean` selects instead of
multiplying.

Functions of tensors raise ValueError if shapes disagree.
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
EXPLAINED_MIN = -1.0
"""Smallest explained variance in metrics."""
SYMMETRIC_KL_MAX = 30.0
"""Limit of the exploration loss: the divergence has no bound when the policy becomes deterministic."""


def clamped_ratio(log_prob: Tensor, behavior_log_prob: Tensor) -> Tensor:
    """Importance ratio pi(a|s) / mu(a|s) [T, B], limited to [0.05, 20]; the gradient is exactly 0 outside and at NaN.

    The difference is clamped before the `exp`: after it, a ratio that overflowed would have the gradient 0 * inf.

    Args:
        log_prob: [T, B], of the current policy.
        behavior_log_prob: [T, B], of the acting policy.
    """
    require_same_shape(log_prob=log_prob, behavior_log_prob=behavior_log_prob)
    return (log_prob - behavior_log_prob).clamp(math.log(RATIO_MIN), math.log(RATIO_MAX)).exp()


def ppo_policy_loss(ratio: Tensor, advantage: Tensor, clip_ratio: float | Tensor) -> Tensor:
    """Clipped surrogate of every step [T, B], to be minimized.

    The ratio is clipped to [1 / (1 + e), 1 + e], symmetric in the logarithm, instead of the paper's [1 - e, 1 + e].

    Args:
        ratio: [T, B], with gradient; see `clamped_ratio`.
        advantage: [T, B], a constant without any importance weight.
        clip_ratio: e, at least 0; a scalar if a tensor.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    require_same_shape(ratio=ratio, advantage=advantage)
    clipped = ratio.clamp(1.0 / (1.0 + clip_ratio), 1.0 + clip_ratio)  # type: ignore[arg-type]
    return -torch.minimum(ratio * advantage, clipped * advantage)


def clipped_value_loss(value: Tensor, behavior_value: Tensor, target: Tensor, clip_value: float) -> Tensor:
    """Squared error of every step [T, B], without credit for moving further than `clip_value` from the acting value.

    The result is the larger of two squares, without a factor 1/2.

    Args:
        value: [T, B], with gradient.
        behavior_value: [T, B], prediction of the acting policy in the units of `value`.
        target: [T, B], a constant.
        clip_value: largest move that may lower the loss, in the same units; 0 or less = no limit.
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
    """
    mean = masked_mean(divergence, valid)
    return zero_invalid(mean, mean.isfinite()).clamp(max=SYMMETRIC_KL_MAX)


def zero_invalid(x: Tensor, valid: Tensor) -> Tensor:
    """Return a copy of x [T, B, *] with zeros, and gradient 0, where `valid` is False.

    Args:
        x: [T, B, *] of any dtype.
        valid: [T, B] bool; any leading dimensions of `x`.
    """
    return x.masked_fill(~valid.reshape(valid.shape + (1,) * (x.dim() - valid.dim())), 0)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over valid steps, a scalar; 0, with gradient 0, without a valid step.

    Args:
        x: [T, B]; invalid rows, NaN and infinity included, have no influence and gradient 0.
        valid: [T, B] bool.
    """
    require_same_shape(x=x, valid=valid)
    return zero_invalid(x, valid).sum() / valid.sum().clamp(min=1)


def masked_means(terms: Mapping[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """Return `masked_mean` of tensors [T, B] by name: small batches cost by the operation, not by the element."""
    require_same_shape(valid=valid, **terms)
    means = torch.stack((*terms.values(),)).masked_fill(~valid, 0.0).flatten(1).sum(1) / valid.sum().clamp(min=1)
    return dict(zip(terms, means.unbind(), strict=True))


def masked_mean_and_std(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over valid steps, scalars without gradient; both 0 without a valid step.

    The deviation divides by n, not n - 1: a single step has 0, not NaN.

    Args:
        x: [T, B]; invalid rows have no influence.
        valid: [T, B] bool.
    """
    require_same_shape(x=x, valid=valid)
    count, invalid = valid.sum().clamp(min=1), ~valid
    x = x.detach().masked_fill(invalid, 0.0)
    mean = x.sum() / count
    squares = (x - mean).double().square_().masked_fill_(invalid, 0.0)  # of numbers beyond 1e19 in float32: infinite
    return mean, (squares.sum() / count).sqrt().to(mean.dtype)


def explained_variance(value: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Return 1 - Var(target - value) / Var(target) over the valid steps, at least -1; 0 if targets are equal. A scalar.

    The limit of RLlib: targets that hardly vary would give any negative number, and outweigh all others in a mean.

    Args:
        value: prediction [T, B]; units and offset of both are without influence if equal.
        target: [T, B].
        valid: [T, B] bool.
    """
    require_same_shape(value=value, target=target, valid=valid)
    x = torch.stack((target, target - value)).detach().masked_fill(~valid, 0.0).double().flatten(1)
    mean = x.sum(1, keepdim=True) / valid.sum().clamp(min=1)
    return explained_share(*(x - mean).square().mul(valid.flatten()).sum(1).unbind())


def explained_share(whole: Tensor, unexplained: Tensor) -> Tensor:
    """Return `explained_variance` from the squared deviations of targets and of errors, summed, scalars."""
    return torch.where(whole > 0, 1.0 - unexplained / whole, 0.0).clamp(min=EXPLAINED_MIN).float()


def normalize_advantage(advantage: Tensor, valid: Tensor, mean_and_std: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return (advantage - mean) / max(1e-3, std) over the valid steps, [T, B]; 0 at the others.

    Args:
        advantage: [T, B].
        valid: [T, B] bool.
        mean_and_std: two scalars of the whole minibatch if `advantage` is a part; None: those of `advantage`.
    """
    mean, std = masked_mean_and_std(advantage, valid) if mean_and_std is None else mean_and_std
    return zero_invalid((advantage - mean) / std.clamp(min=ADVANTAGE_STD_MIN), valid)
