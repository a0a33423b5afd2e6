"""Main's end of a tracker: Weights & Biases, Trackio or MLflow in a process of its own (`tracker_process.py`).

Main writes JSON lines into a pipe and never blocks; records that do not fit are dropped. A tracker that hangs, dies or
cannot reach its server therefore costs figures at the tracker and nothing else.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from appo.algorithms.runtime.monitor import tracker_process
from appo.algorithms.runtime.monitor.tracker_process import FAULT, NOTHING_SENT
from appo.algorithms.runtime.monitor.trackers import TRACKERS
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.processes.restarts import Revival
from appo.utils.run_folder import append_to_own, open_own

log = logging.getLogger(__name__)

END_SECONDS = 1.0  # for the kernel to end a killed process
FAULT_BYTES = 1 << 16  # at the end of the log, searched for the line of the failure


class Tracker:
    """Main's end of a tracker.

    Attributes:
        pid: pid of the process, which leads a process group.
        dropped: number of records that were not sent.
    """

    def __init__(self, name: str, settings: Mapping[str, object], log_path: Path, janitor: Janitor) -> None:
        self.name, self.settings, self.log_path, self.janitor, self.dropped = name, settings, log_path, janitor, 0
        self._revival = Revival(f"the tracker {name}", log_path)
        self._start(time.monotonic())

    def _start(self, now: float) -> None:
        with os.fdopen(append_to_own(self.log_path, make=True), "ab") as output:
            self._log_begins = output.tell()
            self._process = subprocess.Popen(  # noqa: S603 (our own file)
                [sys.executable, "-P", tracker_process.__file__],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                process_group=0,  # no session: the scheduler may share the cores between sessions first
            )
        self.pid = self._process.pid
        self.janitor.watch(self.pid)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        with contextlib.suppress(OSError):  # above the limit of the system
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._rest, self._alive = b"", True
        self._revival.began(now)
        self._send({"tracker": self.name, "settings": self.settings})

    def look(self, now: float) -> None:
        """Log the end of the process, and restart it under the same id when due."""
        if self._alive and self._process.poll() is not None:
            self._lose(now)
        elif self._revival.is_due(now):
            try:
                self._start(now)
            except OSError as error:
                log.warning("%s", self._revival.not_started(now, error))

    def plain(self) -> dict[str, object]:
        """Return the entry of the tracker in status.json."""
        return self._revival.plain()

    def add(self, policy: int, record: Mapping[str, float]) -> None:
        """Send a record of metrics.jsonl without blocking."""
        self._send({name: float(x) for name, x in record.items() if math.isfinite(x)} | {"policy": policy})

    def end(self) -> None:
        """Close the pipe: the process sends the remaining records and ends."""
        if not self._pipe.closed:
            with contextlib.suppress(OSError):
                self._flush()
            self._pipe.close()
            self._alive = False

    def close(self, timeout_seconds: float) -> None:
        """Wait until the process has sent the remaining records, at most `timeout_seconds`, then kill the process."""
        self.end()
        if self._process.returncode is None:
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                log.warning(
                    "the tracker %s did not end within %g s and is killed; see %s",
                    self.name,
                    timeout_seconds,
                    self.log_path,
                )
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_seconds)
        if self.dropped:
            log.warning("%d records were not sent to the tracker %s", self.dropped, self.name)

    def _lose(self, now: float) -> None:
        """Clean up after a process that ended or closed the pipe, and plan the restart."""
        self._alive = False
        self._kill()
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # blocked in the kernel
            self._process.wait(END_SECONDS)
        fault = self._fault() if self._process.returncode == NOTHING_SENT else ""
        line = self._revival.ended(now, self._process.returncode, fault)
        log.warning("%s%s", line, f" ({TRACKERS[self.name].remedy})" if self._revival.given_up else "")

    def _fault(self) -> str:
        """Return the failure that the process logged, without numbers that differ between starts."""
        lines: list[str] = []
        with contextlib.suppress(OSError), open_own(self.log_path) as file:  # the folder of the run may be gone
            file.seek(max(self._log_begins, file.seek(0, os.SEEK_END) - FAULT_BYTES))
            lines = file.read(FAULT_BYTES).decode(errors="replace").splitlines()
        faults = [line.removeprefix(FAULT) for line in lines if line.startswith(FAULT)]
        return re.sub(r"\d{4,}|0x[0-9a-f]+", "...", faults[-1]) if faults else ""

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.janitor.forget(self.pid)

    def _send(self, value: Mapping[str, object]) -> None:
        """Write a line into the pipe, or drop the value while an earlier line is unfinished."""
        if not self._alive:
            self.dropped += 1
            return
        try:
            self._flush()
            if self._rest:
                self.dropped += 1
                return
            self._rest = json.dumps(value).encode() + b"\n"
            self._flush()
        except OSError:
            self.dropped += 1
            self._lose(time.monotonic())

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[os.write(self._pipe.fileno(), self._rest) :]
