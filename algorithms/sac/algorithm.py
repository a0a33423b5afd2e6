"""SAC as an `Algorithm`; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from appo.algorithms.parts.algorithm import require_squashed
from appo.algorithms.replay.algorithm import ReplayAlgorithm, WithoutActors
from appo.algorithms.runtime.algorithm import Algorithm, Context, Presets
from appo.algorithms.sac.config import METRICS, PANEL, SACConfig
from appo.algorithms.sac.presets import IMAGES, NUMBERS, PRESETS, SAMPLE_EFFICIENT

if TYPE_CHECKING:
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.models.policy_network import PolicyNetwork
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.sac.learner import SACLearner
    from appo.algorithms.sac.policy import SACPolicy
    from appo.envs.spec import EnvSpec


@dataclass(frozen=True)
class SAC(ReplayAlgorithm):
    """Squashed Gaussian policy that maximizes reward and entropy, trained on steps drawn from a replay."""

    name: ClassVar[str] = "SAC"
    with_ranks: ClassVar[bool] = True
    flags: ClassVar[type[Any]] = SACConfig
    sample_efficient: ClassVar[Mapping[str, Mapping[str, object]]] = SAMPLE_EFFICIENT
    metrics: ClassVar[Mapping[str, str]] = METRICS
    panel: ClassVar[Mapping[str, str]] = PANEL
    presets: ClassVar[Presets] = Presets(PRESETS, NUMBERS, IMAGES)
    values: ClassVar[str] = ""
    smallest_gpu_batch: ClassVar[int] = 256  # with 256x256 a captured update takes a quarter of the time of a core's

    def check(self, flags: SACConfig, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags, and actions that are not numbers squashed between bounds (UsageError)."""
        super().check(flags, spec)
        if spec is not None:
            require_squashed(self.name, spec.action)

    def without_actors(self) -> Algorithm:
        """Return the variant that reads datasets alone."""
        return OfflineSAC() if type(self) is SAC else super().without_actors()

    def learner_class(self) -> type[SACLearner]:
        """Return the class of the learner."""
        from appo.algorithms.sac.learner import SACLearner

        return SACLearner

    def new_learner(self, context: Context, flat: FlatModule, device: Device) -> SACLearner:
        """Return a learner with the fastest suitable update: captured, written out for MLPs, or plain torch.

        A graph would freeze what a subclass counts or decides in Python, so only the learner itself is captured.
        """
        from appo.algorithms.parts.captured_update import CapturedUpdate
        from appo.algorithms.sac.learner import SACLearner
        from appo.algorithms.sac.quick_gradients import quick_gradients

        def captured(learner: SACLearner) -> CapturedUpdate | None:
            if learner.ranks:  # a graph that is replayed cannot wait for other processes
                return None
            return CapturedUpdate(learner.update, device, learner.device_generator)

        learner = self.learner_class()(flat, context)
        if not context.buffered:
            learner.gradients = quick_gradients(learner)
        elif type(learner) is SACLearner:
            learner.accelerate(captured)
        return learner

    def network(self, context: Context) -> PolicyNetwork:
        """Make the network of the policy."""
        from appo.algorithms.models.policy_network import build_policy_network

        return build_policy_network(context.model, context.spec)

    def policy(self, context: Context, flat: FlatModule) -> SACPolicy:
        """Make the policy; without shared memory of a run, or after an update, no action is uniform."""
        from appo.algorithms.runtime.memory.learner_state import StateBlock
        from appo.algorithms.sac.policy import SACPolicy

        if context.arena is None:
            return SACPolicy(flat, context.spec, 0)
        state = None
        if f"state.{context.policy}.latest" in context.arena:
            state = StateBlock(context.arena, context.policy).read()
        is_trained = state is not None and bool(state.meta["updates"])
        return SACPolicy(flat, context.spec, context.flags.learning_starts, is_trained=is_trained)


@dataclass(frozen=True)
class OfflineSAC(WithoutActors, SAC):
    """SAC that learns from datasets alone."""
