"""Makes the workers that have a network, inside their process."""

from dataclasses import replace

import numpy as np
import torch

from algorithms.appo.learner import Learner, Tune
from algorithms.appo.numpy_learner import NumpyUpdate, numpy_update
from algorithms.appo.verify import VerifyingLearner
from algorithms.models.actor_critic import TowerActorCritic
from algorithms.models.build import computes_in_bf16
from algorithms.models.encoders import share_images
from algorithms.models.flat_module import FlatModule
from algorithms.parts.optimizer import CapturedUpdate
from algorithms.population.member import PopulationMember
from algorithms.run.plan import RunPlan
from algorithms.runtime.devices import Device, device_of
from algorithms.runtime.learning.batches import BatchSource, ColumnBatches, LockstepBatches
from algorithms.runtime.learning.gpu_batches import DeviceBatches
from algorithms.runtime.learning.learner_worker import LearnerMemory, LearnerWorker, TrainingPlan
from algorithms.runtime.memory.arena import Arena
from algorithms.runtime.memory.slots import FinalObservations
from algorithms.runtime.memory.weights import WeightRing
from algorithms.runtime.messages import Address, Worker
from algorithms.runtime.roles import LEARNER, POLICY_WORKER
from algorithms.runtime.sampling.gpu_policy_worker import GpuEngine
from algorithms.runtime.sampling.policy_worker import ActingPlan, Engine, HostEngine, PolicyWorker
from utils import machine


def make_policy_worker(
    blueprint: RunPlan, arena: Arena, address: Address, generation: int = 0, flat: FlatModule | None = None
) -> Worker:
    """A policy worker; its weights come from the ring, recurrent states of a later generation from the slots.

    A model that is there already need not be made.
    """
    device = device_of(blueprint.device_of(POLICY_WORKER), urgent=True)
    device.register(arena)
    return device.make(lambda: _policy_worker(blueprint, arena, address, device, generation, flat))


def _policy_worker(
    blueprint: RunPlan,
    arena: Arena,
    address: Address,
    device: Device,
    generation: int,
    flat: FlatModule | None,
) -> PolicyWorker:
    b, t = blueprint, blueprint.topology
    life = [generation] * (generation > 0)
    alone = range(t.num_groups) if b.config.sampling.lockstep else ()  # groups with random numbers of their own
    plan = ActingPlan(
        spec=b.spec,
        num_groups=t.num_groups,
        recurrence=b.config.learning.segment_steps,
        num_policies=t.num_acting,
        device=device.name,
        seed=_torch_seed(b.seeds(POLICY_WORKER.name, address.index, address.member, *life)),
        group_seeds=tuple(_torch_seed(b.seeds("actions", group, *life)) for group in alone),
        replaces=generation > 0,
    )
    context = b.context(address.index, device.name)
    policy = b.algorithm.make_policy(context, flat or b.algorithm.make_model(context))
    trajectories, finals = b.trajectories(arena), FinalObservations.attach(arena, b.spec)
    engine: Engine = HostEngine(policy, plan, trajectories)
    if b.buffered and t.placement != "local":
        engine = GpuEngine(policy, plan, trajectories, device)
    return PolicyWorker(address, plan, engine, WeightRing(arena, address.index), trajectories, finals)


def make_learner(
    blueprint: RunPlan,
    arena: Arena,
    address: Address,
    kind: type[Learner] = Learner,
    flat: FlatModule | None = None,
) -> Worker:
    """A learner whose weights are published. A model that is there already need not be made."""
    device = device_of(blueprint.device_of(LEARNER))
    device.register(arena)
    return device.make(lambda: _learner(blueprint, arena, address, kind, device, flat))


def _learner(
    blueprint: RunPlan,
    arena: Arena,
    address: Address,
    kind: type[Learner],
    device: Device,
    flat: FlatModule | None,
) -> LearnerWorker:
    b, c, policy = blueprint, blueprint.config, address.index
    torch.manual_seed(_torch_seed(b.seeds("model", policy)))
    flat = flat or b.algorithm.make_model(b.context(policy, device.name))
    if computes_in_bf16(c.model, c.run.precision, flat.module, device.name):
        assert isinstance(flat.module, TowerActorCritic)
        flat.module.compute_in_bf16()
    share_images(flat.module, machine.threads())
    kind = VerifyingLearner if c.logging.verify_reproduction else kind
    learner = kind(flat, b.spec, b.learning_of(policy), _torch_seed(b.seeds(LEARNER.name, policy)))
    plan = TrainingPlan(
        budget=replace(b.budget, env_steps=0) if policy in c.frozen else b.budget,
        max_policy_lag=c.sampling.max_policy_lag,
        device=device.name,
        max_skipped_updates=c.learning.max_skipped_updates,
        incidents=c.run.incidents,
        alone=b.topology.num_policies == 1,
        pause_env_steps=b.pause_env_steps,
        version_env_steps=c.population.self_play_period_env_steps if b.topology.num_past else 0,
    )

    def quick_update() -> CapturedUpdate | NumpyUpdate | None:
        if b.buffered:
            return CapturedUpdate(learner.update, device)
        return numpy_update(learner) if kind is Learner else None  # another class may compute something else

    tune, batches = Tune(learner, quick_update), _batches(b, arena, policy, device)
    memory = LearnerMemory.attach(arena, b.trajectories(arena), policy)
    member = None if plan.alone else PopulationMember(b.traits_of(policy), tune, batches, memory.block)
    return LearnerWorker(address, plan, learner, batches, memory, member)


def _batches(blueprint: RunPlan, arena: Arena, policy: int, device: Device) -> BatchSource:
    """Where a learner's batches come from."""
    b, c = blueprint, blueprint.config
    trajectories, lag = b.trajectories(arena), c.sampling.max_policy_lag
    columns = b.learning_of(policy).macro_batch_columns
    if c.sampling.lockstep:
        return LockstepBatches(trajectories, policy, columns, lag)
    hold, num_policies = c.sampling.num_minibatches_to_accumulate == 0, b.topology.num_acting
    if b.buffered:
        return DeviceBatches(trajectories, policy, columns, lag, hold, num_policies, device)
    return ColumnBatches(trajectories, policy, columns, lag, hold, num_policies)


def _torch_seed(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1, np.uint64)[0] >> 1)
