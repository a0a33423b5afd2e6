"""How a run is at one moment: what the panel draws, JSON lines say and `status.json` keeps."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from algorithms.runtime.performance import Performance
from utils import cpu
from utils.logging import recent_warnings

if TYPE_CHECKING:
    from algorithms.runtime.monitor import Monitor

MEMORY_SECONDS = 10.0  # between looks at the memory of all processes
MEMORY_COST = 1000  # a look that takes a second is repeated after so many at the earliest


@dataclass(frozen=True)
class Overview:
    """A run at one moment; None is what is not known yet.

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

    def plain(self) -> dict[str, Any]:
        """All of it as JSON knows it; every name is always there."""
        return asdict(self) | {"performance": self.performance.plain() if self.performance else None}


class MemoryMeter:
    """Memory of all processes of a run, looked at so seldom that it costs no more than a thousandth of a core."""

    def __init__(self) -> None:
        self._due = 0.0
        self._bytes: int | None = None

    def read(self, now: float) -> int | None:
        """What it was at the last look, which may be now (monotonic time)."""
        if now >= self._due:
            began = time.perf_counter()
            self._bytes = cpu.family_memory_bytes()
            self._due = now + max(MEMORY_SECONDS, MEMORY_COST * (time.perf_counter() - began))
        return self._bytes


memory = MemoryMeter()  # of this process and its descendants, of which there is one family


def overview_of(monitor: "Monitor", now: float) -> Overview:
    """How the run that the monitor listens to is at this monotonic time."""
    totals = monitor.totals()
    return Overview(
        elapsed_seconds=round(monitor.elapsed_seconds(now), 3),
        seconds_left=monitor.seconds_left(now),
        share=monitor.limits.share(monitor.policies, totals.get("actors_collected", 0), now - monitor.started),
        env_steps=totals["env_steps"],
        samples=totals["samples"],
        discarded=totals["discarded"],
        restarts=monitor.restarts,
        env_rebuilds=totals.get("actors_rebuilds", 0),
        memory_bytes=memory.read(now),
        performance=monitor.performance(),
        policies=tuple(monitor.record(policy, now) for policy in range(len(monitor.policies))),
        warnings=recent_warnings(),
    )
