"""How the policies of one run compare at its end: those that `--per_policy` has set apart."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

from algorithms.runtime.monitor import PolicyProgress
from utils.command_line import words_of

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """Of two means; the true one lies within `margin` on both sides with `CONFIDENCE`."""

    mean: float
    margin: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Mean of the second minus mean of the first, of numbers that need not spread alike; None for less than two each.

    Source: Welch 1947, Biometrika 34; the quantile of Student's t by its expansion (Abramowitz and Stegun, 26.7.5).
    """
    if min(len(first), len(second)) < 2:
        return None
    squares = [variance(one) / len(one) for one in (first, second)]
    mean, square = fmean(second) - fmean(first), sum(squares)
    if not square:
        return Difference(mean, 0.0)
    freedom = square**2 / sum(s**2 / (len(one) - 1) for s, one in zip(squares, (first, second), strict=True))
    return Difference(mean, _quantile(freedom) * math.sqrt(square))


def _quantile(freedom: float) -> float:
    """Of Student's t, two-sided, for `CONFIDENCE`."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def comparison(policies: Sequence[PolicyProgress], given: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every policy but the first: how its mean return differs from that of the first.

    The interval is that of the episodes played last; what another seed would have trained is not in it.

    Args:
        policies: of the run.
        given: in what they differ, by flag.
    """
    lines = []
    first = policies[0].episode_return.values()
    for policy, (progress, values) in enumerate(zip(policies, given, strict=True)):
        found = difference(first, progress.episode_return.values()) if policy else None
        if found is None:
            continue
        low, high = found.mean - found.margin, found.mean + found.margin
        verdict = "" if low > 0 or high < 0 else ": no difference that these episodes show"
        own = " ".join(f"{name}={words_of(value)}" for name, value in values.items())
        its = " ".join(f"{name}={words_of(value)}" for name, value in given[0].items())
        lines.append(
            f"policy {policy} ({own}) against policy 0 ({its}): return {found.mean:+.2f}, 95 % interval"
            f" [{low:+.2f}, {high:+.2f}] over their last {progress.episode_return.count} and {len(first)}"
            f" episodes{verdict}"
        )
    return lines
