"""Sampling of actions in numpy, for a few rows at a time.

The distributions are those of `distributions.py`; here is only what acting needs of them. Half a dozen rows are all
dispatch, and that of numpy costs a fifth of torch's. All memory is made once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.ops.distributions import HALF_LOG_TWO_PI, LOG_STD_MAX, LOG_STD_MIN

Array = NDArray[Any]

SUPPORTED = ("categorical", "gaussian")


class ActionSampler:
    """Draws actions of R rows and their log-probabilities.

    Args:
        parts: (kind, size) of each part, of the `SUPPORTED` kinds.
        rows: R.
        generator: of the random numbers.
    """

    def __init__(self, parts: Sequence[tuple[str, int]], rows: int, generator: np.random.Generator) -> None:
        self._parts = []
        logit = value = 0
        for kind, size in parts:
            if kind == "categorical":
                sampler: _Categorical | _Gaussian = _Categorical(rows, size, generator)
                widths = (size, 1)
            else:
                sampler, widths = _Gaussian(rows, size, generator), (2 * size, size)
            self._parts.append((sampler, slice(logit, logit + widths[0]), slice(value, value + widths[1])))
            logit, value = logit + widths[0], value + widths[1]

    def sample(self, logits: Array, action: Array, log_prob: Array) -> None:
        """Fill action [R, A] and log_prob [R] from logits [R, L]; where logits are not finite, so is log_prob."""
        log_prob.fill(0.0)
        for sampler, of_logits, of_values in self._parts:
            log_prob += sampler(logits[:, of_logits], action[:, of_values])


class _Categorical:
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


class _Gaussian:
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


def is_supported(parts: Sequence[tuple[str, int]]) -> bool:
    """Whether an `ActionSampler` can be made for these parts."""
    return all(kind in SUPPORTED for kind, _ in parts)
