"""A ring of weights in the arena, from learners to policy workers: two flat vectors and no lock.

Each buffer has a sequence word: odd from before the first byte is written until after the last, then twice the version.
The newest version is never overwritten, and one buffer is always whole. A writer that publishes twice during a copy
overtakes the reader. A reader therefore accepts a copy only if the word was right before and after, and the checksum
copied with the weights agrees. The ring relies on the store order of x86-64; on other processors publishing and
fetching make one system call in between.
"""

import os
import platform

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.utils.failpoints import failpoint

STRONG_STORE_ORDER = platform.machine() in ("x86_64", "AMD64")


def checksum(vector: Array) -> int:
    """Sum the words of a float32 vector, two by two, to 64 bits; any single changed word changes the sum."""
    words = vector.view(np.uint32)
    pairs = np.add.reduce(words[: len(words) & ~1].view(np.uint64))
    return (int(pairs) + (int(words[-1]) if len(words) % 2 else 0)) % 2**64


def barrier() -> None:
    """Order earlier stores before later ones on processors without such an order."""
    if not STRONG_STORE_ORDER:
        os.getppid()


class WeightRing:
    """The published weights of one policy. One writer (its learner), any number of readers."""

    def __init__(self, arena: Arena, policy: int) -> None:
        self._buffer = arena[f"weights.{policy}.buffer"]
        self._sequence = arena[f"weights.{policy}.sequence"]
        self._checksum = arena[f"weights.{policy}.checksum"]
        self._published = arena[f"weights.{policy}.published"]

    @staticmethod
    def declare(policy: int, size: int) -> list[Field]:
        """Return the arena fields of one policy with `size` float32 values."""
        return [
            Field(f"weights.{policy}.buffer", (2, size), "float32"),
            Field(f"weights.{policy}.sequence", (2,), "int64"),
            Field(f"weights.{policy}.checksum", (2,), "uint64"),
            Field(f"weights.{policy}.published", (1,), "int64"),
        ]

    @property
    def published(self) -> int:
        """Return the newest version; 0 before the first, because versions count from 1."""
        return int(self._published[0])

    def publish(self, weights: Array, version: int) -> None:
        """Publish these weights; `version` must be larger than every version before."""
        self.begin(version)[:] = weights
        self.commit(version)

    def begin(self, version: int) -> Array:
        """Return the buffer [P] for the weights of `version`, to be filled before `commit`."""
        index = 1 - (self._buffer_of(self.published) or 0)
        self._sequence[index] = 2 * version - 1
        barrier()
        buffer: Array = self._buffer[index]
        return buffer

    def commit(self, version: int) -> None:
        """Make the weights written since `begin` the newest."""
        index = int((self._sequence == 2 * version - 1).argmax())
        self._checksum[index] = checksum(self._buffer[index])
        failpoint("learner.publish")
        barrier()
        self._sequence[index] = 2 * version
        barrier()
        self._published[0] = version

    def fetch(self, version: int) -> tuple[int, Array | None]:
        """Return the newest version and a copy of its weights [P]; None for the weights if `version` is the newest.

        A copy overtaken by a publication is repeated. After some attempts the caller keeps its weights until the next
        call.
        """
        for _ in range(8):
            newest = self.published
            if newest == version:
                break
            index = self._buffer_of(newest)
            if index is None:
                continue
            barrier()
            copy, expected = self._buffer[index].copy(), self._checksum[index]
            barrier()
            if int(self._sequence[index]) == 2 * newest and checksum(copy) == expected:
                return newest, copy
        return version, None

    def damaged(self) -> int | None:
        """Return the newest version if its buffer differs from the published weights; None if equal, or overwritten."""
        newest = self.published
        index = self._buffer_of(newest)
        if index is None:
            return None
        barrier()
        differs = checksum(self._buffer[index]) != self._checksum[index]
        barrier()
        return newest if differs and int(self._sequence[index]) == 2 * newest else None

    def _buffer_of(self, version: int) -> int | None:
        """Return the buffer with a whole copy of a version; None without one."""
        first, second = self._sequence.tolist()
        return 0 if first == 2 * version else 1 if second == 2 * version else None
