"""Figures over recent values: rates of counts, and means."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


class RateMeter:
    """The rate of one count over the last seconds, for windows of several lengths, from pairs of time and count."""

    def __init__(self, windows_seconds: Sequence[float] = (10.0, 60.0, 300.0)) -> None:
        self._windows = {seconds: deque[tuple[float, float]]() for seconds in windows_seconds}

    def add(self, now: float, count: float) -> None:
        """Record the count so far at a monotonic time; times must not decrease."""
        for seconds, points in self._windows.items():
            points.append((now, count))
            while len(points) > 2 and points[1][0] <= now - seconds:
                points.popleft()  # the oldest point is the last at or before the window's start

    def rates(self, now: float = -math.inf) -> dict[float, float]:
        """Return counts per second by window length in seconds; nan before two pairs at different times.

        If the last pair is older than the window, and than the time between the pairs kept, the count is taken as
        unchanged until `now`: the rate falls.
        """
        rates = dict.fromkeys(self._windows, math.nan)
        for seconds, points in self._windows.items():
            if points and (apart := points[-1][0] - points[0][0]) > 0:
                is_silent = now - points[-1][0] > max(apart, seconds)
                rates[seconds] = (points[-1][1] - points[0][1]) / (now - points[0][0] if is_silent else apart)
        return rates


class RunningStatistic:
    """Mean, smallest and largest of the last values."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self._values = np.full(length, np.nan)
        self.total = 0  # values ever appended

    def append(self, values: ArrayLike) -> None:
        """Add one value, or several in order."""
        array, length = np.asarray(values, dtype=np.float64).reshape(-1), len(self._values)
        kept = array[-length:]
        self._values[(self.total + len(array) - len(kept) + np.arange(len(kept))) % length] = kept
        self.total += len(array)

    @property
    def count(self) -> int:
        """Return the number of values in the window."""
        return min(self.total, len(self._values))

    def values(self) -> list[float]:
        """Return the values, oldest first."""
        start = self.total % len(self._values) if self.total > len(self._values) else 0
        return np.roll(self._values[: self.count], -start).tolist()  # type: ignore[no-any-return]

    @property
    def mean(self) -> float:
        """Return the mean; nan without values."""
        return float(self._values[: self.count].mean()) if self.total else math.nan

    @property
    def min(self) -> float:
        """Return the smallest value; nan without values."""
        return float(self._values[: self.count].min()) if self.total else math.nan

    @property
    def max(self) -> float:
        """Return the largest value; nan without values."""
        return float(self._values[: self.count].max()) if self.total else math.nan
