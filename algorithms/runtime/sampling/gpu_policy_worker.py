"""A policy worker for devices that are far from the host: buffers that stay, few sizes, one copy back per batch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from algorithms.models.flat_module import FlatModule
from algorithms.ops.distributions import ActionDistribution
from algorithms.runtime.devices import Device
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.slots import FinalObservations, Trajectories
from algorithms.runtime.memory.weights import WeightRing
from algorithms.runtime.messages import ActionRequest, Address
from algorithms.runtime.sampling.policy_worker import ActingPlan, PolicyWorker, Rows
from envs.spec import MASK_KEY
from utils.timing import COPYING, INFERENCE, clock

log = logging.getLogger(__name__)

SMALLEST_BUCKET = 32
WARM_UPS = 3


def bucket_sizes(largest: int) -> list[int]:
    """Powers of two, the last of which holds `largest` rows."""
    sizes = [SMALLEST_BUCKET]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


@dataclass(frozen=True)
class _Bucket:
    """A forward pass of N rows on memory that stays where it is.

    Attributes:
        obs, first: inputs on the device.
        place: [N] where the recurrent state of each row is kept.
        said: [N, A+L+2] on the device: action, logits, log-probability and value, as float32.
        host_place, host_said: the host's ends of `place` and `said`.
        run: the pass.
    """

    obs: dict[str, Tensor]
    first: Tensor
    place: Tensor
    said: Tensor
    host_place: Tensor
    host_said: Tensor
    run: Callable[[], None]


class BufferedPolicyWorker(PolicyWorker):
    """Answers a batch of requests by a captured forward pass of the next larger size, with sampling inside.

    Rows go straight from their slots to the device, as many copies as there are requests and fields. Rows that fill a
    batch up use the state of a row that is nobody's. Recurrent states stay on the device; before a segment of
    backpropagation they are copied into the slot, and whatever is copied has arrived when the replies go out.

    Args:
        address, plan, flat, ring, trajectories, finals: as `PolicyWorker`.
        device: of the model.
    """

    def __init__(
        self,
        address: Address,
        plan: ActingPlan,
        flat: FlatModule,
        ring: WeightRing,
        trajectories: Trajectories,
        finals: FinalObservations,
        device: Device,
    ) -> None:
        super().__init__(address, plan, flat, ring, trajectories, finals)
        groups, rows, size = self.live_state.shape
        self.device, self.sampling = device, self.sampling._replace(numpy=None)
        self.states = torch.zeros(groups * rows + 1, size, device=plan.device)
        self.live_state = self.states[:-1].view(groups, rows, size)
        self.places = np.arange(groups * rows).reshape(groups, rows)
        self.rnn_state = torch.from_numpy(trajectories.rnn_state)
        self.sizes = bucket_sizes(groups * rows)
        self._buckets: dict[int, _Bucket] = {}
        self._capturable = True

    @torch.inference_mode()
    def _act(self, rows: Rows) -> None:
        count = int(np.prod(rows.lead))
        size = next(size for size in self.sizes if size >= count)
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = self._make_bucket(size)
        self._load(bucket, rows, count)
        clock.enter(INFERENCE)
        bucket.run()
        bucket.host_said.copy_(bucket.said, non_blocking=True)
        self.device.mark().synchronize()
        clock.enter(COPYING)
        self._store(rows, bucket.host_said[:count].numpy())

    def _load(self, bucket: _Bucket, rows: Rows, count: int) -> None:
        """Copy the inputs of the rows to the device; what fills the batch up is left as it was."""
        fields = [(bucket.first, self.first), *((x, self.obs[key]) for key, x in bucket.obs.items())]
        num_rows = rows.lead[-1]
        for i, at in enumerate(groups := rows.groups()):  # each is contiguous in its slot
            for target, source in fields:
                target[i * num_rows : (i + 1) * num_rows].copy_(source[at], non_blocking=True)
        if not groups:
            for target, source in fields:
                target[:count].copy_(source[rows.at])
        bucket.host_place[:count] = torch.from_numpy(self.places[rows.state].reshape(-1))
        bucket.host_place[count:] = len(self.states) - 1
        bucket.place.copy_(bucket.host_place, non_blocking=True)

    def _store(self, rows: Rows, said: Array) -> None:
        """Write [N, A+L+2] where the rows lie."""
        t, num_values = self.trajectories, self.plan.spec.action.num_values
        parts = (said[:, :num_values], said[:, num_values:-2], said[:, -2], said[:, -1])
        fields = (t.action, t.behavior_logits, t.behavior_log_prob, t.behavior_value)
        for field, part in zip(fields, parts, strict=True):
            field[rows.at] = part.reshape(rows.lead + part.shape[1:])

    def _snapshot_states(self, requests: list[ActionRequest]) -> None:
        if self.plan.num_policies > 1:
            super()._snapshot_states(requests)
        elif self.model.rnn_state_size:
            for _, group, slot, step, _ in requests:
                if step % self.plan.recurrence == 0:
                    segment = self.rnn_state[slot, step // self.plan.recurrence]
                    segment.copy_(self.live_state[group], non_blocking=True)

    def _make_bucket(self, size: int) -> _Bucket:
        """Allocate the buffers of a size, and capture its pass after running it on rows that are nobody's."""
        spec, device = self.plan.spec.action, self.plan.device
        width = spec.num_values + spec.num_logits + 2
        obs = {key: torch.zeros(size, *x.shape[3:], dtype=x.dtype, device=device) for key, x in self.obs.items()}
        first = torch.zeros(size, dtype=torch.bool, device=device)
        place = torch.full((size,), len(self.states) - 1, device=device)
        said = torch.zeros(size, width, device=device)

        @torch.inference_mode()  # which captures leave
        def run() -> None:
            said.copy_(self._forward(obs, first, place))

        host_place = self.device.host_buffer((size,), torch.int64)
        host_said = self.device.host_buffer((size, width), torch.float32)
        return _Bucket(obs, first, place, said, host_place, host_said, self._captured(run))

    def _forward(self, obs: dict[str, Tensor], first: Tensor, place: Tensor) -> Tensor:
        """One step of rows whose states are in these places; action, logits, log-probability and value, [N, A+L+2]."""
        mask = obs[MASK_KEY].flatten(1) > 0 if self.plan.spec.action_mask else None
        logits, value, after = self.model.act(obs, first, self.states.index_select(0, place))
        self.states.index_copy_(0, place, after)
        distribution = ActionDistribution(self.plan.spec.action.parts, logits, mask)
        action = distribution.sample(self.sampling.generator)
        numbers = torch.stack((distribution.log_prob(action), self.model.denormalize_value(value)), dim=1)
        return torch.cat((action.float(), logits.float(), numbers), dim=1)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """The pass, captured where that is possible; else one warning, and the pass itself."""
        for _ in range(WARM_UPS):
            run()
        if not self._capturable:
            return run
        try:
            with self.device.strict():
                run()
            return self.device.capture(run, self.sampling.generator)
        except RuntimeError as error:
            self._capturable = False
            self._buckets.clear()  # their graphs draw from a generator that has half a capture behind it
            log.warning("the forward pass cannot be captured and runs as it is: %s", error)
            return run
