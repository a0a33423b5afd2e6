"""Sums over leaves, by which leaves are drawn in proportion to what they hold: prioritised sampling.

Schaul et al., "Prioritized Experience Replay", arXiv:1511.05952, appendix B.2.1. Every step of a draw or an update is
made for a whole batch at once. Nodes have many children, as numpy's cost per call is that of some hundred elements: of
2^20 leaves there are then two levels of sums, and the upper one is searched as a whole.
"""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Values = NDArray[np.float64]

CHILDREN = 16
LARGEST_TOP = 4096  # nodes of the level without parents


def padded(num_leaves: int) -> int:
    """Return the length of an array of leaves that a tree takes: the last ones, beyond `num_leaves`, stay 0."""
    unit = 1
    while -(-num_leaves // unit) > LARGEST_TOP:
        unit *= CHILDREN
    return -(-num_leaves // unit) * unit


class SumTree:
    """A tree of sums over an array that somebody else keeps, such as one in shared memory.

    All sums are computed from the children and never moved by differences, so that they do not drift.

    Args:
        leaves: [L] none negative, L as `padded` gives it; written by `set` alone from now on.
    """

    def __init__(self, leaves: Values) -> None:
        assert len(leaves) == padded(len(leaves)), f"{len(leaves)} leaves are no number that `padded` gives"
        self.levels = [leaves]
        while len(self.levels[-1]) > LARGEST_TOP:
            self.levels.append(np.zeros(len(self.levels[-1]) // CHILDREN))
        self.rebuild()

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self.levels[-1].sum())

    def rebuild(self) -> None:
        """Compute all sums from the leaves."""
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            below.reshape(-1, CHILDREN).sum(axis=1, out=level)

    def set(self, index: Indices, value: Values) -> None:
        """Write leaves; of an index that is there more than once the last value counts.

        Args:
            index: [B] of leaves.
            value: [B], not negative.
        """
        self.levels[0][index] = value
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            index = index // CHILDREN
            level[index] = below.reshape(-1, CHILDREN).take(index, axis=0).sum(axis=1)

    def find(self, target: Values) -> Indices:
        """Return the leaves [B] at which the sum of all leaves up to them exceeds the targets [B].

        A leaf of 0 is never found. Targets from the total on find the last leaf that is not 0.

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
        """Draw leaves [count] with a probability in proportion to what they hold, one from each of `count` equal parts.

        Raises:
            ValueError: all leaves are 0.
        """
        return self.find((np.arange(count) + random.random(count)) * (self.total / count))
