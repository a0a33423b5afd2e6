"""APPO whose source repeats stored batches and takes priorities back: what a replay asks of the seam."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered, Feedback
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady

USES = 3  # of every step
CAPACITY = 8  # batches


class RatingLearner(APPOLearner):
    """Yields a priority of every column after a pass: how far the value targets are from what acting recorded."""

    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback | None]:
        error = (batch.recorded["value"] - batch.reward).abs() * batch.valid
        for _ in super().learn(batch, progress):
            yield {"priority": error.sum(0)}


class ReplaySource(BatchSource):
    """Gives every batch once as it comes, then stored ones, the largest priority first; in the learner's process."""

    def __init__(self, fresh: ColumnBatches) -> None:
        self.fresh, self.hold = fresh, False
        self.stored: deque[tuple[float, Batch]] = deque(maxlen=CAPACITY)
        self.owed = self.updated = 0  # uses that are still to be made; priorities that have come back
        self.last: Batch | None = None

    @property
    def staged_samples(self) -> int:
        return self.fresh.staged_samples

    @property
    def waiting(self) -> int:
        return self.fresh.waiting + self.owed

    def add(self, message: TrajectoryReady) -> None:
        self.fresh.add(message)

    def resize(self, columns: int) -> None:
        self.fresh.resize(columns)

    def counts(self) -> BatchCounts:
        return self.fresh.counts()

    def entered(self) -> Entered:
        return self.fresh.entered()

    def fill(self, version: int) -> Iterator[SlotReleased]:
        yield from self.fresh.fill(version)

    def take(self) -> Batch | None:
        self.last = batch = self.fresh.take()
        if batch is not None:
            self.owed += USES - 1
            self.last = batch.copy()
        elif self.owed and self.stored:
            self.owed -= 1
            _, self.last = max(self.stored, key=lambda one: one[0])
            self.stored = deque((one for one in self.stored if one[1] is not self.last), CAPACITY)
        return self.last

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased]:
        for said in feedback:
            assert self.last is not None
            self.updated += len(said["priority"])
            self.stored.append((float(torch.as_tensor(said["priority"]).mean()), self.last))
        yield from self.fresh.trained()

    def weights_replaced(self) -> None:
        self.fresh.weights_replaced()

    def metrics(self) -> dict[str, float]:
        return {"replay/owed": float(self.owed)}


class Replaying(APPO):
    """Trains on every step `USES` times; `samples` counts it once, `used` every time."""

    def learner_class(self) -> type[APPOLearner]:
        return RatingLearner

    def make_source(self, *arguments: Any) -> BatchSource:
        source = super().make_source(*arguments)
        assert isinstance(source, ColumnBatches)
        return ReplaySource(source)
