"""The policy worker: answers every request that waits with one forward pass."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from algorithms.models.flat_module import FlatModule
from algorithms.ops.distributions import ActionDistribution
from algorithms.ops.numpy_twins import ActionSampler, is_supported
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.slots import FinalObservations, Trajectories
from algorithms.runtime.memory.weights import WeightRing, checksum
from algorithms.runtime.messages import ActionRequest, ActionsReady, Address, Message
from algorithms.runtime.sampling.numpy_acting import NumpyActing, numpy_acting
from envs.spec import MASK_KEY, EnvSpec
from utils.errors import ResourceError
from utils.failpoints import failpoint
from utils.timing import COPYING, FRAMEWORK, INFERENCE, clock


class ActingModel(Protocol):
    """What a policy worker needs of a model; N rows."""

    rnn_state_size: int

    def act(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, L], value [N] in normalized units and the next state [N, H]."""
        ...

    def denormalize_value(self, value: Tensor) -> Tensor:
        """Values in units of return."""
        ...


@dataclass(frozen=True)
class ActingPlan:
    """What a policy worker is told once.

    Attributes:
        spec: of the environment.
        num_groups: groups of the whole run.
        recurrence: steps of a BPTT segment; the recurrent state is recorded before each.
        num_policies: policies that may act in one group.
        device: of the forward pass.
        seed: of the sampling of actions.
        replaces: another policy worker has died in this place: recurrent states are rebuilt from the slots.
    """

    spec: EnvSpec
    num_groups: int
    recurrence: int
    num_policies: int
    device: str
    seed: int
    replaces: bool = False


@dataclass(frozen=True)
class Rows:
    """Where the rows of one forward pass lie: indices that select them as [*lead, ...] from shared arrays."""

    at: tuple[Any, ...]  # of trajectory fields
    state: Any  # of the live recurrent state
    lead: tuple[int, ...]

    def groups(self) -> list[tuple[int, int]]:
        """Slot and step of every group, if these are whole groups; else none."""
        if len(self.at) > 2:
            return []
        slots, steps = (np.atleast_1d(index).tolist() for index in self.at)
        return list(zip(slots, steps, strict=True))


class Sampling(NamedTuple):
    """How actions are drawn.

    Attributes:
        generator: by torch.
        sampler: for whole groups without torch, on a CPU where the actions are of the simple kind.
        numpy: all of acting without torch, where the network is too.
    """

    generator: Generator
    sampler: ActionSampler | None = None
    numpy: NumpyActing | None = None


class PolicyWorker:
    """Acts for one policy in its groups and keeps their live recurrent state.

    Args:
        address: of this worker; its index is the policy.
        plan: what it is told once.
        flat: the acting model with its weights in one vector.
        ring: where the learner publishes weights.
        trajectories, finals: the shared arrays.
    """

    def __init__(
        self,
        address: Address,
        plan: ActingPlan,
        flat: FlatModule,
        ring: WeightRing,
        trajectories: Trajectories,
        finals: FinalObservations,
    ) -> None:
        self.address, self.plan, self.flat = address, plan, flat
        self.delivery = WeightDelivery(ring, flat)
        self.model: ActingModel = flat.module  # type: ignore[assignment]
        self.trajectories, self.finals = trajectories, finals
        self.rollout, rows = trajectories.valid.shape[1:]
        self.version = 0
        self.requests: dict[int, ActionRequest] = {}  # by group; the newest of a group is the only current one
        self.live_state = torch.zeros(plan.num_groups, rows, self.model.rnn_state_size, device=plan.device)
        self.obs = {key: torch.from_numpy(a) for key, a in trajectories.obs.items()}
        self.first = torch.from_numpy(trajectories.first)
        self.sampling = self._sampling(plan.seed)
        self._stateless = set(range(plan.num_groups)) if plan.replaces and self.model.rnn_state_size else set()

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a request; it is answered with all others that wait."""
        if isinstance(message, ActionRequest):
            self.requests[message.group] = message
        yield from ()

    def pending(self) -> bool:
        """Whether a request waits."""
        return bool(self.requests)

    def work(self) -> Iterator[Message]:
        """Answer what waits."""
        requests = list(self.requests.values())
        self.requests.clear()
        yield from self.answer(requests)

    def answer(self, requests: list[ActionRequest]) -> Iterator[ActionsReady]:
        """Answer the requests."""
        clock.enter(COPYING)
        self._refresh_weights()
        failpoint("pw.forward")
        if self._stateless:
            self._rebuild_states(requests)
        if self.plan.spec.same_step:
            for request in requests:
                self._value_final_observations(request)
        acting = [request for request in requests if request.step < self.rollout]
        if (numpy := self.sampling.numpy) is not None:
            clock.enter(INFERENCE)
            for _, _, slot, step, _ in acting:
                if self.plan.num_policies == 1:
                    numpy.act(slot, step, self.version)
                else:
                    mine = self.trajectories.policy_id[slot, step] == self.address.index
                    numpy.act_in(mine, slot, step, self.version)
        elif acting and (rows := self._rows(acting)):
            self._snapshot_states(acting)
            self._act(rows)
            self.trajectories.policy_version[rows.at] = self.version
        clock.enter(FRAMEWORK)
        for request in requests:
            yield ActionsReady(*request)

    @torch.inference_mode()
    def _act(self, rows: Rows) -> None:
        """Gather K x R rows, one forward pass, scatter what it says."""
        obs = {key: self._gather(a, rows) for key, a in self.obs.items()}
        mask = obs[MASK_KEY].flatten(1) > 0 if self.plan.spec.action_mask else None
        state = self.live_state[rows.state].flatten(0, len(rows.lead) - 1)
        clock.enter(INFERENCE)
        logits, value, next_state = self.model.act(obs, self._gather(self.first, rows), state)
        clock.enter(COPYING)
        self.live_state[rows.state] = next_state.view(*rows.lead, next_state.shape[-1])
        t, groups = self.trajectories, rows.groups()
        self._scatter(t.behavior_logits, rows, logits)
        self._scatter(t.behavior_value, rows, self.model.denormalize_value(value))
        clock.enter(INFERENCE)
        if groups and (sampler := self.sampling.sampler) is not None:  # a dozen calls of torch less
            for at in groups:
                sampler.sample(t.behavior_logits[at], t.action[at], t.behavior_log_prob[at])
            return
        distribution = ActionDistribution(self.plan.spec.action.parts, logits, mask)
        action = distribution.sample(self.sampling.generator)
        self._scatter(t.action, rows, action)
        self._scatter(t.behavior_log_prob, rows, distribution.log_prob(action))

    def _sampling(self, seed: int) -> Sampling:
        """With random numbers of their own."""
        plan, rows = self.plan, self.trajectories.valid.shape[2]
        generator = torch.Generator(plan.device).manual_seed(seed)
        if plan.device != "cpu" or plan.spec.action_mask or not is_supported(plan.spec.action.parts):
            return Sampling(generator)
        sampler = ActionSampler(plan.spec.action.parts, rows, np.random.default_rng(seed))
        return Sampling(generator, sampler, numpy_acting(self.flat.module, sampler, self.trajectories))

    def _refresh_weights(self) -> None:
        self.version = self.delivery.refresh()

    def _rows(self, requests: list[ActionRequest]) -> Rows | None:
        """The rows of this policy in the requests; None when there are none."""
        num_rows = self.trajectories.valid.shape[2]
        if self.plan.num_policies == 1 and len(requests) == 1:  # plain views, no copy
            one = requests[0]
            return Rows((one.slot, one.step), one.group, (num_rows,))
        groups = np.array([r.group for r in requests])
        slots, steps = np.array([r.slot for r in requests]), np.array([r.step for r in requests])
        if self.plan.num_policies == 1:
            return Rows((slots, steps), groups, (len(requests), num_rows))
        request, row = np.nonzero(self.trajectories.policy_id[slots, steps] == self.address.index)
        if not len(row):
            return None
        return Rows((slots[request], steps[request], row), (groups[request], row), (len(row),))

    def _gather(self, tensor: Tensor, rows: Rows) -> Tensor:
        """The rows of a field, [N, ...] on the device of the model."""
        return tensor[rows.at].flatten(0, len(rows.lead) - 1).to(self.plan.device)

    def _scatter(self, field: Array, rows: Rows, value: Tensor) -> None:
        """Write a result [N, ...] where its rows lie."""
        field[rows.at] = value.cpu().numpy().reshape(rows.lead + value.shape[1:])

    def _snapshot_states(self, requests: list[ActionRequest]) -> None:
        """Record the recurrent state before every BPTT segment."""
        if not self.model.rnn_state_size:
            return
        for _, group, slot, step, _ in requests:
            if step % self.plan.recurrence == 0:
                mine = self.trajectories.policy_id[slot, step] == self.address.index
                state = self.live_state[group].cpu().numpy()
                self.trajectories.rnn_state[slot, step // self.plan.recurrence][mine] = state[mine]

    @torch.inference_mode()
    def _rebuild_states(self, requests: list[ActionRequest]) -> None:
        """Live states of groups that the predecessor served: its last steps again, under the weights of now."""
        for request in requests:
            if request.group not in self._stateless:
                continue
            self._stateless.remove(request.group)
            slot, step = request.slot, request.step
            if not step:
                slot, step = int(self.trajectories.continues[slot]), self.rollout
            if slot < 0:  # new episodes, which begin without a state
                continue
            start = (step - 1) // self.plan.recurrence * self.plan.recurrence  # of the last segment that has begun
            stored = self.trajectories.rnn_state[slot, start // self.plan.recurrence]
            state = torch.from_numpy(stored).to(self.plan.device)
            for t in range(start, step):
                obs = {key: a[slot, t].to(self.plan.device) for key, a in self.obs.items()}
                _, _, state = self.model.act(obs, self.first[slot, t].to(self.plan.device), state)
            self.live_state[request.group] = state

    @torch.inference_mode()
    def _value_final_observations(self, request: ActionRequest) -> None:
        """Value the true final observations of rows that a SAME_STEP environment has reset already.

        It is done once, by the policy that acted, with its live state: the model sees the observation as the next one
        of the same episode, and the state afterwards is thrown away.
        """
        policy, group, slot, step, _ = request
        if not step:  # row 0 continues a slot whose final values were asked for with step T
            return
        rows = self.finals.has_final[group] & (self.trajectories.policy_id[slot, step - 1] == policy)
        if not rows.any():
            return
        obs = {key: torch.from_numpy(a[group][rows]).to(self.plan.device) for key, a in self.finals.final_obs.items()}
        state = self.live_state[group][torch.from_numpy(rows)]
        first = torch.zeros(len(state), dtype=torch.bool, device=self.plan.device)
        before = clock.enter(INFERENCE)
        _, value, _ = self.model.act(obs, first, state)
        clock.enter(before)
        self.trajectories.final_value[slot, step - 1, rows] = self.model.denormalize_value(value).cpu().numpy()


class LockstepPolicyWorker(PolicyWorker):
    """Acts group by group, each with random numbers of its own, so that it makes no difference who asks first.

    Args:
        address, plan, flat, ring, trajectories, finals: as `PolicyWorker`.
        seeds: of the sampling of actions in each group of the run.
    """

    def __init__(
        self,
        address: Address,
        plan: ActingPlan,
        flat: FlatModule,
        ring: WeightRing,
        trajectories: Trajectories,
        finals: FinalObservations,
        seeds: Sequence[int],
    ) -> None:
        super().__init__(address, plan, flat, ring, trajectories, finals)
        self._seeds = seeds
        self._of_group: dict[int, Sampling] = {}

    def answer(self, requests: list[ActionRequest]) -> Iterator[ActionsReady]:
        """Answer the requests one by one: sums of floats can depend on how many rows are computed together."""
        for request in requests:
            if request.group not in self._of_group:
                self._of_group[request.group] = self._sampling(self._seeds[request.group])
            self.sampling = self._of_group[request.group]
            yield from super().answer([request])


# How the weights of a learner reach a model that acts, and how it is proved that they did.


log = logging.getLogger(__name__)

LOAD_ATTEMPTS = 3

DAMAGED_VERSIONS = 3
"""In a row, after which a worker has waited long enough for weights that arrive."""

PROVED_LOADS = 64
"""On a device that is far from the host one load in so many is read back: that costs as much as the load."""


class WeightDelivery:
    """Keeps a model at the newest weights of a ring.

    What arrives damaged is not acted with: the version before stays until a later one comes whole.

    Args:
        ring: where they are published.
        flat: the model.

    Attributes:
        version: of the weights in the model; 0 before the first.
    """

    def __init__(self, ring: WeightRing, flat: FlatModule) -> None:
        self.ring, self.flat = ring, flat
        self.version = self._loads = 0
        self._proved_loads = 1 if flat.flat.device.type == "cpu" else PROVED_LOADS
        self._damaged: list[int] = []  # versions since the last one that came whole

    def refresh(self) -> int:
        """Load the newest weights, if they are newer; the version to act with.

        Raises:
            ResourceError: they do not arrive, however often it is tried.
        """
        newest, weights = self.ring.fetch(self.version)
        if weights is not None:
            self._load(newest, weights)
        elif self.ring.published != self.version and (damaged := self.ring.damaged()) is not None:
            self._miss(damaged)
        return self.version

    def _load(self, version: int, weights: Array) -> None:
        """Load weights, and read them back from time to time."""
        for _ in range(LOAD_ATTEMPTS):
            self.flat.load(weights)
            if self._loads % self._proved_loads or self._loaded() == checksum(weights):
                self._loads += 1
                self._damaged.clear()
                self.version = version
                return
        raise ResourceError(
            f"the weights of version {version} do not reach the model on {self.flat.flat.device}: in {LOAD_ATTEMPTS}"
            " attempts their checksum was another one"
        )

    def _loaded(self) -> int:
        read_back: np.ndarray[tuple[int], np.dtype[np.float32]] = self.flat.flat.cpu().numpy()
        return checksum(read_back)

    def _miss(self, version: int) -> None:
        """Go on with the weights of before, for as long as that can be chance."""
        if version not in self._damaged:
            self._damaged.append(version)
            log.warning("the weights of version %d are damaged; version %d acts on", version, self.version)
        if not self.version or len(self._damaged) > DAMAGED_VERSIONS:
            raise ResourceError(
                f"the weights of version {version} are damaged where all processes share them: their checksum is not"
                " the one they were published with"
            )
