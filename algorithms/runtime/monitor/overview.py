"""An overview of a run at one moment: the panel draws it, JSON lines and `status.json` hold it."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.monitor.performance import Performance
from appo.utils.run_folder import RunFolder, update_own, write_json_atomic
from appo.utils.system import usage

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
            self._main_and_all = usage.family_memory_bytes()
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


# `status.json`: how a run is, for whoever looks in from outside.


STATUS_SECONDS = 2.0

SHORT = ("state", "reason", "pid", "time", "totals", "return_mean", "budget", "seconds", "elapsed_seconds", "env_steps")
"""What is most worth to be known of a status where there is no room for all of it."""

DURABLE_SECONDS = 3.0  # that a state which lasts may take to be on disk


class Status:
    """Writes the state of a run with its counters. A full disk costs what would have been written, nothing else.

    Args:
        directory: of the run.

    Attributes:
        counters: what else is written each time, as soon as there is something to count.
        budget: of the run, as plain values, as soon as it is known.
        machine: that the run has, as plain values.
        disk: does the writing, here and for others of the run in main.
    """

    def __init__(self, directory: Path) -> None:
        self.path = RunFolder(directory).status
        self.counters: Callable[[], Mapping[str, object]] = dict
        self.budget: dict[str, float | None] = {}
        self.machine: Mapping[str, object] = {}
        self.disk = DiskThread("files")
        self._due = -math.inf

    def tick(self, now: float) -> None:
        """Write, while training, every few seconds of this monotonic clock, without waiting for the disk."""
        if now >= self._due:
            self._due = now + STATUS_SECONDS
            self._write("training", "", durable=False)

    def write(self, state: str, reason: str = "") -> None:
        """Write that the run is in this state now, and why."""
        self._write(state, reason, durable=True)

    def _write(self, state: str, reason: str, *, durable: bool) -> None:
        status = {"state": state, "reason": reason, "pid": os.getpid(), "time": time.time()}
        status |= self.counters()
        status = {"totals": {}, "return_mean": [], **status, "budget": self.budget, "machine": self.machine}
        write = partial(_write_status, self.path, status, durable=durable)
        if durable:
            self.disk.do(write, DURABLE_SECONDS)
        else:
            self.disk.do(write, keep=False)  # there will be a newer one


def _write_status(path: Path, status: Mapping[str, object], *, durable: bool) -> None:
    try:
        write_json_atomic(path, status, durable=durable)
    except OSError:
        if durable:  # how the run has ended must not stay unknown
            with contextlib.suppress(OSError):
                _write_in_place(path, status)


def _write_in_place(path: Path, status: Mapping[str, object]) -> None:
    """Overwrite a status, as far as it fits: a full disk takes no new file, but the bytes that this one has."""
    descriptor = update_own(path)
    try:
        room = os.fstat(descriptor).st_size
        short = {name: status[name] for name in SHORT if name in status}
        texts = (json.dumps(one, allow_nan=False).encode() for one in (status, short))
        if text := next((text for text in texts if len(text) < room), None):
            os.pwrite(descriptor, text.ljust(room - 1) + b"\n", 0)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
