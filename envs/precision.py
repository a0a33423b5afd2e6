"""Numbers of observations that float32, in which they are stored, cannot tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from envs.spaces import Space, flat_observation_spaces
from envs.spec import Array

LARGE = 1e4
"""Size from which on digits are missed; noise far below smaller numbers is none that anybody would see."""

LOST_SHARE = 0.1
"""Of the range of a number, that rounding may change it by."""


class Precision:
    """Compares what environments show with what is stored of it."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[Any, Any, Any]] = {}  # the least, the largest and the worst rounding of every entry
        self._examples: dict[str, tuple[Any, Any]] = {}

    def look(self, key: str, shown: Array, stored: Array) -> None:
        """Compare rows [R, *] of an observation key with the same rows as they are stored."""
        kind, size = shown.dtype.kind, shown.dtype.itemsize
        if stored.dtype != np.float32 or kind not in "fiu" or size < (8 if kind == "f" else 4):
            return
        own: Any = shown.astype(np.longdouble)
        with np.errstate(invalid="ignore"):
            error = np.abs(own - stored)
        low, high, worst = self._ends.get(key, (np.inf, -np.inf, 0.0))
        low, high = np.minimum(low, own.min(axis=0)), np.maximum(high, own.max(axis=0))
        self._ends[key] = low, high, np.maximum(worst, error.max(axis=0))
        if kind != "f":
            lost = error > 0
        else:
            size_of_all = np.maximum(np.abs(low), np.abs(high))
            lost = (error > LOST_SHARE * (high - low)) & (high > low) & (size_of_all >= LARGE)
        if lost.any():
            self._examples.setdefault(key, (shown[lost][0], stored[lost][0]))

    def lines(self) -> tuple[str, ...]:
        """Return a line for every key of which numbers are lost."""
        return tuple(
            f"observation key {key}: {shown!s} is stored as {float(stored):.17g}, as float32 cannot hold it: subtract"
            " an offset in the environment, before it is rounded"
            for key, (shown, stored) in self._examples.items()
        )


def may_lose(space: Space) -> bool:
    """Return whether a space says that it shows numbers of more digits than float32 has."""
    boxes = [leaf for _, leaf in flat_observation_spaces(space) if isinstance(leaf, spaces.Box)]
    return any(box.dtype.kind in "fiu" and box.dtype.itemsize >= (8 if box.dtype.kind == "f" else 4) for box in boxes)


@contextmanager
def watched(group: Any) -> Iterator[Precision]:
    """Compare all observations that a group of environments writes while entered."""
    writer = group._observations
    plain, writer.plain_types, writer.precision = writer.plain_types, "", Precision()
    try:
        yield writer.precision
    finally:
        writer.plain_types, writer.precision = plain, None
