"""Memory, descriptors and cores that a run needs, compared with the machine's before the run takes any."""

from collections.abc import Sequence

from appo.algorithms.models.config import check_size
from appo.algorithms.run.config import Config
from appo.algorithms.run.placement import Sampling
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import ResourceError
from appo.utils.system import limits, machine

MEMORY_SHARE = 0.9
# Main has the pipe of each process, its doorbell, and both ends by which its fork server says that it has ended.
DESCRIPTORS_OF_PROCESS = 4
# Metrics, checkpoints, the sockets of a start; and the memory of the queues, which grows in ever larger pieces.
DESCRIPTORS_OF_MAIN = 32
# Less than anything that is forked or played has of its own: what needs more than there is even so is refused at once.
LEAST_PROCESS_BYTES = 12 << 20
LEAST_ENV_BYTES, LEAST_STEP_BYTES = 1 << 10, 16
# What loads torch and tries the environment, before any worker starts.
LEAST_START_BYTES = 128 << 20
# Janitor, resource tracker, fork server, the two that try environment and network, and threads of main.
PIDS_OF_START = 12


def free_bytes(limit_mb: int) -> int:
    """Return the memory to plan with: most of the free memory of machine or cgroup, at most `limit_mb` unless 0."""
    free = int(MEMORY_SHARE * machine.available_memory_bytes())
    return min(free, limit_mb << 20) if limit_mb else free


def reserve(fields: Sequence[Field], limit_mb: int) -> Arena:
    """Reserve the shared memory of a run (ResourceError: memory is too small or limited; lists the needs)."""
    free = free_bytes(limit_mb)
    if sum(field.nbytes for field in fields) > free:
        allowed = f"--memory_limit_mb={limit_mb} allows" if free == limit_mb << 20 else "free are"
        raise ResourceError(
            f"the run needs {memory_plan(fields)}; {allowed} {_mebibytes(free)} MiB: lower --num_workers, "
            "--num_envs_per_worker or --min_traj_buffers_per_worker, or else --batch_size or --rollout"
            + (" or --replay_capacity" if any(field.fills for field in fields) else "")
        )
    return Arena.create(fields)


def memory_plan(fields: Sequence[Field]) -> str:
    """Return the amount of shared memory and its purposes."""
    parts = dict.fromkeys(("slots", "weights", "state", "replay"), 0)
    for field in fields:
        kind = field.name.split(".")[0]
        parts[kind if kind in parts else "slots"] += field.nbytes
    items = ", ".join(f"{name} {_mebibytes(nbytes)}" for name, nbytes in parts.items() if nbytes or name != "replay")
    return f"{_mebibytes(sum(parts.values()))} MiB of shared memory ({items})"


def check_machine(config: Config, sampling: Sampling) -> None:
    """Refuse a run that this machine cannot hold, whatever environment and network need.

    Raises:
        UsageError: the network is too small or too large, see `models.config.check_size`.
        ResourceError: with the numbers.
    """
    check_size(config.model)
    s, free = config.sampling, machine.available_memory_bytes()
    envs = sampling.num_workers * sampling.num_envs_per_worker
    others = s.num_policies * (1 + (s.policy_workers_per_policy if sampling.placement == "central" else 0))
    processes = 0 if sampling.placement == "serial" else sampling.num_workers + others
    env_bytes = LEAST_ENV_BYTES + config.learning.rollout * LEAST_STEP_BYTES
    if (needed := processes * LEAST_PROCESS_BYTES + envs * env_bytes) > free:
        raise ResourceError(
            f"{processes:,} processes and {envs:,} envs need at least {_mebibytes(needed)} MiB of memory, free are "
            f"{_mebibytes(free)} MiB: lower --num_workers, --num_envs_per_worker or --policy_workers_per_policy"
        )
    if processes and free < LEAST_START_BYTES:
        raise ResourceError(
            f"a run needs at least {_mebibytes(LEAST_START_BYTES)} MiB of memory to start, free are "
            f"{_mebibytes(free)} MiB"
        )
    _check_open_files(processes, processes - others, limits.raised_limit())
    free_pids, needed_pids = machine.free_pids(), processes + PIDS_OF_START
    if processes and free_pids is not None and needed_pids > free_pids:
        raise ResourceError(
            f"a run of {processes:,} processes needs at least {needed_pids:,} processes and threads, {free_pids:,} "
            "more may be started: raise `ulimit -u` or pids.max of the cgroup, or lower --num_workers"
        )


def check_descriptors(topology: Topology) -> None:
    """Refuse a run that needs more open files than allowed, before any process starts (ResourceError)."""
    _check_open_files(len(topology.processes()), topology.num_actors, limits.limit())


def _check_open_files(processes: int, actors: int, limit: int | None) -> None:
    now = limits.num_open()
    needed = now + DESCRIPTORS_OF_MAIN + DESCRIPTORS_OF_PROCESS * processes
    if limit is not None and needed > limit:
        fitting = (limit - now - DESCRIPTORS_OF_MAIN) // DESCRIPTORS_OF_PROCESS - (processes - actors)
        lower = f" or lower --num_workers to {fitting}" if fitting > 0 else ""
        raise ResourceError(
            f"a run of {processes} processes needs {needed} open files, `ulimit -n` allows {limit}: raise it{lower}"
        )


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
