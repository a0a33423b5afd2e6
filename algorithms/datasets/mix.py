"""Batches with a share from datasets: from several, or from datasets and actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from appo.algorithms.datasets.columns import NOTHING, Gather, Needs, ShuffledReader
from appo.algorithms.datasets.config import InputConfig, Mix
from appo.algorithms.datasets.episodes import form_of
from appo.algorithms.datasets.reader import Dataset, open_dataset
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import IS_READ, Batch, BatchCounts, BatchSource, Entered, Feedback
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady, Wake
from appo.envs.spec import Array, EnvSpec
from appo.utils.errors import UsageError

Read = Callable[[int, int], Batch]
"""Returns the batch of some units (second argument) that follows some steps (first argument)."""

StepsRead = Callable[[float], int]
"""Returns the steps of datasets that were used so far, given their share of a batch."""


def datasets_of(flags: InputConfig, spec: EnvSpec) -> list[tuple[Dataset, float]]:
    """Open the datasets of `--input`, each with a share of all reading.

    Raises:
        UsageError: a dataset cannot be read, or its spaces or frames differ from the spec.
    """
    mix, form = flags.mix, form_of(spec.action)
    found = []
    for words, share in mix.datasets:
        dataset = open_dataset(words, flags.postprocess_inputs, form)
        if (dataset.spec.observations, dataset.spec.action) != (spec.observations, spec.action):
            raise UsageError(f"--input: {words[0]} shows or takes something else than the environment")
        own, its = dataset.spec.frames_per_step, spec.frames_per_step
        if dataset.says_frames and own != its:
            raise UsageError(f"--input: a step of {words[0]} is {own} frames and not {its}, as of the environment")
        found.append((dataset, share / (1.0 - mix.sampler)))
    return found


def reader_of(flags: InputConfig, spec: EnvSpec, unit_rows: int, gather: Gather, needs: Needs = NOTHING) -> Read:
    """Return a function that reads batches from the datasets of `--input` by share."""
    readers = [
        (ShuffledReader(dataset, flags.shuffle_buffer_size, unit_rows, gather, needs, spec), share)
        for dataset, share in datasets_of(flags, spec)
    ]
    if len(readers) == 1:
        return readers[0][0].read

    turns = turns_of([share for _, share in readers])
    density = [reader.steps_per_unit for reader, _ in readers]
    mean_density = sum(share * one for (_, share), one in zip(readers, density, strict=True))

    def read(samples: int, units: int) -> Batch:
        begin = int(samples / mean_density)
        before, after = (units_before(turns, number, len(readers)) for number in (begin, begin + units))
        return joined(
            [
                reader.read(int(before[i] * density[i]), int(after[i] - before[i]))
                for i, (reader, _) in enumerate(readers)
                if after[i] > before[i]
            ]
        )

    return read


PERIOD = 10_000
"""Units after which the turns of datasets repeat; shares are whole numbers of units."""


def turns_of(shares: Sequence[float]) -> Array:
    """Return the sequence of turns, numbers of datasets for about a `PERIOD`, spread evenly by share.

    Shares hold for batches of any size, over many batches where a batch has fewer units than datasets.

    >>> turns_of([0.5, 0.25, 0.25])[:8].tolist()
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    counts = [max(1, count) for count in shares_of(PERIOD, shares)]
    moments = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    turns: Array = np.repeat(np.arange(len(counts)), counts)[np.argsort(moments, kind="stable")]
    return turns


def units_before(turns: Array, number: int, datasets: int) -> Array:
    """Return the turns of each dataset among the first `number` units, [D]."""
    periods, within = divmod(number, len(turns))
    counts: Array = periods * np.bincount(turns, minlength=datasets) + np.bincount(turns[:within], minlength=datasets)
    return counts


def shares_of(units: int, shares: Sequence[float]) -> list[int]:
    """Divide units by shares that add up to one; the largest remainders get the rest.

    >>> shares_of(10, [0.5, 0.26, 0.24])
    [5, 3, 2]
    """
    wanted = [units * share for share in shares]
    counts = [int(one + 1e-9) for one in wanted]
    for i in sorted(range(len(shares)), key=lambda i: counts[i] - wanted[i])[: units - sum(counts)]:
        counts[i] += 1
    return counts


def mixed_in(
    source: BatchSource,
    read: Read,
    context: Context,
    trajectories: Trajectories,
    *,
    units: int = 1,
    resize: Callable[[int], None] | None = None,
) -> MixedBatches:
    """Return a source that adds the share of `--input` from datasets to batches.

    Args:
        source: source of columns that are used once, or a replay.
        read: reader of the datasets.
        context: flags and spaces.
        trajectories: slots of the run.
        units: units of a column for `read` and for the shares.
        resize: function that sets how many units a replay draws; None: the source is no replay.

    Raises:
        UsageError: the learner trains on a GPU.
    """
    if context.buffered:
        raise UsageError("--input: batches are mixed on the CPU only: add --device=cpu")
    mix, columns = context.flags.mix, context.flags.macro_batch_columns
    ledger = LearnerLedger(trajectories, context.policy)

    def steps_read(share: float) -> int:
        noted = ledger.noted()
        # The steps of a played column are used once, when they enter; those of a replay again and again.
        return noted["used"] - noted["samples"] if resize is None else int(noted["used"] * share)

    return MixedBatches(source, read, mix, columns, steps_read, units=units, resize=resize or source.resize)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return a batch of all columns of several batches."""
    named = [batch.named() for batch in batches]
    return Batch.of({name: torch.cat([one[name] for one in named], dim=1) for name in named[0]})


def _marked(batch: Batch, *, is_read: bool) -> Batch:
    return replace(batch, recorded={**batch.recorded, IS_READ: torch.full_like(batch.valid, is_read)})


class MixedBatches(BatchSource):
    """Returns the batches of a source with columns from datasets behind the source's own.

    Steps of datasets are marked (`IS_READ`). They are used but are no samples: the budget counts played steps only. The
    position in the datasets follows from the counts in the ledger, which outlive the learner and are noted before every
    `take`. A column has `units` units for `read` and for the shares.
    """

    def __init__(
        self,
        source: BatchSource,
        read: Read,
        mix: Mix,
        columns: int,
        steps_read: StepsRead,
        *,
        units: int,
        resize: Callable[[int], None],
    ) -> None:
        self.source, self.read, self.mix, self.steps_read = source, read, mix, steps_read
        self.units, self._resize_source = units, resize
        self.hold, self._version, self._own = source.hold, 0, 0
        self._steps, self._read_steps = 0, 0
        self.resize(columns)

    @property
    def staged_samples(self) -> int:
        """Steps in the unfinished batch."""
        return self.source.staged_samples

    @property
    def waiting(self) -> int:
        """Work of the source."""
        return self.source.waiting

    def counts(self) -> BatchCounts:
        """Return the counts of the source's trajectories."""
        return self.source.counts()

    def add(self, message: TrajectoryReady) -> None:
        """Pass a slot to the source."""
        self.source.add(message)

    def fill(self, version: int) -> Iterator[SlotReleased | Wake]:
        """Fill the source's batch."""
        self._version = version
        return self.source.fill(version)

    def take(self) -> Batch | None:
        """Return the next batch when the source has its part."""
        own = self.source.take()
        if own is None or not self._read_units:
            return own
        of_batch = self._read_units / (self._read_units + own.valid.shape[1])
        read = self.read(self.steps_read(of_batch), self._read_units)
        read.policy_version.fill_(self._version)  # numbers of another run
        if "weight" in own.recorded:  # relative to the largest weight of the batch: datasets keep their share
            read.recorded["weight"].fill_(own.recorded["weight"].mean())
        self._own = own.valid.shape[1]
        steps = int(read.valid.sum())
        self._steps, self._read_steps = self._steps + int(own.valid.sum()) + steps, self._read_steps + steps
        return joined([_marked(own, is_read=False), _marked(read, is_read=True)])

    def entered(self) -> Entered:
        """Return the source's steps that have entered training since the last call."""
        return self.source.entered()

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased | Wake]:
        """Pass the feedback about the source's part to the source."""
        if self._read_units:
            feedback = [
                {name: np.asarray(x)[:, : self._own] if name == "priority" else x for name, x in said.items()}
                for said in feedback
            ]
        return self.source.trained(feedback)

    def resize(self, columns: int) -> None:
        """Make batches of `columns` columns."""
        played = self.mix.played(columns * self.units)
        self._read_units = columns * self.units - played
        self._resize_source(played)

    def retire(self) -> None:
        """Let the source keep no further steps."""
        self.source.retire()

    def weights_replaced(self) -> None:
        """Discard the source's invalid steps."""
        self.source.weights_replaced()

    def metrics(self) -> dict[str, float]:
        """Return the source's figures, and the share of read steps since the last call."""
        steps, read, self._steps, self._read_steps = self._steps, self._read_steps, 0, 0
        return self.source.metrics() | ({"input/share": read / steps} if steps else {})
