"""Synchronous proximal policy optimization, as the runtime sees it; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from appo.algorithms.parts.algorithm import ActorCriticAlgorithm
from appo.algorithms.ppo import presets
from appo.algorithms.ppo.config import METRICS, PANEL, STREAMING_METRICS, PPOConfig
from appo.algorithms.runtime.algorithm import Context

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
    """Actor-critics that act stochastically, and learn from what the newest of them did."""

    name: ClassVar[str] = "PPO"
    flags: ClassVar[type[PPOConfig]] = PPOConfig
    metrics: ClassVar[Mapping[str, str]] = {**METRICS, **STREAMING_METRICS}
    panel: ClassVar[Mapping[str, str]] = PANEL
    synchronous: ClassVar[bool] = True

    def streams(self, flags: PPOConfig) -> bool:
        """Whether a batch is trained on in microbatches that are dropped, see `--microbatch_size`."""
        return flags.streams

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a family of known environments."""
        return presets.learning_preset(name)

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return flag -> value of learning for an unknown environment, by what it shows and takes."""
        return presets.learning_by_kind(images=images, continuous=continuous, rollout=rollout)

    def learner_class(self) -> type[PPOLearner]:
        """Return the class of the learner, which refuses flags that do not go with the network (UsageError)."""
        from appo.algorithms.ppo.learner import PPOLearner

        return PPOLearner

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches of columns, whose slots go back after training where one policy plays."""
        from appo.algorithms.parts.columns import StreamedBatches, make_column_batches

        # With several policies slots cannot be held, as two learners could wait for each other's; a fast actor then
        # fills iterations while a slow one plays on. What is older than one iteration is left out.
        lag = 2 if context.num_policies > 1 else None
        flags, alone = context.flags, context.num_policies == 1
        hold = not flags.streams
        source = make_column_batches(context, trajectories, sampling, device, hold=hold, max_policy_lag=lag)
        if not flags.streams:
            return source
        return StreamedBatches(source, flags.batch_size // flags.microbatch_size, on_policy=alone)

    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Make the learner that trains a network."""
        from appo.algorithms.models.build import let_learn
        from appo.algorithms.parts.verify import VerifyingLearner
        from appo.algorithms.ppo.streaming import StreamingLearner

        let_learn(flat, context.model, context.precision, context.device)
        learner: Learner = (whole := self.learner_class()(flat, context.spec, context.flags, context.torch_seed()))
        if context.flags.streams:
            learner = StreamingLearner(whole)
        return VerifyingLearner(learner, context.spec) if context.verify else learner
