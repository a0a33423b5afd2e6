"""Returns of the presets: trained as anyone would type it, then played in episodes that training has not seen.

    python -m benchmarks.scores [--workload NAME ...] [--seeds 1 2 3] [--add] [--shared] [--json=FILE]

An environment is trained with its preset and a budget of at most five minutes (Atari: ten). Then the newest checkpoint,
not the best one, plays as `appo evaluate` lets it play: each seed the same episodes, once with sampled and once with
the most probable actions. `--add` trains only what the file does not hold yet, so that a measurement that was
interrupted goes on. docs/results.md is made of the file.
"""

import os
import sys

from appo.algorithms.cli import run_command
from benchmarks.scores.trials import BENCHMARK, TRIALS, Scored, score
from benchmarks.shared import seeds


def main() -> int:
    """Train and play all, seed by seed."""
    parser = seeds.parser_of("What the presets reach.", TRIALS, "--workload")
    parser.prog = "python -m benchmarks.scores"
    parser.add_argument("--shared", action="store_true", help="other programs use the machine: say so of the times")
    arguments = parser.parse_args()

    def train_one(name: str, seed: int) -> Scored:
        return score(TRIALS[name], seed, arguments.prefix, shared=arguments.shared)

    seeds.train_all(BENCHMARK, arguments, train_one)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
