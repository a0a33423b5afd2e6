"""Makes the workers that have a network, inside their process."""

import numpy as np
import torch
from torch import nn

from algorithms.appo.blueprint import Blueprint
from algorithms.appo.captured_update import CapturedUpdate
from algorithms.appo.config import Config
from algorithms.appo.learner import Learner
from algorithms.appo.numpy_update import NumpyUpdate, numpy_update
from algorithms.appo.reproduction import VerifyingLearner
from algorithms.appo.tune import Tune
from algorithms.models.actor_critic import TowerActorCritic
from algorithms.models.build import build_model
from algorithms.models.encoders import share_images
from algorithms.runtime.arena import Arena
from algorithms.runtime.batches import BatchSource, ColumnBatches
from algorithms.runtime.buffered_policy_worker import BufferedPolicyWorker
from algorithms.runtime.device import Device, device_of
from algorithms.runtime.device_batches import DeviceBatches
from algorithms.runtime.flat_module import FlatModule
from algorithms.runtime.learner_worker import LearnerMemory, LearnerWorker, TrainingPlan
from algorithms.runtime.lockstep import LockstepBatches, LockstepPolicyWorker
from algorithms.runtime.member_worker import Member, MemberWorker
from algorithms.runtime.messages import Address
from algorithms.runtime.node import Worker
from algorithms.runtime.policy_worker import ActingPlan, PolicyWorker
from algorithms.runtime.trajectories import FinalObservations, Trajectories
from algorithms.runtime.weights import WeightRing
from envs.spec import EnvSpec
from utils import cpu


def new_model(config: Config, spec: EnvSpec, device: str) -> FlatModule:
    """A model on its device, all weights in one vector."""
    return FlatModule(build_model(config.model, spec).to(device))


def computes_in_bf16(config: Config, model: nn.Module, device: str) -> bool:
    """What --precision means for a model: `auto` is bf16 for networks of images on hardware that multiplies it.

    Networks of a few vectors gain nothing, and parts of the user's own need not stand it.
    """
    precision = config.run.precision
    if precision == "fp32" or config.model.encoder_custom:
        return False
    has_images = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return precision == "bf16" or (has_images and _multiplies_bf16(device))


def _multiplies_bf16(device: str) -> bool:
    if device == "cpu":
        return cpu.multiplies_bf16()
    return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere


def make_policy_worker(
    blueprint: Blueprint, arena: Arena, address: Address, generation: int = 0, flat: FlatModule | None = None
) -> Worker:
    """A policy worker; its weights come from the ring, recurrent states of a later generation from the slots.

    A model that is there already need not be made.
    """
    device = device_of(blueprint.device_of("policy_worker"), urgent=True)
    device.register(arena)
    return device.make(lambda: _policy_worker(blueprint, arena, address, device, generation, flat))


def _policy_worker(
    blueprint: Blueprint,
    arena: Arena,
    address: Address,
    device: Device,
    generation: int,
    flat: FlatModule | None,
) -> PolicyWorker:
    b, t = blueprint, blueprint.topology
    life = [generation] * (generation > 0)
    plan = ActingPlan(
        spec=b.spec,
        num_groups=t.num_groups,
        recurrence=b.config.learning.segment_steps,
        num_policies=t.num_acting,
        device=device.name,
        seed=_torch_seed(b.seeds("policy_worker", address.index, address.member, *life)),
        replaces=generation > 0,
    )
    flat = flat or new_model(b.config, b.spec, device.name)
    flat.module.eval()
    if computes_in_bf16(b.config, flat.module, device.name):
        assert isinstance(flat.module, TowerActorCritic)
        flat.compute_with_copies(flat.module.compute_in_bf16(), torch.bfloat16)
    trajectories, finals = Trajectories.attach(arena, b.spec), FinalObservations.attach(arena, b.spec)
    ring = WeightRing(arena, address.index)
    if b.config.sampling.lockstep:
        seeds = [_torch_seed(b.seeds("actions", group, *life)) for group in range(t.num_groups)]
        return LockstepPolicyWorker(address, plan, flat, ring, trajectories, finals, seeds)
    if b.buffered and t.placement != "local":
        return BufferedPolicyWorker(address, plan, flat, ring, trajectories, finals, device)
    return PolicyWorker(address, plan, flat, ring, trajectories, finals)


def make_learner(
    blueprint: Blueprint,
    arena: Arena,
    address: Address,
    kind: type[Learner] = Learner,
    flat: FlatModule | None = None,
) -> Worker:
    """A learner whose weights are published. A model that is there already need not be made."""
    device = device_of(blueprint.device_of("learner"))
    device.register(arena)
    return device.make(lambda: _learner(blueprint, arena, address, kind, device, flat))


def _learner(
    blueprint: Blueprint,
    arena: Arena,
    address: Address,
    kind: type[Learner],
    device: Device,
    flat: FlatModule | None,
) -> LearnerWorker:
    b, c, policy = blueprint, blueprint.config, address.index
    torch.manual_seed(_torch_seed(b.seeds("model", policy)))
    flat = flat or new_model(c, b.spec, device.name)
    if computes_in_bf16(c, flat.module, device.name):
        assert isinstance(flat.module, TowerActorCritic)
        flat.module.compute_in_bf16()
    share_images(flat.module, cpu.threads())
    kind = VerifyingLearner if c.logging.verify_reproduction else kind
    learner = kind(flat, b.spec, b.learning_of(policy), _torch_seed(b.seeds("learner", policy)))
    plan = TrainingPlan(
        env_steps=0 if policy in c.frozen else b.budget.env_steps,
        samples=b.budget.samples,
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

    member = Member(b.traits_of(policy), Tune(learner, quick_update))
    batches = _batches(b, arena, policy, device)
    memory = LearnerMemory.attach(arena, Trajectories.attach(arena, b.spec), policy)
    if plan.alone:
        return LearnerWorker(address, plan, learner, batches, memory)
    return MemberWorker(address, plan, learner, batches, memory, member=member)


def _batches(blueprint: Blueprint, arena: Arena, policy: int, device: Device) -> BatchSource:
    """Where a learner's batches come from."""
    b, c = blueprint, blueprint.config
    trajectories, lag = Trajectories.attach(arena, b.spec), c.sampling.max_policy_lag
    columns = b.learning_of(policy).macro_batch_columns
    if c.sampling.lockstep:
        return LockstepBatches(trajectories, policy, columns, lag)
    hold, num_policies = c.sampling.num_minibatches_to_accumulate == 0, b.topology.num_acting
    if b.buffered:
        return DeviceBatches(trajectories, policy, columns, lag, hold, num_policies, device)
    return ColumnBatches(trajectories, policy, columns, lag, hold, num_policies)


def _torch_seed(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1, np.uint64)[0] >> 1)
