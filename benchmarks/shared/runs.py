"""Training commands observed from outside: speed, memory and CPU time after a warm-up."""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from appo.algorithms.runtime.processes.prctl import bound_to_us
from appo.utils.errors import AppoError
from appo.utils.metrics import read_metrics
from appo.utils.system import machine
from benchmarks.shared import measuring, process_tree
from benchmarks.shared.measuring import ROOT, Point
from benchmarks.shared.process_tree import Process
from benchmarks.shared.workloads import Workload, words_of

POLL_SECONDS = 0.2
START_SECONDS = 180
END_SECONDS = 30
T = TypeVar("T")
MOST_DISCARDED = 0.01  # a run that drops more does not count


class Progress(NamedTuple):
    """Samples trained on so far, and samples dropped as too old."""

    seconds: float
    samples: int
    discarded: int = 0


class Timing(NamedTuple):
    """Length of a measurement, and the words before the command (see `add_run_arguments`)."""

    warm_up_seconds: float
    seconds: float
    prefix: tuple[str, ...] = ()


class Observed(NamedTuple):
    """A run in its steady state; a JSON object in result files."""

    samples_per_second: float
    discarded_share: float
    pss_mib: float
    pss_without_games_mib: float
    processes: int
    cpu_share: float  # share of all cores
    cpu_microseconds: dict[str, float]  # CPU time per sample by role


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a measurement."""
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts (default 3)")
    parser.add_argument(
        "--warm_up_seconds", type=float, default=8, help="seconds of warm-up from the first batch on (default 8)"
    )
    parser.add_argument("--seconds", type=float, default=20, help="measured seconds of each run (default 20)")
    parser.add_argument("--add", action="store_true", help="add to the runs in the file")
    add_file_arguments(parser)


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the prefix of commands and for the result file."""
    parser.add_argument(
        "--prefix",
        type=shlex.split,
        default=[],
        help="words before the command of each run, such as 'flock /tmp/lock' on a shared machine",
    )
    parser.add_argument("--json", type=Path, help="file for the results")


def each_workload(
    benchmark: str,
    arguments: argparse.Namespace,
    names: Iterable[str],
    measure: Callable[[str, Mapping[str, Any]], Any],
) -> dict[str, Any]:
    """Measure the workloads in turn and save each result at once; return the results by name.

    `measure` receives the name and, with --add, the earlier entry of the file.
    """
    measuring.check(arguments.json, benchmark)
    results = {}
    for name in names:
        before = measuring.earlier(arguments.json, name) if arguments.add else {}
        results[name] = measure(name, before)
        if before:
            results[name]["before"] = [*before.get("before", ()), {mark: before[mark] for mark in ("commit", "date")}]
        measuring.save(arguments.json, benchmark, {name: results[name]})
    return results


def timing_of(arguments: argparse.Namespace) -> Timing:
    return Timing(arguments.warm_up_seconds, arguments.seconds, tuple(arguments.prefix))


def train(workload: Workload, timing: Timing, **flags: object) -> Observed:
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        given = {"train_dir": folder, "experiment": "run", "experiment_summaries_interval": 0.5, **flags}
        command = [sys.executable, str(ROOT / "train_appo.py"), *workload.words(**given)]
        metrics = Path(folder, "run", "metrics.jsonl")
        return observe(command, lambda: progress_of(read_metrics(metrics)), timing, Path(folder, "output.log"))


def progress_of(records: Sequence[Mapping[str, Any]]) -> list[Progress]:
    """Return the summed counters of all policies after each record of metrics.jsonl."""
    last: dict[int, Mapping[str, Any]] = {}
    found = []
    for r in records:
        last[r["policy"]] = r
        samples, discarded = (sum(one[name] for one in last.values()) for name in ("samples", "discarded"))
        found.append(Progress(r["elapsed_seconds"], samples, discarded))
    return found


def observe(
    command: Sequence[str],
    progress: Callable[[], list[Progress]],
    timing: Timing,
    log_path: Path,
    environment: Mapping[str, str] | None = None,
) -> Observed:
    """Run a command, measure after the warm-up, then end the command.

    Raises:
        RunError: the command ended early, or did not train in time.
    """
    with _running(command, timing.prefix, log_path, environment or {}) as root:
        pid = _started(progress, root, command, log_path)
        time.sleep(timing.warm_up_seconds)
        start, before, begin = progress()[-1], process_tree.processes(pid), time.monotonic()
        time.sleep(timing.seconds)
        end, after, seconds = progress()[-1], process_tree.processes(pid), time.monotonic() - begin
        pss, games = (process_tree.pss_bytes([p for p in after if (p.role == "game") is g]) for g in (False, True))
        if root.poll() is not None:
            raise _failure(command, log_path, "ended while it was measured")
        window = [p for p in progress() if start.seconds <= p.seconds <= end.seconds]
        if len(window) < 2:
            raise _failure(command, log_path, f"has trained less than twice in {timing.seconds:g} s")
    rate = measuring.rate([Point(p.seconds, p.samples) for p in window])
    return Observed(
        samples_per_second=rate,
        discarded_share=discarded_share(window),
        pss_mib=(pss + games) / 2**20,
        pss_without_games_mib=pss / 2**20,
        processes=len(after),
        cpu_share=sum(cpu_by_role(before, after).values()) / seconds / machine.available_cores(),
        cpu_microseconds={role: 1e6 * s / seconds / rate for role, s in cpu_by_role(before, after).items()},
    )


class Finished(NamedTuple):
    """A finished run: the run's folder, and the seconds from the start to the end of the command."""

    directory: Path
    seconds: float

    def has_reached_goal(self) -> bool:
        """Return whether the mean return of `--train_until_return` ended the run; episodes may end after it."""
        reason = json.loads((self.directory / "status.json").read_text())["reason"]
        return str(reason).startswith("the mean return has reached")


@contextmanager
def finished(flags: Mapping[str, object], prefix: Sequence[str]) -> Iterator[Finished]:
    """Train with train_appo.py to the end; the folder of the run exists within the block.

    Raises:
        RunError: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        given = {**flags, "train_dir": folder, "experiment": "run"}
        begin = time.monotonic()
        run_to_end([sys.executable, str(ROOT / "train_appo.py"), *words_of(given)], prefix)
        yield Finished(Path(folder, "run"), time.monotonic() - begin)


def until(command: Sequence[str], look: Callable[[], T | None], prefix: Sequence[str], log_path: Path) -> T:
    """Run a command until `look` returns a result, then end the command; return the result.

    Raises:
        RunError: the command ended early.
    """
    with _running(command, prefix, log_path, {"PYTHONPATH": ""}) as root:
        while (found := look()) is None:
            if root.poll() is not None:
                raise _failure(command, log_path, "ended too early")
            time.sleep(POLL_SECONDS)
    return found


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians over runs (`Observed` as JSON), and the spread of the speed."""
    roles = sorted({role for run in runs for role in run["cpu_microseconds"]})
    discarded = max(run["discarded_share"] for run in runs)
    plain = ("pss_mib", "pss_without_games_mib", "processes", "cpu_share")
    return {
        "samples_per_second": measuring.spread([run["samples_per_second"] for run in runs]),
        "discarded_share": discarded,
        "counts": discarded <= MOST_DISCARDED,
        "cpu_microseconds": {
            role: measuring.spread([run["cpu_microseconds"].get(role, 0.0) for run in runs]).median for role in roles
        },
        **{name: measuring.spread([run[name] for run in runs]).median for name in plain},
    }


def run_to_end(command: Sequence[str], prefix: Sequence[str]) -> str:
    """Run a command of this repository to the end; return the output.

    Raises:
        RunError: the command failed.
    """
    done = subprocess.run(
        [*prefix, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        preexec_fn=bound_to_us(),
    )
    if done.returncode:
        raise RunError(f"{shlex.join(command)} failed", done.stdout + done.stderr)
    return done.stdout


def discarded_share(window: Sequence[Progress]) -> float:
    """Return the dropped share of all collected samples within a window."""
    samples, discarded = window[-1].samples - window[0].samples, window[-1].discarded - window[0].discarded
    return discarded / (samples + discarded) if discarded else 0.0


def cpu_by_role(before: Sequence[Process], after: Sequence[Process]) -> dict[str, float]:
    """Return CPU seconds by role between two looks, of processes alive at both."""
    used = {p.pid: p.cpu_seconds for p in before}
    seconds: dict[str, float] = {}
    for p in after:
        if p.pid in used:
            seconds[p.role] = seconds.get(p.role, 0.0) + p.cpu_seconds - used[p.pid]
    return seconds


class RunError(AppoError):
    """A run could not be measured; the last output follows the message."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.traceback = "\n".join(output.splitlines()[-20:]) + "\n"


@contextmanager
def _running(
    command: Sequence[str], prefix: Sequence[str], log_path: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command in the root of the repository; kill all leftovers on exit."""
    with log_path.open("wb") as output:
        root = subprocess.Popen(
            [*prefix, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
            env={**os.environ, **environment}, preexec_fn=bound_to_us(),  # noqa: PLW1509 (it calls the system alone)
        )  # fmt: skip
    try:
        yield root
    finally:
        _end(command, root)


def _end(command: Sequence[str], root: "subprocess.Popen[bytes]") -> None:
    """Ask the command to end, then kill the command and its descendants; the prefix ends by itself."""
    pid = _pid_of(command, root.pid) or root.pid
    members = [member.pid for member in process_tree.processes(pid)]
    for sign, asked in ((signal.SIGTERM, members[:1]), (signal.SIGKILL, members)):
        for member in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            root.wait(END_SECONDS)


def _pid_of(command: Sequence[str], root: int) -> int | None:
    """Return the process id of the command below its prefix; None before the start."""
    pids = [p.pid for p in process_tree.processes(root)]
    return next((pid for pid in pids if process_tree.command_of(pid) == list(command)), None)


def _started(
    progress: Callable[[], list[Progress]], root: "subprocess.Popen[bytes]", command: Sequence[str], log_path: Path
) -> int:
    """Wait until the command has trained; return the process."""
    begun = None
    while True:
        if root.poll() is not None:
            raise _failure(command, log_path, "ended before it trained")
        pid = _pid_of(command, root.pid)
        if pid is not None and any(p.samples for p in progress()):
            return pid
        begun = begun or (time.monotonic() if pid is not None else None)
        if begun is not None and time.monotonic() > begun + START_SECONDS:
            raise _failure(command, log_path, f"has trained on nothing in {START_SECONDS} s")
        time.sleep(POLL_SECONDS)


def _failure(command: Sequence[str], log: Path, what: str) -> RunError:
    return RunError(f"{shlex.join(command)} {what}", log.read_text(errors="replace"))


def reported_progress(log_path: Path) -> list[Progress]:
    """Parse the output of a peer's driver: a JSON object `{"seconds", "samples"}` per line, among other lines."""
    if not log_path.exists():
        return []
    found = []
    for line in log_path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            words = json.loads(line)
            found.append(Progress(float(words["seconds"]), int(words["samples"])))
    return found
