"""The learner worker of a member of a population: its traits change while it trains, and so may all of its weights."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from algorithms.runtime.learning.batches import BatchSource, ColumnBatches
from algorithms.runtime.learning.learner_worker import Learner, LearnerMemory, LearnerWorker, TrainingPlan
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.learner_state import LearnerState, StateBlock
from algorithms.runtime.messages import KEY, Address, Adopt, Message, SetHyperparameters, Traits, TraitsSet
from utils.failpoints import failpoint

log = logging.getLogger(__name__)

OWN = ("version", "updates", "generator")
"""What a learner keeps of its own state when it goes on from that of another."""


class Member(NamedTuple):
    """What makes a learner a member.

    Attributes:
        traits: with which it begins, unless its state block has later ones.
        tune: lets the learner train with other hyperparameters from now on; the columns of its batches then.
    """

    traits: Traits
    tune: Callable[[Mapping[str, Any]], int]


class MemberWorker(LearnerWorker):
    """Trains one policy of several.

    Weights and traits are written into the state block together: whoever reads it, main for a checkpoint, another
    member or the next learner in this place, never gets the one without the other.

    Args:
        address, plan, learner, batches, memory: as `LearnerWorker`.
        member: what makes it one.
    """

    def __init__(
        self,
        address: Address,
        plan: TrainingPlan,
        learner: Learner,
        batches: BatchSource,
        memory: LearnerMemory,
        *,
        member: Member,
    ) -> None:
        self.member, self.traits = member, _latest(member.traits, memory.block)
        if self.traits is not member.traits and (columns := member.tune(self.traits.hyperparameters)):
            _resize(batches, columns)
        super().__init__(address, plan, learner, batches, memory)

    def handle(self, message: Message) -> Iterator[Message]:
        """As `LearnerWorker`, and main's orders; they come between two batches."""
        if isinstance(message, SetHyperparameters | Adopt):
            yield self._obey(message)
        else:
            yield from super().handle(message)

    def _obey(self, order: SetHyperparameters | Adopt) -> TraitsSet:
        """Do what is ordered, unless it has been done: an order comes again when main cannot know."""
        taken = None
        if order.traits.changes > self.traits.changes:
            failpoint("pbt.order")
            self._tune(order.traits)
            if isinstance(order, Adopt):
                taken = self._adopt(order.source)
            else:
                self._save()
            failpoint("pbt.done")
        return TraitsSet(self.address.index, self.traits, self.learner.version, taken)

    def _tune(self, traits: Traits) -> None:
        if traits.hyperparameters != self.traits.hyperparameters:
            _resize(self.batches, self.member.tune(traits.hyperparameters))
        self.traits = traits

    def _adopt(self, source: int) -> int:
        """Go on from the latest state of another policy; its env steps.

        Counters and random state stay, and the version rises: neither what is on its way nor what is in the batch that
        is being filled was acted with these weights.
        """
        state = self.block.of_policy(source).read()
        assert state is not None, "a policy is copied only after it has learned"
        own = self.learner.state().meta
        meta = {name: value for name, value in state.meta.items() if name not in OWN}
        if isinstance(self.batches, ColumnBatches):
            self.batches.drop_staged()
        self._go_on_from(replace(state, meta={**meta, **{name: own[name] for name in OWN if name in own}}))
        log.info("went on from policy %d at %d env steps", source, state.meta["env_steps"])
        return int(state.meta["env_steps"])

    def _state(self, into: dict[str, Array]) -> LearnerState:
        state = super()._state(into)
        state.meta[KEY] = self.traits.plain()
        return state


def _latest(given: Traits, block: StateBlock) -> Traits:
    """The traits in a state block, if they were ordered after those that are given."""
    state = block.read()
    kept = Traits.in_state(state.meta) if state is not None else None
    return kept if kept is not None and kept.changes > given.changes else given


def _resize(batches: BatchSource, columns: int) -> None:
    """Let a source that can make batches of another size do so."""
    if isinstance(batches, ColumnBatches):
        batches.resize(columns)
