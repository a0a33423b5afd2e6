"""Forward passes on a GPU: captured passes of few sizes, which read and write the slots themselves."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.sampling.policy import FastPolicy, Policy, Random
from appo.algorithms.runtime.sampling.policy_worker import ActingPlan, HostEngine, Rows
from appo.utils.timing import INFERENCE, clock

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
    """A forward pass of N rows.

    Attributes:
        index: places of the rows on the device, see `GpuEngine._places`, [4, N].
        host_index: host end of `index`.
        run: forward pass.
    """

    index: Tensor
    host_index: Tensor
    run: Callable[[], None]


class GpuEngine(HostEngine):
    """Runs a batch of rows by a captured forward pass of the next larger size, sampling included.

    The arena is pinned, and the device computes with addresses in the arena: the pass gathers its rows from the slots
    and scatters the recorded fields into the slots, so that a batch costs the host one copy of indices and one launch,
    for any number of requests and fields. Padding rows repeat the last row, and use a spare state row. Recurrent states
    stay on the device.
    """

    def __init__(self, policy: Policy, plan: ActingPlan, trajectories: Trajectories, device: Device) -> None:
        super().__init__(policy, plan, trajectories)
        self.device = device
        self.steps, rows = trajectories.valid.shape[1:]
        self.states = torch.zeros(plan.num_groups * rows + 1, policy.rnn_state_size, device=plan.device)
        self.live_state = self.states[:-1].view(plan.num_groups, rows, policy.rnn_state_size)
        self.state_indices = np.arange(plan.num_groups * rows).reshape(plan.num_groups, rows)
        self.sizes = bucket_sizes(plan.num_groups * rows)
        self.capturable = True
        self.slot_obs = {key: self._in_slots(a) for key, a in trajectories.obs.items()}
        self.slot_first = self._in_slots(trajectories.first)
        # by size and by source of random numbers, which a captured pass keeps for ever
        self._buckets: dict[tuple[int, Random], _Bucket] = {}

    @torch.inference_mode()
    def run(self, rows: Rows, random: Random) -> None:
        """Act in the rows by the pass of the smallest sufficient size."""
        places = self._places(rows)
        count = places.shape[1]
        size = next(size for size in self.sizes if size >= count)
        bucket = self._buckets.get((size, random))
        if bucket is None:
            bucket = self._buckets[size, random] = self._make_bucket(size, random, places)
        self._fill(bucket, places)
        clock.enter(INFERENCE)
        bucket.run()
        self.device.mark().synchronize()

    def fast(self, random: Random) -> FastPolicy | None:
        """Return None: no engine is faster than a captured pass."""
        return None

    def _in_slots(self, array: Array) -> Tensor:
        """Return a field [S, steps, R, ...] in the slots as a tensor [S * steps * R, ...] of the device."""
        assert array.flags.c_contiguous, "a copy of the field would be written instead of the slots"
        return self.device.shared(array.reshape(-1, *array.shape[3:]))

    def _places(self, rows: Rows) -> Array:
        """Return the places of the N rows, [4, N]: in observations, states and recorded fields, and in the batch."""
        slots, steps, *row = rows.at
        num_rows = self.state_indices.shape[1]
        if not row:  # whole groups
            slots, steps, row = np.reshape(slots, (-1, 1)), np.reshape(steps, (-1, 1)), [np.arange(num_rows)]
        observations, fields = ((slots * length + steps) * num_rows + row[0] for length in (self.steps + 1, self.steps))
        count = observations.size
        states = self.state_indices[rows.state]
        return np.stack([observations.ravel(), states.ravel(), fields.ravel(), np.arange(count)])

    def _fill(self, bucket: _Bucket, places: Array) -> None:
        """Send the places of the rows to the device; padding rows have the places of the last row."""
        count = places.shape[1]
        host = bucket.host_index.numpy()
        host[:, :count] = places
        host[:, count:] = places[:, -1:]
        host[1, count:] = len(self.states) - 1
        bucket.index.copy_(bucket.host_index, non_blocking=True)

    def _make_bucket(self, size: int, random: Random, places: Array) -> _Bucket:
        """Make the pass of a size: run it on the given rows, and capture it."""
        index = torch.zeros((4, size), dtype=torch.int64, device=self.device.name)
        host_index = self.device.host_buffer((4, size), torch.int64)

        @torch.inference_mode()  # captures leave this mode
        def run() -> None:
            self._act(index, random)

        bucket = _Bucket(index, host_index, run)
        self._fill(bucket, places)
        index[1] = len(self.states) - 1  # a pass that is run to be captured moves no state
        return _Bucket(index, host_index, self._capture(run, random))

    def _act(self, index: Tensor, random: Random) -> None:
        """Act in the rows at these places [4, N]; scatter the recorded fields into the slots."""
        observations, states, fields, batch = index.unbind()
        obs = {key: x.index_select(0, observations) for key, x in self.slot_obs.items()}
        rows = states.clamp(max=len(self.states) - 2)  # the spare row has no number
        first, state = self.slot_first.index_select(0, observations), self.states.index_select(0, states)
        recorded, after = self.policy.act(obs, first, state, rows, random)
        self.states.index_copy_(0, states, after)
        for name, value in recorded.items():
            target = self._in_slots(self.fields[name])
            rows_of_batch = value.index_select(0, batch)  # padding rows write what the last row writes
            target.index_copy_(0, fields, rows_of_batch.to(target.dtype).view(len(batch), *target.shape[1:]))

    def _capture(self, run: Callable[[], None], random: Random) -> Callable[[], None]:
        """Return the captured pass; if capture fails, warn once and return the pass itself."""
        for _ in range(WARM_UPS):
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
