"""Ape-X as an `Algorithm`; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from appo.algorithms.apex.config import METRICS, PANEL, ApexConfig
from appo.algorithms.apex.presets import IMAGES, NUMBERS, PRESETS
from appo.algorithms.parts.choices import epsilon_of_rows, require_choices
from appo.algorithms.replay.algorithm import ReplayAlgorithm, WithoutActors
from appo.algorithms.runtime.algorithm import Algorithm, Context, Presets

if TYPE_CHECKING:
    from appo.algorithms.apex.learner import ApexLearner
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.models.q_network import QNetwork
    from appo.algorithms.parts.epsilon_greedy import EpsilonGreedyPolicy
    from appo.algorithms.replay.storage import ReplayPlan
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.memory.slots import Recorded
    from appo.envs.spec import EnvSpec


@dataclass(frozen=True)
class APEX(ReplayAlgorithm):
    """Epsilon-greedy Q-network, trained on steps drawn from a prioritized replay."""

    name: ClassVar[str] = "APEX"
    flags: ClassVar[type[Any]] = ApexConfig
    metrics: ClassVar[Mapping[str, str]] = METRICS
    panel: ClassVar[Mapping[str, str]] = PANEL
    presets: ClassVar[Presets] = Presets(PRESETS, NUMBERS, IMAGES)
    with_ranks: ClassVar[bool] = True
    values: ClassVar[str] = "actions"

    def check(self, flags: ApexConfig, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags, and environments whose actions are not choices (UsageError)."""
        super().check(flags, spec)
        require_choices(self.name, spec)

    def without_actors(self) -> Algorithm:
        """Return the variant that reads datasets alone."""
        return OfflineAPEX() if type(self) is APEX else super().without_actors()

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the recorded fields, which give first priorities; values are in units of return."""
        from appo.algorithms.runtime.memory.slots import Recorded  # late: --help needs no numpy

        return {"q_taken": Recorded(("T", "R")), "q_max": Recorded(("T", "R"))}

    def explores(self, row: int, rows: int) -> bool:
        """Return whether a row belongs to the two thirds of rows that explore most, without reported returns."""
        return row < rows - -(-rows // 3)

    def learner_class(self) -> type[ApexLearner]:
        """Return the class of the learner."""
        from appo.algorithms.apex.learner import ApexLearner

        return ApexLearner

    def new_learner(self, context: Context, flat: FlatModule, device: Device) -> ApexLearner:
        """Return a learner of a network, with a twin in numpy unless actions have masks."""
        from appo.algorithms.apex.numpy_learner import numpy_update

        learner = self.learner_class()(flat, context)
        return learner if context.spec.action_mask else learner.accelerate(numpy_update)

    def network(self, context: Context) -> QNetwork:
        """Make a Q-network."""
        from appo.algorithms.models.q_network import build_q_network

        return build_q_network(context.model, context.spec, dueling=context.flags.dueling)

    def policy(self, context: Context, flat: FlatModule) -> EpsilonGreedyPolicy:
        """Make the policy; without shared memory of a run the policy does not explore."""
        from appo.algorithms.parts.epsilon_greedy import EpsilonGreedyPolicy

        return EpsilonGreedyPolicy(flat, context.spec, epsilon_of_rows(context), rescaled=context.flags.value_rescaling)

    def plan(self, flags: ApexConfig) -> ReplayPlan:
        """Return the plan of the replay for these flags."""
        return replace(super().plan(flags), eta=flags.priority_eta, rescaled=flags.value_rescaling)


@dataclass(frozen=True)
class OfflineAPEX(WithoutActors, APEX):
    """Ape-X that learns from datasets alone."""
