"""Small worlds in this process: a shared memory with the workers of a run, without processes."""

import time
from dataclasses import dataclass, field

import numpy as np

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.tuning.network import probe
from appo.algorithms.run.workers.blueprint import Blueprint
from appo.algorithms.run.workers.networks import make_learner, make_policy_worker
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import ActionRequest, Address, LearnerReport, TrajectoryReady, Worker
from appo.algorithms.runtime.sampling.policy_worker import PolicyWorker
from appo.algorithms.runtime.topology import Topology
from benchmarks.gpu_check.cases import CARTPOLE, GROUPS, MODELS, ROLLOUT, ROWS, SLOTS, Flags
from benchmarks.gpu_check.report import Failed

BATCHES = 6
WAIT_SECONDS = 30


@dataclass
class World:
    """A shared memory with trajectories, and workers of one kind."""

    blueprint: Blueprint
    arena: Arena
    trajectories: Trajectories
    acting: Worker
    learning: Worker
    learner_worker: LearnerWorker
    policy_worker: PolicyWorker
    reports: list[LearnerReport] = field(default_factory=list)


def blueprint_of(kind: type[Blueprint], device: str, model: str, more: Flags) -> Blueprint:
    """Return the blueprint of a central run with one policy."""
    flags = {"device": "cpu", "inference": "central", "experiment": "check", **CARTPOLE, **MODELS[model], **more}
    config = parse_train([f"--{name}={value}" for name, value in flags.items() if value is not None])
    found = probe(config)
    topology = Topology("central", 1, GROUPS, SLOTS, 1, 1, ROWS, ROLLOUT)
    budget = Budget(10**9, 10**9, 1e9, None, None)
    return kind(found.config, found.spec, found.models, topology, budget, device, 1)


def world_of(kind: type[Blueprint], device: str, model: str, **more: object) -> World:
    """Return workers around random observations; worlds of one model have equal weights and observations."""
    blueprint = blueprint_of(kind, device, model, more)
    arena = Arena.create(blueprint.fields())
    trajectories, rng = blueprint.trajectories(arena), np.random.default_rng(0)
    for array in trajectories.obs.values():
        array[:] = rng.standard_normal(array.shape)
    trajectories.first[:] = rng.random(trajectories.first.shape) < 0.1
    trajectories.valid[:] = ~trajectories.first[:, 1:]
    trajectories.reward[:] = rng.standard_normal(trajectories.reward.shape)
    trajectories.num_frames[:] = 1
    learning = make_learner(blueprint, arena, Address("learner", 0))
    acting = make_policy_worker(blueprint, arena, Address("policy_worker", 0, 0))
    inner = [getattr(worker, "worker", worker) for worker in (learning, acting)]
    return World(blueprint, arena, trajectories, acting, learning, *inner)


def arrays(trajectories: Trajectories) -> dict[str, Array]:
    """Return all arrays of trajectories by name, with observations as obs.KEY and records as recorded.NAME."""
    named: dict[str, Array] = {}
    for name in Trajectories.__dataclass_fields__:
        value = getattr(trajectories, name)
        named |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return named


def act(world: World) -> None:
    """Act in every slot of every group, for one, two or all groups at once: batches must be padded."""
    for slot in range(SLOTS):
        for step in range(ROLLOUT):
            groups = list(range(GROUPS))[: 1 + step % GROUPS], list(range(GROUPS))[1 + step % GROUPS :]
            for together in filter(None, groups):
                for group in together:
                    list(world.acting.handle(ActionRequest(0, group, group * SLOTS + slot, step, 0)))
                list(world.acting.work())


def train_batches(world: World) -> None:
    """Train on the same slots repeatedly."""
    t, learner, limit = world.trajectories, world.learner_worker, time.monotonic() + WAIT_SECONDS
    while learner.totals["batches"] < BATCHES or learner.publisher.busy:
        if learner.totals["batches"] < BATCHES and not world.learning.pending():
            for slot in range(GROUPS * SLOTS):
                t.sequence[slot] += 1
                list(world.learning.handle(TrajectoryReady(0, slot, int(t.sequence[slot]), 0)))
        world.reports += [message for message in world.learning.work() if isinstance(message, LearnerReport)]
        if time.monotonic() > limit:
            raise Failed(f"{learner.totals['batches']} of {BATCHES} batches in {WAIT_SECONDS} s")
