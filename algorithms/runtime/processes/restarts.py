"""Restarts: when a process hangs, when one that has ended is started again, and when it is given up. Pure rules."""

import signal
from dataclasses import dataclass
from pathlib import Path

from appo.algorithms.runtime.config import SamplingConfig
from appo.algorithms.runtime.memory.heartbeat import Activity, Pulse
from appo.envs.incidents import HANG
from appo.utils.errors import EnvironmentFailure

BACKOFF_SECONDS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
SERVER_SECONDS = 0.1  # between attempts to start the fork server again; a run that gets nowhere ends as it stalls
MAX_IDLE_DEATHS = 8
MAX_FAULTS = 3
MAX_FIRST_RESETS = 3  # after the first one
SETTLED_SECONDS = 60.0
SILENT_SECONDS = 20.0  # who waits says so five times a second, unless it gets no core
QUEUE_SECONDS = 2.0  # a queue is left within microseconds, unless somebody has died in it ...
QUEUE_PATIENCE_SECONDS = 5.0  # ... or who is in it gets no core


@dataclass(frozen=True)
class Death:
    """The end of a process.

    Attributes:
        cause: in one line, with the name of the process.
        own_fault: it failed by itself (raised, crashed, left); otherwise it was killed from outside or had to be.
        exit_code: of the run, should it end because of this.
        traceback: of the process, if it left one.
        collateral: it went down, or did not come up, with the fork server: that says nothing of the process.
        lasting: another life would only repeat it.
        ending: how it ended by itself without being able to say so: the name of a signal, an exit code or `HANG`.
        retired: it has asked for a successor, and ended in good order.
        said: it has said so itself, with what it raised.
    """

    cause: str
    own_fault: bool
    exit_code: int = 1
    traceback: str = ""
    collateral: bool = False
    lasting: bool = False
    ending: str = ""
    retired: bool = False
    said: bool = False


@dataclass
class SeatHistory:
    """The deaths in one seat.

    Attributes:
        idle_deaths: in a row, without a unit of work in between.
        faults: own faults in a row, each within `SETTLED_SECONDS` of a start.
        first_resets: deaths before the run has begun.
    """

    idle_deaths: int = 0
    faults: int = 0
    first_resets: int = 0

    def delay_at_start(self, death: Death) -> float | None:
        """Return after how many seconds an actor may make its environments again before the run has begun; None: not.

        A crash, a kill or a hang may be an accident of a game that loads, of which several start at the same moment.
        What an environment has raised has been tried again in its process already, and is for the user to see.
        """
        self.first_resets += 1
        if death.said or self.first_resets > MAX_FIRST_RESETS:
            return None
        return BACKOFF_SECONDS[min(self.first_resets, len(BACKOFF_SECONDS) - 1)]

    def delay(self, death: Death, *, worked: bool, lived_seconds: float) -> float | None:
        """Return after how many seconds a process may take the seat; None: it is given up.

        What fails by itself soon after every start is a bug that the user must see, however much is done in between;
        what is killed, by the kernel for example when memory is short, may go on as long as it gets something done.

        Args:
            death: the latest.
            worked: whether it has done a unit of work in its life.
            lived_seconds: how long that was.
        """
        if death.collateral:
            return SERVER_SECONDS
        if death.retired:
            return 0.0
        self.idle_deaths = 0 if worked else self.idle_deaths + 1
        self.faults = (0 if lived_seconds >= SETTLED_SECONDS else self.faults) + death.own_fault
        if death.lasting:
            return None
        if self.idle_deaths >= MAX_IDLE_DEATHS or self.faults >= MAX_FAULTS:
            return None
        return BACKOFF_SECONDS[min(self.idle_deaths, len(BACKOFF_SECONDS) - 1)]


REVIVAL_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
MAX_FUTILE = 6
MAX_SAME_FAULTS = 3


def ending_of(exit_code: int | None) -> str:
    """Return how a process ended by itself: the name of a signal, or its exit code."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    return signal.Signals(-exit_code).name


@dataclass
class Revival:
    """A process beside training, which may do without it: when it is started again. Pure rules, too.

    Attributes:
        name: for people.
        log_path: where it has said why it ended.
        restarts: so far.
        due: monotonic time at which it is to be started again; None: it lives, or is given up.
        given_up: whether it has ended too often, each time soon after its start.
    """

    name: str
    log_path: Path
    restarts: int = -1
    due: float | None = None
    given_up: bool = False
    _began: float = 0.0
    _futile: int = 0
    _fault: str = ""
    _same_faults: int = 0

    def began(self, now: float) -> None:
        """Note that the process has been started at this monotonic time."""
        self.restarts, self.due, self._began = self.restarts + 1, None, now

    def ended(self, now: float, exit_code: int | None, fault: str = "") -> str:
        """Note that the process has ended at this monotonic time; return the line for the log.

        A process that was killed, which no fault of its own explains, is started again for ever, if later and later.

        Args:
            now: monotonic time.
            exit_code: of the process, negative for a signal.
            fault: why the process failed before it did any work, in one line; empty where it did some. A start that
                fails `MAX_SAME_FAULTS` times in a row with one fault is the last, however long each attempt took.
        """
        self._same_faults = self._same_faults + 1 if fault and fault == self._fault else int(bool(fault))
        self._fault = fault
        if self._same_faults >= MAX_SAME_FAULTS:
            self.given_up, self.due = True, None
            return f"{self.name} failed {MAX_SAME_FAULTS} times with {fault!r}: not started again; see {self.log_path}"
        return self._next(now, f"ended with {ending_of(exit_code)}", MAX_FUTILE - (exit_code == -signal.SIGKILL))

    def not_started(self, now: float, error: OSError) -> str:
        """Note that the process could not be started at this monotonic time; return the line that says so."""
        return self._next(now, f"could not be started: {error}", MAX_FUTILE)

    def _next(self, now: float, how: str, most_futile: int) -> str:
        self._futile = 1 if now - self._began >= SETTLED_SECONDS else min(self._futile + 1, most_futile)
        self.given_up = self._futile >= MAX_FUTILE
        if self.given_up:
            self.due = None
            return (
                f"{self.name} {how}, as {MAX_FUTILE} times soon after its start: not started again; see {self.log_path}"
            )
        self.due = now + REVIVAL_SECONDS[self._futile - 1]
        return f"{self.name} {how}; starting it again (restart {self.restarts + 1}), see {self.log_path}"

    def is_due(self, now: float) -> bool:
        """Return whether the process is to be started at this monotonic time."""
        return self.due is not None and now >= self.due

    def plain(self) -> dict[str, object]:
        """Return the entry of the process in status.json."""
        state = "given up" if self.given_up else "running" if self.due is None else "ended"
        return {"state": state, "restarts": max(0, self.restarts)}


@dataclass(frozen=True)
class Limits:
    """The longest times that a process may take.

    Attributes:
        restart: whether a process is started again where one has ended; otherwise that ends the run.
        reset_seconds: for the first reset of the environments of a group.
        step_seconds: for one turn of an actor.
        work_seconds: for everything else that a process does at a time.
    """

    restart: bool
    reset_seconds: float
    step_seconds: float
    work_seconds: float

    @classmethod
    def of_flags(cls, flags: SamplingConfig, *, in_segments: bool = False) -> "Limits":
        """Return the limits of the flags; within a segment no process can repeat what a dead one did, a start can."""
        reset, step, work = flags.reset_timeout_seconds, flags.step_timeout_seconds, flags.work_timeout_seconds
        return cls(flags.restart_workers and not in_segments, reset, step, work)

    def of(self, activity: Activity, *, is_actor: bool) -> float:
        """Return how long a process may do one thing."""
        if activity is Activity.RESETTING:
            return self.reset_seconds
        if is_actor and activity is Activity.WORKING:
            return self.step_seconds
        if is_actor and activity is Activity.WAITING:  # its death stays unknown while the fork server is stopped
            return min(max(self.step_seconds, SILENT_SECONDS), self.work_seconds)
        return self.work_seconds

    def hang(self, name: str, pulse: Pulse, now: float, *, is_actor: bool) -> Death | None:
        """Return the end of a process that has done one thing for too long; None for all others."""
        seconds = now - pulse.since
        if seconds <= self.of(pulse.activity, is_actor=is_actor):
            return None
        what = {
            Activity.RESETTING: "the first reset of its environments took longer than",
            Activity.WORKING: "a step of its environments takes longer than" if is_actor else "hangs in its work for",
        }.get(pulse.activity, "gives no sign of life for")
        exit_code = EnvironmentFailure.exit_code if is_actor else 1
        return Death(f"{name}: {what} {seconds:.0f} s", own_fault=True, exit_code=exit_code, ending=HANG)
