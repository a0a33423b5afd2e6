"""Estimates of a policy's return from whole episodes of another policy; numpy arrays of float64.

Episodes of different lengths are rows of an array [E, L], with zeros behind their ends: rewards, values, and the
logarithm of the ratio pi(a|s) / mu(a|s), so the weight of an episode keeps its last value.

Every estimate is a sum over K terms, each a weighted mean of the episodes:

    V = sum_k  sum_e numerator[e, k] / sum_e denominator[e, k]

so a single bootstrap over episodes gives the intervals of all estimates.
"""

from typing import NamedTuple

import numpy as np

from appo.algorithms.ops.intervals import Floats, bootstrap_episodes


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    value: float
    low: float
    high: float


class Terms(NamedTuple):
    """The terms of an estimate.

    Attributes:
        numerator, denominator: [E, K].
    """

    numerator: Floats
    denominator: Floats

    def value(self) -> float:
        """Return the estimate."""
        return float(_total(self.numerator.sum(0), self.denominator.sum(0)))

    def interval(self, resamples: int, *, seed: int = 0) -> Interval:
        """Return the estimate with a bootstrap interval: the same for the same episodes and seed."""
        ends = bootstrap_episodes(
            lambda times: _total(times @ self.numerator, times @ self.denominator), len(self.numerator), resamples, seed
        )
        return Interval(self.value(), *ends)


def _total(numerator: Floats, denominator: Floats) -> Floats:
    """Sums [...] over terms [..., K]; one whose denominator is 0 has no episode with any weight, and counts as 0."""
    total: Floats = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0).sum(-1)
    return total


def discounts(length: int, gamma: float) -> Floats:
    """Return gamma^t, [L]."""
    powers: Floats = gamma ** np.arange(length, dtype=np.float64)
    return powers


def importance_sampling(log_ratio: Floats, reward: Floats, gamma: float) -> Terms:
    """Per-decision importance sampling: unbiased, with a variance that grows with the length of episodes.

        V = mean_e sum_t gamma^t w_t r_t        w_t = prod_{i <= t} pi(a_i|s_i) / mu(a_i|s_i)

    `log_ratio` and `reward` are [E, L].

    Source: Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy evaluation", eq. 4.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite, the caller reports
        weight = np.exp(np.cumsum(log_ratio, axis=1))
        return of_episodes((weight * reward) @ discounts(reward.shape[1], gamma))


def weighted_importance_sampling(log_ratio: Floats, reward: Floats, gamma: float) -> Terms:
    """Per-decision weighted importance sampling: biased, consistent, with a far smaller variance.

        V = sum_t gamma^t  sum_e w_t r_t / sum_e w_t

    `log_ratio` and `reward` are [E, L]. An episode that is over keeps its last weight (Thomas 2015, "Safe reinforcement
    learning", section 3.8).

    Source: Precup, Sutton, Singh 2000, eq. 5.
    """
    summed = np.cumsum(log_ratio, axis=1)
    weight = np.exp(summed - summed.max(axis=0))  # a factor for each t, which cancels
    return Terms(weight * reward * discounts(reward.shape[1], gamma), weight)


def doubly_robust(log_ratio: Floats, reward: Floats, value: Floats, q_taken: Floats, gamma: float) -> Terms:
    """Doubly robust: unbiased where either the ratios or the values are right.

        V_t = v(s_t) + rho_t (r_t + gamma V_{t+1} - q(s_t, a_t))        rho_t = pi(a_t|s_t) / mu(a_t|s_t)

    Args:
        log_ratio: [E, L].
        reward: [E, L].
        value: [E, L+1] estimated values of the states under pi, the last one of what a cut episode has not seen; 0
            behind the ends of others.
        q_taken: [E, L] estimated values of what was done.
        gamma: discount per step.

    Source: Jiang and Li 2016, arXiv:1511.03722, eq. 10.
    """
    following = value[:, -1]
    with np.errstate(over="ignore", invalid="ignore"):
        rho = np.exp(log_ratio)
        for t in range(reward.shape[1] - 1, -1, -1):
            following = value[:, t] + rho[:, t] * (reward[:, t] + gamma * following - q_taken[:, t])
    return of_episodes(following)


def of_episodes(values: Floats) -> Terms:
    """Return the terms of a mean over episodes of values [E]."""
    return Terms(values[:, None], np.ones((len(values), 1)))


def effective_episodes(log_ratio: Floats) -> float:
    """Return the number of equally weighted episodes worth as much as weights w: (sum w)^2 / sum w^2.

    Source: Kish 1965, "Survey sampling".
    """
    summed = log_ratio.sum(axis=1)
    weight = np.exp(summed - summed.max())
    return float(weight.sum() ** 2 / (weight**2).sum())
