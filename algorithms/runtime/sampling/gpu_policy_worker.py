"""Forward passes on a GPU: permanent buffers, few sizes, one copy back per batch."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.sampling.policy import FastPolicy, Policy, Random
from appo.algorithms.runtime.sampling.policy_worker import ActingPlan, HostEngine, Rows
from appo.utils.timing import COPYING, INFERENCE, clock

log = logging.getLogger(__name__)

SMALLEST_BUCKET = 32
WARM_UPS = 3


def bucket_sizes(largest: int) -> list[int]:
    """Return powers of two, up to a size with room for `largest` rows."""
    sizes = [SMALLEST_BUCKET]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


@dataclass(frozen=True)
class _Bucket:
    """A forward pass of N rows on permanent memory.

    Attributes:
        obs, first: inputs on the device.
        state_index: index [N] of the recurrent state of each row.
        said: recorded fields [N, W] on the device, as float32.
        said_shapes: shape of one row of each recorded field, in the order of `said`.
        host_state_index, host_said: host ends of `state_index` and `said`.
        run: forward pass.
    """

    obs: dict[str, Tensor]
    first: Tensor
    state_index: Tensor
    said: Tensor
    said_shapes: dict[str, tuple[int, ...]]
    host_state_index: Tensor
    host_said: Tensor
    run: Callable[[], None]


class GpuEngine(HostEngine):
    """Runs a batch of rows by a captured forward pass of the next larger size, sampling included.

    Rows are copied from their slots to the device directly, in one copy per request and field. Padding rows use a spare
    state row. Recurrent states stay on the device. All recorded fields return in one copy, as float32.
    """

    def __init__(self, policy: Policy, plan: ActingPlan, trajectories: Trajectories, device: Device) -> None:
        super().__init__(policy, plan, trajectories)
        self.device = device
        groups, rows = plan.num_groups, trajectories.valid.shape[2]
        self.states = torch.zeros(groups * rows + 1, policy.rnn_state_size, device=plan.device)
        self.live_state = self.states[:-1].view(groups, rows, policy.rnn_state_size)
        self.state_indices = np.arange(groups * rows).reshape(groups, rows)
        self.sizes = bucket_sizes(groups * rows)
        self.capturable = True
        # by size and by source of random numbers, which a captured pass keeps for ever
        self._buckets: dict[tuple[int, Random], _Bucket] = {}

    @torch.inference_mode()
    def run(self, rows: Rows, random: Random) -> None:
        """Act in the rows by the pass of the smallest sufficient size."""
        count = int(np.prod(rows.lead))
        size = next(size for size in self.sizes if size >= count)
        bucket = self._buckets.get((size, random))
        if bucket is None:
            bucket = self._buckets[size, random] = self._make_bucket(size, random)
        self._load(bucket, rows, count)
        clock.enter(INFERENCE)
        bucket.run()
        bucket.host_said.copy_(bucket.said, non_blocking=True)
        self.device.mark().synchronize()
        clock.enter(COPYING)
        said, start = bucket.host_said[:count].numpy(), 0
        for name, shape in bucket.said_shapes.items():
            end = start + math.prod(shape)
            self.fields[name][rows.at] = said[:, start:end].reshape(rows.lead + shape)
            start = end

    def fast(self, random: Random) -> FastPolicy | None:
        """Return None: no engine is faster than a captured pass."""
        return None

    def _load(self, bucket: _Bucket, rows: Rows, count: int) -> None:
        """Copy the inputs of the rows to the device; padding rows keep their contents."""
        fields = [(bucket.first, self.first), *((x, self.obs[key]) for key, x in bucket.obs.items())]
        num_rows = rows.lead[-1]
        for i, at in enumerate(groups := rows.groups()):  # each is contiguous in its slot
            for target, source in fields:
                target[i * num_rows : (i + 1) * num_rows].copy_(source[at], non_blocking=True)
        if not groups:
            for target, source in fields:
                target[:count].copy_(source[rows.at])
        bucket.host_state_index[:count] = torch.from_numpy(self.state_indices[rows.state].reshape(-1))
        bucket.host_state_index[count:] = len(self.states) - 1
        bucket.state_index.copy_(bucket.host_state_index, non_blocking=True)

    def _make_bucket(self, size: int, random: Random) -> _Bucket:
        """Allocate the buffers of a size, run its pass on spare rows, and capture the pass."""
        device = self.device.name
        obs = {key: torch.zeros(size, *x.shape[3:], dtype=x.dtype, device=device) for key, x in self.obs.items()}
        first = torch.zeros(size, dtype=torch.bool, device=device)
        state_index = torch.full((size,), len(self.states) - 1, device=device)
        recorded = self._forward(obs, first, state_index, random)  # the first warm-up determines the recorded fields
        said = _side_by_side(recorded)

        @torch.inference_mode()  # captures leave this mode
        def run() -> None:
            said.copy_(_side_by_side(self._forward(obs, first, state_index, random)))

        return _Bucket(
            obs=obs,
            first=first,
            state_index=state_index,
            said=said,
            said_shapes={name: tuple(value.shape[1:]) for name, value in recorded.items()},
            host_state_index=self.device.host_buffer((size,), torch.int64),
            host_said=self.device.host_buffer(tuple(said.shape), torch.float32),
            run=self._capture(run, random),
        )

    def _forward(self, obs: dict[str, Tensor], first: Tensor, state_index: Tensor, random: Random) -> dict[str, Tensor]:
        """Act in rows whose recurrent states have these indices [N]; return the recorded fields."""
        rows = state_index.clamp(max=len(self.states) - 2)  # the spare row has no number
        recorded, after = self.policy.act(obs, first, self.states.index_select(0, state_index), rows, random)
        self.states.index_copy_(0, state_index, after)
        return recorded

    def _capture(self, run: Callable[[], None], random: Random) -> Callable[[], None]:
        """Return the captured pass; if capture fails, warn once and return the pass itself."""
        for _ in range(WARM_UPS - 1):
            run()
        if not self.capturable:
            return run
        try:
            with self.device.strict():
                run()
            return self.device.capture(run, random.generator)
        except RuntimeError as error:
            self.capturable = False
            self._buckets.clear()  # their graphs draw from a generator left half captured
            log.warning("the forward pass cannot be captured and runs as it is: %s", error)
            return run


def _side_by_side(recorded: dict[str, Tensor]) -> Tensor:
    """Return all recorded fields of N rows as float32, [N, W]."""
    return torch.cat([value.float().reshape(len(value), -1) for value in recorded.values()], dim=1)
