"""Counts of work done by processes of an algorithm, by which main detects hanging processes."""

from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.topology import Topology


class Units:
    """A count of work done in a place of an algorithm's own processes, which shows that the process gets on.

    Args:
        arena: the shared memory.
        place: of the worker among `Topology.workers_apart`.
    """

    def __init__(self, arena: Arena, place: int) -> None:
        self._row = arena["units"][place]

    @staticmethod
    def declare(topology: Topology) -> Field:
        """Return the arena field; a row is 128 bytes long so that no two writers share a cache line."""
        return Field("units", (len(topology.workers_apart()), 16), "int64")

    def add(self) -> None:
        """Count one."""
        self._row[0] += 1

    @property
    def count(self) -> int:
        """Return the units of all processes that have been in this place."""
        return int(self._row[0])
