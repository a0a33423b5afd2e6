"""Heartbeats: every process writes into the arena what it does and since when."""

import time
from enum import IntEnum
from typing import NamedTuple

from appo.algorithms.runtime.memory.arena import Arena, Field


class Activity(IntEnum):
    """The activities of a process that its heartbeat names."""

    STARTING = 0
    RESETTING = 1
    WAITING = 2
    WORKING = 3
    STOPPING = 4


class Pulse(NamedTuple):
    """A heartbeat as read by somebody else; times are monotonic seconds.

    Attributes:
        activity: what the process does.
        since: when it last began a unit of that, a wait or a turn, or to make or reset an environment.
        began: when it began to do nothing but that.
        turns: units so far.
        peer: number of the worker at the other end of the queue in which it is; None: it is in none.
        entered: when it entered that queue.
    """

    activity: Activity
    since: float
    began: float
    turns: int
    peer: int | None
    entered: float

    def not_before(self, moment: float) -> "Pulse":
        """Return the pulse as if nothing had begun before a moment: while nobody runs, nobody hangs."""
        times = {name: max(moment, getattr(self, name)) for name in ("since", "began", "entered")}
        return self._replace(**times)


class Heartbeat:
    """The heartbeat of a process: a row in the arena, 128 bytes long so that no two writers share a cache line."""

    def __init__(self, arena: Arena, row: int) -> None:
        self._row = arena["heartbeat"][row]
        self._activity: Activity | None = None

    @staticmethod
    def declare(num_processes: int) -> Field:
        """Return the arena field."""
        return Field("heartbeat", (num_processes, 16), "int64")

    def beat(self, activity: Activity) -> None:
        """Say which activity begins now."""
        now = time.monotonic_ns()
        if activity is not self._activity:
            self._activity = activity
            self._row[3] = now
        self._row[:2] = (activity, now)
        self._row[2] += 1

    def alive(self) -> None:
        """Say that the process gets on with its activity."""
        self._row[1] = time.monotonic_ns()

    def clear(self) -> None:
        """Say that a process is started, in whose place there may have been another one before."""
        self._row[4] = 0
        self.beat(Activity.STARTING)

    def enter_queue(self, peer: int) -> None:
        """Say in which queue this process is now: if it dies holding its mutex, all others are stopped in there."""
        self._row[4:6] = (peer + 1, time.monotonic_ns())

    def leave_queue(self) -> None:
        """Say that the process has left the queue."""
        self._row[4] = 0

    def read(self) -> Pulse:
        """Return the last pulse."""
        activity, since_ns, turns, began_ns, peer, entered_ns = self._row[:6].tolist()
        inside = peer - 1 if peer else None
        return Pulse(Activity(activity), since_ns / 1e9, began_ns / 1e9, turns, inside, entered_ns / 1e9)
