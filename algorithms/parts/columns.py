"""The source of algorithms that train on every trajectory once, in the order in which they come."""

from algorithms.runtime.algorithm import Context
from algorithms.runtime.config import SamplingConfig
from algorithms.runtime.devices import Device
from algorithms.runtime.learning.batches import BatchSource, ColumnBatches, LockstepBatches
from algorithms.runtime.learning.gpu_batches import DeviceBatches
from algorithms.runtime.memory.slots import Trajectories


def make_column_batches(
    context: Context,
    trajectories: Trajectories,
    sampling: SamplingConfig,
    device: Device,
    *,
    hold: bool | None = None,
    max_policy_lag: int | None = None,
) -> BatchSource:
    """Make batches of whole columns; the flags say how many columns and how old they may be.

    Args:
        context: of the learner.
        trajectories: the shared arrays.
        sampling: flags of sampling.
        device: of the batches.
        hold: release slots only after training; None: as `--num_minibatches_to_accumulate=0` says.
        max_policy_lag: limit of the algorithm's own below that of `--max_policy_lag`, in versions.
    """
    columns, lag = context.flags.macro_batch_columns, sampling.max_policy_lag
    if max_policy_lag is not None:
        lag = min(lag, max_policy_lag)
    if sampling.lockstep:
        return LockstepBatches(trajectories, context.policy, columns, lag)
    if hold is None:
        hold = sampling.num_minibatches_to_accumulate == 0
    if context.buffered:
        return DeviceBatches(trajectories, context.policy, columns, lag, hold, context.num_policies, device)
    return ColumnBatches(trajectories, context.policy, columns, lag, hold, context.num_policies)
