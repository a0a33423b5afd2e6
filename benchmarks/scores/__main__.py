"""Returns of the presets: default training, then unseen evaluation episodes.

    python -m benchmarks.scores [--workload NAME ...] [--seeds 1 2 3] [--add] [--shared] [--json=FILE]

Each environment is trained with the preset for at most five minutes (Atari: ten); to the env steps of a published
figure at most fifteen, except trials of hours, which `--workload` names. Then `appo evaluate` plays the newest
checkpoint, not the best: the same episodes for each seed, once with sampled and once with the most probable actions.
`--add` trains only the runs that the file lacks, which continues an interrupted measurement. docs/results.md is
generated from the file.
"""

import os
import sys

from appo.algorithms.cli import run_command
from benchmarks.scores.trials import BENCHMARK, TRIALS, Scored, score
from benchmarks.shared import seeds


def main() -> int:
    parser = seeds.parser_of("What the presets reach.", TRIALS, "--workload")
    parser.set_defaults(names=[name for name, trial in TRIALS.items() if trial.seconds])
    parser.prog = "python -m benchmarks.scores"
    parser.add_argument("--shared", action="store_true", help="other programs use the machine: mark the times")
    arguments = parser.parse_args()

    def train_one(name: str, seed: int) -> Scored:
        return score(TRIALS[name], seed, arguments.prefix, shared=arguments.shared)

    seeds.train_all(BENCHMARK, arguments, train_one)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
