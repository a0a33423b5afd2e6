"""Where the time of a process goes: its one clock is told at every boundary between phases, and by nobody else.

A boundary costs a fraction of a microsecond. The CPU clock needs a system call, so what share of a phase is CPU time
(the rest is spent waiting for a core, a device or another process) is sampled, up to 200 times a second and phase.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

PHASES = ("framework", "env", "reset", "inference", "training", "copying", "waiting", "waiting_for_slots")
FRAMEWORK, ENV, RESET, INFERENCE, TRAINING, COPYING, WAITING, WAITING_FOR_SLOTS = range(len(PHASES))
SAMPLE_INTERVAL_NS = 50_000_000  # of a phase; more often than the scheduler looks costs switches between processes


class Spent(NamedTuple):
    """Seconds by phase since the clock was started; a phase that never was is left out."""

    seconds: dict[str, float]  # wall time; they add up to the time since the start
    cpu_seconds: dict[str, float]  # CPU time of all threads; they add up to that of the process


class PhaseClock:
    """Splits the time of one thread among phases; in the beginning, and between all others, it is the framework's.

    Args:
        wall_ns, cpu_ns: the clocks of wall and CPU time.

    Attributes:
        phase: the present one.
        started_ns, entered_ns: wall time at the start and at the last boundary.
        collected: valid steps taken by environments of this process.
        trained: samples that this process trained on.
        parked: groups of environments that have no free slot; while there are any, waiting is for slots.
    """

    def __init__(
        self, wall_ns: Callable[[], int] = time.perf_counter_ns, cpu_ns: Callable[[], int] = time.process_time_ns
    ) -> None:
        self._wall_ns, self._cpu_ns = wall_ns, cpu_ns
        self.restart()

    def restart(self) -> None:
        """Begin anew, now."""
        count = len(PHASES)
        self.phase, self.collected, self.trained, self.parked = FRAMEWORK, 0, 0, 0
        self._wall, self._cpu = [0] * count, [0.0] * count
        self._split_wall = [0] * count  # of `_wall`, that has its CPU time
        self._due, self._sampling = [0] * count, False
        self._sampled_wall, self._sampled_cpu = [0] * count, [0] * count  # since the last split
        self._cpu_share = [1.0] * WAITING + [0.0] * (count - WAITING)
        self._split_cpu_ns = self._sample_began = self._cpu_ns()
        self.started_ns = self.entered_ns = self._wall_ns()

    def enter(self, phase: int) -> int:
        """From now on it is this phase; the one before."""
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
        """From now on it waits, for a slot or for anything else."""
        self.enter(WAITING_FOR_SLOTS if self.parked else WAITING)

    def spent(self) -> Spent:
        """How the time was spent up to now."""
        self.enter(self.phase)
        self._split()
        used = [phase for phase, wall in enumerate(self._wall) if wall]
        return Spent(
            {PHASES[phase]: self._wall[phase] / 1e9 for phase in used},
            {PHASES[phase]: self._cpu[phase] / 1e9 for phase in used},
        )

    def _split(self) -> None:
        """Split the CPU time of the process since the last call, as the samples since then say."""
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
            return
        for phase, guess in enumerate(guesses):
            self._cpu[phase] += spent * guess / total


clock = PhaseClock()
"""Of this process."""
