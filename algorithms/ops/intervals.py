"""Confidence intervals of 95 %: of means, differences of means, shares, and estimates from resampled episodes."""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE_PERCENT = 95
TAIL_PERCENT = (100 - CONFIDENCE_PERCENT) / 2
NORMAL_QUANTILE = NormalDist().inv_cdf(0.5 + CONFIDENCE_PERCENT / 200)

ANGLES = 10_001  # of a numerical integral
LARGEST_FREEDOM = 10_000.0  # beyond, quantiles are that of a normal distribution to four digits, and angles are too few
RESAMPLES = 2000  # of the values of a mean
CHUNK = 64  # resamples of episodes at a time


class MeanWithMargin(NamedTuple):
    """A mean and half the width of its interval."""

    mean: float
    margin: float


def student_interval(values: Sequence[float]) -> MeanWithMargin:
    """Return the mean of a few values and its margin by Student's t; the margin of a single value is nan.

    >>> mean, margin = student_interval([1.0, 3.0])
    >>> round(margin, 3)
    12.706
    """
    if len(values) < 2:
        return MeanWithMargin(values[0], math.nan)
    return MeanWithMargin(fmean(values), _t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def welch_interval(first: Sequence[float], second: Sequence[float]) -> MeanWithMargin | None:
    """Return the mean of the second minus the mean of the first, of unequal variances; None for fewer than two values.

    Source: Welch 1947, Biometrika 34.
    """
    if min(len(first), len(second)) < 2:
        return None
    squares = [variance(values) / len(values) for values in (first, second)]
    mean, square = fmean(second) - fmean(first), sum(squares)
    if not square:
        return MeanWithMargin(mean, 0.0)
    freedom = square**2 / sum(s**2 / (len(values) - 1) for s, values in zip(squares, (first, second), strict=True))
    return MeanWithMargin(mean, _t_quantile(freedom) * math.sqrt(square))


def _t_quantile(freedom: float) -> float:
    """Return the two-sided quantile of Student's t for one degree of freedom or more, a whole number or not.

    For t = sqrt(f) tan(a), the density of the angle a in [0, pi/2] is proportional to cos(a)^(f-1).
    """
    freedom = min(freedom, LARGEST_FREEDOM)
    angle = np.linspace(0, math.pi / 2, ANGLES)
    density = np.cos(angle) ** (freedom - 1)
    share = np.cumsum(density[1:] + density[:-1])
    return math.sqrt(freedom) * math.tan(float(np.interp(CONFIDENCE_PERCENT / 100, share / share[-1], angle[1:])))


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return low and high end of a share, valid even if all trials end alike; too wide if draws count half.

    Source: Wilson 1927, JASA 22.
    """
    z = NORMAL_QUANTILE
    share, prior = successes / trials, z * z / trials
    center = (share + prior / 2) / (1 + prior)
    half = z * math.sqrt((share * (1 - share) + prior / 4) / trials) / (1 + prior)
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return low and high end of the mean by resampling with a fixed seed; nan without values.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; percentiles.
    """
    if not values:
        return math.nan, math.nan
    return bootstrap_episodes(lambda times: times @ np.asarray(values) / len(values), len(values), RESAMPLES, 0)


def bootstrap_episodes(
    estimate: Callable[[Floats], Floats], episodes: int, resamples: int, seed: int
) -> tuple[float, float]:
    """Return low and high end of an estimate from episodes by resampling the episodes (Efron 1979).

    Args:
        estimate: function from weights [R, E] of the episodes to R estimates [R].
        episodes: number of episodes, E.
        resamples: number of resamples.
        seed: seed of the resamples.
    """
    random, found = np.random.default_rng(seed), []
    for begin in range(0, resamples, CHUNK):
        size = min(CHUNK, resamples - begin)
        times = random.multinomial(episodes, np.full(episodes, 1 / episodes), size=size).astype(np.float64)
        found.append(estimate(times))
    return _percentiles(np.concatenate(found))


def _percentiles(estimates: Floats) -> tuple[float, float]:
    low, high = np.percentile(estimates, (TAIL_PERCENT, 100 - TAIL_PERCENT))
    return float(low), float(high)
