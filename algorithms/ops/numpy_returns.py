"""Advantages and targets of `returns.py` in numpy, for learners whose batches are all dispatch."""

from typing import NamedTuple

import numpy as np

from appo.algorithms.ops.numpy_twins import Array


class TrajectoryTerms(NamedTuple):
    """A trajectory with every invalid row zeroed; see `returns.py` for what each field means."""

    difference: Array  # [T, B] reward + gamma * next value - value
    value: Array  # [T, B]
    trace_ends: Array  # [T-1, B] bool

    @classmethod
    def of(cls, signals: dict[str, Array], value: Array, final_value: Array | None, gamma: float) -> "TrajectoryTerms":
        """The steps of `reward`, `terminated`, `truncated`, `valid` [T, B], `first` [T+1, B] and a value [T+1, B]."""
        valid, first, terminated = signals["valid"], signals["first"], signals["terminated"]
        last_known = value[:-1] if final_value is None else final_value
        reached = np.where(valid & first[1:], last_known, value[1:])
        next_value = np.where(valid & ~terminated, reached, np.float32(0.0))
        present = np.where(valid, value[:-1], np.float32(0.0))
        reward = np.where(valid, signals["reward"], np.float32(0.0))
        ends = terminated | signals["truncated"] | first[1:] | ~valid
        return cls(reward + np.float32(gamma) * next_value - present, present, ends[:-1])


def vtrace(
    steps: TrajectoryTerms, ratio: Array, gamma: float, vtrace_lambda: float, rho_clip: float, c_clip: float
) -> tuple[Array, Array]:
    """Advantages and targets [T, B] of `returns.vtrace`; the ratio [T, B] is 0 where a step is invalid."""
    decay = np.where(
        steps.trace_ends, np.float32(0.0), np.minimum(ratio[:-1], c_clip) * np.float32(gamma * vtrace_lambda)
    )
    correction = _accumulate(np.minimum(ratio, rho_clip) * steps.difference, decay)
    advantage = steps.difference.copy()
    advantage[:-1] += np.where(steps.trace_ends, np.float32(0.0), correction[1:]) * np.float32(gamma)
    return advantage, correction + steps.value


def gae(steps: TrajectoryTerms, gamma: float, gae_lambda: float) -> tuple[Array, Array]:
    """Advantages and targets [T, B] of `returns.gae`."""
    decay = np.where(steps.trace_ends, np.float32(0.0), np.float32(gamma * gae_lambda))
    advantage = _accumulate(steps.difference.copy(), decay)
    return advantage, advantage + steps.value


def _accumulate(term: Array, decay: Array) -> Array:
    """Solve x[t] = term[t] + decay[t] * x[t+1] in place."""
    for t in range(len(decay) - 1, -1, -1):
        term[t] += decay[t] * term[t + 1]
    return term
