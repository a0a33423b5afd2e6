"""Asynchronous proximal policy optimization, as the runtime sees it; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms.appo.config import LearningConfig
from algorithms.runtime.algorithm import Context, Recorded

if TYPE_CHECKING:
    from algorithms.models.flat_module import FlatModule
    from algorithms.parts.stochastic_policy import StochasticPolicy
    from envs.spec import EnvSpec


@dataclass(frozen=True)
class APPO:
    """Actor-critics that act stochastically, and learn from what they recorded of it."""

    name: ClassVar[str] = "APPO"
    flags: ClassVar[type[LearningConfig]] = LearningConfig

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare what acting records beside actions; values are in units of return."""
        return {
            "logits": Recorded(("T", "R", spec.action.num_logits)),
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
        return StochasticPolicy(flat, context.spec)
