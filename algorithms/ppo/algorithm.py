"""Synchronous proximal policy optimization, as the runtime sees it; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms.ppo.config import PPOConfig
from algorithms.runtime.algorithm import Context, Recorded

if TYPE_CHECKING:
    from algorithms.models.flat_module import FlatModule
    from algorithms.parts.stochastic_policy import StochasticPolicy
    from algorithms.ppo.learner import PPOLearner
    from algorithms.runtime.devices import Device
    from envs.spec import EnvSpec


@dataclass(frozen=True)
class PPO:
    """Actor-critics that act stochastically, and learn from what the newest of them did."""

    name: ClassVar[str] = "PPO"
    flags: ClassVar[type[PPOConfig]] = PPOConfig

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare what acting records beside actions; values are in units of return."""
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

    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> PPOLearner:
        """Make the learner that trains a network, with a seed of the context's own."""
        from algorithms.ppo.learner import PPOLearner

        assert context.seeds is not None
        seed = int(context.seeds.generate_state(1, "uint64")[0] >> 1)
        return PPOLearner(flat, context.spec, context.flags, seed)
