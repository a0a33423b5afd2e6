"""Makes the workers that have a network, inside their process."""

import numpy as np
import torch

from algorithms.appo.blueprint import Blueprint
from algorithms.appo.config import Config
from algorithms.appo.learner import Learner
from algorithms.appo.reproduction import VerifyingLearner
from algorithms.models.build import build_model
from algorithms.runtime.arena import Arena
from algorithms.runtime.batches import ColumnBatches
from algorithms.runtime.flat_module import FlatModule
from algorithms.runtime.learner_worker import LearnerWorker, TrainingPlan
from algorithms.runtime.messages import Address
from algorithms.runtime.policy_worker import ActingPlan, PolicyWorker
from algorithms.runtime.state_block import StateBlock
from algorithms.runtime.trajectories import FinalObservations, Trajectories
from algorithms.runtime.weights import WeightRing
from envs.spec import EnvSpec


def new_model(config: Config, spec: EnvSpec, device: str) -> FlatModule:
    """A model on its device, all weights in one vector."""
    return FlatModule(build_model(config.model, spec).to(device))


def make_policy_worker(
    blueprint: Blueprint, arena: Arena, address: Address, flat: FlatModule | None = None
) -> PolicyWorker:
    """A policy worker; it takes its weights from the ring. A model that is there already need not be made."""
    b, t = blueprint, blueprint.topology
    plan = ActingPlan(
        spec=b.spec,
        num_groups=t.num_groups,
        recurrence=b.config.learning.segment_steps,
        num_policies=t.num_policies,
        device=b.device,
        seed=_torch_seed(b.seeds("policy_worker", address.index, address.member)),
    )
    flat = flat or new_model(b.config, b.spec, b.device)
    flat.module.eval()
    trajectories, finals = Trajectories.attach(arena, b.spec), FinalObservations.attach(arena, b.spec)
    return PolicyWorker(address, plan, flat, WeightRing(arena, address.index), trajectories, finals)


def make_learner(
    blueprint: Blueprint,
    arena: Arena,
    address: Address,
    kind: type[Learner] = Learner,
    flat: FlatModule | None = None,
) -> LearnerWorker:
    """A learner whose weights are published. A model that is there already need not be made."""
    b, c, policy = blueprint, blueprint.config, address.index
    torch.manual_seed(_torch_seed(b.seeds("model", policy)))
    flat = flat or new_model(c, b.spec, b.device)
    kind = VerifyingLearner if c.logging.verify_reproduction else kind
    learner = kind(flat, b.spec, c.learning, _torch_seed(b.seeds("learner", policy)))
    plan = TrainingPlan(
        env_steps=b.budget.env_steps,
        samples=b.budget.samples,
        max_policy_lag=c.sampling.max_policy_lag,
        device=b.device,
    )
    batches = ColumnBatches(
        Trajectories.attach(arena, b.spec),
        policy,
        columns=c.learning.macro_batch_columns,
        max_policy_lag=c.sampling.max_policy_lag,
        hold=c.sampling.num_minibatches_to_accumulate == 0,
        num_policies=b.topology.num_policies,
    )
    return LearnerWorker(address, plan, learner, batches, WeightRing(arena, policy), StateBlock(arena, policy))


def _torch_seed(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1, np.uint64)[0] >> 1)
