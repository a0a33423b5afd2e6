"""The cost of evaluation: training that is evaluated twice a minute beside training that is not.

    python -m benchmarks.promises.evaluation [--workload NAME ...] [--pairs=5] [--seconds=60] [--json=FILE]
    python -m benchmarks.promises.evaluation --env=ID [flags of appo train]

A checkpoint is saved before each evaluation, which is part of its cost. The process that evaluates has the
lowest priority, so that its CPU time is no measure.
"""

import sys

from appo.algorithms.cli import run_command
from benchmarks.shared.paired import Question, Side, ask

EVERY_SECONDS = 30
QUESTION = Question(
    "evaluation",
    "evaluation",
    3.0,
    Side(flags={"eval_every_sec": EVERY_SECONDS}),
    Side(),
    seconds=2 * EVERY_SECONDS,
    takes_leftovers=True,
)


def main() -> int:
    """Measure, print and keep."""
    return ask(QUESTION)


if __name__ == "__main__":
    sys.exit(run_command(main))
