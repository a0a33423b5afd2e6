"""Base classes of algorithms, those with an actor-critic and all with a `FlatLearner`; torch-free at import."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appo.algorithms.runtime.algorithm import Algorithm, Context
from appo.utils.errors import UsageError

if TYPE_CHECKING:
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.parts.learner import FlatLearner
    from appo.algorithms.parts.stochastic_policy import StochasticPolicy
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import BatchSource
    from appo.algorithms.runtime.learning.learner_worker import Learner
    from appo.algorithms.runtime.memory.learner_state import StateLayout
    from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
    from appo.envs.spec import ActionSpec, EnvSpec


def acting_records() -> Mapping[str, Recorded]:
    """Declare the recorded fields of an actor-critic; values are in units of return."""
    from appo.algorithms.runtime.memory.slots import Recorded  # late: --help needs no numpy

    return {
        "log_prob": Recorded(("T", "R")),  # of the action
        "value": Recorded(("T", "R")),
        "final_value": Recorded(("F", "R")),  # of the true final observation
    }


def require_squashed(algo: str, action: ActionSpec) -> None:
    """Refuse actions that are not numbers squashed between bounds (UsageError).

    Args:
        algo: name of the algorithm.
        action: actions of the environment, in the form that the flags chose.
    """
    if all(part.kind == "tanh_gaussian" for part in action.parts):
        return
    if not all(part.is_real for part in action.parts):
        raise UsageError(
            f"--algo={algo} needs continuous actions, the environment has choices: take APEX, PQN, APPO or PPO"
        )
    bounds = (*(action.low or ()), *(action.high or ()))
    is_squashed = any(part.kind == "tanh_gaussian" for part in action.parts)
    if is_squashed or not all(abs(bound) < float("inf") for bound in bounds):
        raise UsageError(
            f"--algo={algo} needs actions between two bounds, the environment has numbers without: declare them"
            " by gymnasium.wrappers.TransformAction(env, lambda action: action, gymnasium.spaces.Box(low, high)),"
            " or take APPO or PPO"
        )
    raise UsageError(f"--algo={algo} squashes actions between their bounds: add --action_distribution=tanh_gaussian")


@dataclass(frozen=True)
class FlatAlgorithm(Algorithm):
    """An algorithm whose learner is a `FlatLearner`; a subclass writes `learner_class`."""

    @abstractmethod
    def learner_class(self) -> type[FlatLearner]:
        """Return the class of the learner, imported inside: main and actors do not import torch."""

    def layout(self, context: Context, flat: FlatModule) -> StateLayout:
        """Return the layout of a new learner, without preparing the network for training."""
        return self.learner_class()(flat, context).layout

    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Make the learner of a network."""
        from appo.algorithms.models.build import let_learn

        let_learn(flat, context.model, context.precision, context.device)
        return self.new_learner(context, flat, device)

    def new_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Return a learner of a network that is prepared for training."""
        return self.learner_class()(flat, context)


@dataclass(frozen=True)
class ActorCriticAlgorithm(FlatAlgorithm):
    """Draws actions from an actor-critic and trains on every whole column once, in the order of arrival.

    A subclass sets `name`, `flags` (a `ColumnsConfig`) and `metrics`, and writes `learner_class`.
    """

    def check(self, flags: Any, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags, and an unsuitable environment once the environment is known (UsageError)."""
        flags.check()
        if flags.lr_schedule.startswith("kl_adaptive") and "kl_divergence" not in self.metrics:
            raise UsageError(f"--lr_schedule={flags.lr_schedule}: --algo={self.name} measures no KL divergence")
        alpha = getattr(flags, "rpo_alpha", 0.0)
        if alpha and spec is not None and not any(spec.action.is_real):
            raise UsageError(
                f"--rpo_alpha={alpha:g}: no action is continuous, or --continuous_as_bins makes choices of all; take 0"
            )

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the recorded fields; values are in units of return."""
        return acting_records()

    def make_model(self, context: Context) -> FlatModule:
        """Make an actor-critic on the device, with weights drawn from torch's global generator."""
        from appo.algorithms.models.build import new_model

        return new_model(context.model, context.spec, context.device)

    def make_policy(self, context: Context, flat: FlatModule) -> StochasticPolicy:
        """Make the policy that acts with a network; no learner trains the network from now on."""
        from appo.algorithms.models.build import let_act
        from appo.algorithms.parts.stochastic_policy import StochasticPolicy

        let_act(flat, context.model, context.precision, context.device)
        return StochasticPolicy(flat, context.spec, self.recorded(context.spec))

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches of columns, in the order of arrival."""
        from appo.algorithms.parts.columns import make_column_batches

        return make_column_batches(context, trajectories, sampling, device)

    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Make the learner of a network, which compares values with acting for `--verify_reproduction`."""
        from appo.algorithms.parts.verify import VerifyingLearner

        learner = super().make_learner(context, flat, device)
        return VerifyingLearner(learner, context.spec, context.max_policy_lag) if context.verify else learner
