"""What a run takes of the machine, known and compared with what there is before it is taken."""

from collections.abc import Sequence

from algorithms.runtime.memory.arena import Arena, Field
from algorithms.runtime.topology import Topology
from utils import limits, machine
from utils.errors import ResourceError

MEMORY_SHARE = 0.9
# Main has the pipe of each process, its doorbell, and both ends by which its fork server says that it has ended.
DESCRIPTORS_OF_PROCESS = 4
# Metrics, checkpoints, the sockets of a start; and the memory of the queues, which grows in ever larger pieces.
DESCRIPTORS_OF_MAIN = 32


def free_bytes(limit_mb: int) -> int:
    """Memory that may be planned with: most of what the machine or its cgroup has free, at most `limit_mb` unless 0."""
    free = int(MEMORY_SHARE * machine.available_memory_bytes())
    return min(free, limit_mb << 20) if limit_mb else free


def reserve(fields: Sequence[Field], limit_mb: int) -> Arena:
    """The shared memory of a run.

    Raises:
        ResourceError: it is more than there is or than may be taken; the message says what needs how much.
    """
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
    """How much shared memory there is, and for what."""
    parts = dict.fromkeys(("slots", "weights", "state", "replay"), 0)
    for field in fields:
        kind = field.name.split(".")[0]
        parts[kind if kind in parts else "slots"] += field.nbytes
    items = ", ".join(f"{name} {_mebibytes(nbytes)}" for name, nbytes in parts.items() if nbytes or name != "replay")
    return f"{_mebibytes(sum(parts.values()))} MiB of shared memory ({items})"


def check_descriptors(topology: Topology) -> None:
    """Refuse a run for which too few files may be open, before any of its processes starts.

    Raises:
        ResourceError: with the numbers.
    """
    processes, limit, now = len(topology.processes()), limits.limit(), limits.num_open()
    needed = now + DESCRIPTORS_OF_MAIN + DESCRIPTORS_OF_PROCESS * processes
    if limit is not None and needed > limit:
        others = processes - topology.num_actors
        fitting = (limit - now - DESCRIPTORS_OF_MAIN) // DESCRIPTORS_OF_PROCESS - others
        lower = f" or lower --num_workers to {fitting}" if fitting > 0 else ""
        raise ResourceError(
            f"a run of {processes} processes needs {needed} open files, `ulimit -n` allows {limit}: raise it{lower}"
        )


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
