"""Figures over recent values: rates of counts, and means."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


class RateWindow:
    """Rate of a count over the last seconds, from (monotonic time, count) pairs."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now: float, count: float) -> None:
        """Record the count so far at a time; times must not decrease."""
        self._points.append((now, count))
        while len(self._points) > 2 and self._points[1][0] <= now - self.seconds:
            self._points.popleft()  # the oldest point is the last at or before the window's start

    def rate(self) -> float:
        """Return counts per second; nan before two pairs at different times."""
        if len(self._points) < 2:
            return math.nan
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else math.nan


class RateMeter:
    """The rate of one count over several windows at once."""

    def __init__(self, windows_seconds: Sequence[float] = (10.0, 60.0, 300.0)) -> None:
        self._windows = [RateWindow(seconds) for seconds in windows_seconds]

    def add(self, now: float, count: float) -> None:
        """Record the count so far at a monotonic time."""
        for window in self._windows:
            window.add(now, count)

    def rates(self) -> dict[float, float]:
        """Return counts per second by window length in seconds; nan before the first rate."""
        return {window.seconds: window.rate() for window in self._windows}


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
