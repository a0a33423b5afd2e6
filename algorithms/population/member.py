"""A member of a population: its traits change while its learner trains, and so may all of its weights."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from appo.algorithms.runtime.learning.batches import BatchSource
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.messages import KEY, CopyWeights, PolicyTraits, SetHyperparameters, TraitsSet
from appo.utils.failpoints import failpoint

log = logging.getLogger(__name__)

OWN = ("version", "updates", "generator")
"""Values that a learner keeps of its own state when it goes on from the state of another."""


class PopulationMember:
    """Carries out main's orders for one policy of several.

    Weights and traits are written into the state block together: whatever reads it, main for a checkpoint, another
    member or the next learner in this seat, never gets the one without the other.

    Args:
        traits: with which the policy begins, unless its state block has later ones.
        tune: lets the learner train with other hyperparameters from now on; the columns of its batches then.
        batches: of the learner.
        block: of the policy.
    """

    def __init__(
        self, traits: PolicyTraits, tune: Callable[[Mapping[str, Any]], int], batches: BatchSource, block: StateBlock
    ) -> None:
        self.traits, self._tune, self._batches, self._block = traits, tune, batches, block
        state = block.read()
        kept = PolicyTraits.in_state(state.meta) if state is not None else None
        if kept is not None and kept.changes > traits.changes:
            self.traits = kept
            batches.resize(tune(kept.hyperparameters))

    def obey(self, order: SetHyperparameters | CopyWeights, worker: LearnerWorker) -> TraitsSet:
        """Carry out an order, unless it has been carried out: it comes again when main cannot know."""
        taken = None
        if order.traits.changes > self.traits.changes:
            failpoint("pbt.order")
            if order.traits.hyperparameters != self.traits.hyperparameters:
                self._batches.resize(self._tune(order.traits.hyperparameters))
            self.traits = order.traits
            if isinstance(order, CopyWeights):
                taken = self._copy_weights(order.source, worker)
            else:
                worker.save()
            failpoint("pbt.done")
        return TraitsSet(worker.address.index, self.traits, worker.learner.version, taken)

    def plain(self) -> dict[str, Any]:
        """Return the traits as a state holds them."""
        return {KEY: self.traits.plain()}

    def _copy_weights(self, source: int, worker: LearnerWorker) -> int:
        """Go on from the latest state of another policy; return its env steps.

        Counters and random state stay, and the version rises: neither what is on its way nor what is in the batch that
        is being filled was acted with these weights.
        """
        state = self._block.of_policy(source).read()
        assert state is not None, "a policy is copied only after it has learned"
        own = worker.learner.state().meta
        meta = {name: value for name, value in state.meta.items() if name not in OWN}
        worker.go_on_from(replace(state, meta={**meta, **{name: own[name] for name in OWN if name in own}}))
        log.info("went on from policy %d at %d env steps", source, state.meta["env_steps"])
        return int(state.meta["env_steps"])
