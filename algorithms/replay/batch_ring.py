"""Batches from a shard of the replay to the learner, and errors back, in shared memory.

Every count below has a single writer, only grows, and is stored last. Unfinished work of a process that dies does not
count: a shard draws another batch, a learner trains again on the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from appo.algorithms.replay.part import Shapes
from appo.algorithms.replay.storage import ReplayPlan, Samples
from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.weights import barrier

PLACES = 3
"""Batches of a shard in memory: one in training, the next one, and a spare for drawing."""

SHOWN = ("insert_us", "sample_ms", "update_ms", "age_samples", "waiting_slots", "held")
"""Figures whose sums and counts a shard keeps for the learner."""


class Told(NamedTuple):
    """Facts of a shard's replay for the learner.

    Attributes:
        samples, env_steps: inserted in this start.
        unsampled, dropped: as in `Note`.
        size: number of steps that can be drawn.
        priority: sum of their leaves.
        since: steps inserted since training began; 0 before.
    """

    samples: float = 0.0
    env_steps: float = 0.0
    unsampled: float = 0.0
    dropped: float = 0.0
    size: float = 0.0
    priority: float = 0.0
    since: float = 0.0


class BatchRing:
    """The batches of a shard; batch n, counted from 1, is in place n % `PLACES`.

    Attributes:
        tensors: tensors of every place by name.
        figures: sum and count of each of `SHOWN`, written by the shard.
        told: `Told`, written by the shard.
    """

    def __init__(self, arena: Arena, prefix: str) -> None:
        self._words = {name: arena[f"{prefix}.batch.{name}"] for name in ("filled", "trained", "answered")}
        self._used, self._drawn = arena[f"{prefix}.batch.used"], arena[f"{prefix}.batch.drawn"]
        self._error, self.figures, self.told = (arena[f"{prefix}.{name}"] for name in ("error", "figures", "told"))
        start = f"{prefix}.tensor."
        names = [field.name.removeprefix(start) for field in arena.fields if field.name.startswith(start)]
        self.tensors = [{name: arena[f"{start}{name}"][place] for name in names} for place in range(PLACES)]

    @staticmethod
    def declare(prefix: str, plan: ReplayPlan, shapes: Shapes) -> list[Field]:
        """Return the fields for batches of tensors with these shapes."""
        steps, count = shapes["valid"][0]
        return [
            *(Field(f"{prefix}.batch.{name}", (16,), "int64") for name in ("filled", "trained", "answered")),
            Field(f"{prefix}.batch.used", (PLACES,), "int64"),  # samples of all batches up to this one
            Field(f"{prefix}.batch.drawn", (PLACES, len(Samples._fields), count), "int64"),
            Field(f"{prefix}.error", (PLACES, steps, count), "float32"),
            Field(f"{prefix}.figures", (len(SHOWN), 2), "float64"),
            Field(f"{prefix}.told", (len(Told._fields),), "float64"),
            *(Field(f"{prefix}.tensor.{name}", (PLACES, *shape), dtype) for name, (shape, dtype) in shapes.items()),
        ]

    # ---- by the shard

    @property
    def has_room(self) -> bool:
        """Whether a batch can be drawn: the replay has the errors of the batch that used the place."""
        return self._word("filled") - self._word("answered") < PLACES - 1

    @property
    def next_tensors(self) -> Mapping[str, Array]:
        """Tensors of the next batch; requires room."""
        return self.tensors[(self._word("filled") + 1) % PLACES]

    def commit(self, samples: Samples, used: int) -> None:
        """Publish the next batch."""
        number = self._word("filled") + 1
        place = number % PLACES
        self._drawn[place, :3] = np.broadcast_arrays(samples.column, samples.step, samples.word)
        self._used[place] = used
        barrier()
        self._words["filled"][0] = number

    @property
    def unanswered(self) -> int:
        """Number of trained batches whose errors the replay has not read."""
        return self._word("trained") - self._word("answered")

    def next_errors(self) -> tuple[Samples, Array]:
        """Return the oldest unanswered batch: samples and errors [T, B], negative: no error."""
        place = (self._word("answered") + 1) % PLACES
        column, step, word = self._drawn[place, :3]
        return Samples(column, step, word, np.zeros(0)), self._error[place]

    def answer(self) -> None:
        """Note that the replay has the errors of `next_errors`."""
        barrier()
        self._words["answered"][0] += 1

    @property
    def filled_uses(self) -> int:
        """Samples of all published batches."""
        return int(self._used[self._word("filled") % PLACES])

    # ---- by the learner

    @property
    def waiting(self) -> int:
        """Number of batches ready for training."""
        return self._word("filled") - self._word("trained")

    @property
    def next_place(self) -> int:
        """Place of the next batch for training."""
        return (self._word("trained") + 1) % PLACES

    def give_back(self, error: Array | None) -> None:
        """Return the errors [T, B] of the batch in `next_place` after training; None: no errors."""
        self._error[self.next_place] = -1.0 if error is None else error
        barrier()
        self._words["trained"][0] += 1

    @property
    def trained_uses(self) -> int:
        """Samples of all trained batches."""
        return int(self._used[self._word("trained") % PLACES])

    def _word(self, name: str) -> int:
        return int(self._words[name][0])
