"""Stalls: times without training, the log lines about waiting processes, and the end of a hopeless run."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from appo.algorithms.runtime.memory.heartbeat import Activity, Pulse
from appo.algorithms.runtime.processes.progress import Progress
from appo.algorithms.runtime.processes.restarts import MAX_FAULTS
from appo.algorithms.runtime.processes.supervisor import Supervisor, WorkerError

log = logging.getLogger(__name__)

SAY_AFTER_SECONDS = 5.0
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 60.0
VERBS = {
    Activity.STARTING: "starts",
    Activity.RESETTING: "resets its environments",
    Activity.WAITING: "waits",
    Activity.WORKING: "works",
    Activity.STOPPING: "stops",
}


def who_waits(pulses: Mapping[str, Pulse], owes: Mapping[str, str], dead: Mapping[str, float], now: float) -> str:
    """Return a line with all processes, the longest activity first.

    Args:
        pulses: heartbeats of the living processes.
        owes: awaited work of each process.
        dead: due times of restarts, monotonic seconds.
        now: monotonic seconds.
    """
    parts = []
    for name, pulse in sorted(pulses.items(), key=lambda item: item[1].began):
        owed = f" ({owes[name]})" if owes.get(name) else ""
        began = pulse.since if pulse.activity is Activity.WORKING else pulse.began
        parts.append(f"{name} {VERBS[pulse.activity]} since {now - began:.1f} s{owed}")
    parts += [f"{name} is started again in {max(0.0, due - now):.1f} s" for name, due in dead.items()]
    return ", ".join(parts)


def all_wait_since(pulses: Mapping[str, Pulse], *, complete: bool) -> float | None:
    """Return the monotonic time since which all processes wait; None while a process is active or missing."""
    if not complete or any(pulse.activity is not Activity.WAITING for pulse in pulses.values()):
        return None
    return max((pulse.began for pulse in pulses.values()), default=None)


@dataclass
class Stall:
    """A time without training, and the rule for the end of the run.

    An environment may be so slow that a batch takes minutes, so time alone ends no run. Either workers died meanwhile
    and the stall is much longer than any before, or all workers wait, because a message was lost.

    Attributes:
        patience_seconds: shortest stall that ends a run.
        progress: progress of the run, a number that grows.
        since: monotonic time of the last growth.
        longest: longest time between two growths.
        deaths: number of deaths since the last growth.
    """

    patience_seconds: float = PATIENCE_SECONDS
    progress: int = -1
    since: float = 0.0
    longest: float = 0.0
    deaths: int = 0
    _said: float = field(default=0.0, repr=False)

    def note(self, now: float, progress: int) -> None:
        """Compare the progress at monotonic time `now` with the last."""
        if progress != self.progress:
            if self.progress > 0:
                self.longest = max(self.longest, now - self.since)
            self.progress, self.since, self.deaths, self._said = progress, now, 0, now

    def hopeless(self, now: float, all_wait_since: float | None) -> bool:
        """Return whether the run should end.

        Args:
            now: monotonic seconds.
            all_wait_since: time since which all workers wait; None while a worker works or starts.
        """
        limit = max(self.patience_seconds, 3 * self.longest)
        waited = 0.0 if all_wait_since is None else now - max(self.since, all_wait_since)
        return waited >= self.patience_seconds or (self.deaths >= MAX_FAULTS and now - self.since >= limit)

    def worth_saying(self, now: float, every_seconds: float) -> bool:
        """Return whether a log line about the stall is due; intervals grow."""
        if now - self._said < max(every_seconds, 2 * self.longest, self._said - self.since):
            return False
        self._said = now
        return True


class StallWatch:
    """Checks a run for stalls."""

    def __init__(
        self, progress: Progress, grows: Callable[[], int], patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.progress, self.grows = progress, grows
        self.stall = Stall(patience_seconds)
        self._due, self._deaths = 0.0, 0

    def look(self, supervisor: Supervisor, now: float) -> None:
        """Log the waiting processes if nothing has been trained for a while.

        Raises:
            WorkerError: training will not continue.
        """
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        self.stall.deaths += supervisor.deaths - self._deaths
        self._deaths = supervisor.deaths
        self.stall.note(now, self.grows())
        if now - self.stall.since < SAY_AFTER_SECONDS:
            return
        pulses = supervisor.pulses()
        nothing = f"nothing trained for {now - self.stall.since:.0f} s"
        hopeless = self.stall.hopeless(now, all_wait_since(pulses, complete=not supervisor.due))
        if hopeless and self.stall.deaths and (last := supervisor.last_death):
            raise WorkerError(f"{nothing}: {last.cause}", last.exit_code, last.traceback)
        if hopeless or self.stall.worth_saying(now, SAY_AFTER_SECONDS):
            owed = {name: self.progress.owes(name) for name in pulses}
            line = f"{nothing}: {who_waits(pulses, owed, supervisor.due, now)}"
            if hopeless:
                raise WorkerError(line)
            log.info("%s", line)
