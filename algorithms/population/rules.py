"""Rules of population-based training without effects: selection of policies and mutation of values.

Larger objectives are better; an objective that is not finite ranks worst.

Source: Jaderberg et al. 2017, arXiv:1711.09846 (truncation selection, perturbation).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

REFERENCE = 0
"""The policy whose values never mutate: it keeps the values of the command line unless it copies another policy."""
RESET_PROBABILITY = 0.05  # of going back to the value of the command line, where a mutation changes a value

SMALLEST_FACTOR, LARGEST_FACTOR = 1.01, 1.5

SAMPLES_FACTOR = 1.2
SHAPING_RANGE = 100.0  # most by which a coefficient of rewards may come to differ from the environment's own


@dataclass(frozen=True)
class Selection:
    """The rule that replaces policies.

    Attributes:
        replace_fraction: f in k = min(ceil(f n), floor(n/2)), the number of best and worst of n policies.
        relative_gap: smallest gap of the objective, relative to the larger absolute value.
        absolute_gap: smallest gap; both gaps must be exceeded.
    """

    replace_fraction: float
    relative_gap: float
    absolute_gap: float

    def num_replaced(self, num_policies: int) -> int:
        """Return k: the k best are copied, the k worst may be replaced."""
        return min(math.ceil(self.replace_fraction * num_policies - 1e-9), num_policies // 2)

    def best(self, objectives: Mapping[int, float]) -> list[int]:
        """Return the k best policies, of which others copy."""
        return rank_policies(objectives)[: self.num_replaced(len(objectives))]

    def worst(self, objectives: Mapping[int, float]) -> list[int]:
        """Return the k worst policies, which may be replaced."""
        return rank_policies(objectives)[len(objectives) - self.num_replaced(len(objectives)) :]

    def is_worth_it(self, best: float, worst: float) -> bool:
        """Return whether a policy with objective `best` replaces a policy with objective `worst`.

        The gap is compared with the larger absolute value, so the result depends neither on the sign of rewards nor on
        a zero.
        """
        if not (math.isfinite(best) and math.isfinite(worst)):
            return math.isfinite(best)
        gap = best - worst
        return gap > self.absolute_gap and gap > self.relative_gap * max(abs(best), abs(worst))

    def source(self, policy: int, objectives: Mapping[int, float], random: np.random.Generator) -> int:
        """Return the policy that gives weights and hyperparameters to another: one of the best, or itself."""
        if policy not in self.worst(objectives):
            return policy
        best = self.best(objectives)
        candidate = best[int(random.integers(len(best)))]
        return candidate if self.is_worth_it(objectives[candidate], objectives[policy]) else policy


def rank_policies(objectives: Mapping[int, float]) -> list[int]:
    """Return policies from the best to the worst; equals in their order."""
    losses = {policy: -one if math.isfinite(one) else math.inf for policy, one in objectives.items()}
    return sorted(objectives, key=lambda policy: (losses[policy], policy))


class Tuned(NamedTuple):
    """A hyperparameter that mutates.

    Attributes:
        default: value of the command line; some mutations return to it.
        low, high: inclusive limits.
        unit: the value is a multiple of the unit; 0: any number.
    """

    default: float
    low: float
    high: float
    unit: int = 0

    def mutate(self, value: float, rate: float, random: np.random.Generator) -> float:
        """Return a value after a mutation with probability `rate`. 0 means off, and stays off."""
        if random.random() >= rate:
            return value
        if value != self.default and random.random() < RESET_PROBABILITY:
            return self.default
        factor = SAMPLES_FACTOR if self.unit else float(random.uniform(SMALLEST_FACTOR, LARGEST_FACTOR))
        changed = value * factor if random.random() < 0.5 else value / factor
        if not value:
            return value
        limited = min(max(changed, self.low), self.high)
        return int(limited // self.unit) * self.unit if self.unit else limited


def mutate(
    values: Mapping[str, Any], tuned: Mapping[str, Tuned], rate: float, random: np.random.Generator
) -> dict[str, Any]:
    """Return hyperparameters after a mutation of the tuned ones."""
    return {**values, **{name: one.mutate(values[name], rate, random) for name, one in tuned.items()}}


def mutate_shaping(value: Any, default: Any, rate: float, random: np.random.Generator) -> Any:
    """Return mutated coefficients of rewards: every nested number separately; booleans flip."""
    if isinstance(value, Mapping):
        return {name: mutate_shaping(value[name], default[name], rate, random) for name in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [mutate_shaping(one, its, rate, random) for one, its in zip(value, default, strict=True)]
    if isinstance(value, bool):
        return not value if random.random() < rate else value
    if not isinstance(value, (int, float)):
        return value
    size = abs(default)
    number = Tuned(size, size / SHAPING_RANGE, size * SHAPING_RANGE).mutate(abs(value), rate, random)
    return math.copysign(number, default) if number != abs(value) else value
