"""Synchronous proximal policy optimization as an `Algorithm`; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from appo.algorithms.parts.algorithm import ActorCriticAlgorithm
from appo.algorithms.parts.config import SURROGATE_PANEL
from appo.algorithms.ppo import presets
from appo.algorithms.ppo.config import METRICS, STREAMING_METRICS, PPOConfig
from appo.algorithms.runtime.algorithm import Context
from appo.envs.presets import discount_preset

if TYPE_CHECKING:
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.ppo.learner import PPOLearner
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import BatchSource
    from appo.algorithms.runtime.learning.learner_worker import Learner
    from appo.algorithms.runtime.memory.slots import Trajectories


@dataclass(frozen=True)
class PPO(ActorCriticAlgorithm):
    """Synchronous actor-critic that trains only on steps of the newest weights."""

    name: ClassVar[str] = "PPO"
    flags: ClassVar[type[PPOConfig]] = PPOConfig
    sample_efficient: ClassVar[Mapping[str, Mapping[str, object]]] = presets.SAMPLE_EFFICIENT
    metrics: ClassVar[Mapping[str, str]] = {**METRICS, **STREAMING_METRICS}
    panel: ClassVar[Mapping[str, str]] = SURROGATE_PANEL
    with_ranks: ClassVar[bool] = True
    synchronous: ClassVar[bool] = True

    def streams(self, flags: PPOConfig) -> bool:
        """Return whether the learner drops each microbatch after its gradient, see `--microbatch_size`."""
        return flags.streams

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a known environment."""
        return presets.PRESETS.get(name) or discount_preset(name) | presets.WITHOUT_BUDGET.get(name, {})

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return flag -> value of learning for an unknown environment."""
        if images:
            return presets.IMAGES
        # With the default batch_size, an iteration of `CONTINUOUS` has 512 steps, in whole trajectories.
        return presets.CONTINUOUS if continuous and 512 % rollout == 0 else {}

    def learner_class(self) -> type[PPOLearner]:
        """Return the class of the learner; the learner refuses flags that contradict the network (UsageError)."""
        from appo.algorithms.ppo.learner import PPOLearner

        return PPOLearner

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches of columns; with a single policy, slots are released after training."""
        from appo.algorithms.parts.columns import StreamedBatches, make_column_batches

        # With several policies, two learners that hold slots could wait for each other forever, so slots are not held.
        # Fast actors then fill iterations before slow actors finish. Steps older than one iteration are discarded.
        flags, alone = context.flags, context.num_policies == 1
        lag = None if alone else 2
        source = make_column_batches(
            context, trajectories, sampling, device, hold=not flags.streams, max_policy_lag=lag
        )
        if not flags.streams:
            return source
        return StreamedBatches(source, flags.batch_size // flags.microbatch_size, on_policy=alone)

    def new_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Return a learner with the fastest suitable gradient; of microbatches, if batches stream."""
        from appo.algorithms.ppo.numpy_learner import numpy_gradient
        from appo.algorithms.ppo.streaming import StreamingLearner

        learner = self.learner_class()(flat, context)
        if context.flags.streams:
            return StreamingLearner(learner)
        return learner if context.verify else learner.accelerate(numpy_gradient)
