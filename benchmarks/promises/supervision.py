"""The cost of supervision: training beside training without supervision, checks and recovery (`bare.py`).

python -m benchmarks.promises.supervision [--workload NAME ...] [--pairs=5] [--seconds=15] [--json=FILE]
python -m benchmarks.promises.supervision --env=ID [flags of appo train]
"""

import sys

from appo.algorithms.cli import run_command
from benchmarks.promises import bare
from benchmarks.shared.paired import Question, Side, ask

QUESTION = Question("supervision", "supervision", 1.0, Side(), Side(("-c", bare.PROGRAM)), seconds=15)


def main() -> int:
    return ask(QUESTION)


if __name__ == "__main__":
    sys.exit(run_command(main))
