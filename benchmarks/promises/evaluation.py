"""The cost of evaluation: training with two evaluations a minute beside training without.

    python -m benchmarks.promises.evaluation [--workload NAME ...] [--pairs=5] [--seconds=60] [--json=FILE]
    python -m benchmarks.promises.evaluation --env=ID [flags of appo train]

The cost includes a checkpoint before each evaluation. CPU time is no measure here, because the evaluating process has
the lowest priority.
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
    return ask(QUESTION)


if __name__ == "__main__":
    sys.exit(run_command(main))
