"""How fast datasets are read: the time of a learner that does not go to training, where it learns from files alone.

    python -m benchmarks.reading [--case NAME ...] [--repeats=3] [--seconds=20] [--json=FILE]

Random actions are recorded, and cloned with the network that the preset has. The learner's own clock says where its
time goes. A case with a buffer reads each episode anew in every epoch, one without reads all of them at the start.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from algorithms.cli import run_command
from benchmarks import measuring, promises, runs
from benchmarks.promises import Figure
from utils.command_line import own_command
from utils.metrics import read_metrics
from utils.run_folder import RunFolder

MOST_PERCENT = 10.0
"""Reading feeds a learner with 0.9 of the speed at which it trains."""


class Case(NamedTuple):
    """A dataset of random actions, and how it is read.

    Attributes:
        env: its id.
        steps: that are recorded.
        flags: of cloning.
    """

    env: str
    steps: int
    flags: Mapping[str, object]


CASES = {
    "cartpole": Case("CartPole-v1", 100_000, {}),
    "cartpole_buffer": Case("CartPole-v1", 100_000, {"shuffle_buffer_size": 10_000}),
    "pong": Case("ALE/Pong-v5", 20_000, {"encoder_subtype": "convnet_atari"}),
    "pong_buffer": Case("ALE/Pong-v5", 20_000, {"encoder_subtype": "convnet_atari", "shuffle_buffer_size": 5_000}),
}


class Reading(NamedTuple):
    """A run: shares of the learner's time by phase in percent, and steps per second."""

    phases: dict[str, float]
    samples_per_second: float

    @property
    def lost(self) -> float:
        """Percent of the time that do not go to training."""
        return 100 - self.phases["training"]


def read(case: Case, dataset: Path, seconds: float, prefix: Sequence[str]) -> Reading:
    """Clone what is in a dataset for so many seconds, in the second half of which shares are taken."""
    flags = {"algo": "BC", "env": case.env, "input": dataset, "device": "cpu", "train_for_seconds": seconds}
    more = {"experiment_summaries_interval": 1, "train_for_env_steps": 10**12, **case.flags}
    with runs.finished({**flags, **more}, prefix) as run:
        records = read_metrics(RunFolder(run.directory).metrics)
    late = [one for one in records if one["elapsed_seconds"] >= seconds / 2]
    mark = "perf/learner/"
    phases = {name.removeprefix(mark) for one in late for name in one if name.startswith(mark)}
    shares = {phase: 100 * statistics.fmean(one.get(mark + phase, 0.0) for one in late) for phase in phases}
    return Reading(shares, statistics.fmean(one["perf/samples_per_second"] for one in late))


def measure(name: str, case: Case, plan: argparse.Namespace) -> dict[str, Any]:
    """All runs of a case."""
    found = []
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        dataset = Path(folder, "dataset")
        words = ["record", f"--env={case.env}", "-o", str(dataset), f"--steps={case.steps}", "--seed=1"]
        runs.run_to_end(own_command(words), plan.prefix)
        for _ in range(plan.repeats):
            one = read(case, dataset, plan.seconds, plan.prefix)
            found.append(one)
            shares = ", ".join(f"{phase} {share:.1f} %" for phase, share in sorted(one.phases.items()))
            print(f"{name}: {one.samples_per_second:,.0f} steps/s; {shares}", flush=True)
    lost = statistics.median(one.lost for one in found)
    figure = Figure(f"time of a learner that is not training, {name}", lost, MOST_PERCENT, "%")
    return promises.result_of([figure], runs=[one._asdict() for one in found])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description="How fast datasets are read.")
    parser.add_argument(
        "--case", nargs="*", choices=CASES, default=CASES, metavar="NAME", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts (default 3)")
    parser.add_argument("--seconds", type=float, default=20, help="of each run (default 20)")
    runs.add_file_arguments(parser)
    arguments = parser.parse_args(argv)
    results = {}
    for name in arguments.case:
        results[name] = measure(name, CASES[name], arguments)
        measuring.save(arguments.json, "reading", results)
    return promises.show(results)


if __name__ == "__main__":
    sys.exit(run_command(main))
