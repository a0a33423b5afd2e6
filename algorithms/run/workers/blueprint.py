"""Makes the workers of a process. Torch is imported only for workers with a network."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial

from appo.algorithms.datasets.output import OutputWriter, attach_ring, writer_name
from appo.algorithms.datasets.writer import DatasetWriter
from appo.algorithms.population.matchmaking import matchmaker_of
from appo.algorithms.run.plan import RunPlan
from appo.algorithms.run.resources import free_bytes
from appo.algorithms.runtime.callbacks import GroupHooks, Hooks
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.heartbeat import Activity, Heartbeat
from appo.algorithms.runtime.memory.output_ring import GroupTap
from appo.algorithms.runtime.memory.slots import FinalObservations
from appo.algorithms.runtime.messages import Address, Worker
from appo.algorithms.runtime.processes import crash_recorder
from appo.algorithms.runtime.processes.process import ProcessPlan
from appo.algorithms.runtime.roles import ACTOR, LEARNER, POLICY_WORKER, WRITER
from appo.algorithms.runtime.sampling.actor_worker import ActorWorker
from appo.algorithms.runtime.sampling.env_group import EnvGroup, GroupPlan, only_policy
from appo.algorithms.runtime.sampling.leak_watch import LeakWatch
from appo.envs.incidents import IncidentFolder
from appo.envs.loop.env_set import OnFailure
from appo.envs.make import make_group

LEAST_GROWTH_BYTES = 256 << 20  # that is no leak, however little memory there is


def make_actor(blueprint: RunPlan, plan: ProcessPlan, heartbeat: Heartbeat, address: Address) -> ActorWorker:
    """Make an actor; its environments are made and reset."""
    trajectories = blueprint.trajectories(plan.arena)
    finals = FinalObservations.attach(plan.arena, blueprint.spec)
    sampling = blueprint.config.sampling
    groups = []
    incidents = IncidentFolder(blueprint.config.run.incidents, str(address), asdict(blueprint.config.env))
    rebuilds = blueprint.config.env.max_env_rebuilds if sampling.restart_workers else 0
    on_failure = OnFailure(rebuilds, incidents, alive=heartbeat.alive)
    env, names = blueprint.config.env.as_trained, blueprint.config.logging.callbacks
    hooks = Hooks.make(names, blueprint.config.to_flat(), address.index) if names else None
    matchmaker = matchmaker_of if blueprint.topology.num_acting > 1 else only_policy
    for index in blueprint.topology.groups_of(address.index):
        heartbeat.beat(Activity.RESETTING)
        group_plan = _group_plan(blueprint, index, plan.generation)
        seeds = blueprint.seeds("group", index, plan.generation)
        envs = make_group(
            env,
            blueprint.topology.rows // blueprint.spec.num_agents,
            seed=(int(seeds.generate_state(1)[0]), index),
            decorrelate_steps=0 if blueprint.config.whole_episodes else blueprint.config.learning.rollout,
            spec=blueprint.spec,
            on_failure=replace(on_failure, memory=crash_recorder.memory_of(plan.arena, index)),
        )
        groups.append(EnvGroup(group_plan, envs, trajectories, finals, seeds, matchmaker))
        if hooks is not None:
            first_row = index * blueprint.topology.rows
            groups[-1].hooks = GroupHooks(hooks, trajectories, first_row, blueprint.spec.num_agents)
        if blueprint.topology.writes:
            ring = attach_ring(blueprint.config.output, plan.arena, blueprint.spec, blueprint.recorded)
            groups[-1].tap = GroupTap(ring, trajectories, index, plan.generation)
        groups[-1].reset()
    pause_seconds = sampling.decorrelate_experience_max_seconds * address.index / blueprint.topology.num_actors
    leaks = _leak_watch(blueprint, plan.generation)
    return ActorWorker(address, groups, 0.0 if sampling.benchmark else pause_seconds, leaks, hooks)


def make_writer(blueprint: RunPlan, plan: ProcessPlan, address: Address) -> OutputWriter:
    """Make the worker that writes episodes into a dataset."""
    config, spec = blueprint.config, blueprint.spec
    about: dict[str, object] = {
        "algorithm_name": config.run.algo,
        "environment": config.env.env,
        "recorded_from": config.run.experiment,
    }
    return OutputWriter(
        config.output,
        attach_ring(config.output, plan.arena, spec, blueprint.recorded),
        partial(DatasetWriter, config.output, spec, about, writer_name(config.run.run_directory)),
        looks=plan.links is not None,
    )


def _leak_watch(blueprint: RunPlan, generation: int) -> LeakWatch | None:
    """Return the memory growth allowed to a replaceable actor: the flag's value, or a share of free memory."""
    sampling, topology = blueprint.config.sampling, blueprint.topology
    if topology.placement == "serial" or blueprint.in_segments or not sampling.restart_workers:
        return None
    if sampling.actor_max_growth_mb:
        flag = f"--actor_max_growth_mb={sampling.actor_max_growth_mb}"
        return LeakWatch(sampling.actor_max_growth_mb << 20, flag, generation)
    share = max(LEAST_GROWTH_BYTES, free_bytes(0) // topology.num_actors)
    return LeakWatch(share, "its share of what was free when it started", generation)


def _group_plan(blueprint: RunPlan, index: int, generation: int) -> GroupPlan:
    c, t = blueprint.config, blueprint.topology
    exploring = [blueprint.algorithm.explores(index * t.rows + row, t.acting_rows) for row in range(t.rows)]
    return GroupPlan(
        index=index,
        slots=t.slots_of(index),
        # Slots of different groups end at different times from the start on, so learners get them evenly.
        start=0 if generation or c.whole_episodes else index * t.rollout // t.num_groups,
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
        exploring=tuple(exploring) if any(exploring) else (),
        soft_horizon=(c.env.horizon or 0) * c.env.soft_horizon,
        episodic_life=c.env.episodic_life and blueprint.spec.num_agents == 1,
        whole_episodes=c.whole_episodes,
        untimed=t.placement == "serial",
        num_takers=t.num_takers,
    )


class Blueprint(RunPlan):
    """A plan that builds the workers of each process."""

    def __call__(self, plan: ProcessPlan, heartbeat: Heartbeat) -> Mapping[Address, Worker]:
        """Make the workers of a process, ready to begin."""
        self.config.run.keep_code_out()
        make: dict[str, Callable[[Address], Worker]] = {
            ACTOR.name: partial(make_actor, self, plan, heartbeat),
            WRITER.name: partial(make_writer, self, plan),
        }
        if any(address.facts.has_network for address in plan.workers):
            from appo.algorithms.run.workers.networks import make_policy_worker

            make[LEARNER.name] = partial(self.make_learner, plan.arena)
            make[POLICY_WORKER.name] = partial(make_policy_worker, self, plan.arena, generation=plan.generation)
        workers: dict[Address, Worker] = {}
        for address in plan.workers:
            of_the_runtime = make.get(address.role)
            workers[address] = of_the_runtime(address) if of_the_runtime else self.make_further(plan, address, workers)
        return workers

    def make_further(self, plan: ProcessPlan, address: Address, others: Mapping[Address, Worker]) -> Worker:
        """Make a worker of a role that the algorithm declares."""
        number = [role.name for role, _ in (*self.topology.further, *self.topology.apart)].index(address.role)
        seeds = self.seeds("further", number, address.index, address.member, plan.generation)
        context = self.context(address.index, self.device_of(address.facts), seeds, plan.arena)
        return self.algorithm.make_worker(address, context, self.trajectories(plan.arena, address.index), others)

    def make_learner(self, arena: Arena, address: Address) -> Worker:
        """Make the learner of a policy; variants of the algorithm override this method."""
        from appo.algorithms.run.workers.networks import make_learner

        return make_learner(self, arena, address)
