"""Counts of work done by processes of an algorithm, by which main detects hanging processes."""

from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.topology import Topology


class Units:
    """A count of work done in one place of an algorithm's own processes, as proof of progress.

    The place is the index of the worker in `Topology.workers_apart`.
    """

    def __init__(self, arena: Arena, place: int) -> None:
        self._row = arena["units"][place]

    @staticmethod
    def declare(topology: Topology) -> Field:
        """Return the arena field; rows of 128 bytes keep writers on separate cache lines."""
        return Field("units", (len(topology.workers_apart()), 16), "int64")

    def add(self) -> None:
        """Count one unit."""
        self._row[0] += 1

    @property
    def count(self) -> int:
        """Return the units of all processes so far in this place."""
        return int(self._row[0])
