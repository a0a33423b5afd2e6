"""Weights & Biases beside our own figures, in a process of its own that nothing here waits for.

Main writes JSON lines into a pipe without ever blocking; what does not fit is dropped. So a tracker that hangs, dies or
cannot reach its server costs figures there and nothing else. Run as a script, this file is that process.
"""

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.runtime.processes.janitor import Janitor

log = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
CLOSE_SECONDS = 5.0
WAITING_RECORDS = 1000
LONGEST_NAME = 100  # of a run in its id, which has 128 characters at most
LOCATION_FLAGS = ("train_dir", "experiments_root", "config", "init_from")
HEAD = ("elapsed_seconds", "env_steps", "samples", "discarded", "policy")


class Tracker:
    """Main's end of it.

    Args:
        settings: arguments of `wandb.init`.
        log_path: what the process prints goes there.
        janitor: ends it should main be killed.

    Attributes:
        pid: of the process, which leads a group.
        dropped: records that were not taken.
    """

    def __init__(self, settings: Mapping[str, object], log_path: Path, janitor: "Janitor") -> None:
        from utils.run_folder import append_to_own  # not at the top: as a script this file finds no package of ours

        self.log_path, self.janitor, self.dropped = log_path, janitor, 0
        with os.fdopen(append_to_own(log_path), "ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 (our own file)
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                process_group=0,  # no session: the scheduler may share the cores between sessions first
            )
        self.pid = self._process.pid
        janitor.watch(self.pid)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(OSError):  # beyond what the system allows
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._rest = b""
        self._alive = True
        self._send(settings)

    def add(self, policy: int, record: Mapping[str, float]) -> None:
        """Hand over a record of metrics.jsonl; returns at once."""
        finite = {name: float(value) for name, value in record.items() if math.isfinite(value)}
        self._send({**finite, "policy": policy})

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Let it send what it has, but for no longer than this, and end it."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(OSError):
            self._flush()
        self._process.stdin.close()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("the tracker did not end within %g s and is killed; see %s", timeout_seconds, self.log_path)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # and what it has started
            os.killpg(self.pid, signal.SIGKILL)
        self.janitor.forget(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        if self.dropped:
            log.warning("%d records were not sent to the tracker", self.dropped)

    def _send(self, value: Mapping[str, object]) -> None:
        """Queue a line in the pipe; one that has begun is finished before the next."""
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
            self._alive = False
            self.dropped += 1
            log.warning("the tracker has ended: its figures are not sent any more; see %s", self.log_path)

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[os.write(self._pipe, self._rest) :]


def wandb_settings(flags: Mapping[str, Any], begun: float) -> dict[str, object]:
    """The arguments of `wandb.init` for the flags of a run; the same run goes on under the same id.

    Nothing in them names a folder of this machine.

    Args:
        flags: of the run, with its seed.
        begun: when (seconds since 1970): names and seeds come again in other groups of runs, and after
            --restart_behavior.
    """
    shared = {name: value for name, value in flags.items() if name not in LOCATION_FLAGS}
    origin = hashlib.sha256(repr((flags["experiments_root"], flags["seed"], begun)).encode()).hexdigest()
    return {
        "project": flags["wandb_project"],
        "entity": flags["wandb_user"] or None,
        "group": flags["wandb_group"] or flags["experiments_root"] or None,
        "job_type": flags["wandb_job_type"] or None,
        "tags": list(flags["wandb_tags"]),
        "name": flags["experiment"],
        "id": f"{flags['experiment'][:LONGEST_NAME]}-{origin[:12]}",
        "resume": "allow",
        "config": shared,
    }


def is_installed() -> bool:
    """Whether there is something to track with."""
    return importlib.util.find_spec("wandb") is not None


class _Lines(threading.Thread):
    """Reads what main says as soon as it comes, so that a slow tracker drops the oldest and never fills the pipe."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.waiting: deque[dict[str, Any]] = deque(maxlen=WAITING_RECORDS)
        self.changed = threading.Condition()
        self.ended = False

    def run(self) -> None:
        for line in sys.stdin.buffer:
            with self.changed:
                self.waiting.append(json.loads(line))
                self.changed.notify()
        with self.changed:
            self.ended = True
            self.changed.notify()

    def next(self) -> dict[str, Any] | None:
        """The oldest line; None when there are no more."""
        with self.changed:
            while not self.waiting and not self.ended:
                self.changed.wait(1.0)
            return self.waiting.popleft() if self.waiting else None


def _main() -> None:
    for name in ("INT", "TERM", "HUP", "QUIT", "USR2", "ALRM"):  # main ends it
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    first = sys.stdin.buffer.readline()
    if not first:
        return
    settings = json.loads(first)
    lines = _Lines()
    lines.start()
    wandb = importlib.import_module("wandb")
    run = wandb.init(**settings)
    while (record := lines.next()) is not None:
        policy = record.pop("policy")
        prefix = f"p{policy}/" if settings["config"].get("num_policies", 1) > 1 else ""
        run.log({name if name in HEAD else prefix + name: value for name, value in record.items()})
    run.finish()


if __name__ == "__main__":
    _main()
