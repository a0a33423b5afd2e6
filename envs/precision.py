"""Numbers of observations that float32, the type of storage, cannot tell apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from appo.envs.spaces import Space, flat_observation_spaces
from appo.envs.spec import Array

LARGE = 1e4
"""Smallest size at which digits are missed; noise far below smaller numbers is invisible."""

LOST_SHARE = 0.1
"""Largest change of a number by rounding, as a part of the number's range."""


class Precision:
    """Compares observations of environments with the stored copies."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, ...]] = {}  # of every number: the least, the largest, one that lost most

    def look(self, key: str, shown: Array, stored: Array) -> None:
        """Compare rows [R, *] of an observation key with the stored rows."""
        kind, size = shown.dtype.kind, shown.dtype.itemsize
        if stored.dtype != np.float32 or kind not in "fiu" or size < (8 if kind == "f" else 4):
            return
        low, high, worst = self._seen.get(key, (shown[0], shown[0], shown[0]))
        rows = np.stack([*shown, worst])
        worst = np.take_along_axis(rows, np.expand_dims(_error(rows).argmax(axis=0), 0), 0)[0]
        self._seen[key] = np.minimum(low, shown.min(axis=0)), np.maximum(high, shown.max(axis=0)), worst

    def lines(self) -> tuple[str, ...]:
        """Return a line for every key that loses numbers."""
        lines = []
        for key, seen in self._seen.items():
            low, high, worst = (np.asarray(one) for one in seen)
            lost = _error(worst) > 0
            if worst.dtype.kind == "f":
                span = high.astype(np.longdouble) - low
                lost = (_error(worst) > LOST_SHARE * span) & (span > 0) & (np.maximum(-low, high) >= LARGE)
            for one in worst[lost][:1]:
                lines.append(
                    f"observation key {key}: {one!s} is stored as {float(np.float32(one)):.17g}, as float32 cannot hold"
                    " it: subtract an offset in the environment, before it is rounded"
                )
        return tuple(lines)


def _error(numbers: Array) -> Any:
    """Return the distance of numbers from the stored numbers; 0 for NaN and infinity, which are refused elsewhere."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.nan_to_num(np.abs(numbers.astype(np.longdouble) - numbers.astype(np.float32)), posinf=0.0)


def may_lose(space: Space) -> bool:
    """Return whether a space contains numbers of more digits than float32 has."""
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
