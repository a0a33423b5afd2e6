"""The learner worker of a rank, which trains together with the learners of other ranks."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import torch

from appo.algorithms.runtime.budget import OVER
from appo.algorithms.runtime.learning.batches import Batch, BatchSource, Feedback, GroupBroken
from appo.algorithms.runtime.learning.learner_worker import (
    Learner,
    LearnerMemory,
    LearnerWorker,
    TrainingPlan,
    saved_counts,
)
from appo.algorithms.runtime.learning.rank_group import RankGroup
from appo.algorithms.runtime.messages import Address, Message, Stop

NAP_SECONDS = 0.002
"""Time between looks whether other ranks wait."""


class RankLearnerWorker(LearnerWorker):
    """Trains the part of one rank of every batch.

    A rank joins the group with its first batch, and holds a batch until a round of the group begins. A rank that the
    others wait for in vain takes part with a batch without a valid step. A rank 0 that was started again joins at once,
    as the end of the run may come before its first batch; at the end of the budget the others wait for rank 0.

    Args:
        address, plan, learner, batches, memory: as of a `LearnerWorker`.
        group: learners of all ranks.
        alone: whether no other worker shares the process: this one then sleeps between looks at the others.

    Attributes:
        known: counts of all ranks in the state that this worker began with; {} without a state.
    """

    def __init__(
        self,
        address: Address,
        plan: TrainingPlan,
        learner: Learner,
        batches: BatchSource,
        memory: LearnerMemory,
        *,
        group: RankGroup,
        alone: bool,
    ) -> None:
        self.group, self.alone = group, alone
        state = memory.block.read()
        self.known = {} if state is None else saved_counts(state)
        self._looked = 0.0
        self._held: Batch | None = None
        self._empty: Batch | None = None
        self._counted = False  # whether the batch held is counted
        super().__init__(address, plan, learner, batches, memory)
        if group.is_back:
            self._empty = batches.blank()

    @property
    def of_all(self) -> dict[str, int]:
        """Return the totals of all ranks at the last round; before the first one, as far as this rank has them."""
        return self.totals | (self.group.totals if self.group.size else self.known) | {OVER: int(self.group.over)}

    def handle(self, message: Message) -> Iterator[Message]:
        """Add a trajectory, or answer main; leave the group before the end."""
        if isinstance(message, Stop):
            self.group.leave()
        yield from super().handle(message)

    def pending(self) -> bool:
        """Return whether something waits, or a look at the other ranks is due."""
        if super().pending():
            return True
        is_due = self.alone or time.monotonic() - self._looked >= NAP_SECONDS
        return is_due and not (self._empty is None or self.stopped or self.group.over)

    def work(self) -> Iterator[Message]:
        """Train with the others. After the budget, let in a rank that waits for the state, and await the end."""
        yield from super().work()
        if self._empty is not None and super()._budget_reached() and not self.group.over:
            if self.group.ready(self) and self.group.is_wanted():
                yield from self._round(None)
            if self.of_all[OVER]:
                yield self._report()  # by which main ends
            self._looked = time.monotonic()
            if self.alone:
                time.sleep(NAP_SECONDS)

    def _budget_reached(self) -> bool:
        return self.group.over or super()._budget_reached()

    def _next(self, *, enter: bool) -> Generator[Message, None, Batch | None]:
        held, self._held = self._held, None
        if self._counted and held is not None:
            return held
        self._counted = False
        return (yield from super()._next(enter=enter))

    def _use(self, batch: Batch | None) -> Iterator[Message]:
        if batch is None:
            self._enter()
        elif not self._counted:
            self._account(batch)
            self._counted = True
            self._empty = self._empty or batch.map(torch.zeros_like)
        self._held, version = batch, self.learner.version
        if self._empty is None:
            return
        is_ready = self.group.ready(self)
        if batch is not None and self.learner.version > version:  # the weights are another rank's: it is too old
            self._held = None
            yield from self._released(self.batches.trained())
        elif is_ready and (batch is not None or self.group.is_awaited()):
            yield from self._round(batch)
        else:
            self._looked = time.monotonic()
            if self.alone or batch is not None:  # a late rank may need the core
                time.sleep(NAP_SECONDS)

    def _round(self, batch: Batch | None) -> Iterator[Message]:
        """Train together with all ranks, unless the group is to form anew first."""
        assert self._empty is not None
        try:
            progress = self.group.begin(self.totals, self._progress())
        except GroupBroken as error:
            self.group.broken(error)
            return
        if progress is None:
            return
        self._held, self._counted = None, False
        if batch is None:
            self._learn(self._empty, progress)
        else:
            yield from self._train(batch, progress)

    def _learn(self, batch: Batch, progress: float) -> list[Feedback]:
        try:
            return super()._learn(batch, progress)
        except GroupBroken as error:  # the rest of the batch is lost
            self.group.broken(error)
            return []

    def _heed(self, skipped_in_a_row: int, batch: Batch | None) -> None:
        if self.group.rank.number:
            return  # rank 0 decides for all
        before = self.learner.version
        super()._heed(skipped_in_a_row, batch)
        if self.learner.version != before:
            self.group.lead()
