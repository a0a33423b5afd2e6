"""Stalls: whether a run gets anywhere, and which process waits for which when nothing is trained."""

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
    """Return a line of every process, its activity and since when, the longest one first."""
    parts = []
    for name, pulse in sorted(pulses.items(), key=lambda item: item[1].began):
        owed = f" ({owes[name]})" if owes.get(name) else ""
        began = pulse.since if pulse.activity is Activity.WORKING else pulse.began
        parts.append(f"{name} {VERBS[pulse.activity]} since {now - began:.1f} s{owed}")
    parts += [f"{name} is started again in {max(0.0, due - now):.1f} s" for name, due in dead.items()]
    return ", ".join(parts)


def all_wait_since(pulses: Mapping[str, Pulse], *, complete: bool) -> float | None:
    """Return when the last process began to wait; None while one does something, or is not there."""
    if not complete or any(pulse.activity is not Activity.WAITING for pulse in pulses.values()):
        return None
    return max((pulse.began for pulse in pulses.values()), default=None)


@dataclass
class Stall:
    """A time without training, and whether it is the end.

    An environment may be so slow that a batch takes minutes. So time alone ends no run: workers must have died
    meanwhile, and it must be much longer than it ever took before; or all of them wait, which only a lost message can
    explain.

    Attributes:
        patience_seconds: nothing is the end before.
        progress: of the run, any number that grows.
        since: when it last grew.
        longest: time that it ever took to grow.
        deaths: since then.
    """

    patience_seconds: float = 60.0
    progress: int = -1
    since: float = 0.0
    longest: float = 0.0
    deaths: int = 0
    _said: float = field(default=0.0, repr=False)

    def note(self, now: float, progress: int) -> None:
        """Look at the progress now."""
        if progress != self.progress:
            if self.progress > 0:
                self.longest = max(self.longest, now - self.since)
            self.progress, self.since, self.deaths, self._said = progress, now, 0, now

    def hopeless(self, now: float, all_wait_since: float | None) -> bool:
        """Return whether the run shall end.

        Args:
            now: monotonic seconds.
            all_wait_since: when the last worker began to wait; None while one works or is started.
        """
        limit = max(self.patience_seconds, 3 * self.longest)
        waited = 0.0 if all_wait_since is None else now - max(self.since, all_wait_since)
        return waited >= self.patience_seconds or (self.deaths >= MAX_FAULTS and now - self.since >= limit)

    def worth_saying(self, now: float, every_seconds: float) -> bool:
        """Return whether it is time for a line about it: later and later."""
        if now - self._said < max(every_seconds, 2 * self.longest, self._said - self.since):
            return False
        self._said = now
        return True


class StallWatch:
    """Looks at a run from time to time.

    Args:
        progress: what has been done, and who owes what.
        grows: the number that must grow.
        patience_seconds: how long it may stay before that is the end.
    """

    def __init__(
        self, progress: Progress, grows: Callable[[], int], patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.progress, self.grows = progress, grows
        self.stall = Stall(patience_seconds)
        self._due = 0.0
        self._deaths = 0

    def look(self, supervisor: Supervisor, now: float) -> None:
        """Log which process waits for which if nothing has been trained for a while.

        Raises:
            WorkerError: there is no hope that anything will be trained any more.
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
        if self.stall.hopeless(now, all_wait_since(pulses, complete=not supervisor.due)):
            last = supervisor.last_death
            line = who_waits(pulses, self._owed(pulses), supervisor.due, now)
            summary = f"{nothing}: {last.cause if last else line}"
            raise WorkerError(summary, last.exit_code if last else 1, last.traceback if last else "")
        if self.stall.worth_saying(now, SAY_AFTER_SECONDS):
            log.info("%s: %s", nothing, who_waits(pulses, self._owed(pulses), supervisor.due, now))

    def _owed(self, pulses: Mapping[str, Pulse]) -> dict[str, str]:
        return {name: self.progress.owes(name) for name in pulses}
