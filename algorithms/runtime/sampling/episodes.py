"""Returns and lengths of the episodes of a group, accumulated as arrays."""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import EpisodesDone
from appo.envs.spec import EpisodeStats, StepRow


class SoftHorizon:
    """Ends episodes after a number of steps of an agent, in the statistics alone.

    Attributes:
        ends: rows [R] whose episode ends with the step counted last, while the environment continues.
    """

    def __init__(self, steps: int, num_rows: int) -> None:
        self.steps, self.ends = steps, np.zeros(num_rows, np.bool_)
        self._taken = np.zeros(num_rows, np.int64)

    def count(self, row: StepRow, valid: Array) -> None:
        """Count a step of the `valid` rows [R]; an episode that ends by itself resets the count."""
        over = row.terminated | row.truncated
        self._taken += valid
        np.logical_and(self._taken == self.steps, ~over, out=self.ends)
        self._taken[over | self.ends | ~valid] = 0


class LostLives:
    """Ends episodes with a lost life, in learning alone.

    Attributes:
        now: lives [R] after the present step; the environment writes them.
    """

    def __init__(self, num_rows: int) -> None:
        self.now, self._before = np.zeros((2, num_rows), np.int32)

    def end(self, row: StepRow, valid: Array) -> None:
        """Mark `valid` rows [R] that lost a life as terminated; a truncated row stays truncated."""
        ended = row.terminated | row.truncated | ~valid
        row.terminated |= (self.now < self._before) & valid & ~row.truncated
        self._before[:] = np.where(ended, 0, self.now)  # the next game may begin with fewer lives


FLUSH_SECONDS = 0.2


class Episodes:
    """Accumulates unscaled rewards, and reports finished episodes a few times a second.

    Attributes:
        count: number of finished episodes.
        cut: rows [R] with an episode begun before the first step; its return and length are unknown and not reported.
    """

    def __init__(self, num_rows: int, exploring: Sequence[bool] = ()) -> None:
        self.count, self.cut = 0, np.zeros(num_rows, np.bool_)
        self._exploring = np.array(exploring, np.bool_) if exploring else np.zeros(num_rows, np.bool_)
        self._explores = any(exploring)
        self._return = np.zeros(num_rows, np.float64)
        self._length, self._frames = np.zeros((2, num_rows), np.int64)
        self._done = np.zeros(num_rows, np.bool_)
        self._ended: list[tuple[Array, Array, Array, Array]] = []
        self._stats: list[tuple[int, dict[str, float]]] = []
        self._flushed = time.monotonic()

    def record(self, row: StepRow, valid: Array, policy: Array, stats: Sequence[EpisodeStats]) -> None:
        """Add one step of every row, [R], and the episodes that end with the step."""
        self._return += row.reward
        self._length += np.multiply(row.num_frames, valid, out=self._frames)
        np.logical_or(row.terminated, row.truncated, out=self._done)
        if row.logical_end is not None:
            self._done |= row.logical_end
        if self._done.any():
            ended = (self._done & ~self.cut).nonzero()[0]
            self.count += len(ended)
            if len(ended):
                self._ended.append((policy[ended], self._return[ended], self._length[ended], self._exploring[ended]))
            self._return[self._done] = 0
            self._length[self._done] = 0
        for one in stats:
            if not (self._exploring[one.row] or self.cut[one.row]):
                self._stats.append((int(policy[one.row]), one.stats))
        self.cut &= ~self._done

    def forget(self, rows: Array) -> None:
        """Drop the sums of these rows [R], in which the next episode begins.

        After a finished episode the sums are zero; after a failure of the environment they are not.
        """
        self._return[rows] = 0
        self._length[rows] = 0
        self.cut[rows] = False

    def flush(self, now: bool = False) -> Iterator[EpisodesDone]:
        """Report finished episodes, if the last report is old enough or `now` is set."""
        if self._ended and (now or time.monotonic() - self._flushed >= FLUSH_SECONDS):
            policy, episode_return, length, exploring = map(np.concatenate, zip(*self._ended, strict=True))
            yield EpisodesDone(
                policy, episode_return, length, tuple(self._stats), exploring if self._explores else None
            )
            self._ended, self._stats, self._flushed = [], [], time.monotonic()
