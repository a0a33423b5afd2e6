"""Policy workers and learners, the workers with a network; made inside their process."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.parts.learner import FlatLearner
from appo.algorithms.parts.stochastic_policy import THOUGHTS, StochasticPolicy
from appo.algorithms.population.member import PopulationMember
from appo.algorithms.run.plan import RunPlan, seed_of
from appo.algorithms.runtime.device_of import device_of
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.learner_worker import LearnerMemory, LearnerWorker, TrainingPlan
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.slots import FinalObservations
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import Address, Worker
from appo.algorithms.runtime.roles import LEARNER, POLICY_WORKER
from appo.algorithms.runtime.sampling.gpu_policy_worker import GpuEngine
from appo.algorithms.runtime.sampling.policy_worker import ActingPlan, HostEngine, PolicyWorker
from appo.utils.run_folder import RunFolder


def make_policy_worker(
    blueprint: RunPlan, arena: Arena, address: Address, generation: int = 0, flat: FlatModule | None = None
) -> Worker:
    """Make a policy worker. Weights come from the ring, recurrent states of later generations from the slots.

    Without a model in `flat`, the worker gets a new one.
    """
    device = device_of(blueprint.device_of(POLICY_WORKER), urgent=True)
    pinned = device.register(arena)
    return device.make(lambda: _policy_worker(blueprint, arena, address, device, generation, flat, pinned))


def _policy_worker(
    blueprint: RunPlan,
    arena: Arena,
    address: Address,
    device: Device,
    generation: int,
    flat: FlatModule | None,
    pinned: bool,
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
        seed=seed_of(b.seeds(POLICY_WORKER.name, address.index, address.member, *life)),
        group_seeds=tuple(seed_of(b.seeds("actions", group, *life)) for group in alone),
        replaces=generation > 0,
        learns=address.index < t.num_policies and address.index not in b.config.frozen,
        whole_rollouts=b.algorithm.whole_rollouts,
    )
    context = b.context(address.index, device.name, arena=arena)
    policy = b.algorithm.make_policy(context, flat or b.algorithm.make_model(context))
    if isinstance(policy, StochasticPolicy):
        policy.records |= b.recorded.keys() & set(THOUGHTS)  # logits too, if a dataset is to have them
    trajectories, finals = b.trajectories(arena, address.index), FinalObservations.attach(arena, b.spec)
    engine = HostEngine(policy, plan, trajectories)
    if b.buffered and pinned and t.placement != "local":
        engine = GpuEngine(policy, plan, trajectories, device)
    return PolicyWorker(address, plan, engine, WeightRing(arena, address.index), trajectories, finals)


def make_learner(blueprint: RunPlan, arena: Arena, address: Address, flat: FlatModule | None = None) -> Worker:
    """Make a learner, with published weights; `flat` is the model to use, None for a new model."""
    device = device_of(blueprint.device_of(LEARNER))
    device.register(arena)
    return device.make(lambda: _learner(blueprint, arena, address, device, flat))


def _learner(
    blueprint: RunPlan, arena: Arena, address: Address, device: Device, flat: FlatModule | None
) -> LearnerWorker:
    b, c, policy = blueprint, blueprint.config, address.index
    torch.manual_seed(seed_of(b.seeds("model", policy)))
    context = b.context(policy, device.name, b.seeds(LEARNER.name, policy), arena)
    learner = b.algorithm.make_learner(context, flat or b.algorithm.make_model(context), device)
    plan = TrainingPlan(
        budget=replace(b.budget, env_steps=0) if policy in c.frozen else b.budget,
        max_policy_lag=c.sampling.max_policy_lag,
        device=device.name,
        max_skipped_updates=context.flags.max_skipped_updates,
        incidents=None if b.directory is None else RunFolder(b.directory).incidents,
        alone=b.topology.num_policies == 1 or not b.topology.num_actors,
        pause_env_steps=b.pause_env_steps,
        version_env_steps=c.population.self_play_period_env_steps if b.topology.num_past else 0,
        measures_lag=b.topology.num_actors > 0 and not b.algorithm.replays,
        metrics=frozenset(b.algorithm.metrics),
    )
    flags = context.flags

    def tune(values: Mapping[str, Any]) -> int:
        """Let the learner follow these flags and the others as before; return the columns of its batches then."""
        nonlocal flags
        flags = replace(flags, **values)
        learner.configure(flags)
        return int(flags.macro_batch_columns)

    trajectories = b.trajectories(arena, policy)
    batches = b.algorithm.make_source(context, trajectories, c.sampling, device)
    memory = LearnerMemory.attach(arena, trajectories, policy)
    if b.rank is not None and b.directory is not None:
        from appo.algorithms.runtime.learning.rank_group import RankGroup  # late, for several learners alone
        from appo.algorithms.runtime.learning.rank_worker import RankLearnerWorker

        assert isinstance(learner, FlatLearner)
        learner.join(group := RankGroup(b.rank, learner.flat.flat.device))
        alone = b.topology.placement != "serial" and not b.topology.colocated
        return RankLearnerWorker(address, plan, learner, batches, memory, group=group, alone=alone)
    member = (
        None if b.topology.num_policies == 1 else PopulationMember(b.traits_of(policy), tune, batches, memory.block)
    )
    return LearnerWorker(address, plan, learner, batches, memory, member)
