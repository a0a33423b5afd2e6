"""The cost of writing a dataset: training with `--output` beside training without.

    python -m benchmarks.speed.writing [--workload NAME ...] [--pairs=7] [--seconds=20] [--json=FILE]
    python -m benchmarks.speed.writing --env=ID [flags of appo train]

The CPU time of a sample counts all processes, the writer among them.
"""

import sys

from appo.algorithms.cli import run_command
from benchmarks.shared.paired import Question, Side, ask

QUESTION = Question("writing", "writing a dataset", 3.0, Side(own_folder="output"), Side(), seconds=20)


def main() -> int:
    return ask(QUESTION)


if __name__ == "__main__":
    sys.exit(run_command(main))
