"""Speed of reading datasets: learning from files beside learning from one batch in memory.

    python -m benchmarks.speed.reading [--case NAME ...] [--pairs=5] [--seconds=15] [--json=FILE]

The benchmark records random actions and clones the actions with the network of the preset. A case with a buffer reads
each episode again in every epoch; a case without reads all episodes at the start. Both sides run in a single process
(`--inference=serial`), in which the first batch can replace the dataset.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.cli import run, run_command
from appo.utils.command_line import own_command
from benchmarks.shared import measuring, promises, runs
from benchmarks.shared.paired import Question, Side, measure
from benchmarks.shared.runs import Timing
from benchmarks.shared.workloads import Workload

MOST_PERCENT = 11.1
"""Speed lost to reading: a learner that is fed with 0.9 of the speed at which it trains."""
HELD = "--one_batch"
"""First word of a command line that trains on a batch that is read once."""


class Case(NamedTuple):
    """A dataset of random actions with flags of reading.

    Attributes:
        env: id of the environment.
        steps: steps to record.
        flags: flags of cloning.
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
LEARNING = {"algo": "BC", "device": "cpu", "inference": "serial", "train_for_env_steps": 10**12}


def question() -> Question:
    """Return the comparison between a dataset and its first batch."""
    held = Side(program=("-m", "benchmarks.speed.reading", HELD))
    return Question("reading", "reading a dataset", MOST_PERCENT, Side(), held, seconds=15, takes_leftovers=True)


def of_case(name: str, plan: argparse.Namespace) -> dict[str, Any]:
    """Record the dataset of a case, and learn in pairs."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="appo-benchmark-") as folder:
        dataset = Path(folder, "dataset")
        words = ["record", f"--env={case.env}", "-o", str(dataset), f"--steps={case.steps}", "--seed=1"]
        runs.run_to_end(own_command(words), ())
        workload = Workload(case.env, {**LEARNING, **case.flags, "input": dataset}, name)
        return measure(question(), name, workload, plan.pairs, Timing(3, plan.seconds))


def train_on_one_batch(words: Sequence[str]) -> int:
    """Train with a reader that repeats the first batch; return the exit code."""
    from appo.algorithms.datasets.columns import ShuffledReader
    from appo.algorithms.runtime.learning.batches import Batch

    read, kept = ShuffledReader.read, dict[int, Batch]()

    def held(self: ShuffledReader, samples: int, units: int) -> Batch:
        if units not in kept:
            kept[units] = read(self, samples, units)
        return kept[units]

    ShuffledReader.read = held  # type: ignore[method-assign]
    return run("train", words)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [HELD]:
        return train_on_one_batch(words[1:])
    parser = argparse.ArgumentParser(description="How fast datasets are read.")
    known = f"of {', '.join(CASES)}"
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES), metavar="NAME", help=known)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs (default 5)")
    parser.add_argument("--seconds", type=float, default=15, help="measured seconds of each run (default 15)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args(words)
    results = {}
    for name in arguments.case:
        results[name] = of_case(name, arguments)
        measuring.save(arguments.json, "reading", results)
    return promises.show(results)


if __name__ == "__main__":
    sys.exit(run_command(main))
