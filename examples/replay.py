"""APPO with replay: every batch is trained on when it is fresh, and once more when it is `AGE` batches old.

    python -m examples.replay --env=CartPole-v1 --train_until_return=475

A variant of the algorithm is a `Learner` and three lines that put it into the place of the usual one. Actors, slots,
batches, checkpoints and flags stay what they are. V-trace corrects for the age of what is replayed: how likely the
policy of that time was to act so travels in the batch.
"""

import sys
from collections import deque
from collections.abc import Iterator

from algorithms.appo.config import LearningConfig
from algorithms.appo.learner import Learner
from algorithms.cli import run_command
from algorithms.models.flat_module import FlatModule
from algorithms.run.build_workers import Blueprint
from algorithms.run.config import parse_train
from algorithms.run.main import Run, train
from algorithms.runtime.learning.batches import Batch
from algorithms.runtime.memory.arena import Arena
from algorithms.runtime.messages import Address, Worker
from envs.spec import EnvSpec

AGE = 2


class ReplayingLearner(Learner):
    """Trains on every batch twice; samples are counted once, by the worker around it."""

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: LearningConfig, seed: int) -> None:
        super().__init__(flat, spec, config, seed)
        self.kept: deque[Batch] = deque()

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """As `Learner.learn`, then the same for the batch that came `AGE` batches before."""
        yield from super().learn(batch, progress)
        self.kept.append(batch.copy())
        if len(self.kept) > AGE:
            yield from super().learn(self.kept.popleft(), progress)


class ReplayingBlueprint(Blueprint):
    """Builds the same workers but for the learner."""

    def make_learner(self, arena: Arena, address: Address) -> Worker:
        """A learner worker around a `ReplayingLearner`."""
        from algorithms.run.build_learner import make_learner

        return make_learner(self, arena, address, ReplayingLearner)


class ReplayingRun(Run):
    """APPO in every other respect."""

    blueprint = ReplayingBlueprint


if __name__ == "__main__":
    sys.exit(run_command(lambda: train(parse_train(sys.argv[1:]), ReplayingRun)))
