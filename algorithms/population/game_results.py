"""Results of games between the learning policy and past versions."""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import MatchResults
from appo.envs.spec import StepRow

REPORT_SECONDS = 0.2

NOBODY = -1
"""Version of a game without an opponent."""


class GameResults:
    """Returns of agents in the games of a group, and results against past versions."""

    def __init__(self, num_envs: int, num_agents: int) -> None:
        shape = self.num_envs, self.num_agents = num_envs, num_agents
        self._return = np.zeros(shape, np.float64)
        self._played, self._ended, self._is_past = (np.zeros(shape, np.bool_) for _ in range(3))
        self._opponent = np.full(num_envs, NOBODY, np.int64)
        self._done: list[tuple[Array, Array]] = []
        self._past_steps = 0
        self._flushed = time.monotonic()

    def record(self, row: StepRow, valid: Array, is_past: Array) -> None:
        """Take in a step, [R]."""
        shape = self._return.shape
        self._return += row.reward.reshape(shape)
        self._played |= valid.reshape(shape)
        self._ended |= (row.terminated | row.truncated).reshape(shape)
        self._past_steps += int(np.count_nonzero(valid & is_past))

    def begin(self, envs: Array, is_past: Array, opponent: Sequence[int]) -> None:
        """Begin games; the previous games count as ended, unless their environments have failed.

        Args:
            envs: [E] numbers in the group.
            is_past: [E, A] whether a past version plays the agent.
            opponent: version of each game, or `NOBODY`.
        """
        played, was_past = self._played[envs], self._is_past[envs]
        own, other = played & ~was_past, played & was_past
        over = (self._ended[envs] | ~played).all(axis=1) & (self._opponent[envs] != NOBODY)
        counts = over & own.any(axis=1) & other.any(axis=1)
        if counts.any():
            own_mean, other_mean = (self._mean(envs[counts], side[counts]) for side in (own, other))
            self._done.append((self._opponent[envs[counts]], own_mean - other_mean))
        self._return[envs] = 0.0
        self._played[envs] = self._ended[envs] = False
        self._is_past[envs], self._opponent[envs] = is_past, opponent

    def _mean(self, envs: Array, side: Array) -> Array:
        """Return the mean return [E] of the agents in `side` [E, A]."""
        mean: Array = (self._return[envs] * side).sum(axis=1) / side.sum(axis=1)
        return mean

    def finish(self, not_handed_over: int) -> None:
        """Count ended games without a successor; discount steps that are never handed over.

        Args:
            not_handed_over: valid steps of past versions in a slot that stays behind.
        """
        self._past_steps -= not_handed_over
        over = np.flatnonzero(self._ended.all(axis=1))
        self.begin(over, np.zeros((len(over), self.num_agents), np.bool_), [NOBODY] * len(over))

    def flush(self, now: bool) -> Iterator[MatchResults]:
        """Report results if the last report is old enough or `now`."""
        if (self._done or self._past_steps) and (now or time.monotonic() - self._flushed >= REPORT_SECONDS):
            nothing = np.zeros(0, np.int64), np.zeros(0, np.float64)
            versions, differences = map(np.concatenate, zip(nothing, *self._done, strict=True))
            yield MatchResults(versions, differences, self._past_steps)
            self._done, self._past_steps, self._flushed = [], 0, time.monotonic()
