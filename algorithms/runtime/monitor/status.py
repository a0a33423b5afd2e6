"""`status.json`: the state of a run, for readers outside of the run."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from appo.algorithms.runtime.disk import DiskThread
from appo.utils.directories import closing
from appo.utils.run_folder import RunFolder, update_own, write_json_atomic

STATUS_SECONDS = 2.0
SHORT = (
    *("state", "reason", "pid", "time", "totals", "return_mean"),
    *("budget", "seconds", "elapsed_seconds", "env_steps", "share"),
)
"""Most important names, for a status that does not fit on the disk as a whole."""

DURABLE_SECONDS = 3.0  # to write a lasting state to the disk


class Status:
    """Writes the state of a run with counters. A full disk costs only the lost writes.

    Attributes:
        counters: function that returns further entries.
        budget: budget of the run, as JSON values; empty until known.
        machine: machine of the run, as JSON values.
        disk: thread that writes files, shared by main's writers.
    """

    def __init__(self, directory: Path) -> None:
        self.path = RunFolder(directory).status
        self.counters: Callable[[], Mapping[str, object]] = dict
        self.budget: dict[str, float | None] = {}
        self.machine: Mapping[str, object] = {}
        self.disk = DiskThread("files")
        self._due = -math.inf

    def tick(self, now: float) -> None:
        """Write the state "training" every few seconds of monotonic time, without waiting for the disk."""
        if now >= self._due:
            self._due = now + STATUS_SECONDS
            self.write("training", durable=False)

    def write(self, state: str, reason: str = "", *, durable: bool = True) -> None:
        """Write a state of the run and the reason; wait for the disk if `durable`, at most `DURABLE_SECONDS`."""
        status = {"state": state, "reason": reason, "pid": os.getpid(), "time": time.time()}
        status |= self.counters()
        status = {"totals": {}, "return_mean": [], **status, "budget": self.budget, "machine": self.machine}
        write = partial(_write_status, self.path, status, durable=durable)
        if durable:
            self.disk.do(write, DURABLE_SECONDS)
        else:
            self.disk.do(write, keep=False)  # a newer state follows


def _write_status(path: Path, status: Mapping[str, object], *, durable: bool) -> None:
    try:
        write_json_atomic(path, status, durable=durable)
    except OSError:
        if durable:  # the end of a run must be recorded
            with contextlib.suppress(OSError):
                _write_in_place(path, status)


def _write_in_place(path: Path, status: Mapping[str, object]) -> None:
    """Overwrite the bytes of the existing file, as far as the status fits: a full disk takes no new file."""
    with closing(update_own(path)) as descriptor:
        room = os.fstat(descriptor).st_size
        short = {name: status[name] for name in SHORT if name in status}
        texts = (json.dumps(one, allow_nan=False).encode() for one in (status, short))
        if text := next((text for text in texts if len(text) < room), None):
            os.pwrite(descriptor, text.ljust(room - 1) + b"\n", 0)
            os.fsync(descriptor)
