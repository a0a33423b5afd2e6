"""Cost of an addition to training: pairs of runs with and without the addition.

The runs of a pair take turns, A B B A A B ..., each from a fresh start. Each pair yields a difference of speed and of
CPU time per sample; the median over all pairs counts. On a busy machine CPU time varies less than speed. For an
addition of low priority, which takes leftover CPU time, only the speed counts.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from appo.utils.metrics import read_metrics
from benchmarks.shared import measuring, promises, runs
from benchmarks.shared.measuring import ROOT
from benchmarks.shared.promises import Figure
from benchmarks.shared.runs import Observed, Timing
from benchmarks.shared.workloads import Workload, add_workload_arguments, chosen_workloads


class Side(NamedTuple):
    """One side of a pair.

    Attributes:
        program: words after the interpreter.
        flags: flags of train_appo.py.
        own_folder: flag that names a folder for each run; empty: no such flag.
    """

    program: tuple[str, ...] = (str(ROOT / "train_appo.py"),)
    flags: Mapping[str, object] = {}
    own_folder: str = ""


class Question(NamedTuple):
    """A comparison.

    Attributes:
        benchmark: name in result files.
        what: name of the addition.
        most_percent: highest allowed cost.
        takes_leftovers: whether the addition mostly takes leftover CPU time; then only the speed counts.
        having, lacking: training with and without the addition.
        seconds: default length of the measurement of a run.
    """

    benchmark: str
    what: str
    most_percent: float
    having: Side
    lacking: Side
    seconds: float
    takes_leftovers: bool = False


def train(side: Side, workload: Workload, timing: Timing) -> Observed:
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        given = {"train_dir": folder, "experiment": "run", "experiment_summaries_interval": 0.5, "auto_tune": False}
        if side.own_folder:
            given[side.own_folder] = str(Path(folder, "own"))
        command = [sys.executable, *side.program, *workload.words(**given, **side.flags)]
        metrics = Path(folder, "run", "metrics.jsonl")
        look = lambda: runs.progress_of(read_metrics(metrics))  # noqa: E731
        return runs.observe(command, look, timing, Path(folder, "output.log"))


def measure(question: Question, name: str, workload: Workload, pairs: int, timing: Timing) -> dict[str, Any]:
    """Measure all pairs of a workload."""
    sides = {"having": question.having, "lacking": question.lacking}
    found: dict[str, list[Observed]] = {kind: [] for kind in sides}
    for pair in range(pairs):
        for kind in list(sides) if pair % 2 == 0 else reversed(list(sides)):
            found[kind].append(train(sides[kind], workload, timing))
            seen = found[kind][-1]
            print(f"{name}, {kind} it: {seen.samples_per_second:,.0f} samples/s, {_cpu(seen):.2f} CPU us", flush=True)
    both = list(zip(found["having"], found["lacking"], strict=True))
    speed = [100 * (without.samples_per_second / having.samples_per_second - 1) for having, without in both]
    cpu_time = [100 * (_cpu(having) / _cpu(without) - 1) for having, without in both]
    what, most = f"{question.what}, {name}, {pairs} pairs", question.most_percent
    figures = [Figure(f"speed lost to {what}", statistics.median(speed), most, "%")]
    if not question.takes_leftovers:
        figures.insert(0, Figure(f"CPU time of {what}", statistics.median(cpu_time), most, "%"))
    by_kind = {kind: [run._asdict() for run in of_kind] for kind, of_kind in found.items()}
    return promises.result_of(figures, cpu_percent=cpu_time, speed_percent=speed, **by_kind)


def _cpu(run: Observed) -> float:
    return sum(run.cpu_microseconds.values())


def ask(question: Question) -> int:
    """Measure as the command line asks, print and save; return the exit code."""
    parser = argparse.ArgumentParser(description=f"Cost of {question.what}.")
    add_workload_arguments(parser)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs (default 5)")
    parser.add_argument(
        "--warm_up_seconds", type=float, default=6, help="seconds of warm-up from the first batch on (default 6)"
    )
    parser.add_argument(
        "--seconds", type=float, default=question.seconds, help=f"measured seconds of each run ({question.seconds:g})"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments, words = parser.parse_known_args()
    arguments.workload = arguments.workload or ["cartpole"]
    timing = Timing(arguments.warm_up_seconds, arguments.seconds)
    results: dict[str, Mapping[str, Any]] = {}
    for name, workload in chosen_workloads(arguments, words).items():
        results[name] = measure(question, name, workload, arguments.pairs, timing)
        measuring.save(arguments.json, question.benchmark, results)
    return promises.show(results)
