"""Trackers beside our own figures: Weights & Biases, Trackio, MLflow, each in a process that nothing here waits for.

Main writes JSON lines into a pipe without ever blocking; what does not fit is dropped. So a tracker that hangs, dies or
cannot reach its server costs figures there and nothing else. Run as a script, this file is that process: it imports the
tracker's package, and no other process does.

A further tracker is a row of `TRACKERS`: its package, what it is told of the run, and a class with `log` and `finish`.
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
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

if TYPE_CHECKING:
    from appo.algorithms.runtime.processes.janitor import Janitor

log = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
CLOSE_SECONDS = 5.0
END_SECONDS = 1.0  # in which the kernel takes it away
NOTHING_SENT = 3  # exit code of a tracker's process that failed before it had sent a record
FAULT = "error: "  # begins the line of its log that names the failure
FAULT_BYTES = 1 << 16  # of the end of the log, in which that line is looked for
WAITING_RECORDS = 1000
LONGEST_NAME = 100  # of a run in its id, which has 128 characters at most
LOCATION_FLAGS = ("train_dir", "experiments_root", "config", "init_from")
HEAD = ("elapsed_seconds", "env_steps", "samples", "discarded", "policy")


class Tracker:
    """Main's end of a tracker.

    Args:
        name: in `TRACKERS`.
        settings: of the run, as that row makes them.
        log_path: what the process prints goes there.
        janitor: ends it should main be killed.

    Attributes:
        pid: of the process, which leads a group.
        dropped: records that were not taken.
    """

    def __init__(self, name: str, settings: Mapping[str, object], log_path: Path, janitor: "Janitor") -> None:
        from appo.algorithms.runtime.processes.restarts import Revival  # as a script this file finds no package of ours

        self.name, self.settings, self.log_path, self.janitor, self.dropped = name, settings, log_path, janitor, 0
        self._revival = Revival(f"the tracker {name}", log_path)
        self._start(time.monotonic())

    def _start(self, now: float) -> None:
        from appo.utils.run_folder import append_to_own

        with os.fdopen(append_to_own(self.log_path, make=True), "ab") as output:
            self._log_begins = output.tell()
            self._process = subprocess.Popen(  # noqa: S603 (our own file)
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                process_group=0,  # no session: the scheduler may share the cores between sessions first
            )
        self.pid = self._process.pid
        self.janitor.watch(self.pid)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(OSError):  # beyond what the system allows
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._rest = b""
        self._alive = True
        self._revival.began(now)
        self._send({"tracker": self.name, "settings": self.settings})

    def look(self, now: float) -> None:
        """Log that the process has ended, if it has; start it again, under the same id, when that is due."""
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
        """Hand over a record of metrics.jsonl; returns at once."""
        finite = {name: float(value) for name, value in record.items() if math.isfinite(value)}
        self._send({**finite, "policy": policy})

    def end(self) -> None:
        """Tell the process that nothing more comes, so that it sends what it has and ends."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._flush()
            self._process.stdin.close()
            self._alive = False

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Let the process send what it has, but for no longer than this, and end it."""
        self.end()
        if self._process.returncode is None:
            self._await(timeout_seconds)
        if self.dropped:
            log.warning("%d records were not sent to the tracker %s", self.dropped, self.name)

    def _await(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
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

    def _lose(self, now: float) -> None:
        """Note that the process has ended, or closed its end of the pipe."""
        self._alive = False
        self._kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel does not let it go
            self._process.wait(END_SECONDS)
        fault = self._fault() if self._process.returncode == NOTHING_SENT else ""
        line = self._revival.ended(now, self._process.returncode, fault)
        log.warning("%s%s", line, f" ({TRACKERS[self.name].remedy})" if self._revival.given_up else "")

    def _fault(self) -> str:
        """Return the failure that the process has written into its log, without what changes from start to start."""
        from appo.utils.run_folder import open_own

        lines: list[str] = []
        with contextlib.suppress(OSError), open_own(self.log_path) as file:  # the folder of the run may be gone
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_begins, end - FAULT_BYTES))
            lines = file.read(FAULT_BYTES).decode(errors="replace").splitlines()
        faults = [line.removeprefix(FAULT) for line in lines if line.startswith(FAULT)]
        return re.sub(r"\d{4,}|0x[0-9a-f]+", "...", faults[-1]) if faults else ""

    def _kill(self) -> None:
        """End the process with all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.janitor.forget(self.pid)

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
            self.dropped += 1
            self._lose(time.monotonic())

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[os.write(self._pipe, self._rest) :]


# What a tracker is told of a run: nothing in it names a folder of this machine.


def run_id(flags: Mapping[str, Any], begun: float) -> str:
    """Return the name of a run that no other has, and that it keeps when it goes on.

    Args:
        flags: of the run, with its seed.
        begun: when (seconds since 1970): names and seeds come again in other groups of runs, and after
            --restart_behavior.
    """
    origin = hashlib.sha256(repr((flags["experiments_root"], flags["seed"], begun)).encode()).hexdigest()
    return f"{flags['experiment'][:LONGEST_NAME]}-{origin[:12]}"


def _shared(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if name not in LOCATION_FLAGS}


def _group(flags: Mapping[str, Any]) -> str | None:
    return flags["wandb_group"] or flags["experiments_root"] or None


def wandb_settings(flags: Mapping[str, Any], begun: float) -> dict[str, object]:
    """Return the arguments of `wandb.init`."""
    return {
        "project": flags["wandb_project"],
        "entity": flags["wandb_user"] or None,
        "group": _group(flags),
        "job_type": flags["wandb_job_type"] or None,
        "tags": list(flags["wandb_tags"]),
        "name": flags["experiment"],
        "id": run_id(flags, begun),
        "resume": "allow",
        "config": _shared(flags),
    }


def trackio_settings(flags: Mapping[str, Any], begun: float) -> dict[str, object]:
    """Return the arguments of `trackio.init`. Trackio identifies a run by name, so the name is the id."""
    wandb = wandb_settings(flags, begun)
    return {name: wandb[name] for name in ("project", "group", "resume", "config")} | {"name": wandb["id"]}


def mlflow_settings(flags: Mapping[str, Any], begun: float) -> dict[str, object]:
    """Return the settings of `MlflowClient`."""
    tags = {"appo.id": run_id(flags, begun), "appo.group": _group(flags) or "", "appo.job": flags["wandb_job_type"]}
    words = {f"appo.tag.{number}": tag for number, tag in enumerate(flags["wandb_tags"])}
    return {
        "experiment": flags["wandb_project"],
        "run_name": flags["experiment"],
        "tags": {**tags, **words},
        "config": _shared(flags),
    }


# The process of a tracker.


class Client(Protocol):
    """A run at a tracker; made with the settings that the row of the tracker gives."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures at so many env steps."""
        ...

    def finish(self) -> None:
        """Send all that is left."""
        ...


class WandbClient:
    """A run at Weights & Biases, or at Trackio, whose package has the API of wandb.

    Args:
        package: name of the package.
        settings: arguments of the package's `init`.
    """

    def __init__(self, package: str, settings: Mapping[str, Any]) -> None:
        self._run = importlib.import_module(package).init(**settings)
        # Steps of W&B must increase, and several policies may be at equal env steps: W&B counts records instead.
        self._counts_records = package == "wandb"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures, which include the env steps."""
        self._run.log(dict(figures), **({} if self._counts_records else {"step": step}))

    def finish(self) -> None:
        """Send all figures that wait."""
        self._run.finish()


class MlflowClient:
    """A run at MLflow, where `MLFLOW_TRACKING_URI` says; a run that goes on is found by a tag of ours."""

    PARAMETERS_AT_ONCE, LONGEST_PARAMETER = 100, 500
    FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in the name of a metric

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._mlflow = mlflow = importlib.import_module("mlflow")
        experiment = mlflow.set_experiment(settings["experiment"])
        same = f"tags.`appo.id` = '{settings['tags']['appo.id']}'"
        found = mlflow.search_runs([experiment.experiment_id], filter_string=same, max_results=1, output_format="list")
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
            return
        mlflow.start_run(run_name=settings["run_name"], tags=settings["tags"])
        parameters = iter(settings["config"].items())
        while some := dict(islice(parameters, self.PARAMETERS_AT_ONCE)):
            mlflow.log_params({name: str(value)[: self.LONGEST_PARAMETER] for name, value in some.items()})

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures at so many env steps."""
        self._mlflow.log_metrics({self.FORBIDDEN.sub("_", name): value for name, value in figures.items()}, step=step)

    def finish(self) -> None:
        """Say that the run has ended."""
        self._mlflow.end_run()


class Kind(NamedTuple):
    """A kind of tracker.

    Attributes:
        package: that has to be installed, and the extra of ours that does it.
        settings: returns what it is told of a run, by its flags and when it began.
        client: a run at it, made of that in the process of the tracker.
        remedy: what a user can do where each start fails.
    """

    package: str
    settings: Callable[[Mapping[str, Any], float], dict[str, object]]
    client: Callable[[Mapping[str, Any]], Client]
    remedy: str


TRACKERS: Mapping[str, Kind] = {
    "wandb": Kind(
        "wandb",
        wandb_settings,
        partial(WandbClient, "wandb"),
        "wandb login, or WANDB_MODE=offline where there is no network",
    ),
    "trackio": Kind(
        "trackio", trackio_settings, partial(WandbClient, "trackio"), 'pip install --upgrade "appo[trackio]"'
    ),
    "mlflow": Kind(
        "mlflow",
        mlflow_settings,
        MlflowClient,
        'pip install --upgrade "appo[mlflow]", or MLFLOW_TRACKING_URI of a server',
    ),
}
"""Values of `--track`."""


def asked_trackers(track: Sequence[str], with_wandb: bool) -> list[str]:
    """Return the trackers that flags name, each once."""
    return list(dict.fromkeys([*(["wandb"] if with_wandb else []), *track]))


def is_installed(name: str) -> bool:
    """Return whether a tracker's package is there."""
    return importlib.util.find_spec(TRACKERS[name].package) is not None


class _Lines(threading.Thread):
    """Reads main's lines as soon as they come, so that a slow tracker drops the oldest and never fills the pipe.

    Args:
        stream: none of Python's own: its end would wait for the thread, in vain, and abort the process.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self.waiting: deque[dict[str, Any]] = deque(maxlen=WAITING_RECORDS)
        self.changed = threading.Condition()
        self.ended = False

    def run(self) -> None:
        for line in self._stream:
            if not line.endswith(b"\n"):  # main was killed while it wrote
                break
            with self.changed:
                self.waiting.append(json.loads(line))
                self.changed.notify()
        with self.changed:
            self.ended = True
            self.changed.notify()

    def next(self) -> dict[str, Any] | None:
        """Return the oldest line; None when there are no more."""
        with self.changed:
            while not self.waiting and not self.ended:
                self.changed.wait(1.0)
            return self.waiting.popleft() if self.waiting else None


def _main() -> None:
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU"):  # main ends it
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    stream = open(0, "rb", closefd=False)  # noqa: SIM115 - as long as the process lives
    first = stream.readline()
    if not first.endswith(b"\n"):  # main has ended before it said anything
        return
    asked = json.loads(first)
    settings = asked["settings"]
    lines = _Lines(stream)
    lines.start()
    sent = 0
    try:
        run = TRACKERS[asked["tracker"]].client(settings)
        while (record := lines.next()) is not None:
            policy = record.pop("policy")
            prefix = f"p{policy}/" if settings["config"].get("num_policies", 1) > 1 else ""
            figures = {name if name in HEAD else prefix + name: value for name, value in record.items()}
            run.log(figures, int(record.get("env_steps", 0)))
            sent += 1
        run.finish()
    except Exception as error:  # whatever a package raises
        traceback.print_exc()
        message = next(iter(str(error).splitlines()), "")
        sys.stderr.write(f"{FAULT}{type(error).__name__}: {message}\n")
        sys.exit(1 if sent else NOTHING_SENT)


if __name__ == "__main__":
    _main()
