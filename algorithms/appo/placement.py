"""How many workers, groups and environments, and where policies act: what `0` and `auto` mean.

Nothing here changes what is learned from a given batch; only how fast batches come.
"""

from dataclasses import dataclass

from algorithms.appo.config import Config
from algorithms.runtime.topology import Placement
from utils.errors import UsageError

# Measured on 2 cores: a request and its reply between two processes, with both wake-ups.
ROUND_TRIP_SECONDS = 15e-6
MAX_ENVS_PER_WORKER = 64


@dataclass(frozen=True)
class Sampling:
    """The sampling flags with every `0` and `auto` decided.

    Attributes:
        placement: where policies act.
        num_workers: actor workers.
        num_envs_per_worker: environments of one actor.
        num_splits: groups of one actor.
    """

    placement: Placement
    num_workers: int
    num_envs_per_worker: int
    num_splits: int


def plan_workers(config: Config, cores: int, placement: Placement) -> Sampling:
    """Fill in the counts for a placement.

    Without flags the environments of all actors together make one macro batch of trajectories, within limits.
    """
    s, learning = config.sampling, config.learning
    num_workers = s.num_workers or (1 if placement == "serial" else cores)
    splits = s.worker_num_splits or (2 if placement == "central" else 1)
    columns = learning.num_batches_per_iteration * learning.batch_size // learning.rollout
    envs = s.num_envs_per_worker or _clamp(columns // num_workers, 1, MAX_ENVS_PER_WORKER)
    if not s.num_envs_per_worker:
        envs = max(1, envs // splits) * splits
    if not s.worker_num_splits and envs % splits:
        splits = 1
    if envs % splits:
        raise UsageError(f"--num_envs_per_worker={envs} is not a multiple of --worker_num_splits={splits}")
    return Sampling(placement, num_workers, envs, splits)


def rows_to_time(config: Config, cores: int) -> tuple[int, ...]:
    """Batch sizes whose forward passes decide `--inference=auto`: of one local group, and of all groups together."""
    local, central = plan_workers(config, cores, "local"), plan_workers(config, cores, "central")
    return local.num_envs_per_worker, central.num_envs_per_worker * central.num_workers // central.num_splits


def choose_placement(config: Config, cores: int, device: str, forward_seconds: dict[int, float]) -> Placement:
    """Where policies act when the flags do not say.

    Acting inside the actors needs no message per step but makes smaller batches; a process of its own pays when what
    the larger batch saves per row is more than the round trip. On a GPU it always does: one process owns the device's
    queue.
    """
    wanted = config.sampling.inference
    if wanted != "auto":
        return _as_placement(wanted)
    if device == "cuda":
        return "central"
    if cores == 1:
        return "serial"
    small, large = rows_to_time(config, cores)
    per_row_local, per_row_central = forward_seconds[small] / small, forward_seconds[large] / large
    return "local" if per_row_local <= per_row_central + ROUND_TRIP_SECONDS / small else "central"


def _as_placement(name: str) -> Placement:
    match name:
        case "central" | "local" | "serial":
            return name
    raise ValueError(f"{name} is no placement")


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))
