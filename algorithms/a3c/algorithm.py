"""Asynchronous advantage actor-critic as an `Algorithm`; torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from appo.algorithms.a3c.config import COMPUTED, METRICS, PANEL, A3CConfig
from appo.algorithms.a3c.presets import CONTINUOUS, IMAGES, NUMBERS, PRESETS
from appo.algorithms.parts.algorithm import acting_records
from appo.algorithms.runtime.algorithm import Algorithm, Context, Presets, companion
from appo.algorithms.runtime.roles import ACTOR, POLICY_WORKER, Role
from appo.utils.errors import UsageError

if TYPE_CHECKING:
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.parts.stochastic_policy import StochasticPolicy
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import BatchSource
    from appo.algorithms.runtime.learning.gradients import GradientRing
    from appo.algorithms.runtime.learning.learner_worker import Learner
    from appo.algorithms.runtime.memory.arena import Field
    from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
    from appo.algorithms.runtime.messages import Address, Worker
    from appo.algorithms.runtime.topology import Topology
    from appo.envs.spec import EnvSpec

GRADIENT_WORKER = POLICY_WORKER.variant("gradient_worker", ("gradient", "gradients"), takes_trajectories=True)
"""Role of the workers beside actors that compute gradients."""


@dataclass(frozen=True)
class A3C(Algorithm):
    """Actor-critic: workers beside actors compute gradients, and the learner applies the gradients on arrival."""

    name: ClassVar[str] = "A3C"
    flags: ClassVar[type[A3CConfig]] = A3CConfig
    metrics: ClassVar[Mapping[str, str]] = METRICS
    panel: ClassVar[Mapping[str, str]] = PANEL
    presets: ClassVar[Presets] = Presets(PRESETS, NUMBERS, IMAGES, CONTINUOUS)
    whole_rollouts: ClassVar[bool] = True

    def check(self, flags: A3CConfig, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags (UsageError)."""
        flags.check()

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the recorded fields; values are in units of return."""
        return acting_records()  # which differentiating must reproduce

    def make_model(self, context: Context) -> FlatModule:
        """Make an actor-critic on the device, with weights drawn from torch's global generator.

        Raises:
            UsageError: the flags select layers that change with every forward pass of training.
        """
        from appo.algorithms.models.build import new_model

        if context.model.use_spectral_norm:
            raise UsageError("--use_spectral_norm: with --algo=A3C no network makes the passes that keep its estimates")
        return new_model(context.model, context.spec, context.device)

    def make_policy(self, context: Context, flat: FlatModule) -> StochasticPolicy:
        """Make the policy; weights stay float32 because the gradient worker differentiates the same network."""
        from appo.algorithms.models.build import let_learn
        from appo.algorithms.parts.stochastic_policy import StochasticPolicy

        flat.module.eval()
        let_learn(flat, context.model, context.precision, context.device)
        return StochasticPolicy(flat, context.spec, self.recorded(context.spec))

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of gradients, which drops old gradients."""
        from appo.algorithms.runtime.learning.gradients import GradientSource
        from appo.algorithms.runtime.memory.learner_state import StateBlock

        assert context.arena is not None
        ring, block = self.ring(context), StateBlock(context.arena, context.policy)
        return GradientSource(ring, context.policy, trajectories, block, GRADIENT_WORKER, sampling.max_policy_lag)

    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Make the learner, which applies gradients of the workers."""
        from appo.algorithms.a3c.learner import A3CLearner

        return A3CLearner(flat, context)

    def ring(self, context: Context) -> GradientRing:
        """Return the shared memory of gradients."""
        from appo.algorithms.runtime.learning.gradients import GradientRing

        assert context.arena is not None
        return GradientRing(context.arena, context.policy)

    def fields(self, context: Context, topology: Topology, num_weights: int) -> Sequence[Field]:
        """Declare the ring of gradients, with room for metrics and for moments of normalized inputs and returns."""
        from appo.algorithms.runtime.learning.gradients import GradientRing

        model, of_returns = context.model, 3
        numbers = [
            1 + 2 * prod(spec.shape)  # a count, means and second moments
            for spec in context.spec.observations.values()
            if model.normalize_input and (model.normalize_images or spec.dtype.startswith("float"))
        ]
        return GradientRing.declare(
            context.policy, topology.num_actors, num_weights, len(COMPUTED) + sum(numbers) + of_returns
        )

    def workers(self, topology: Topology) -> Mapping[Role, Role]:
        """Declare a gradient worker beside every actor."""
        return {GRADIENT_WORKER: ACTOR}

    def make_worker(
        self, address: Address, context: Context, trajectories: Trajectories, others: Mapping[Address, Worker]
    ) -> Worker:
        """Make the gradient worker of an actor, with the network of its policy worker."""
        from appo.algorithms.a3c.learner import TrajectoryGradient
        from appo.algorithms.a3c.worker import GradientWorker
        from appo.algorithms.runtime.sampling.policy_worker import PolicyWorker

        acting = companion(others, address, POLICY_WORKER, PolicyWorker)
        differentiate = TrajectoryGradient(acting.policy.flat, context.spec, context.flags)
        return GradientWorker(address, trajectories, acting.weights, differentiate, self.ring(context))
