"""The policy worker: answers all waiting requests with one forward pass."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import FinalObservations, Trajectories
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import ActionRequest, ActionsReady, Address, Message
from appo.algorithms.runtime.sampling.policy import FastPolicy, Follows, Policy, Random
from appo.algorithms.runtime.sampling.weight_reader import WeightReader
from appo.envs.spec import EnvSpec
from appo.utils.failpoints import failpoint
from appo.utils.timing import COPYING, FRAMEWORK, INFERENCE, clock


@dataclass(frozen=True)
class ActingPlan:
    """The settings of a policy worker.

    Attributes:
        num_groups: groups of the whole run.
        recurrence: steps of a BPTT segment; the recurrent state is recorded before each.
        num_policies: policies that may act in one group.
        device: device of the forward pass.
        seed: seed of the random numbers of all groups together.
        group_seeds: seed of the random numbers of each group; groups then act one by one, and the order of requests
            makes no difference (lockstep). (): all groups act together.
        replaces: whether another policy worker died in this place; recurrent states are then rebuilt from the slots.
        learns: whether a learner trains the policy and counts its env steps; not for past versions and frozen policies.
        whole_rollouts: fetch weights only at the begin of a trajectory. With one group per actor, in the `local`
            placement, one version then acts in all steps of a trajectory.
    """

    spec: EnvSpec
    num_groups: int
    recurrence: int
    num_policies: int
    device: str
    seed: int
    group_seeds: tuple[int, ...] = ()
    replaces: bool = False
    learns: bool = True
    whole_rollouts: bool = False


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass: indices that select [*lead, ...] from shared arrays."""

    at: tuple[Any, ...]  # of trajectory fields
    state: Any  # of the live recurrent state
    lead: tuple[int, ...]


class HostEngine:
    """Gathers the rows, acts, and scatters the recorded fields; works on a device too, slowly.

    Attributes:
        live_state: recurrent state [G, R, H] of every group of the run, on the device.
    """

    def __init__(self, policy: Policy, plan: ActingPlan, trajectories: Trajectories) -> None:
        self.policy, self.trajectories, self.plan = policy, trajectories, plan
        num_rows = trajectories.valid.shape[2]
        self.live_state = torch.zeros(plan.num_groups, num_rows, policy.rnn_state_size, device=plan.device)
        self.numbers = torch.arange(plan.num_groups * num_rows, device=plan.device).view(plan.num_groups, num_rows)
        self.numbers_of_group = self.numbers.unbind()
        self.obs = {key: torch.from_numpy(a) for key, a in trajectories.obs.items()}
        self.first = torch.from_numpy(trajectories.first)
        self.fields = {"action": trajectories.action, **trajectories.recorded}

    @torch.inference_mode()
    def run(self, rows: Rows, random: Any) -> None:
        """Act in K x R rows: gather them, make one forward pass, scatter its outputs; update the recurrent state."""
        obs = {key: self._gather(a, rows) for key, a in self.obs.items()}
        state = self.live_state[rows.state].flatten(0, len(rows.lead) - 1)
        one_group = isinstance(rows.state, int)
        numbers = self.numbers_of_group[rows.state] if one_group else self.numbers[rows.state].flatten()
        clock.enter(INFERENCE)
        recorded, state = self.policy.act(
            obs, self._gather(self.first, rows), state, numbers, random, whole_groups=len(rows.at) == 2
        )
        clock.enter(COPYING)
        self.live_state[rows.state] = state.view(*rows.lead, state.shape[-1])
        for name, value in recorded.items():
            array = value.cpu().numpy()
            self.fields[name][rows.at] = array if one_group else array.reshape(rows.lead + value.shape[1:])

    def fast(self, random: Any) -> FastPolicy | None:
        """Return a cheaper engine for whole groups, the policy's twin without torch; None without one."""
        return self.policy.fast(self.trajectories, random)

    def _gather(self, tensor: Tensor, rows: Rows) -> Tensor:
        """Return the rows of a field, [N, ...] on the device of the policy."""
        return tensor[rows.at].flatten(0, len(rows.lead) - 1).to(self.plan.device)


class Chance(NamedTuple):
    """The random numbers of one or of all groups.

    Attributes:
        random: random numbers of the policy.
        fast: cheaper engine for whole groups with these random numbers; None without one.
    """

    random: Random
    fast: FastPolicy | None


class PolicyWorker:
    """Acts for one policy in its groups, and keeps their live recurrent state."""

    def __init__(
        self,
        address: Address,
        plan: ActingPlan,
        engine: HostEngine,
        ring: WeightRing,
        trajectories: Trajectories,
        finals: FinalObservations,
    ) -> None:
        self.address, self.plan, self.engine, self.policy = address, plan, engine, engine.policy
        self.weights = WeightReader(ring, engine.policy.flat)
        self.trajectories, self.finals = trajectories, finals
        self.rollout, self.num_rows = trajectories.valid.shape[1:]
        self.version = 0
        self._follows = engine.policy if isinstance(engine.policy, Follows) else None
        if self._follows is not None and not plan.learns:  # no count will ever end a beginning such as random actions
            self._follows.follow(sys.maxsize)
            self._follows = None
        self.requests: dict[int, ActionRequest] = {}  # the newest of each group
        self.live_state = engine.live_state
        self.chance = self._chance(plan.seed)
        self._of_group: dict[int, Chance] = {}
        self._stateless = set(range(plan.num_groups)) if plan.replaces and self.policy.rnn_state_size else set()

    def handle(self, message: Message) -> Iterator[Message]:
        """Note a request, answered together with all others waiting."""
        if isinstance(message, ActionRequest):
            self.requests[message.group] = message
        yield from ()

    def pending(self) -> bool:
        """Return whether a request waits."""
        return bool(self.requests)

    def work(self) -> Iterator[Message]:
        """Answer the waiting requests."""
        requests = list(self.requests.values())
        self.requests.clear()
        yield from self.answer(requests)

    def answer(self, requests: list[ActionRequest]) -> Iterator[ActionsReady]:
        """Answer the requests together or, if every group has its own random numbers, one by one.

        Sums of floats can depend on the number of rows computed together.
        """
        if not self.plan.group_seeds:
            yield from self._answer(requests, self.chance)
            return
        for request in requests:
            if request.group not in self._of_group:
                self._of_group[request.group] = self._chance(self.plan.group_seeds[request.group])
            yield from self._answer([request], self._of_group[request.group])

    def _chance(self, seed: int) -> Chance:
        random = self.policy.random(seed, self.num_rows)
        return Chance(random, self.engine.fast(random))

    def _answer(self, requests: list[ActionRequest], chance: Chance) -> Iterator[ActionsReady]:
        """Act, record, and reply."""
        clock.enter(COPYING)
        self._refresh(requests)
        failpoint("pw.forward")
        if self._stateless:
            self._rebuild_states(requests)
        if self.plan.spec.same_step:
            for request in requests:
                self._value_final_observations(request)
        acting = [request for request in requests if request.step < self.rollout]
        if (fast := chance.fast) is not None:
            clock.enter(INFERENCE)
            for _, _, slot, step, _ in acting:
                if self.plan.num_policies == 1:
                    fast.act(slot, step, self.version)
                else:
                    mine = self.trajectories.policy_id[slot, step] == self.address.index
                    fast.act_in(mine, slot, step, self.version)
        elif acting and (rows := self._rows(acting)):
            self._snapshot_states(acting)
            self.engine.run(rows, chance.random)
            self.trajectories.policy_version[rows.at] = self.version
        clock.enter(FRAMEWORK)
        for request in requests:
            yield ActionsReady(*request)

    def _refresh(self, requests: list[ActionRequest]) -> None:
        """Fetch the newest weights, and let a policy that follows the agent steps note the count."""
        if not (self.plan.whole_rollouts and self.version) or any(not request.step for request in requests):
            self.version = self.weights.refresh()
        if self._follows is not None:
            counts = self.trajectories.learner_counts[self.address.index]
            self._follows.follow(int(counts[LearnerLedger.NAMES.index("samples")]))

    def _rows(self, requests: list[ActionRequest]) -> Rows | None:
        """Return the rows of this policy in the requests; None without any."""
        if self.plan.num_policies == 1 and len(requests) == 1:  # plain views, no copy
            one = requests[0]
            return Rows((one.slot, one.step), one.group, (self.num_rows,))
        groups = np.array([r.group for r in requests])
        slots, steps = np.array([r.slot for r in requests]), np.array([r.step for r in requests])
        if self.plan.num_policies == 1:
            return Rows((slots, steps), groups, (len(requests), self.num_rows))
        request, row = np.nonzero(self.trajectories.policy_id[slots, steps] == self.address.index)
        rows = Rows((slots[request], steps[request], row), (groups[request], row), (len(row),))
        return rows if len(row) else None

    def _snapshot_states(self, requests: list[ActionRequest]) -> None:
        """Record the recurrent state before every BPTT segment; copies have arrived when the replies are sent."""
        if not self.policy.rnn_state_size:
            return
        for _, group, slot, step, _ in requests:
            if step % self.plan.recurrence:
                continue
            segment = self.trajectories.rnn_state[slot, step // self.plan.recurrence]
            if self.plan.num_policies == 1:
                torch.from_numpy(segment).copy_(self.live_state[group], non_blocking=True)
            else:
                mine = self.trajectories.policy_id[slot, step] == self.address.index
                segment[mine] = self.live_state[group].cpu().numpy()[mine]

    @torch.inference_mode()
    def _rebuild_states(self, requests: list[ActionRequest]) -> None:
        """Rebuild live states of groups served by the predecessor: repeat its last steps with the present weights."""
        for request in requests:
            if request.group not in self._stateless:
                continue
            self._stateless.remove(request.group)
            slot, step = request.slot, request.step
            if not step:
                slot, step = int(self.trajectories.continues[slot]), self.rollout
            if slot < 0:  # new episodes begin without a state
                continue
            start = (step - 1) // self.plan.recurrence * self.plan.recurrence  # of the last segment begun
            state = self._to_device(self.trajectories.rnn_state[slot, start // self.plan.recurrence])
            for t in range(start, step):
                obs = {key: self._to_device(a[slot, t]) for key, a in self.trajectories.obs.items()}
                first = self._to_device(self.trajectories.first[slot, t])
                _, state = self.policy.act(obs, first, state, None, None, greedy=True)
            self.live_state[request.group] = state

    @torch.inference_mode()
    def _value_final_observations(self, request: ActionRequest) -> None:
        """Compute values of true final observations, in rows already reset by a SAME_STEP environment.

        The acting policy does so once, with its live state. To the model the observation continues the episode; the
        resulting state is discarded.
        """
        policy, group, slot, step, _ = request
        if not step:  # row 0 continues a slot whose final values came with step T
            return
        rows = self.finals.has_final[group] & (self.trajectories.policy_id[slot, step - 1] == policy)
        if not rows.any():
            return
        obs = {key: self._to_device(a[group][rows]) for key, a in self.finals.final_obs.items()}
        state = self.live_state[group][torch.from_numpy(rows)]
        first = torch.zeros(len(state), dtype=torch.bool, device=self.plan.device)
        before = clock.enter(INFERENCE)
        recorded = self.policy.final(obs, first, state)
        clock.enter(before)
        for name, value in recorded.items():
            self.trajectories.recorded[name][slot, step - 1, rows] = value.cpu().numpy()

    def _to_device(self, array: Array) -> Tensor:
        """Return the array as a tensor on the device of the policy."""
        return torch.from_numpy(array).to(self.plan.device)
