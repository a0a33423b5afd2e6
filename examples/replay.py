"""APPO with replay: every batch is trained on when it is fresh, and once more when it is `AGE` batches old.

    appo train --algo=examples.replay:Replay --env=CartPole-v1 --train_until_return=475

A variant of APPO is an `APPOLearner` and a class that names it. Actors, slots, batches, checkpoints and flags do not
change. V-trace corrects for the age of a replayed batch: its log-probabilities are those of the policy that
acted.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.runtime.learning.batches import Batch

AGE = 2


class ReplayingLearner(APPOLearner):
    """Trains on every batch twice; samples are counted once, by the worker around it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: deque[Batch] = deque()

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """As `APPOLearner.learn`, then the same for the batch that came `AGE` batches before."""
        yield from super().learn(batch, progress)
        self.kept.append(batch.copy())
        if len(self.kept) > AGE:
            yield from super().learn(self.kept.popleft(), progress)


class Replay(APPO):
    """APPO in every other respect."""

    def learner_class(self) -> type[APPOLearner]:
        """Return the learner that trains twice."""
        return ReplayingLearner
