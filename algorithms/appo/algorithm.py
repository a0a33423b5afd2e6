"""Asynchronous proximal policy optimization as an `Algorithm`; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from appo.algorithms.appo import presets
from appo.algorithms.appo.config import METRICS, APPOConfig
from appo.algorithms.parts.algorithm import ActorCriticAlgorithm
from appo.algorithms.parts.config import SURROGATE_PANEL
from appo.algorithms.runtime.algorithm import Context
from appo.envs.presets import discount_preset, family_learning
from appo.utils.errors import UsageError

if TYPE_CHECKING:
    from appo.algorithms.appo.learner import APPOLearner
    from appo.algorithms.appo.numpy_learner import NumpyUpdate
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.parts.captured_update import CapturedUpdate
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import BatchSource
    from appo.algorithms.runtime.learning.learner_worker import Learner
    from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
    from appo.envs.spec import EnvSpec


@dataclass(frozen=True)
class APPO(ActorCriticAlgorithm):
    """Asynchronous actor-critic: V-trace corrects for the age of recorded steps, a clip bounds each update."""

    name: ClassVar[str] = "APPO"
    flags: ClassVar[type[APPOConfig]] = APPOConfig
    sample_efficient: ClassVar[Mapping[str, Mapping[str, object]]] = presets.SAMPLE_EFFICIENT
    metrics: ClassVar[Mapping[str, str]] = METRICS
    panel: ClassVar[Mapping[str, str]] = SURROGATE_PANEL
    with_ranks: ClassVar[bool] = True

    def check(self, flags: APPOConfig, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags, and an unsuitable environment once the environment is known (UsageError)."""
        super().check(flags, spec)
        continuous = spec is not None and any(spec.action.is_real)
        if continuous and flags.exploration_loss == "symmetric_kl" and flags.exploration_loss_coeff:
            raise UsageError(
                "--exploration_loss=symmetric_kl: the environment has continuous actions, of which none are uniform;"
                " take entropy"
            )
        if spec is not None and spec.same_step and flags.mix.datasets:
            raise UsageError(
                "--input: this vector environment resets in the step that ends an episode, which no episode of a"
                " dataset does; take --env_vectorization=python"
            )

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a known environment."""
        return discount_preset(name) | presets.PRESETS.get(name, {}) | family_learning(name, device)

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return flag -> value of learning for an unknown environment."""
        of_actions = presets.CONTINUOUS if continuous else {}
        room = {"batch_size": rollout} if rollout > presets.BATCH_SIZE else {}  # for one trajectory
        return (presets.IMAGES if images else presets.NUMBERS) | of_actions | room

    def preset_by_cost(self, *, images: bool, rollout: int) -> Mapping[str, object]:
        """Return flags of learning for an unknown environment whose steps cost much."""
        if images:
            return {}
        small = presets.SLOW_BATCH_SIZE % rollout == 0  # a batch holds whole trajectories
        return presets.SLOW | ({"batch_size": presets.SLOW_BATCH_SIZE} if small else {})

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the recorded fields, with logits for the KL divergence."""
        from appo.algorithms.runtime.memory.slots import Recorded  # late: --help needs no numpy

        return {"logits": Recorded(("T", "R", spec.action.num_logits)), **super().recorded(spec)}

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches of columns, a share from the datasets of `--input`."""
        source, mix = super().make_source(context, trajectories, sampling, device), context.flags.mix
        if not mix.datasets:
            return source
        from appo.algorithms.datasets.columns import Needs, columns_of, without_values
        from appo.algorithms.datasets.mix import mixed_in, reader_of

        flags, (segments, _, state_size) = context.flags, trajectories.rnn_state.shape[1:]
        gather = without_values(columns_of(flags.rollout, segments, state_size))
        recorded = tuple(name for name in trajectories.recorded if name not in ("value", "final_value"))
        needs = Needs(recorded, context.reward_scale, context.reward_clip)
        read = reader_of(flags, context.spec, flags.rollout, gather, needs)
        return mixed_in(source, read, context, trajectories, units=1)

    def learner_class(self) -> type[APPOLearner]:
        """Return the class of the learner; variants of APPO override this method."""
        from appo.algorithms.appo.learner import APPOLearner

        return APPOLearner

    def new_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Return a learner with the fastest suitable update: captured, numpy or plain torch.

        A graph would freeze what a subclass counts or decides in Python, so only the learner itself is captured.
        """
        from appo.algorithms.appo.learner import APPOLearner
        from appo.algorithms.appo.numpy_learner import numpy_update
        from appo.algorithms.parts.captured_update import CapturedUpdate

        def make_quick(learner: APPOLearner) -> CapturedUpdate | NumpyUpdate | None:
            if context.buffered and type(learner) is APPOLearner and not learner.ranks:
                return CapturedUpdate(learner.update, device)  # which, replayed, could not wait for other processes
            return None if context.verify else numpy_update(learner)

        return self.learner_class()(flat, context).accelerate(make_quick)
