"""Pure rules for processes: hanging, restarting, giving up."""

import signal
from dataclasses import dataclass
from pathlib import Path

from appo.algorithms.runtime.config import SamplingConfig
from appo.algorithms.runtime.memory.heartbeat import Activity, Pulse
from appo.envs.incidents import HANG
from appo.utils.errors import EnvironmentFailure

BACKOFF_SECONDS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
SERVER_SECONDS = 0.1  # between attempts to restart the fork server; a stall ends a run without success
MAX_IDLE_DEATHS = 8
MAX_FAULTS = 3
MAX_FIRST_RESETS = 3  # after the first start
SETTLED_SECONDS = 60.0
QUEUE_SECONDS = 2.0  # a process leaves a queue within microseconds, unless the peer died inside ...
QUEUE_PATIENCE_SECONDS = 5.0  # ... or the process in the queue lacks a core
REVIVAL_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
MAX_FUTILE = 6
MAX_SAME_FAULTS = 3


@dataclass(frozen=True)
class Death:
    """The end of a process.

    Attributes:
        cause: cause in one line, with the name of the process.
        own_fault: whether the process failed by itself (raised, crashed, exited, hung); else it was killed.
        exit_code: exit code of the run, if the death ends the run.
        traceback: traceback of the process, if any.
        collateral: whether the process died, or failed to start, with the fork server: no fault of the process.
        lasting: whether a restart would repeat the failure.
        ending: end of a process without a message: name of a signal, exit code or `HANG`.
        retired: whether the process asked for a replacement and ended in good order.
        said: whether the process reported its error itself.
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
        idle_deaths: number of deaths in a row without a unit of work in between.
        faults: number of own faults in a row, each within `SETTLED_SECONDS` of a start.
        first_resets: number of deaths before the run began.
    """

    idle_deaths: int = 0
    faults: int = 0
    first_resets: int = 0

    def delay_at_start(self, death: Death) -> float | None:
        """Return the seconds until the restart of an actor before the run began; None: no restart.

        A crash, a kill or a hang may be an accident of several games that load at once. An environment that raises was
        created again by the actor already, and the user must see the error.
        """
        self.first_resets += 1
        if death.said or self.first_resets > MAX_FIRST_RESETS:
            return None
        return BACKOFF_SECONDS[min(self.first_resets, len(BACKOFF_SECONDS) - 1)]

    def delay(self, death: Death, *, worked: bool, lived_seconds: float) -> float | None:
        """Return the seconds until a process restarts in the seat; None: the seat is given up.

        A process that fails by itself soon after every start has a bug that the user must see, however much work is
        done in between. A killed process, for example when memory is short, restarts as long as work is done.
        """
        if death.collateral:
            return SERVER_SECONDS
        if death.retired:
            return 0.0
        self.idle_deaths = 0 if worked else self.idle_deaths + 1
        self.faults = (0 if lived_seconds >= SETTLED_SECONDS else self.faults) + death.own_fault
        if death.lasting or self.idle_deaths >= MAX_IDLE_DEATHS or self.faults >= MAX_FAULTS:
            return None
        return BACKOFF_SECONDS[min(self.idle_deaths, len(BACKOFF_SECONDS) - 1)]


def ending_of(exit_code: int | None) -> str:
    """Return the end of a process: the name of a signal, or an exit code."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    names = {one.value: one.name for one in signal.Signals}
    return names.get(-exit_code, f"signal {-exit_code}")  # real-time signals have numbers alone


@dataclass
class Revival:
    """The restarts of a process beside training, such as an evaluator or a tracker.

    Attributes:
        name: name in log lines.
        log_path: path of the log with the cause of an end.
        restarts: number of restarts so far.
        due: monotonic time of the next restart; None while the process lives, or if given up.
        given_up: whether the process has ended too often soon after a start.
    """

    name: str
    log_path: Path
    restarts: int = -1
    due: float | None = None
    given_up: bool = False
    _began: float = 0.0
    _short_lives: int = 0
    _futile: int = 0  # of them, those that the process ended itself
    _fault: str = ""
    _same_faults: int = 0

    def began(self, now: float) -> None:
        """Record a start at monotonic time `now`."""
        self.restarts, self.due, self._began = self.restarts + 1, None, now

    def ended(self, now: float, exit_code: int | None, fault: str = "") -> str:
        """Record an end; return the line for the log.

        A killed process restarts for ever, at growing intervals.

        Args:
            now: monotonic seconds.
            exit_code: exit code, negative for a signal.
            fault: cause of a failure before any work, in one line; empty after work. After `MAX_SAME_FAULTS` failures
                in a row with one fault the process is given up, however long each attempt took.
        """
        self._same_faults = self._same_faults + 1 if fault and fault == self._fault else int(bool(fault))
        self._fault = fault
        if self._same_faults >= MAX_SAME_FAULTS:
            self.given_up, self.due = True, None
            return f"{self.name} failed {MAX_SAME_FAULTS} times with {fault!r}: not started again; see {self.log_path}"
        return self._next(now, f"ended with {ending_of(exit_code)}", by_itself=exit_code != -signal.SIGKILL)

    def not_started(self, now: float, error: OSError) -> str:
        """Record a start that failed at monotonic time `now`; return the line for the log."""
        return self._next(now, f"could not be started: {error}", by_itself=True)

    def _next(self, now: float, how: str, *, by_itself: bool) -> str:
        if now - self._began >= SETTLED_SECONDS:
            self._short_lives = self._futile = 0
        self._began = now  # starts that fail from now on do not count as the end of a long life
        self._short_lives += 1
        self._futile += by_itself
        self.given_up = self._futile >= MAX_FUTILE
        if self.given_up:
            self.due = None
            return (
                f"{self.name} {how}, as {MAX_FUTILE} times soon after its start: not started again; see {self.log_path}"
            )
        self.due = now + REVIVAL_SECONDS[min(self._short_lives, len(REVIVAL_SECONDS)) - 1]
        return f"{self.name} {how}; starting it again (restart {self.restarts + 1}), see {self.log_path}"

    def is_due(self, now: float) -> bool:
        """Return whether a restart is due at monotonic time `now`."""
        return self.due is not None and now >= self.due

    def plain(self) -> dict[str, object]:
        """Return the entry of the process in status.json."""
        state = "given up" if self.given_up else "running" if self.due is None else "ended"
        return {"state": state, "restarts": max(0, self.restarts)}


@dataclass(frozen=True)
class Limits:
    """The longest times of activities of a process.

    Attributes:
        restart: whether processes restart; else a death ends the run.
        reset_seconds: limit of the first reset of the environments of a group.
        step_seconds: limit of one turn of an actor.
        work_seconds: limit of every other activity.
    """

    restart: bool
    reset_seconds: float
    step_seconds: float
    work_seconds: float

    @classmethod
    def of_flags(cls, flags: SamplingConfig, *, in_segments: bool = False) -> "Limits":
        """Return the limits of the flags. In segments nothing restarts: only a new start can repeat work."""
        reset, step, work = flags.reset_timeout_seconds, flags.step_timeout_seconds, flags.work_timeout_seconds
        return cls(flags.restart_workers and not in_segments, reset, step, work)

    def of(self, activity: Activity, *, is_actor: bool) -> float:
        """Return the limit of an activity in seconds."""
        if activity is Activity.RESETTING:
            return self.reset_seconds
        if is_actor and activity is Activity.WORKING:
            return self.step_seconds
        if is_actor and activity is Activity.WAITING:  # a stopped fork server cannot report a death
            # A waiting process beats five times a second, unless it lacks a core.
            return min(max(self.step_seconds, 20.0), self.work_seconds)
        return self.work_seconds

    def hang(self, name: str, pulse: Pulse, now: float, *, is_actor: bool) -> Death | None:
        """Return the death of a process whose activity exceeds the limit; None otherwise."""
        seconds = now - pulse.since
        if seconds <= self.of(pulse.activity, is_actor=is_actor):
            return None
        what = {
            Activity.RESETTING: "the first reset of its environments took longer than",
            Activity.WORKING: "a step of its environments takes longer than" if is_actor else "hangs in its work for",
        }.get(pulse.activity, "gives no sign of life for")
        exit_code = EnvironmentFailure.exit_code if is_actor else 1
        return Death(f"{name}: {what} {seconds:.0f} s", own_fault=True, exit_code=exit_code, ending=HANG)
