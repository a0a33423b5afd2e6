"""The clock of a process, which splits time among phases.

A boundary between phases costs a fraction of a microsecond. The CPU clock needs a system call, so the share of CPU time
in a phase (the rest is waiting for a core, a device or another process) is sampled, up to 20 times a second and phase.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

PHASES = ("framework", "env", "reset", "inference", "training", "copying", "waiting", "waiting_for_slots")
FRAMEWORK, ENV, RESET, INFERENCE, TRAINING, COPYING, WAITING, WAITING_FOR_SLOTS = range(len(PHASES))
SAMPLE_INTERVAL_NS = 50_000_000  # of a phase; more often than the scheduler looks costs switches between processes


class Spent(NamedTuple):
    """Seconds by phase since the start of the clock, without phases that never began."""

    seconds: dict[str, float]  # wall time; the sum is the time since the start
    cpu_seconds: dict[str, float]  # CPU time of all threads; the sum is the CPU time of the process


class PhaseClock:
    """Splits the time of one thread among phases; unmarked time is the framework's.

    Attributes:
        phase: present phase.
        started_ns: wall time at the start.
        entered_ns: wall time at the last boundary.
        collected: number of valid steps of environments in this process.
        trained: number of samples that this process trained on.
        parked: number of groups of environments without a free slot; above 0, waiting counts as waiting for slots.
    """

    def __init__(
        self, wall_ns: Callable[[], int] = time.perf_counter_ns, cpu_ns: Callable[[], int] = time.process_time_ns
    ) -> None:
        self._wall_ns, self._cpu_ns = wall_ns, cpu_ns
        self.restart()

    def restart(self) -> None:
        """Set all times and counts to 0."""
        count = len(PHASES)
        self.phase, self.collected, self.trained, self.parked = FRAMEWORK, 0, 0, 0
        self._wall, self._cpu = [0] * count, [0.0] * count
        self._split_wall = [0] * count  # part of `_wall` with known CPU time
        self._due, self._sampling = [0] * count, False
        self._sampled_wall, self._sampled_cpu = [0] * count, [0] * count  # since the last split
        self._cpu_share = [1.0] * WAITING + [0.0] * (count - WAITING)
        self._split_cpu_ns = self._sample_began = self._cpu_ns()
        self.started_ns = self.entered_ns = self._wall_ns()

    def enter(self, phase: int) -> int:
        """Begin a phase; return the phase before."""
        now, before = self._wall_ns(), self.phase
        spent = now - self.entered_ns
        self._wall[before] += spent
        if self._sampling:
            self._sampled_cpu[before] += self._cpu_ns() - self._sample_began
            self._sampled_wall[before] += spent
            self._sampling = False
        if now >= self._due[phase]:
            self._due[phase] = now + SAMPLE_INTERVAL_NS
            self._sample_began = self._cpu_ns()
            self._sampling = True
        self.entered_ns, self.phase = now, phase
        return before

    def wait(self) -> None:
        """Begin to wait, for a slot or another process."""
        self.enter(WAITING_FOR_SLOTS if self.parked else WAITING)

    def spent(self) -> Spent:
        """Return the time spent so far."""
        self.enter(self.phase)
        self._split()
        used = [phase for phase, wall in enumerate(self._wall) if wall]
        return Spent(
            {PHASES[phase]: self._wall[phase] / 1e9 for phase in used},
            {PHASES[phase]: self._cpu[phase] / 1e9 for phase in used},
        )

    def _split(self) -> None:
        """Split the CPU time of the process since the last call by the shares in the samples."""
        cpu = self._cpu_ns()
        spent, self._split_cpu_ns = cpu - self._split_cpu_ns, cpu
        for phase, wall in enumerate(self._sampled_wall):
            if wall:
                self._cpu_share[phase] = self._sampled_cpu[phase] / wall
                self._sampled_wall[phase] = self._sampled_cpu[phase] = 0
        walls = [wall - before for wall, before in zip(self._wall, self._split_wall, strict=True)]
        guesses = [wall * share for wall, share in zip(walls, self._cpu_share, strict=True)]
        self._split_wall = list(self._wall)
        total = sum(guesses)
        if not total:
            self._cpu[self.phase] += spent
        for phase, guess in enumerate(guesses if total else ()):
            self._cpu[phase] += spent * guess / total


clock = PhaseClock()
"""Clock of this process."""
