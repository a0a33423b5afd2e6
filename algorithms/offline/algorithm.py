"""Algorithms that learn from datasets: BC and MARWIL; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from appo.algorithms.offline.config import CLONING_METRICS, MARWIL_METRICS, CloningConfig, MarwilConfig
from appo.algorithms.parts.algorithm import ActorCriticAlgorithm
from appo.algorithms.runtime.algorithm import Context
from appo.envs.presets import discount_preset

if TYPE_CHECKING:
    from appo.algorithms.offline.learner import CloningLearner, MarwilLearner
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import BatchSource
    from appo.algorithms.runtime.memory.slots import Trajectories
    from appo.envs.config import EnvConfig
    from appo.envs.spec import EnvSpec


@dataclass(frozen=True)
class BC(ActorCriticAlgorithm):
    """Behaviour cloning: the policy imitates the actions of a dataset."""

    name: ClassVar[str] = "BC"
    flags: ClassVar[type[Any]] = CloningConfig
    metrics: ClassVar[Mapping[str, str]] = CLONING_METRICS
    panel: ClassVar[Mapping[str, str]] = {"loss": "loss", "agreement": "agreement", "entropy": "entropy"}
    needs_actors: ClassVar[bool] = False
    values: ClassVar[str] = ""

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a family of known environments: the discount, where it is unusual."""
        return discount_preset(name)

    def find_spec(self, flags: CloningConfig, env: EnvConfig) -> EnvSpec:
        """Return the spaces of the datasets (UsageError: a dataset is missing or damaged)."""
        from appo.algorithms.datasets.reader import spec_of_input

        return spec_of_input(flags, env)

    def learner_class(self) -> type[CloningLearner]:
        """Return the class of the learner."""
        from appo.algorithms.offline.learner import CloningLearner

        return CloningLearner

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches, which reads in the learner's process."""
        from appo.algorithms.datasets.columns import Needs, columns_of
        from appo.algorithms.datasets.mix import reader_of
        from appo.algorithms.runtime.learning.read_batches import ReadBatches
        from appo.algorithms.runtime.memory.ownership import LearnerLedger

        flags, (segments, _, state_size) = context.flags, trajectories.rnn_state.shape[1:]
        gather = columns_of(flags.rollout, segments, state_size)
        needs = Needs((), context.reward_scale, context.reward_clip)
        read = reader_of(flags, context.spec, flags.rollout, gather, needs)
        return ReadBatches(read, flags.macro_batch_columns, LearnerLedger(trajectories, context.policy))


@dataclass(frozen=True)
class MARWIL(BC):
    """Advantage-weighted cloning: the policy imitates actions of higher advantage more."""

    name: ClassVar[str] = "MARWIL"
    flags: ClassVar[type[Any]] = MarwilConfig
    metrics: ClassVar[Mapping[str, str]] = MARWIL_METRICS
    values: ClassVar[str] = "critic"
    panel: ClassVar[Mapping[str, str]] = {
        "policy_loss": "policy",
        "value_loss": "value",
        "entropy": "entropy",
        "weight_mean": "weight",
        "grad_norm": "gradient",
    }

    def learner_class(self) -> type[MarwilLearner]:
        """Return the class of the learner."""
        from appo.algorithms.offline.learner import MarwilLearner

        return MarwilLearner
