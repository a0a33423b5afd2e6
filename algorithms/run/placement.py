"""Counts and places of workers: `0` and `auto` become numbers of actors and envs, a placement, cores and GPUs.

These rules apply without measurements. The result of training on a given batch never depends on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from appo.algorithms.population.config import past_slots
from appo.algorithms.run.algorithms import find_preset
from appo.algorithms.run.config import Config
from appo.algorithms.runtime.config import SamplingConfig
from appo.algorithms.runtime.messages import Address
from appo.algorithms.runtime.roles import ACTOR, register
from appo.algorithms.runtime.topology import Placement, Topology, check_slots, slots_per_group
from appo.utils.errors import UsageError
from appo.utils.system.machine import affinity_plan, allowed_cores

MAX_ENVS_PER_WORKER = 64
ENVS_PER_REQUEST = 8
SHARE_OF_LAG = 0.5
"""Largest mean age of trajectories as a share of --max_policy_lag; older plans would discard many trajectories."""


@dataclass(frozen=True)
class Sampling:
    """The sampling flags with every `0` and `auto` decided.

    Attributes:
        placement: place where policies act.
        num_workers: number of actor workers; 0: no environment is played.
        num_envs_per_worker: environments per actor.
        num_splits: groups per actor.
        learner_threads: threads of a learner on the CPU.
    """

    placement: Placement
    num_workers: int
    num_envs_per_worker: int
    num_splits: int
    learner_threads: int = 1


def plan_workers(config: Config, cores: int, placement: Placement, num_agents: int = 1) -> Sampling:
    """Fill in the counts for a placement.

    Without flags, the agents of all environments together make one macro batch of trajectories, within limits.
    """
    s = config.sampling
    if not config.algorithm.needs_actors:
        return Sampling(placement, 0, 0, 0, s.learner_main_loop_num_cores or 1)
    splits = s.worker_num_splits or (2 if placement == "central" else 1)
    most = int(most_envs(config, num_agents)) // (s.num_envs_per_worker or splits)
    if config.algorithm.whole_rollouts:
        most = cores  # no batch of all is collected, for which trajectories would grow old
    num_workers = s.num_workers or (1 if placement == "serial" else max(1, min(cores, most)))
    fewest = num_workers if s.num_workers else -(-num_workers // 2)  # idle cores would cost more than older steps
    plans = [_with_workers(n, config, splits, placement, num_agents) for n in range(num_workers, fewest - 1, -1)]
    return next((plan for plan in plans if fills_evenly(plan, config, num_agents)), plans[0])


def fills_evenly(plan: Sampling, config: Config, num_agents: int) -> bool:
    """Return whether rounds of all environments make exactly one iteration, where actors wait while the learner trains.

    Otherwise some groups still have a free slot when the iteration is full, and fill it by the old weights.
    """
    learning, envs = config.learning, plan.num_workers * plan.num_envs_per_worker
    waits = config.takes_turns and not config.sampling.lockstep and not config.algorithm.streams(learning)
    return not waits or learning.macro_batch_columns % (envs * num_agents) == 0


def goes_on(plan: Sampling, config: Config, num_agents: int) -> str:
    """Return why sampling goes on while a synchronous learner trains; empty if it does not."""
    if not config.takes_turns:
        return "several policies: sampling goes on while one trains"
    if fills_evenly(plan, config, num_agents):
        return ""
    rows, columns = plan.num_workers * plan.num_envs_per_worker * num_agents, config.learning.macro_batch_columns
    return f"{columns} trajectories of an iteration are no multiple of {rows} played at once: some go on in training"


def _with_workers(num_workers: int, config: Config, splits: int, placement: Placement, num_agents: int) -> Sampling:
    """Fill in the number of environments of so many actors."""
    s, learning = config.sampling, config.learning
    threads, envs = s.learner_main_loop_num_cores or 1, s.num_envs_per_worker
    if not envs:
        envs = min(MAX_ENVS_PER_WORKER, learning.macro_batch_columns // (num_workers * num_agents))
        if (
            placement == "central" and config.device == "cuda"
        ):  # a request of many rows costs the policy worker hardly more than one of a few
            envs = max(envs, min(ENVS_PER_REQUEST * splits, int(most_envs(config, num_agents)) // num_workers))
        envs = max(1, envs // splits) * splits
    if not s.worker_num_splits and envs % splits:
        splits = 1
    if envs % splits:
        raise UsageError(f"--num_envs_per_worker={envs} is not a multiple of --worker_num_splits={splits}")
    return Sampling(placement, num_workers, envs, splits, threads)


def require_one_per_process(config: Config) -> Config:
    """Return flags that give every environment its own process, against presets.

    Raises:
        UsageError: given flags put several environments into a process.
    """
    s = config.sampling
    names = ["num_envs_per_worker", "worker_num_splits", *["num_workers"] * (s.inference == "serial")]
    many = {name: count for name in names if (count := getattr(s, name)) > 1}
    preset = config.by_kind or find_preset(config.env.env, "cpu", config.algorithm, config.run.preset) or {}
    given = [f"--{name}={count}" for name, count in many.items() if name in config.given or count != preset.get(name)]
    if given:
        fits = " ".join(f"--{name}=1" for name in names if name in many or name == "num_envs_per_worker")
        raise UsageError(f"{config.env.env} allows one environment per process, not {' '.join(given)}: {fits}")
    ones: dict[str, Any] = dict.fromkeys(["num_envs_per_worker", *many], 1)
    return replace(config, sampling=replace(s, **ones))


def most_envs(config: Config, num_agents: int) -> float:
    """Return the largest number of environments whose trajectories are trained on before they are too old.

    While one macro batch is collected, weights change once per minibatch and epoch of the batch before. A synchronous
    algorithm trains on no steps of older weights: more environments would act for the iteration after the next.
    """
    s, learning, algorithm = config.sampling, config.learning, config.algorithm
    macro_batches = SHARE_OF_LAG * s.max_policy_lag / (learning.num_batches_per_iteration * learning.ppo_epochs)
    if algorithm.synchronous and not algorithm.streams(learning):
        macro_batches = 1.0
    return float(max(1.0, macro_batches) * learning.macro_batch_columns * s.num_policies / num_agents)


def choose_placement(config: Config, cores: int, device: str) -> Placement:
    """Return the place where policies act, without measurements.

    Networks that read images act on a GPU, if it is the device; all others act inside the actors, without a message per
    step.
    """
    wanted = config.sampling.inference
    if config.algorithm.whole_rollouts:
        return "local"
    if wanted != "auto":
        return cast(Placement, wanted)  # one of the choices of the flag
    if config.run.deterministic_resume and not config.sampling.lockstep:
        return "serial"
    if device == "cuda" and config.reads_images:
        return "central"
    return "local" if cores > 1 or config.sampling.ray else "serial"  # a single process has no place for a bridge


def topology_of(config: Config, sampling: Sampling, num_agents: int) -> Topology:
    """Return numbers and places of all workers, with as many slots as batches need.

    Raises:
        UsageError: all slots together can never fill a batch, or the environment has too few agents.
    """
    s, learning = config.sampling, config.learning
    if not sampling.num_workers:
        return Topology(sampling.placement, 0, 0, 0, s.num_policies, 0, rows=num_agents, rollout=learning.rollout)
    rows = sampling.num_envs_per_worker // sampling.num_splits * num_agents
    if config.whole_episodes and rows > 1:
        raise UsageError("--batch_mode=complete_episodes is for environments of one agent: others end at other times")
    groups = sampling.num_workers * sampling.num_splits
    waiting = -(-config.waiting_minibatches // learning.num_batches_per_iteration)
    columns = learning.num_batches_per_iteration * config.largest_batch_size // learning.rollout
    if config.algorithm.replays:  # slots are emptied as they come, no batch is collected in them
        columns = min(columns, getattr(learning, "waiting_columns", columns))
    # With more slots than one iteration takes, some of what synchronous policies leave would be two iterations old.
    slots = slots_per_group(
        minimum=s.min_traj_buffers_per_worker,
        waiting_batches=waiting,
        batch_columns=columns * (1 if config.algorithm.synchronous else s.num_policies),
        rows=rows,
        groups=groups,
    )
    if config.algorithm.whole_rollouts:
        slots = 1  # the next trajectory, and with it newer weights, begins when this one is done with
    elif s.lockstep or config.algorithm.streams(learning):
        slots = 1  # batches are filled by as many rounds as they need
    else:
        check_slots(slots=slots, rows=rows, groups=groups, batch_columns=columns)
    topology = Topology(
        placement=sampling.placement,
        num_actors=sampling.num_workers,
        groups_per_actor=sampling.num_splits,
        slots_per_group=slots,
        num_policies=s.num_policies,
        policy_workers_per_policy=s.policy_workers_per_policy,
        rows=rows,
        rollout=learning.rollout,
        colocated=s.gpu_colocate,
        num_past=past_slots(config.population, config.env.env, num_agents),
        writes=bool(config.output.output),
        # Slots of one more macro batch; the slots on other machines bound what waits there.
        bridged=max(2, -(-columns // (rows * slots))) if s.ray else 0,
    )
    if sampling.placement != "serial" and not config.repeatable:
        apart = config.algorithm.processes(learning, alone=config.alone)
        topology = replace(topology, apart=tuple((register(role), count) for role, count in apart.items()))
    return replace(
        topology, further=tuple((register(role), host) for role, host in config.algorithm.workers(topology).items())
    )


def cores_of(worker: Address, topology: Topology, sampling: SamplingConfig, cores: int) -> frozenset[int]:
    """Return the cores that a process is pinned to; empty: not pinned. Only actors are pinned, to whole cores.

    The usable `cores` may be fewer than the allowed ones, by the limit of a cgroup.
    """
    allowed = allowed_cores()
    if worker.role != ACTOR.name or not sampling.set_workers_cpu_affinity or cores < len(allowed):
        return frozenset()
    return affinity_plan(topology.num_actors, allowed)[worker.index]


def gpus_of(workers: Sequence[Address], sampling: SamplingConfig) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the process of these workers: one GPU per actor in turn; None: no actor.

    Policies inside actors use the CPU, see `Role.cpu_placements`.
    """
    actors, gpus = [worker.index for worker in workers if worker.role == ACTOR.name], sampling.actor_worker_gpus
    return ",".join(dict.fromkeys(str(gpus[actor % len(gpus)]) for actor in actors if gpus)) if actors else None
