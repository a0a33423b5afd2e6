"""PPO's clipped surrogate and value loss without torch: their means over valid steps, and their derivatives.

`losses.py` defines the terms. Twins of learners share this module: `appo/numpy_learner.py`, `ppo/numpy_learner.py`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from appo.algorithms.ops.losses import ADVANTAGE_STD_MIN, EXPLAINED_MIN, RATIO_MAX, RATIO_MIN
from appo.algorithms.ops.numpy_twins import PolicyTerms

Array = NDArray[Any]
ZERO = np.float32(0.0)
LOG_RATIO_MIN, LOG_RATIO_MAX = np.float32(math.log(RATIO_MIN)), np.float32(math.log(RATIO_MAX))


class Weights(NamedTuple):
    """Numbers of the objective.

    Attributes:
        lower, upper: range of the probability ratio.
        clip_value: largest move of a value that may lower the loss; 0 = no limit.
        value_loss, entropy: weights of both terms.
    """

    lower: float
    upper: float
    clip_value: float
    value_loss: float
    entropy: float


class Steps(NamedTuple):
    """M steps, [M] each.

    Attributes:
        valid: bool.
        log_prob: of the action, by the acting policy; of invalid steps, any number.
        advantage: normalized, 0 at invalid steps.
        value, acted_value, target: by the trained network and the acting one, in units of the critic.
    """

    valid: Array
    log_prob: Array
    advantage: Array
    value: Array
    acted_value: Array
    target: Array


def differentiate(
    policy: PolicyTerms, steps: Steps, weights: Weights, kl: str, terms: dict[str, Array]
) -> tuple[dict[str, float], Array, Array]:
    """Return means by the names of the learners' metrics, and the gradients of logits [M, L] and values [M].

    Args:
        policy: trained policy, with noise.
        steps: steps.
        weights: numbers of the objective.
        kl: name of the metric of the KL divergence.
        terms: further terms [M] by name: those of `kl` and "value_mean".
    """
    valid, count = steps.valid, max(1, int(np.count_nonzero(steps.valid)))
    log_ratio, ratio = ratios(policy, steps.log_prob, valid)
    free, held = ratio * steps.advantage, np.clip(ratio, weights.lower, weights.upper) * steps.advantage
    value_loss, slope = _value_loss(steps, weights.clip_value)
    terms = {
        "policy_loss": -np.minimum(free, held),
        "value_loss": value_loss,
        "entropy": policy.entropy,
        kl: terms[kl],
        "ratio_mean": ratio,
        "fraction_clipped": (ratio < weights.lower) | (ratio > weights.upper),
        "value_mean": terms["value_mean"],
    }
    sums = np.where(valid, np.stack((*terms.values(),)), ZERO).sum(axis=1, dtype=np.float32).tolist()
    means = {name: x / count for name, x in zip(terms, sums, strict=True)}
    loss = means["policy_loss"] + weights.value_loss * means["value_loss"] - weights.entropy * means["entropy"]
    share = valid * np.float32(1.0 / count)
    inside = (log_ratio >= LOG_RATIO_MIN) & (log_ratio <= LOG_RATIO_MAX) & (free <= held)
    of_log_prob = np.where(valid & inside, -steps.advantage * ratio, ZERO) * share
    of_value = np.where(valid, slope, ZERO) * share * np.float32(weights.value_loss)
    metrics = {"loss": loss, **means, "ratio_max": float(np.where(valid, ratio, ZERO).max())}
    return metrics, policy.gradient(of_log_prob, share * np.float32(-weights.entropy)), of_value


def ratios(policy: PolicyTerms, log_prob: Array, valid: Array) -> tuple[Array, Array]:
    """Return the logarithms [M] of probability ratios to the acting policy, and the ratios of `losses.clamped_ratio`.

    Args:
        policy: trained policy.
        log_prob: log-probabilities [M] by the acting policy.
        valid: [M] bool; other steps have the ratio 1.
    """
    log_ratio = policy.log_prob - np.where(valid, log_prob, policy.log_prob)
    return log_ratio, np.exp(np.clip(log_ratio, LOG_RATIO_MIN, LOG_RATIO_MAX))


def normalized(advantage: Array, valid: Array, moments: tuple[float, float] | None = None) -> tuple[Array, float]:
    """Return the result of `losses.normalize_advantage`, and the standard deviation, of these steps or as given."""
    count = max(1, int(np.count_nonzero(valid)))
    advantage = np.where(valid, advantage, ZERO)
    mean = np.float32(moments[0]) if moments else advantage.sum(dtype=np.float32) / np.float32(count)
    centered = np.where(valid, advantage - mean, ZERO)
    deviation = moments[1] if moments else math.sqrt(float(np.square(centered, dtype=np.float64).sum()) / count)
    return centered / np.float32(max(deviation, ADVANTAGE_STD_MIN)), deviation


def explained_variance(value: Array, target: Array, valid: Array) -> float:
    """Return the result of `losses.explained_variance`."""
    target = target[valid].astype(np.float64)
    error = target - value[valid]
    count = max(1, len(target))  # a third of the time of `var`; the first value as origin makes equal targets exactly 0
    whole, unexplained = (x.dot(x) - x.sum() ** 2 / count for x in (target - target[:1], error - error[:1]))
    return max(EXPLAINED_MIN, float(1.0 - unexplained / whole)) if whole > 0 else 0.0


def _value_loss(steps: Steps, limit: float) -> tuple[Array, Array]:
    """Return the result of `losses.clipped_value_loss` [M], and its derivative by the value."""
    error = steps.value - steps.target
    squared = np.square(error)
    if limit <= 0:
        return squared, 2.0 * error
    move = steps.value - steps.acted_value
    beyond = np.clip(move, -limit, limit) - move
    moved = np.square(error + beyond)
    return np.maximum(squared, moved), np.where((beyond == 0.0) | (squared >= moved), 2.0 * error, ZERO)
