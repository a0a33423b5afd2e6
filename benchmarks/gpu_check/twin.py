"""APPO with the code paths of a GPU on any device: buffers, buckets and uploads, answered by the CPU instead of CUDA.

    python -m benchmarks.gpu_check.twin --env=CartPole-v1 --inference=central ...

Flags and results equal `train_appo.py`; on a GPU both programs are the same.
"""

import sys

from appo.algorithms.cli import run_command
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.main import Run, train
from appo.algorithms.run.workers.blueprint import Blueprint


class BufferedBlueprint(Blueprint):
    """Builds the workers of a GPU on any device."""

    @property
    def buffered(self) -> bool:
        return True


class PlainBlueprint(Blueprint):
    """Builds the workers of a CPU on any device."""

    @property
    def buffered(self) -> bool:
        return False


class TwinRun(Run):
    """APPO with the workers of a GPU."""

    blueprint = BufferedBlueprint


if __name__ == "__main__":
    sys.exit(run_command(lambda: train(parse_train(sys.argv[1:]), TwinRun)))
