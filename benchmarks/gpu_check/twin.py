"""APPO with the code paths of a GPU on any device: buffers, buckets and uploads, with the CPU's answers for CUDA's.

    python -m benchmarks.gpu_check.twin --env=CartPole-v1 --inference=central ...

Flags and results are those of `train_appo.py`; on a GPU it is the same program.
"""

import sys

from appo.algorithms.cli import run_command
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.main import Run, train
from appo.algorithms.run.workers.blueprint import Blueprint


class BufferedBlueprint(Blueprint):
    """Builds the workers of a GPU, whatever the device."""

    @property
    def buffered(self) -> bool:
        """Always."""
        return True


class PlainBlueprint(Blueprint):
    """Builds the workers of a CPU, whatever the device."""

    @property
    def buffered(self) -> bool:
        """Never."""
        return False


class TwinRun(Run):
    """APPO in every other respect."""

    blueprint = BufferedBlueprint


if __name__ == "__main__":
    sys.exit(run_command(lambda: train(parse_train(sys.argv[1:]), TwinRun)))
