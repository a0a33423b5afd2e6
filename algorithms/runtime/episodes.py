"""Returns and lengths of the episodes of one group, gathered as arrays."""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from algorithms.runtime.arena import Array
from algorithms.runtime.messages import EpisodesDone
from envs.spec import EpisodeStats, StepRow

FLUSH_SECONDS = 0.2


class Episodes:
    """Accumulates rewards as the env gave them, and reports finished episodes a few times a second."""

    def __init__(self, num_rows: int) -> None:
        self.count = 0
        self._return = np.zeros(num_rows, np.float64)
        self._length, self._frames = np.zeros((2, num_rows), np.int64)
        self._done = np.zeros(num_rows, np.bool_)
        self._ended: list[tuple[Array, Array, Array]] = []
        self._stats: list[tuple[int, dict[str, float]]] = []
        self._flushed = time.monotonic()

    def record(self, row: StepRow, valid: Array, policy: Array, stats: Sequence[EpisodeStats]) -> None:
        """Add one step of every row, [R]; remember the episodes that end with it."""
        self._return += row.reward
        self._length += np.multiply(row.num_frames, valid, out=self._frames)
        if np.logical_or(row.terminated, row.truncated, out=self._done).any():
            ended = self._done.nonzero()[0]
            self.count += len(ended)
            self._ended.append((policy[ended], self._return[ended], self._length[ended]))
            self._return[ended] = 0
            self._length[ended] = 0
        for one in stats:
            self._stats.append((int(policy[one.row]), one.stats))

    def forget(self, rows: Array) -> None:
        """Drop what was gathered of episodes that go on nowhere: in these rows [R] the next one begins.

        After an episode that ended there is nothing to drop; after a failure of the environment there is.
        """
        self._return[rows] = 0
        self._length[rows] = 0

    def flush(self, now: bool = False) -> Iterator[EpisodesDone]:
        """Report what has ended, if the last report is old enough or `now`."""
        if self._ended and (now or time.monotonic() - self._flushed >= FLUSH_SECONDS):
            policy, episode_return, length = (np.concatenate(arrays) for arrays in zip(*self._ended, strict=True))
            yield EpisodesDone(policy, episode_return, length, tuple(self._stats))
            self._ended, self._stats, self._flushed = [], [], time.monotonic()
