"""Distributions over actions in numpy: sampling a few rows at a time, and what training needs with its derivatives.

The distributions are those of `distributions.py`. Half a dozen rows are all dispatch, and that of numpy costs a fifth
of torch's; a thousand rows of a few logits still are half dispatch. The memory for sampling is made once.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from appo.algorithms.ops.distributions import (
    HALF_LOG_TWO_PI,
    LOG_STD_MAX,
    LOG_STD_MIN,
    NORMAL_NODES,
    NORMAL_WEIGHTS,
    REAL,
)

Array = NDArray[Any]

CHOICES = ("categorical", "bins")
SUPPORTED = (*CHOICES, *REAL)


class _Slices(NamedTuple):
    kind: str
    size: int
    logits: slice
    values: slice


def _laid_out(parts: Sequence[tuple[str, int]]) -> Iterator[_Slices]:
    logit = value = 0
    for kind, size in parts:
        num_logits, num_values = (size, 1) if kind in CHOICES else (2 * size, size)
        yield _Slices(kind, size, slice(logit, logit + num_logits), slice(value, value + num_values))
        logit, value = logit + num_logits, value + num_values


class ActionSampler:
    """Draws actions of R rows and their log-probabilities; parts have the `SUPPORTED` kinds."""

    def __init__(self, parts: Sequence[tuple[str, int]], rows: int, generator: np.random.Generator) -> None:
        kinds: dict[str, type[_CategoricalSampler] | type[_GaussianSampler]] = {
            **dict.fromkeys(CHOICES, _CategoricalSampler),
            "gaussian": _GaussianSampler,
            "tanh_gaussian": _TanhGaussianSampler,
        }
        self.rows = rows
        self._parts = [
            (kinds[part.kind](rows, part.size, generator), part.logits, part.values) for part in _laid_out(parts)
        ]

    def sample(self, logits: Array, action: Array, log_prob: Array) -> None:
        """Fill action [R, A] and log_prob [R] from logits [R, L]; where logits are not finite, so is log_prob."""
        log_prob.fill(0.0)
        for sampler, of_logits, of_values in self._parts:
            log_prob += sampler(logits[:, of_logits], action[:, of_values])


class _CategoricalSampler:
    """By the inverse of the distribution function: one random number a row, where Gumbel noise takes one a choice."""

    def __init__(self, rows: int, size: int, generator: np.random.Generator) -> None:
        self._random = generator.random
        self._largest, self._log_sum = np.empty((rows, 1), np.float32), np.empty(rows, np.float32)
        self._shifted, self._cumulative = np.empty((2, rows, size), np.float32)
        self._threshold, self._log_prob = np.empty((2, rows), np.float32)
        self._below = np.empty((rows, size - 1), np.bool_)
        self._choice, self._index = np.empty((2, rows), np.intp)
        self._first = np.arange(rows) * size
        # views, made once
        self._sum, self._inner = self._cumulative[:, -1], self._cumulative[:, :-1]
        self._threshold_column = self._threshold[:, None]

    def __call__(self, logits: Array, action: Array) -> Array:
        """Fill action [R, 1] from logits [R, size]; their log-probability [R], overwritten by the next call."""
        np.maximum.reduce(logits, axis=1, keepdims=True, out=self._largest)
        np.subtract(logits, self._largest, out=self._shifted)
        np.exp(self._shifted, out=self._cumulative)
        np.add.accumulate(self._cumulative, axis=1, out=self._cumulative)
        self._random(dtype=np.float32, out=self._threshold)
        np.multiply(self._threshold, self._sum, out=self._threshold)
        # As the last entry is not compared, rounding cannot lead to a choice beyond the last.
        np.less_equal(self._inner, self._threshold_column, out=self._below)
        np.add.reduce(self._below, axis=1, out=self._choice)
        np.add(self._choice, self._first, out=self._index)
        self._shifted.take(self._index, out=self._log_prob, mode="clip")
        np.log(self._sum, out=self._log_sum)
        np.subtract(self._log_prob, self._log_sum, out=self._log_prob)
        action[:, 0] = self._choice
        return self._log_prob


class _GaussianSampler:
    def __init__(self, rows: int, size: int, generator: np.random.Generator) -> None:
        self._size, self._normal = size, generator.standard_normal
        self._log_std, self._std, self._distance = np.empty((3, rows, size), np.float32)
        self._log_prob = np.empty(rows, np.float32)
        self._constant = np.float32(-size * HALF_LOG_TWO_PI)

    def __call__(self, logits: Array, action: Array) -> Array:
        """Fill action [R, size] from logits [R, 2 * size]; their log-probability [R], overwritten by the next call."""
        mean = logits[:, : self._size]
        np.maximum(logits[:, self._size :], LOG_STD_MIN, out=self._log_std)
        np.minimum(self._log_std, LOG_STD_MAX, out=self._log_std)
        np.exp(self._log_std, out=self._std)
        self._normal(dtype=np.float32, out=self._distance)
        np.multiply(self._distance, self._std, out=self._distance)
        np.add(self._distance, mean, out=action)
        # from the action as it was rounded, as the learner will see it
        np.subtract(action, mean, out=self._distance)
        np.divide(self._distance, self._std, out=self._distance)
        np.square(self._distance, out=self._distance)
        np.multiply(self._distance, -0.5, out=self._distance)
        np.subtract(self._distance, self._log_std, out=self._distance)
        np.add.reduce(self._distance, axis=1, out=self._log_prob)
        return np.add(self._log_prob, self._constant, out=self._log_prob)


class _TanhGaussianSampler(_GaussianSampler):
    def __call__(self, logits: Array, action: Array) -> Array:
        """Return the log-probabilities of the Gaussian under the density of tanh(action)."""
        log_prob = super().__call__(logits, action)
        log_prob -= _log_slope_of_tanh(action).sum(axis=1)
        return log_prob


def _log_slope_of_tanh(value: Array) -> Array:
    slope: Array = np.float32(2.0) * (np.float32(np.log(2.0)) - value - np.logaddexp(np.float32(0.0), -2.0 * value))
    return slope


class PolicyTerms:
    """Terms of a policy that the losses read, for M steps, and how they depend on the logits.

    Args:
        parts: (kind, size) of each part, of the `SUPPORTED` kinds.
        logits: [M, L].
        action: [M, A].

    Attributes:
        log_prob, entropy: [M] each.
    """

    def __init__(self, parts: Sequence[tuple[str, int]], logits: Array, action: Array) -> None:
        kinds: dict[str, type[_CategoricalTerms] | type[_GaussianTerms]] = {
            **dict.fromkeys(CHOICES, _CategoricalTerms),
            "gaussian": _GaussianTerms,
            "tanh_gaussian": _TanhGaussianTerms,
        }
        # A few logits of many steps: side by side, the steps are what numpy loops over.
        logits, action = np.ascontiguousarray(logits.T), np.ascontiguousarray(action.T)
        self._parts = [
            (kinds[part.kind](logits[part.logits], action[part.values]), part.logits) for part in _laid_out(parts)
        ]
        self.log_prob: Array = reduce(np.add, [part.log_prob for part, _ in self._parts])
        self.entropy: Array = reduce(np.add, [part.entropy for part, _ in self._parts])

    def kl_from(self, behavior_logits: Array) -> Array:
        """Return KL(acting policy || current policy) [M] for logits [M, L] of the acting policy."""
        behavior_logits = np.ascontiguousarray(behavior_logits.T)
        divergence: Array = reduce(np.add, [part.kl_from(behavior_logits[own]) for part, own in self._parts])
        return divergence

    def gradient(self, log_prob: Array, entropy: Array) -> Array:
        """Return the gradient of the logits [M, L], from those of `log_prob` and `entropy` [M]."""
        gradient: Array = np.concatenate([part.gradient(log_prob, entropy) for part, _ in self._parts]).T
        return gradient


class _CategoricalTerms:
    def __init__(self, logits: Array, action: Array) -> None:
        self._log_p = _log_softmax(logits)
        self._p = np.exp(self._log_p)
        self._index = action[0].astype(np.intp), np.arange(action.shape[1])
        self.log_prob = self._log_p[self._index]
        self.entropy = -(self._p * self._log_p).sum(axis=0)

    def kl_from(self, behavior_logits: Array) -> Array:
        log_p = _log_softmax(behavior_logits)
        divergence: Array = (np.exp(log_p) * (log_p - self._log_p)).sum(axis=0)
        return divergence

    def gradient(self, log_prob: Array, entropy: Array) -> Array:
        # d log p[a] = 1[a] - p, and dH = -p (log p + H)
        gradient: Array = self._log_p + self.entropy
        gradient *= entropy
        gradient += log_prob
        gradient *= -self._p
        gradient[self._index] += log_prob
        return gradient


class _GaussianTerms:
    def __init__(self, logits: Array, action: Array) -> None:
        mean, raw = _halves(logits)
        log_std = np.clip(raw, LOG_STD_MIN, LOG_STD_MAX)
        self._free = (raw >= LOG_STD_MIN) & (raw <= LOG_STD_MAX)
        self._mean, self._log_std = mean, log_std
        self._precision = np.exp(-log_std)
        self._distance = (action - mean) * self._precision
        self.log_prob = (-0.5 * np.square(self._distance) - log_std - np.float32(HALF_LOG_TWO_PI)).sum(axis=0)
        self.entropy = (log_std + np.float32(0.5 + HALF_LOG_TWO_PI)).sum(axis=0)

    def kl_from(self, behavior_logits: Array) -> Array:
        mean, raw = _halves(behavior_logits)
        widening = self._log_std - np.clip(raw, LOG_STD_MIN, LOG_STD_MAX)
        distance = np.square((mean - self._mean) * self._precision)
        divergence: Array = (widening + 0.5 * (np.exp(-2.0 * widening) + distance - 1.0)).sum(axis=0)
        return divergence

    def gradient(self, log_prob: Array, entropy: Array) -> Array:
        mean = log_prob * self._distance * self._precision
        log_std = (log_prob * (np.square(self._distance) - 1.0) + entropy) * self._free
        both: Array = np.concatenate((mean, log_std))
        return both


class _TanhGaussianTerms(_GaussianTerms):
    def __init__(self, logits: Array, action: Array) -> None:
        super().__init__(logits, action)
        self._std = np.exp(self._log_std)
        self.log_prob = self.log_prob - _log_slope_of_tanh(action).sum(axis=0)
        slopes = [weight * _log_slope_of_tanh(self._mean + node * self._std) for node, weight in _QUADRATURE]
        self.entropy = self.entropy + np.sum(slopes, axis=(0, 1))

    def gradient(self, log_prob: Array, entropy: Array) -> Array:
        # log(1 - tanh(x)^2) has the derivative -2 tanh(x); x moves with the mean, and by its node with the deviation
        by_mean, by_log_std = np.zeros_like(self._mean), np.zeros_like(self._mean)
        for node, weight in _QUADRATURE:
            slope = -2.0 * weight * np.tanh(self._mean + node * self._std)
            by_mean += slope
            by_log_std += node * slope
        squashing = np.concatenate((by_mean, by_log_std * self._std * self._free)) * entropy
        gradient: Array = super().gradient(log_prob, entropy) + squashing
        return gradient


_QUADRATURE = [(np.float32(x), np.float32(w)) for x, w in zip(NORMAL_NODES, NORMAL_WEIGHTS, strict=True)]


def _halves(logits: Array) -> tuple[Array, Array]:
    """Return means and logarithms of deviations, [size, M] each, from [2 * size, M]."""
    half = len(logits) // 2
    return logits[:half], logits[half:]


def _log_softmax(logits: Array) -> Array:
    """Over the first dimension of [size, M]."""
    shifted = logits - logits.max(axis=0)
    log_p: Array = shifted - np.log(np.exp(shifted).sum(axis=0))
    return log_p


def most_probable(parts: Sequence[tuple[str, int]], logits: Array, action: Array) -> None:
    """Fill action [R, A] with the most probable one for logits [R, L]; parts are of the `SUPPORTED` kinds."""
    for part in _laid_out(parts):
        own = logits[:, part.logits]
        action[:, part.values] = own[:, : part.size] if part.kind in REAL else own.argmax(axis=1, keepdims=True)


def is_supported(parts: Sequence[tuple[str, int]]) -> bool:
    """Whether an `ActionSampler` can be made for these parts."""
    return all(kind in SUPPORTED for kind, _ in parts)
