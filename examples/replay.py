"""APPO with replay: the learner trains on every batch twice, at once and again `AGE` batches later.

    appo train --algo=examples.replay:Replay --env=CartPole-v1 --train_until_return=475

A variant of APPO is a subclass of `APPOLearner` and an algorithm class that returns it. Actors, slots, batches,
checkpoints and flags do not change. V-trace corrects for the age of a replayed batch, because the batch holds the
log-probabilities of the policy that acted.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.runtime.learning.batches import Batch

AGE = 2


class ReplayingLearner(APPOLearner):
    """Trains on every batch twice. The learner worker counts samples, each sample once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: deque[Batch] = deque()

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Train on the batch, then on the batch that arrived `AGE` batches earlier."""
        yield from super().learn(batch, progress)
        self.kept.append(batch.copy())
        if len(self.kept) > AGE:
            yield from super().learn(self.kept.popleft(), progress)


class Replay(APPO):
    """APPO with the learner that trains twice."""

    def learner_class(self) -> type[APPOLearner]:
        """Return the class of the learner."""
        return ReplayingLearner
