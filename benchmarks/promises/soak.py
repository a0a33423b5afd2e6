"""A long run whose memory, open files and threads must not grow.

    python -m benchmarks.promises.soak [--minutes=30] [--warm_up=0.2] [--json=FILE] [flags of appo train]

Every few seconds the benchmark reads the private memory, open files and threads of all processes of a run. Private
memory contains no file and no memory shared on purpose, because a share of other pages grows whenever another process
with the pages ends. After a warm-up, in which windows fill and allocators settle, the slope of the line of best fit is
the growth of a process.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.cli import run_command
from appo.utils.metrics import read_metrics
from benchmarks.promises.marked_run import marked_run
from benchmarks.shared import measuring, process_tree, promises
from benchmarks.shared.promises import Figure
from benchmarks.shared.runs import RunError

LOOK_SECONDS, LOOKS = 5.0, 60  # longest time between two looks, fewest looks in a run
MOST_MIB_PER_HOUR = 10.0  # per process
MOST_MORE = 0.5  # allowed growth of open files and threads over the run, by the line
END_SECONDS = 20.0
FLAGS = ("--env=CartPole-v1", "--inference=central", "--seed=1", "--save_every_sec=15")


class Look(NamedTuple):
    """One process at one time."""

    seconds: float
    anon_mib: float
    open_files: int
    threads: int


def look(root: int, seconds: float) -> dict[str, Look]:
    """Return all processes of a run, by role and process id."""
    found = {}
    for process in process_tree.processes(root):
        role = "main" if process.pid == root else process.role
        try:
            open_files, threads = (len(os.listdir(f"/proc/{process.pid}/{what}")) for what in ("fd", "task"))
        except OSError:  # the process has just ended
            continue
        found[f"{role} {process.pid}"] = Look(
            seconds, process_tree.anonymous_bytes(process.pid) / 2**20, open_files, threads
        )
    return found


def watch(minutes: float, words: Sequence[str]) -> dict[str, list[Look]]:
    """Run for `minutes`; return the looks at every process.

    Raises:
        RunError: the run ended early or with an error.
    """
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        log_path = Path(folder, "output.log")
        flags = [*FLAGS, *words, f"--train_dir={folder}", "--experiment=run"]
        flags += [f"--train_for_seconds={60 * minutes + 600}"]
        with marked_run(flags, folder, log_path, end_seconds=END_SECONDS) as main:
            seen = _watch(main, Path(folder, "run", "metrics.jsonl"), 60 * minutes, log_path)
            main.send_signal(signal.SIGINT)
            if main.wait(END_SECONDS) != 130:
                raise _failure(f"it ended with exit code {main.returncode}", log_path)
    return seen


def _watch(main: "subprocess.Popen[bytes]", metrics: Path, length: float, log_path: Path) -> dict[str, list[Look]]:
    seen: dict[str, list[Look]] = {}
    begin: float | None = None
    pause = min(LOOK_SECONDS, length / LOOKS)
    while begin is None or time.monotonic() - begin < length:
        time.sleep(pause)
        if main.poll() is not None:
            raise _failure("it ended by itself", log_path)
        if begin is None and any(record["samples"] for record in read_metrics(metrics)):
            begin = time.monotonic()
        if begin is not None:
            for name, one in look(main.pid, time.monotonic() - begin).items():
                seen.setdefault(name, []).append(one)
    return seen


def _failure(what: str, log_path: Path) -> RunError:
    return RunError(what, log_path.read_text(errors="replace"))


def slopes(seen: Mapping[str, Sequence[Look]], warm_up_seconds: float) -> dict[str, dict[str, float]]:
    """Return the growth of every process per hour: the slope of the line of best fit after the warm-up.

    Processes that did not live all the time, normally none, do not count.
    """
    longest = max(len(looks) for looks in seen.values())
    found: dict[str, dict[str, float]] = {}
    for name, looks in seen.items():
        later = [one for one in looks if one.seconds >= warm_up_seconds]
        if len(looks) < longest - 1 or len(later) < 3:
            continue
        times = [one.seconds / 3600 for one in later]
        found[name] = {
            what: statistics.linear_regression(times, [getattr(one, what) for one in later]).slope
            for what in ("anon_mib", "open_files", "threads")
        }
        found[name]["anon_mib_at_end"] = later[-1].anon_mib
    return found


def figures(found: Mapping[str, Mapping[str, float]], hours: float) -> list[Figure]:
    """Return the process with the largest growth, of each kind."""
    worst = {what: max(found, key=lambda name: found[name][what]) for what in ("anon_mib", "open_files", "threads")}
    memory = Figure(
        f"growth of memory in {60 * hours:g} min, {worst['anon_mib']}",
        found[worst["anon_mib"]]["anon_mib"], MOST_MIB_PER_HOUR, "MiB/h",
    )  # fmt: skip
    counts = [
        Figure(f"{name} added in {60 * hours:g} min, {worst[what]}", found[worst[what]][what] * hours, MOST_MORE)
        for what, name in (("open_files", "open files"), ("threads", "threads"))
    ]
    return [memory, *counts]


def main() -> int:
    parser = argparse.ArgumentParser(description="A long run that must not grow.")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes from the first batch on (default 30)")
    parser.add_argument(
        "--warm_up", type=float, default=0.2, help="share of the minutes that does not count (default 0.2)"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments, words = parser.parse_known_args()
    seen = watch(arguments.minutes, words)
    warm_up_seconds = 60 * arguments.minutes * arguments.warm_up
    found = slopes(seen, warm_up_seconds)
    for name, of in found.items():
        per_hour = f"{of['anon_mib']:+.2f} MiB, {of['open_files']:+.2f} open files, {of['threads']:+.2f} threads"
        print(f"{name:24} {of['anon_mib_at_end']:7.1f} MiB; in an hour {per_hour}")
    hours = arguments.minutes * (1 - arguments.warm_up) / 60
    result = promises.result_of(figures(found, hours), processes=found, minutes=arguments.minutes)
    results = {" ".join(["cartpole", *words]): result}
    measuring.save(arguments.json, "soak", results)
    return promises.show(results)


if __name__ == "__main__":
    sys.exit(run_command(main))
