"""`status.json`: how a run is, for whoever looks in from outside."""

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

from algorithms.runtime.monitor import Monitor
from algorithms.runtime.overview import overview_of
from utils.errors import UsageError
from utils.files import read_mapping, write_json_atomic

STATUS_FILE = "status.json"
STATUS_SECONDS = 2.0


class Status:
    """Writes the state of a run with its counters. A full disk costs what would have been written, nothing else.

    Args:
        directory: of the run.

    Attributes:
        monitor: whose counters are written, as soon as there is one.
        budget: of the run, as plain values, as soon as it is known.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / STATUS_FILE
        self.monitor: Monitor | None = None
        self.budget: dict[str, float | None] = {}
        self._due = -math.inf

    def tick(self, now: float) -> None:
        """While training: write every few seconds of this monotonic clock, without waiting for the disk."""
        if now >= self._due:
            self._due = now + STATUS_SECONDS
            self._write("training", "", durable=False)

    def write(self, state: str, reason: str = "") -> None:
        """Write that the run is in this state now, and why."""
        self._write(state, reason, durable=True)

    def _write(self, state: str, reason: str, *, durable: bool) -> None:
        status = {"state": state, "reason": reason, "pid": os.getpid(), "time": time.time()}
        if self.monitor is not None:
            status |= _counters(self.monitor)
        with contextlib.suppress(OSError):
            write_json_atomic(
                self.path, {"totals": {}, "return_mean": [], **status, "budget": self.budget}, durable=durable
            )


def read_status(directory: Path) -> dict[str, Any]:
    """What was last written; {} where there is nothing that can be read."""
    try:
        return read_mapping(directory / STATUS_FILE, own=True)
    except UsageError:
        return {}


def _counters(monitor: Monitor) -> dict[str, object]:
    now = time.monotonic()
    means = [p.episode_return.mean for p in monitor.policies if p.episodes]
    return {
        **overview_of(monitor, now).plain(),
        "seconds": round(now - monitor.started, 3),  # of this start
        "totals": monitor.totals(),
        "return_mean": [mean if math.isfinite(mean) else None for mean in means],
    }
