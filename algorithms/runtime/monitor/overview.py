"""The overview of a run at one moment, for the panel, JSON lines and `status.json`."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from appo.algorithms.runtime.monitor.performance import Performance
from appo.utils.system import usage

MIB = 1 << 20


@dataclass(frozen=True)
class Overview:
    """The figures of a run at one moment; an unknown figure is None.

    Attributes:
        elapsed_seconds: training time of all starts.
        seconds_left: estimate of the remaining time.
        share: used share of the budget, for the nearest limit; None without a limit, also with a return to reach.
        env_steps: env steps of all policies.
        samples: samples of all policies.
        discarded: discarded samples of all policies.
        restarts: number of restarts of processes.
        env_rebuilds: number of times an environment was created again.
        memory_bytes: memory of all processes of the run.
        performance: use of time.
        policies: record of each policy, as in metrics.jsonl.
        warnings: latest warnings, each a line that begins with the time of day.
        line: progress, speed, lag, return and remaining time in one line, for people; not in `plain`.
    """

    elapsed_seconds: float
    seconds_left: float | None
    share: float | None
    env_steps: int
    samples: int
    discarded: int
    restarts: int
    env_rebuilds: int
    memory_bytes: int | None
    performance: Performance | None
    policies: tuple[Mapping[str, float], ...]
    warnings: tuple[str, ...]
    line: str = field(default="", compare=False)

    def plain(self) -> dict[str, Any]:
        """Return the overview as JSON values; no name is ever missing."""
        plain = asdict(self) | {"performance": self.performance.plain() if self.performance else None}
        del plain["line"]
        return plain


class MemoryMeter:
    """Memory of the processes of a run; readings cost at most a thousandth of a core."""

    def __init__(self) -> None:
        self._due = 0.0
        self._main_and_all: tuple[int, int] | None = None

    def read(self, now: float) -> int | None:
        """Return the memory of all processes at the last reading, perhaps at monotonic time `now`."""
        if now >= self._due:
            began = time.perf_counter()
            self._main_and_all = usage.family_memory_bytes()
            self._due = now + max(10.0, 1000 * (time.perf_counter() - began))
        return self._main_and_all and self._main_and_all[1]

    def tags(self, now: float) -> dict[str, float]:
        """Return TensorBoard tag -> MiB at the last reading, of all processes and of main, as far as known."""
        self.read(now)
        if self._main_and_all is None:
            return {}
        main, total = self._main_and_all
        return {"perf/memory_mib": total / MIB, "perf/memory_main_mib": main / MIB}


memory = MemoryMeter()  # of main and its descendants
