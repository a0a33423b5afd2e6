"""A3C whose way through the ring of gradients is written down, each step before it is done."""

import json
import os

from appo.algorithms.a3c.algorithm import A3C
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.learning.gradients import GradientRing
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import TrajectoryReady

TESTIMONY = "APPO_TEST_TESTIMONY"  # names the file


class Testimony(GradientRing):
    def _say(self, *words: object) -> None:
        with open(os.environ[TESTIMONY], "ab", buffering=0) as file:
            file.write(json.dumps(words).encode() + b"\n")  # in one write, which no kill halves

    def commit(
        self, actor: int, gradient: Array, figures: Array, batch: Batch, message: TrajectoryReady, version: int
    ) -> None:
        self._say("committed", actor, int(self._committed[actor, 0]) + 1, int(batch.valid.sum()))
        super().commit(actor, gradient, figures, batch, message, version)

    def apply(self, actor: int) -> Batch:
        self._say("applied", actor, int(self._applied[actor, 0]) + 1, 0)
        return super().apply(actor)

    def drop(self, actor: int) -> None:
        self._say("dropped", actor, int(self._applied[actor, 0]) + 1, 0)
        super().drop(actor)


class Witnessed(A3C):
    """A3C in every other respect."""

    def ring(self, context: Context) -> GradientRing:
        assert context.arena is not None
        return Testimony(context.arena, context.policy)


ALGORITHM = f"{__name__}:{Witnessed.__name__}"
