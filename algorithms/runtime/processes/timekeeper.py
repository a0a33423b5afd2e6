"""Reports of the time that a process spends per phase."""

from appo.algorithms.runtime.messages import TimeReport
from appo.utils.system.usage import Descendants
from appo.utils.timing import ENV, PHASES, clock


class Timekeeper:
    """Reads the clock of the process once a second.

    Args:
        runs_environments: whether child processes, such as games, do the work of environments.
    """

    def __init__(self, process: str, role: str, *, runs_environments: bool) -> None:
        self.process, self.role = process, role
        self._children = Descendants() if runs_environments else None
        self.begin()

    def begin(self) -> None:
        """Restart the clock."""
        clock.restart()
        self._reported_ns = clock.started_ns
        self._children_before = self._children.cpu_seconds() if self._children else 0.0

    def due(self) -> bool:
        """Return whether the last report is a second old."""
        return clock.entered_ns - self._reported_ns >= 1_000_000_000

    def report(self) -> TimeReport:
        """Return the time per phase since `begin`."""
        seconds, cpu_seconds = clock.spent()
        self._reported_ns = clock.entered_ns
        if self._children:
            children = self._children.cpu_seconds() - self._children_before
            cpu_seconds[PHASES[ENV]] = cpu_seconds.get(PHASES[ENV], 0.0) + children
        return TimeReport(
            self.process, self.role, clock.started_ns, seconds, cpu_seconds, clock.collected, clock.trained
        )
