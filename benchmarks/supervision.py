"""What supervision costs: training as it is beside training with nothing watched, checked or kept (`bare.py`).

    python -m benchmarks.supervision [--workload NAME ...] [--pairs=5] [--seconds=15] [--json=FILE]
    python -m benchmarks.supervision --env=ID [flags of appo train]

Both run in turns, A B B A A B ..., each from its own start. Compared are, pair by pair, the speed and the CPU time of a
sample; the median of all pairs counts. The CPU time is the figure to go by: it varies less, and on a machine that is
busy it is the speed.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithms.cli import run_command
from benchmarks import bare, measuring, promises, runs
from benchmarks.measuring import ROOT
from benchmarks.promises import Figure
from benchmarks.runs import Observed, Timing
from benchmarks.workloads import Workload, add_workload_arguments, chosen_workloads
from utils.metrics import read_metrics

MOST_PERCENT = 1.0
USUAL, BARE = (str(ROOT / "train_appo.py"),), ("-c", bare.PROGRAM)


def train(program: Sequence[str], workload: Workload, timing: Timing) -> Observed:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        given = {"train_dir": folder, "experiment": "run", "experiment_summaries_interval": 0.5, "auto_tune": False}
        command = [sys.executable, *program, *workload.words(**given)]
        metrics = Path(folder, "run", "metrics.jsonl")
        look = lambda: runs.progress_of(read_metrics(metrics))  # noqa: E731
        return runs.observe(command, look, timing, Path(folder, "output.log"))


def measure(name: str, workload: Workload, pairs: int, timing: Timing) -> dict[str, Any]:
    """All pairs of a workload."""
    found: dict[str, list[Observed]] = {"usual": [], "bare": []}
    programs = {"usual": USUAL, "bare": BARE}
    for pair in range(pairs):
        for kind in ("usual", "bare") if pair % 2 == 0 else ("bare", "usual"):
            found[kind].append(train(programs[kind], workload, timing))
            seen = found[kind][-1]
            cpu = sum(seen.cpu_microseconds.values())
            print(f"{name}, {kind}: {seen.samples_per_second:,.0f} samples/s, {cpu:.2f} CPU us", flush=True)
    both = list(zip(found["usual"], found["bare"], strict=True))
    speed = [100 * (bare.samples_per_second / usual.samples_per_second - 1) for usual, bare in both]
    cpu_time = [100 * (_cpu(usual) / _cpu(bare) - 1) for usual, bare in both]
    figures = [
        Figure(f"CPU time of supervision, {name}, {pairs} pairs", statistics.median(cpu_time), MOST_PERCENT, "%"),
        Figure(f"speed lost to supervision, {name}, {pairs} pairs", statistics.median(speed), MOST_PERCENT, "%"),
    ]
    by_kind = {kind: [run._asdict() for run in of_kind] for kind, of_kind in found.items()}
    return promises.result_of(figures, cpu_percent=cpu_time, speed_percent=speed, **by_kind)


def _cpu(run: Observed) -> float:
    return sum(run.cpu_microseconds.values())


def main() -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description="What supervision costs.")
    add_workload_arguments(parser)
    parser.add_argument("--pairs", type=int, default=5, help="of runs (default 5)")
    parser.add_argument("--warm_up_seconds", type=float, default=6, help="from the first batch on (default 6)")
    parser.add_argument("--seconds", type=float, default=15, help="of each run that are measured (default 15)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments, words = parser.parse_known_args()
    arguments.workload = arguments.workload or ["cartpole"]
    timing = Timing(arguments.warm_up_seconds, arguments.seconds)
    results: dict[str, Mapping[str, Any]] = {}
    for name, workload in chosen_workloads(arguments, words).items():
        results[name] = measure(name, workload, arguments.pairs, timing)
        measuring.save(arguments.json, "supervision", results)
    return promises.show(results)


if __name__ == "__main__":
    sys.exit(run_command(main))
