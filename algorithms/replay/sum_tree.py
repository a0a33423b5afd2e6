"""Sums over leaves for draws in proportion to the leaves: prioritized sampling.

Schaul et al., "Prioritized Experience Replay", arXiv:1511.05952, appendix B.2.1. Every step handles a whole batch.
Nodes have many children, because a call of numpy costs as much as some hundred elements: 2^20 leaves have two levels of
sums, and the upper level is searched as a whole.
"""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Values = NDArray[np.float64]

CHILDREN = 16
LARGEST_TOP = 4096  # nodes of the level without parents


def padded(num_leaves: int) -> int:
    """Return the length of the leaf array for a tree; leaves beyond `num_leaves` stay 0."""
    unit = 1
    while -(-num_leaves // unit) > LARGEST_TOP:
        unit *= CHILDREN
    return -(-num_leaves // unit) * unit


class SumTree:
    """A tree of sums over an array of the caller's, for example in shared memory.

    All sums are computed from the children, never from differences, and therefore do not drift.

    Args:
        leaves: [L] nonnegative, L from `padded`; only `set` writes from now on.
    """

    def __init__(self, leaves: Values) -> None:
        assert len(leaves) == padded(len(leaves)), f"{len(leaves)} leaves are no number that `padded` gives"
        self.levels = [leaves]
        while len(self.levels[-1]) > LARGEST_TOP:
            self.levels.append(np.zeros(len(self.levels[-1]) // CHILDREN))
        self.rebuild()

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self.levels[-1].sum())

    def rebuild(self) -> None:
        """Compute all sums from the leaves."""
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            below.reshape(-1, CHILDREN).sum(axis=1, out=level)

    def set(self, index: Indices, value: Values) -> None:
        """Write leaves; the last value of a repeated index counts.

        Args:
            index: [B] indices of leaves.
            value: [B], not negative.
        """
        self.levels[0][index] = value
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            index = index // CHILDREN
            level[index] = below.reshape(-1, CHILDREN).take(index, axis=0).sum(axis=1)

    def find(self, target: Values) -> Indices:
        """Return the leaves [B] whose cumulative sum first exceeds the targets [B].

        A leaf of 0 is never found. Targets beyond the total find the last leaf above 0.

        Raises:
            ValueError: all leaves are 0.
        """
        top = self.levels[-1].cumsum()
        if not top[-1] > 0:
            raise ValueError("nothing can be drawn: all leaves are 0")
        target = np.minimum(target, np.nextafter(top[-1], 0))
        index = top.searchsorted(target, side="right")
        target = target - np.where(index > 0, top[index - 1], 0)
        for level in self.levels[-2::-1]:
            sums = level.reshape(-1, CHILDREN).take(index, axis=0).T.copy()
            for child_before in range(CHILDREN - 1):  # numpy's cumsum takes twice the time along one axis, and more
                sums[child_before + 1] += sums[child_before]
            # Sums of the level above may be a rounding larger than these: what lies beyond belongs to the last child.
            target = np.minimum(target, np.nextafter(sums[-1], 0))
            child = np.add.reduce(sums <= target, axis=0, dtype=np.int8).astype(np.int64)
            before = (child - 1) * len(child) + np.arange(len(child))
            target = target - np.where(child > 0, sums.ravel().take(before, mode="clip"), 0)
            index = index * CHILDREN + child
        return index

    def sample(self, count: int, random: np.random.Generator) -> Indices:
        """Draw leaves [count] in proportion to their values, one from each of `count` equal parts.

        Raises:
            ValueError: all leaves are 0.
        """
        return self.find((np.arange(count) + random.random(count)) * (self.total / count))
