"""A member of a population: traits and weights may change during training."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from appo.algorithms.runtime.learning.batches import BatchSource
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.plain_state import GENERATORS
from appo.algorithms.runtime.messages import KEY, CopyWeights, PolicyTraits, SetHyperparameters, TraitsSet
from appo.utils.failpoints import failpoint

log = logging.getLogger(__name__)

OWN = ("version", "updates", *GENERATORS)
"""Values of its own state that a learner keeps when it continues from another state."""


class PopulationMember:
    """Carries out main's orders for one policy of several.

    The state block receives weights and traits together. Every reader (main for a checkpoint, another member, the next
    learner of the policy) gets matching values. Later traits in the block replace the initial ones. `tune` changes the
    learner's hyperparameters and returns the columns of a batch.
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
        """Carry out an order once; main repeats orders after a restart."""
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
        """Return the traits in the form of a state."""
        return {KEY: self.traits.plain()}

    def _copy_weights(self, source: int, worker: LearnerWorker) -> int:
        """Continue from the latest state of another policy; return the env steps of that policy.

        Counters and random state stay. The version rises, because trajectories on the way and in the unfinished batch
        come from other weights.
        """
        state = self._block.of_policy(source).read()
        assert state is not None, "a policy is copied only after it has learned"
        own = worker.learner.state().meta
        meta = {name: value for name, value in state.meta.items() if name not in OWN}
        worker.go_on_from(replace(state, meta={**meta, **{name: own[name] for name in OWN if name in own}}))
        log.info("went on from policy %d at %d env steps", source, state.meta["env_steps"])
        return int(state.meta["env_steps"])
