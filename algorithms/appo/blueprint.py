"""What a run is made of, known before any worker exists; torch-free, so that actors and main can read it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from algorithms.appo.config import Config, LearningConfig
from algorithms.appo.resources import free_bytes
from algorithms.runtime import flight_recorder
from algorithms.runtime.actor_worker import ActorWorker
from algorithms.runtime.arena import Arena, Field
from algorithms.runtime.channels import Mailboxes
from algorithms.runtime.env_group import EnvGroup, GroupPlan
from algorithms.runtime.heartbeat import Activity, Heartbeat
from algorithms.runtime.leaks import LeakWatch
from algorithms.runtime.messages import Address
from algorithms.runtime.node import Worker
from algorithms.runtime.process import ProcessPlan
from algorithms.runtime.runner import Budget
from algorithms.runtime.state_block import StateBlock
from algorithms.runtime.topology import Topology
from algorithms.runtime.traits import Traits
from algorithms.runtime.trajectories import FinalObservations, Trajectories, sizes_of
from algorithms.runtime.weights import WeightRing
from envs.env_set import OnFailure
from envs.incidents import IncidentFolder
from envs.make import make_group
from envs.spec import EnvSpec

if TYPE_CHECKING:
    from algorithms.runtime.callbacks import Hooks

LEAST_GROWTH_BYTES = 256 << 20  # that is no leak, however little memory there is

# Every random generator of a run derives from --seed through one of these branches, or that of population/breeding.py.
SEED_BRANCHES = {"model": 0, "learner": 1, "policy_worker": 2, "group": 3, "start": 4, "leg": 5, "actions": 6}


@dataclass(frozen=True)
class ModelDescription:
    """What memory must be reserved for a model.

    Attributes:
        table: name and shape of every weight.
        rnn_state_size: H.
        num_moments: values of the running statistics.
    """

    table: list[tuple[str, tuple[int, ...]]]
    rnn_state_size: int
    num_moments: int

    @property
    def num_weights(self) -> int:
        """P."""
        return sum(int(np.prod(shape, dtype=np.int64)) for _, shape in self.table)


@dataclass(frozen=True)
class Probe:
    """What was found out about the environment and its model before memory is reserved.

    Attributes:
        spec: of the environment.
        model: of its network.
        config: all flags, those included that the kind of observation decides.
    """

    spec: EnvSpec
    model: ModelDescription
    config: Config


@dataclass(frozen=True)
class Blueprint:
    """Everything workers are built from; travels to every process at its start.

    Attributes:
        config: all flags; each worker is given its part.
        spec: of the environment.
        model: what the weights look like.
        topology: how many of everything, and where.
        budget: when training ends.
        device: of the networks, "cpu" or "cuda".
        seed: of the run; of this start, if it resumes; of this leg, see `legs.py`.
        pause_env_steps: where this leg ends; None: with the run.
        traits: with which each policy begins or goes on; (): they do not differ.
    """

    config: Config
    spec: EnvSpec
    model: ModelDescription
    topology: Topology
    budget: Budget
    device: str
    seed: int
    pause_env_steps: int | None = None
    traits: tuple[Traits, ...] = ()

    @property
    def in_legs(self) -> bool:
        """Whether the run is divided into legs, see `legs.py`."""
        return self.pause_env_steps is not None

    @property
    def buffered(self) -> bool:
        """Whether networks are fed through buffers that stay where they are, as a GPU needs it."""
        return self.device != "cpu"

    def device_of(self, role: str) -> str:
        """Where a worker's network lives: what acts inside an actor stays on the CPU, a context per actor would not."""
        return "cpu" if role == "policy_worker" and self.topology.placement == "local" else self.device

    def traits_of(self, policy: int) -> Traits:
        """What sets a policy apart at the start."""
        return self.traits[policy] if self.traits else Traits()

    def learning_of(self, policy: int) -> LearningConfig:
        """The learning flags that a policy begins with."""
        return replace(self.config.learning, **self.traits_of(policy).hyperparameters)

    def seeds(self, branch: str, *index: int) -> np.random.SeedSequence:
        """The random seeds of one worker; generations differ, restarts do not repeat a past."""
        return np.random.SeedSequence(self.seed, spawn_key=(SEED_BRANCHES[branch], *index))

    def fields(self) -> list[Field]:
        """The shared memory of the run."""
        c, t = self.config, self.topology
        sizes = sizes_of(t, self.spec, self.model.rnn_state_size, c.learning.segment_steps)
        fields = Trajectories.declare(sizes, self.spec) + FinalObservations.declare(sizes, self.spec)
        fields += [*Mailboxes.declare(t), Heartbeat.declare(len(t.processes()))]
        fields += flight_recorder.declare(t, self.spec)
        for policy in range(t.num_acting):
            fields += WeightRing.declare(policy, self.model.num_weights)
        for policy in range(t.num_policies):
            fields += StateBlock.declare(policy, self.model.num_weights, self.model.num_moments)
        return fields

    def __call__(self, plan: ProcessPlan, heartbeat: Heartbeat) -> Mapping[Address, Worker]:
        """The workers of a process, ready to begin; torch is imported only where there is a network."""
        make: dict[str, Callable[[Address], Worker]] = {"actor": partial(make_actor, self, plan, heartbeat)}
        if any(address.role != "actor" for address in plan.workers):
            from algorithms.appo.build import make_policy_worker

            make["learner"] = partial(self.make_learner, plan.arena)
            make["policy_worker"] = partial(make_policy_worker, self, plan.arena, generation=plan.generation)
        return {address: make[address.role](address) for address in plan.workers}

    def make_learner(self, arena: Arena, address: Address) -> Worker:
        """The learner of a policy; a variant of the algorithm makes another one here."""
        from algorithms.appo.build import make_learner

        return make_learner(self, arena, address)


def make_actor(blueprint: Blueprint, plan: ProcessPlan, heartbeat: Heartbeat, address: Address) -> ActorWorker:
    """An actor whose environments are made and reset."""
    trajectories = Trajectories.attach(plan.arena, blueprint.spec)
    finals = FinalObservations.attach(plan.arena, blueprint.spec)
    sampling = blueprint.config.sampling
    groups = []
    on_failure = replace(_on_failure(blueprint.config, str(address)), alive=heartbeat.alive)
    hooks = _hooks(blueprint.config, address.index)
    for index in blueprint.topology.groups_of(address.index):
        heartbeat.beat(Activity.RESETTING)
        group_plan = _group_plan(blueprint, index, plan.generation)
        seeds = blueprint.seeds("group", index, plan.generation)
        envs = make_group(
            blueprint.config.env,
            blueprint.topology.rows // blueprint.spec.num_agents,
            seed=(int(seeds.generate_state(1)[0]), index),
            decorrelate_steps=blueprint.config.learning.rollout,
            spec=blueprint.spec,
            on_failure=replace(on_failure, memory=flight_recorder.memory_of(plan.arena, index)),
        )
        groups.append(EnvGroup(group_plan, envs, trajectories, finals, seeds))
        if hooks is not None:
            from algorithms.runtime.telling import ToldEpisodes

            groups[-1].episodes = ToldEpisodes(groups[-1], hooks)
        groups[-1].reset()
    pause_seconds = sampling.decorrelate_experience_max_seconds * address.index / blueprint.topology.num_actors
    leaks = _leak_watch(blueprint, plan.generation)
    return ActorWorker(address, groups, 0.0 if sampling.benchmark else pause_seconds, leaks, hooks)


def _hooks(config: Config, actor: int) -> "Hooks | None":
    """Who is told what an actor does; nothing is imported where nobody is."""
    if not config.logging.callbacks:
        return None
    from algorithms.runtime.callbacks import Hooks

    return Hooks.make(config.logging.callbacks, config.to_flat(), actor)


def _leak_watch(blueprint: Blueprint, generation: int) -> LeakWatch | None:
    """Where an actor can be replaced: it may grow by as much as the flag says, or as there is for each of them."""
    sampling, topology = blueprint.config.sampling, blueprint.topology
    if topology.placement == "serial" or blueprint.in_legs or not sampling.restart_workers:
        return None
    if sampling.actor_max_growth_mb:
        flag = f"--actor_max_growth_mb={sampling.actor_max_growth_mb}"
        return LeakWatch(sampling.actor_max_growth_mb << 20, flag, generation)
    share = max(LEAST_GROWTH_BYTES, free_bytes(0) // topology.num_actors)
    return LeakWatch(share, "its share of what was free when it started", generation)


def _on_failure(config: Config, worker: str) -> OnFailure:
    incidents = IncidentFolder(config.run.incidents, worker, asdict(config.env))
    return OnFailure(config.env.max_env_rebuilds if config.sampling.restart_workers else 0, incidents)


def _group_plan(blueprint: Blueprint, index: int, generation: int) -> GroupPlan:
    c, t = blueprint.config, blueprint.topology
    return GroupPlan(
        index=index,
        slots=t.slots_of(index),
        # Slots of different groups end at different times from the start on, so learners get them evenly.
        start=0 if generation else index * t.rollout // t.num_groups,
        num_policies=t.num_acting,
        num_past=t.num_past,
        past_share=c.population.self_play_past_share,
        per_row_policy=c.population.pbt_mix_policies_in_one_env,
        policy_mapping=c.population.policy_mapping,
        reward_shaping=tuple(blueprint.traits_of(policy).reward_shaping for policy in range(t.num_policies)),
        reward_scale=c.env.reward_scale,
        reward_clip=c.env.reward_clip,
        keep=c.sampling.sampler_only,
        generation=generation,
    )
