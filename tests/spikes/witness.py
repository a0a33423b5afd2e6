"""Gradients whose way through the ring is written down, each step before it is done."""

import json
import os

from algorithms.runtime.learning.gradients import GradientRing
from tests.spikes.gradients import Gradients

TESTIMONY = "APPO_TEST_TESTIMONY"  # names the file


class Testimony(GradientRing):
    def _say(self, *words):
        with open(os.environ[TESTIMONY], "ab", buffering=0) as file:
            file.write(json.dumps(words).encode() + b"\n")  # in one write, which no kill halves

    def commit(self, actor, gradient, batch, message, version):
        self._say("committed", actor, int(self._committed[actor, 0]) + 1, int(batch.valid.sum()))
        super().commit(actor, gradient, batch, message, version)

    def apply(self, actor):
        self._say("applied", actor, int(self._applied[actor, 0]) + 1, 0)
        return super().apply(actor)


class Witnessed(Gradients):
    ring = Testimony


ALGORITHM = f"{__name__}:{Witnessed.__name__}"
