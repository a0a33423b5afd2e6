"""Heartbeats: every process writes its activity and the time of the last change into the arena."""

import time
from enum import IntEnum
from typing import NamedTuple

from appo.algorithms.runtime.memory.arena import Arena, Field


class Activity(IntEnum):
    """The activities of a process."""

    STARTING = 0
    RESETTING = 1
    WAITING = 2
    WORKING = 3
    STOPPING = 4


class Pulse(NamedTuple):
    """A heartbeat as read by another process; times are monotonic seconds.

    Attributes:
        activity: present activity.
        since: begin of the last unit: a wait, a turn, or making or resetting an environment.
        began: begin of the present activity.
        turns: units so far.
        peer: number of the worker at the other end of the queue in use; None: no queue is in use.
        entered: time of entering the queue.
    """

    activity: Activity
    since: float
    began: float
    turns: int
    peer: int | None
    entered: float

    def not_before(self, moment: float) -> "Pulse":
        """Return the pulse with no time before `moment`: a suspended machine is no hang."""
        return self._replace(**{name: max(moment, getattr(self, name)) for name in ("since", "began", "entered")})


class Heartbeat:
    """The heartbeat of a process: a row in the arena of 128 bytes, on separate cache lines."""

    def __init__(self, arena: Arena, row: int) -> None:
        self._row = arena["heartbeat"][row]
        self._activity: Activity | None = None

    @staticmethod
    def declare(num_processes: int) -> Field:
        """Return the arena field."""
        return Field("heartbeat", (num_processes, 16), "int64")

    def beat(self, activity: Activity) -> None:
        """Record the begin of a unit of an activity."""
        now = time.monotonic_ns()
        if activity is not self._activity:
            self._activity = activity
            self._row[3] = now
        self._row[:2] = (activity, now)
        self._row[2] += 1

    def alive(self) -> None:
        """Record progress in the present activity."""
        self._row[1] = time.monotonic_ns()

    def clear(self) -> None:
        """Record the start of a process, perhaps in the place of an earlier one."""
        self._row[4] = 0
        self.beat(Activity.STARTING)

    def enter_queue(self, peer: int) -> None:
        """Record the queue this process enters: if the process dies inside, its mutex may block the peer for ever."""
        self._row[4:6] = (peer + 1, time.monotonic_ns())

    def leave_queue(self) -> None:
        """Record that the process has left the queue."""
        self._row[4] = 0

    def read(self) -> Pulse:
        """Return the last pulse."""
        activity, since_ns, turns, began_ns, peer, entered_ns = self._row[:6].tolist()
        inside = peer - 1 if peer else None
        return Pulse(Activity(activity), since_ns / 1e9, began_ns / 1e9, turns, inside, entered_ns / 1e9)
