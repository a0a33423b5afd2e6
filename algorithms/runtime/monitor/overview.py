"""An overview of a run at one moment: the panel draws it, JSON lines and `status.json` hold it."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from appo.algorithms.runtime.monitor.performance import Performance
from appo.utils import machine

MEMORY_SECONDS = 10.0  # between looks at the memory of all processes

MIB = 1 << 20

MEMORY_COST = 1000  # a look that takes a second is repeated after so many at the earliest


@dataclass(frozen=True)
class Overview:
    """The figures of a run at one moment; None stands for what is not known yet.

    Attributes:
        elapsed_seconds: of all starts.
        seconds_left: an estimate.
        share: of the budget that is used up, of whichever limit is nearest; None where there is no limit, but perhaps
            a return to be reached.
        env_steps, samples, discarded: of all policies together.
        restarts, env_rebuilds: how often processes were started again, and environments made again.
        memory_bytes: of all processes of the run.
        performance: where the time goes.
        policies: a record of each, as metrics.jsonl has it.
        warnings: the last ones, each one line that begins with the time of day.
        line: progress, speed, lag, return and time left in one line, for people; not in `plain`.
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
        """Return all of it as JSON knows it; every name is always there."""
        plain = asdict(self) | {"performance": self.performance.plain() if self.performance else None}
        del plain["line"]
        return plain


class MemoryMeter:
    """Memory of the processes of a run, looked at so seldom that it costs no more than a thousandth of a core."""

    def __init__(self) -> None:
        self._due = 0.0
        self._main_and_all: tuple[int, int] | None = None

    def read(self, now: float) -> int | None:
        """Return the memory of all processes at the last look, which may be now (monotonic time)."""
        if now >= self._due:
            began = time.perf_counter()
            self._main_and_all = machine.family_memory_bytes()
            self._due = now + max(MEMORY_SECONDS, MEMORY_COST * (time.perf_counter() - began))
        return self._main_and_all and self._main_and_all[1]

    def tags(self, now: float) -> dict[str, float]:
        """Return TensorBoard tag -> MiB at the last look, of all processes and of main, as far as known."""
        self.read(now)
        if self._main_and_all is None:
            return {}
        main, total = self._main_and_all
        return {"perf/memory_mib": total / MIB, "perf/memory_main_mib": main / MIB}


memory = MemoryMeter()  # of this process and its descendants, of which there is one family
