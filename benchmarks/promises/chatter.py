"""Environments that print a megabyte a second and invent a statistic per episode: no file and no memory may grow.

    python -m benchmarks.promises.chatter [--minutes=10] [--json=FILE] [flags of appo train]

Twice a second the benchmark measures the largest log, the growth of main's own memory after a warm-up, and the sizes of
metrics.jsonl and the TensorBoard files.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.cli import run_command
from appo.utils.metrics import read_metrics
from appo.utils.run_folder import RunFolder
from benchmarks.promises.marked_run import marked_run
from benchmarks.shared import measuring, process_tree, promises
from benchmarks.shared.promises import Figure
from benchmarks.shared.runs import RunError

MIB = 1 << 20
LOOK_SECONDS = 0.5
SETTLE_SECONDS = 5.0  # main still loads modules
END_SECONDS = 30.0
MOST_MIB_MORE = 20.0  # growth of main
MOST_TENSORBOARD_MIB = 20.0
FLAGS = (
    "--env=tests.chaos.hostile_env:Chatterbox",
    "--inference=local",
    "--num_workers=2",
    "--num_envs_per_worker=1",
    "--auto_tune=False",
    "--rollout=16",
    "--batch_size=64",
    "--experiment_summaries_interval=1",
    "--seed=1",
    "--no_plot",
)


class Look(NamedTuple):
    """A run at one time, in MiB."""

    largest_log: float
    main: float
    metrics: float
    tensorboard: float


def look(main: int, run: RunFolder) -> Look:
    """Measure a run."""
    return Look(
        max((size_of(path) for path in run.logs.glob("*.log")), default=0.0),
        process_tree.anonymous_bytes(main) / MIB,
        size_of(run.metrics),
        sum(size_of(path) for path in run.summaries(0).glob("*")),
    )


def size_of(path: Path) -> float:
    """Return the MiB of a file; 0 during a replacement of the file."""
    try:
        return path.stat().st_size / MIB
    except FileNotFoundError:
        return 0.0


def watch(seconds: float, words: Sequence[str], log_mib: int, metrics_mib: int) -> tuple[list[Look], str]:
    """Run for `seconds`; return the looks and the text on stderr.

    Raises:
        RunError: the run ended early or with an error.
    """
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        output = Path(folder, "output.log")
        flags = [*FLAGS, f"--max_log_mb={log_mib}", f"--max_metrics_mb={metrics_mib}", *words]
        flags += [f"--train_dir={folder}", "--experiment=run", "--train_for_env_steps=1000000000000"]
        with marked_run(flags, folder, output, end_seconds=END_SECONDS, only_errors=True) as main:
            looks = _looks(main, RunFolder(Path(folder, "run")), seconds, output)
            main.send_signal(signal.SIGINT)
            if main.wait(END_SECONDS) != 130:
                raise RunError(f"it ended with exit code {main.returncode}", output.read_text(errors="replace"))
        return looks, output.read_text(errors="replace")


def _looks(main: "subprocess.Popen[bytes]", run: RunFolder, seconds: float, output: Path) -> list[Look]:
    looks: list[Look] = []
    begin: float | None = None
    while begin is None or time.monotonic() - begin < SETTLE_SECONDS + seconds:
        time.sleep(LOOK_SECONDS)
        if main.poll() is not None:
            raise RunError("it ended by itself", output.read_text(errors="replace"))
        if begin is None and any(record["samples"] for record in read_metrics(run.metrics, ("samples",))):
            begin = time.monotonic()
        if begin is not None and time.monotonic() - begin >= SETTLE_SECONDS:
            looks.append(look(main.pid, run))
    return looks


def figures(looks: Sequence[Look], log_mib: int, metrics_mib: int) -> list[Figure]:
    """Return the maximum of each measurement."""
    return [
        Figure("largest log", max(one.largest_log for one in looks), log_mib, "MiB"),
        Figure("main has grown by", max(one.main for one in looks) - looks[0].main, MOST_MIB_MORE, "MiB"),
        Figure("metrics.jsonl", max(one.metrics for one in looks), metrics_mib * 1.01, "MiB"),
        Figure("TensorBoard", max(one.tensorboard for one in looks), MOST_TENSORBOARD_MIB, "MiB"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="A run that prints and invents names without end.")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes after the warm-up (default 10)")
    parser.add_argument("--max_log_mb", type=int, default=64, help="value of the flag of appo train")
    parser.add_argument("--max_metrics_mb", type=int, default=64, help="value of the flag of appo train")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments, words = parser.parse_known_args()
    bounds = arguments.max_log_mb, arguments.max_metrics_mb
    looks, said = watch(60 * arguments.minutes, words, *bounds)
    print(said, end="", file=sys.stderr)
    result = promises.result_of(figures(looks, *bounds), minutes=arguments.minutes, last=looks[-1]._asdict())
    results = {" ".join(["chatter", *words]): result}
    measuring.save(arguments.json, "chatter", results)
    return promises.show(results)


if __name__ == "__main__":
    sys.exit(run_command(main))
