"""Synchronous proximal policy optimization, as the runtime sees it; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms.ppo import presets
from algorithms.ppo.config import METRICS, PANEL, STREAMING_METRICS, PPOConfig
from algorithms.runtime.algorithm import Context, Defaults

if TYPE_CHECKING:
    from algorithms.models.flat_module import FlatModule
    from algorithms.parts.stochastic_policy import StochasticPolicy
    from algorithms.runtime.config import SamplingConfig
    from algorithms.runtime.devices import Device
    from algorithms.runtime.learning.batches import BatchSource
    from algorithms.runtime.learning.learner_worker import Learner
    from algorithms.runtime.memory.learner_state import StateLayout
    from algorithms.runtime.memory.slots import Recorded, Trajectories
    from envs.spec import EnvSpec


@dataclass(frozen=True)
class PPO(Defaults):
    """Actor-critics that act stochastically, and learn from what the newest of them did."""

    name: ClassVar[str] = "PPO"
    flags: ClassVar[type[PPOConfig]] = PPOConfig
    metrics: ClassVar[Mapping[str, str]] = {**METRICS, **STREAMING_METRICS}
    panel: ClassVar[Mapping[str, str]] = PANEL
    synchronous: ClassVar[bool] = True

    def check(self, flags: PPOConfig, spec: EnvSpec | None) -> None:
        """Refuse flags that contradict each other (UsageError); a recurrent network refuses more, see `layout`."""
        flags.check(recurrent=False)

    def streams(self, flags: PPOConfig) -> bool:
        """Whether a batch is trained on in microbatches that are dropped, see `--microbatch_size`."""
        return flags.streams

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a family of known environments."""
        return presets.learning_preset(name)

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return flag -> value of learning for an unknown environment, by what it shows and takes."""
        return presets.learning_by_kind(images=images)

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare what acting records beside actions; values are in units of return."""
        from algorithms.runtime.memory.slots import Recorded  # late: --help needs no numpy

        return {
            "log_prob": Recorded(("T", "R")),  # of the action
            "value": Recorded(("T", "R")),
            "final_value": Recorded(("F", "R")),  # of the true final observation
        }

    def make_model(self, context: Context) -> FlatModule:
        """Make an actor-critic on its device; its weights are drawn from torch's global generator."""
        from algorithms.models.build import new_model

        return new_model(context.model, context.spec, context.device)

    def make_policy(self, context: Context, flat: FlatModule) -> StochasticPolicy:
        """Make the policy that acts with a network, which nobody trains from now on."""
        from algorithms.models.build import let_act
        from algorithms.parts.stochastic_policy import StochasticPolicy

        let_act(flat, context.model, context.precision, context.device)
        return StochasticPolicy(flat, context.spec, self.recorded(context.spec))

    def layout(self, context: Context, flat: FlatModule) -> StateLayout:
        """Return what the state of a learner holds: weights, moments of Adam, running statistics.

        Raises:
            UsageError: the flags do not go with the network.
        """
        from algorithms.ppo.learner import layout_of

        context.flags.check(recurrent=bool(flat.module.rnn_state_size))
        return layout_of(flat, context.flags)

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches of columns, whose slots go back after training where one policy plays."""
        from algorithms.parts.columns import StreamedBatches, make_column_batches

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
        from algorithms.models.build import let_learn
        from algorithms.parts.verify import VerifyingLearner
        from algorithms.ppo.learner import PPOLearner
        from algorithms.ppo.streaming import StreamingLearner

        let_learn(flat, context.model, context.precision, context.device)
        learner: Learner = (whole := PPOLearner(flat, context.spec, context.flags, context.torch_seed()))
        if context.flags.streams:
            learner = StreamingLearner(whole)
        return VerifyingLearner(learner, context.spec) if context.verify else learner
