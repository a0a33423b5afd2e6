import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.build import build_model
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Recorded
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import ActionRequest, ActionsReady, Address, Stop
from appo.algorithms.runtime.sampling.gpu_policy_worker import GpuEngine
from appo.algorithms.runtime.sampling.policy_worker import ActingPlan, HostEngine, PolicyWorker
from appo.envs.spec import MASK_KEY, ActionPart, ActionSpec, EnvSpec, ObservationSpec
from tests.unit.runtime.worlds import SPEC, World, arrays_of, world_of

GRU = ModelConfig(encoder_mlp_layers=(8,), hidden_size=5)
PLAIN = replace(GRU, use_rnn=False)
GROUPS, ROWS, ROLLOUT, RECURRENCE = 4, 3, 4, 2
ENGINES: dict[str, Callable[..., HostEngine]] = {"host": HostEngine, "gpu": partial(GpuEngine, device=Device())}
kind, lockstep = "host", False


@pytest.fixture(autouse=True, params=[(kind, lockstep) for kind in ENGINES for lockstep in (False, True)], ids=str)
def each_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a policy worker does, it does with every engine, whether its groups act together or one by one."""
    for name, value in zip(("kind", "lockstep"), request.param, strict=True):
        monkeypatch.setattr(sys.modules[__name__], name, value)


@dataclass
class Acting:
    """A policy worker, the world it writes into, and its learner's end of the ring."""

    worker: PolicyWorker
    world: World
    ring: WeightRing
    model: ActorCritic  # what the weights were taken from; never the worker's own


def acting_of(
    spec: EnvSpec = SPEC, config: ModelConfig = GRU, *, policy: int = 0, num_policies: int = 1, seed: int = 0
) -> Acting:
    model = model_of(spec, config)
    size = len(FlatModule(model).flat)
    world = world_of(
        spec, rnn_state_size=model.rnn_state_size, recurrence=RECURRENCE, groups_per_actor=GROUPS, slots_per_group=1,
        rows=ROWS, rollout=ROLLOUT, num_policies=num_policies, more=tuple(WeightRing.declare(policy, size)),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    for key, array in world.trajectories.obs.items():
        array[:] = 1 if key == MASK_KEY else rng.standard_normal(array.shape)
    world.trajectories.first[:] = rng.random(world.trajectories.first.shape) < 0.3
    group_seeds = tuple(range(GROUPS)) if lockstep else ()
    plan = ActingPlan(spec, GROUPS, RECURRENCE, num_policies, "cpu", seed=7, group_seeds=group_seeds)
    ring = WeightRing(world.arena, policy)
    torch.manual_seed(99)
    flat = FlatModule(build_model(config, spec))  # other weights: what acts is what was published
    flat.module.eval()
    worker = worker_of(flat, plan, ring, world, policy)
    ring.publish(FlatModule(model).flat.numpy(), 1)
    worker.live_state[:] = torch.from_numpy(rng.standard_normal(tuple(worker.live_state.shape)))
    return Acting(worker, world, ring, model)


def worker_of(flat: FlatModule, plan: ActingPlan, ring: WeightRing, world: World, policy: int = 0) -> PolicyWorker:
    engine = ENGINES[kind](StochasticPolicy(flat, plan.spec), plan, world.trajectories)
    return PolicyWorker(Address("policy_worker", policy), plan, engine, ring, world.trajectories, world.finals)


def model_of(spec: EnvSpec, config: ModelConfig, seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    model = build_model(config, spec)
    with torch.no_grad():
        model.policy_head.linear.weight.mul_(100.0)  # logits that depend visibly on what was observed
    model.set_return_statistics(3.0, 2.0)
    return model


def request(group: int, step: int, policy: int = 0) -> ActionRequest:
    return ActionRequest(policy, group, group, step, 0)  # a group's only slot has its number


def expected_act(acting: Acting, group: int, step: int, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    t = acting.world.trajectories
    obs = {key: torch.from_numpy(a[group, step]) for key, a in t.obs.items()}
    with torch.inference_mode():
        logits, value, after = acting.model.act(obs, torch.from_numpy(t.first[group, step]), state)
        return logits, acting.model.denormalize_value(value), after


def close(found: np.ndarray | torch.Tensor, expected: np.ndarray | torch.Tensor) -> bool:
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-5, atol=1e-5)


def test_requests_wait_until_there_is_a_turn() -> None:
    acting = acting_of()
    worker = acting.worker
    assert not worker.pending()
    assert list(worker.handle(request(0, 0))) == []
    assert list(worker.handle(request(2, 0))) == []
    assert list(worker.handle(Stop())) == []
    assert worker.pending()
    assert list(worker.work()) == [ActionsReady(*request(0, 0)), ActionsReady(*request(2, 0))]
    assert not worker.pending()


class Counting(StochasticPolicy):
    """Notes the agent steps before every forward pass."""

    def follow(self, samples: int) -> None:
        self.followed = [*getattr(self, "followed", []), samples]


@pytest.mark.parametrize(("learns", "followed"), [(True, [0, 12]), (False, [sys.maxsize])])
def test_a_policy_follows_the_agent_steps_that_its_learner_has_counted(learns: bool, followed: list[int]) -> None:
    acting = acting_of(config=PLAIN)
    policy, plan = Counting(acting.worker.policy.flat, SPEC), replace(acting.worker.plan, learns=learns)
    engine = ENGINES[kind](policy, plan, acting.world.trajectories)
    worker = PolicyWorker(
        acting.worker.address, plan, engine, acting.ring, acting.world.trajectories, acting.world.finals
    )
    ledger = LearnerLedger(acting.world.trajectories, 0)
    for samples in (0, 12):
        ledger.note({name: samples * (name == "samples") for name in ledger.NAMES})
        list(worker.answer([request(0, 0)]))
    assert policy.followed == followed


@pytest.mark.parametrize("config", [GRU, replace(GRU, rnn_type="lstm"), PLAIN])
def test_a_reply_records_everything_the_model_said(config: ModelConfig) -> None:
    acting = acting_of(config=config)
    t, before = acting.world.trajectories, acting.worker.live_state[1].clone()
    logits, value, after = expected_act(acting, 1, 0, before)
    list(acting.worker.answer([request(1, 0)]))
    assert close(t.recorded["logits"][1, 0], logits)
    assert close(t.recorded["value"][1, 0], value)
    assert close(acting.worker.live_state[1], after)
    assert (t.policy_version[1, 0] == 1).all()
    log_prob = logits.log_softmax(-1).gather(-1, torch.from_numpy(t.action[1, 0]).long())[:, 0]
    assert close(t.recorded["log_prob"][1, 0], log_prob)
    untouched = np.ones((GROUPS, ROLLOUT), bool)
    untouched[1, 0] = False
    for field in (t.recorded["logits"], t.recorded["value"], t.recorded["log_prob"], t.policy_version, t.action):
        assert not field[untouched].any()


@pytest.mark.parametrize("config", [GRU, PLAIN])
def test_several_requests_at_once_equal_one_by_one(config: ModelConfig) -> None:
    together, alone = acting_of(config=config), acting_of(config=config)
    for worker in (together.worker, alone.worker):  # actions without chance: the noise is nothing beside these logits
        worker.weights.refresh()
        worker.policy.flat.module.policy_head.linear.weight.data.mul_(1e4)  # type: ignore[union-attr]
    requests = [request(3, 0), request(0, 2), request(2, 3), request(1, 1)]
    replies = list(together.worker.answer(requests))
    one_by_one = [reply for one in requests for reply in alone.worker.answer([one])]
    assert replies == one_by_one == [ActionsReady(*one) for one in requests]
    mine, theirs = together.world.trajectories, alone.world.trajectories
    recorded = ("recorded.logits", "recorded.log_prob", "recorded.value")
    for name in ("action", *recorded, "policy_version", "rnn_state"):
        found, expected = arrays_of(mine)[name], arrays_of(theirs)[name]
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-3), name
    assert close(together.worker.live_state, alone.worker.live_state)
    for one in requests:
        logits = mine.recorded["logits"][one.slot, one.step]
        assert np.array_equal(mine.action[one.slot, one.step, :, 0], logits.argmax(-1))


def test_the_state_before_each_segment_is_recorded() -> None:
    acting = acting_of()
    t, worker = acting.world.trajectories, acting.worker
    before: dict[tuple[int, int], torch.Tensor] = {}
    for step in range(ROLLOUT):
        for group in (0, 2):
            before[group, step] = worker.live_state[group].clone()
        list(worker.answer([request(0, step), request(2, step)]))
    for (group, step), state in before.items():
        if step % RECURRENCE == 0:
            assert np.array_equal(t.rnn_state[group, step // RECURRENCE], state.numpy())
    assert not t.rnn_state[[1, 3]].any()
    assert not np.array_equal(t.rnn_state[0, 0], t.rnn_state[0, 1])


def test_the_state_of_rows_that_start_an_episode_has_no_influence() -> None:
    acting = acting_of()
    t, worker = acting.world.trajectories, acting.worker
    t.first[0, 0] = [True, False, True]
    list(worker.answer([request(0, 0)]))
    zero = torch.zeros(ROWS, worker.live_state.shape[-1])
    fresh, _, after = expected_act(acting, 0, 0, zero)
    assert close(t.recorded["logits"][0, 0, [0, 2]], fresh[[0, 2]])
    assert not close(t.recorded["logits"][0, 0, 1], fresh[1])
    assert close(worker.live_state[0, [0, 2]], after[[0, 2]])


def test_new_weights_are_used_at_once_and_their_version_is_recorded() -> None:
    acting = acting_of(config=PLAIN)
    t = acting.world.trajectories
    list(acting.worker.answer([request(0, 0)]))
    acting.model = model_of(SPEC, PLAIN, seed=1)
    acting.ring.publish(FlatModule(acting.model).flat.numpy(), 105)
    list(acting.worker.answer([request(0, 1), request(1, 0)]))
    logits, _, _ = expected_act(acting, 0, 1, torch.zeros(ROWS, 0))
    assert close(t.recorded["logits"][0, 1], logits)
    assert [np.unique(t.policy_version[s, i]).tolist() for s, i in ((0, 0), (0, 1), (1, 0))] == [[1], [105], [105]]


@pytest.mark.parametrize("config", [PLAIN, GRU])
def test_sampling_is_repeatable_and_follows_the_probabilities(config: ModelConfig) -> None:
    actions = []
    for _ in range(2):
        acting = acting_of(config=config)
        acting.worker.weights.refresh()
        head: Any = acting.worker.policy.flat.module.policy_head
        head.linear.weight.data.zero_()
        head.linear.bias.data.copy_(torch.tensor([0.0, 1.0, -30.0, 0.5]))
        drawn = []
        for _ in range(200):
            list(acting.worker.answer([request(group, 0) for group in range(GROUPS)]))
            drawn.append(acting.world.trajectories.action[:, 0].copy())
        actions.append(np.stack(drawn))
    assert np.array_equal(actions[0], actions[1])
    share = np.bincount(actions[0].reshape(-1), minlength=4) / actions[0].size
    expected = torch.tensor([0.0, 1.0, -30.0, 0.5]).softmax(-1).numpy()
    assert np.abs(share - expected).max() < 0.03
    assert share[2] == 0


def test_continuous_actions_are_recorded_as_sampled() -> None:
    spec = replace(SPEC, action=ActionSpec((ActionPart("gaussian", 2),), (-0.01, -0.01), (0.01, 0.01)))
    acting = acting_of(spec, PLAIN)
    list(acting.worker.answer([request(0, 0)]))
    t = acting.world.trajectories
    action, logits = torch.from_numpy(t.action[0, 0]), torch.from_numpy(t.recorded["logits"][0, 0])
    assert (action.abs() > 0.01).any()  # not clipped: the environment is
    normal = torch.distributions.Normal(logits[:, :2], logits[:, 2:].exp())
    assert close(t.recorded["log_prob"][0, 0], normal.log_prob(action).sum(-1))


def test_masked_actions_are_never_taken() -> None:
    observations = {"obs": ObservationSpec((4,), "float32"), MASK_KEY: ObservationSpec((4,), "uint8")}
    acting = acting_of(replace(SPEC, observations=observations, action_mask=4), PLAIN)
    mask = acting.world.trajectories.obs[MASK_KEY]
    mask[:] = np.random.default_rng(3).random(mask.shape) < 0.4
    mask[..., 2] |= ~mask.any(axis=-1)
    for group in range(GROUPS):
        for step in range(ROLLOUT):
            list(acting.worker.answer([request(group, step)]))
    t = acting.world.trajectories
    assert np.take_along_axis(mask[:, :ROLLOUT], t.action.astype(np.int64), -1).all()
    assert np.isfinite(t.recorded["log_prob"]).all()
    forced = mask[:, :ROLLOUT].sum(-1) == 1
    assert forced.any()
    assert np.abs(t.recorded["log_prob"][forced]).max() < 1e-6  # the only allowed action is certain


SAME_STEP = replace(SPEC, same_step=True)


def end_rows(acting: Acting, group: int, rows: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Rows of a group were truncated in the step before; their final observations."""
    finals = acting.world.finals
    finals.has_final[group] = np.isin(np.arange(ROWS), rows)
    for array in finals.final_obs.values():
        array[group] = np.random.default_rng(seed).standard_normal(array[group].shape)
    return {key: torch.from_numpy(array[group][rows]) for key, array in finals.final_obs.items()}


def test_final_observations_are_valued_with_the_live_state_which_stays() -> None:
    acting = acting_of(SAME_STEP)
    t, worker = acting.world.trajectories, acting.worker
    list(worker.answer([request(1, 0), request(2, 0)]))
    t.recorded["final_value"][:] = -7
    before = worker.live_state.clone()
    final_obs = end_rows(acting, 1, [0, 2], seed=1)
    t.first[1, 1] = [True, False, True]
    with torch.inference_mode():
        _, value, _ = acting.model.act(final_obs, torch.zeros(2, dtype=torch.bool), before[1][[0, 2]])
    logits, _, after = expected_act(acting, 1, 1, before[1])
    list(worker.answer([request(1, 1), request(2, 1)]))
    assert close(t.recorded["final_value"][1, 0, [0, 2]], acting.model.denormalize_value(value))
    t.recorded["final_value"][1, 0, [0, 2]] = -7
    assert (t.recorded["final_value"] == -7).all()
    assert close(t.recorded["logits"][1, 1], logits)  # and the next step continues as if nothing had been asked
    assert close(worker.live_state[1], after)


def test_the_request_after_the_last_step_asks_only_for_final_values() -> None:
    acting = acting_of(SAME_STEP)
    t, worker = acting.world.trajectories, acting.worker
    before = worker.live_state.clone()
    final_obs = end_rows(acting, 3, [1], seed=2)
    with torch.inference_mode():
        _, value, _ = acting.model.act(final_obs, torch.zeros(1, dtype=torch.bool), before[3][[1]])
    last = request(3, ROLLOUT)
    assert list(worker.answer([last, request(0, 0)])) == [ActionsReady(*last), ActionsReady(*request(0, 0))]
    assert close(t.recorded["final_value"][3, ROLLOUT - 1, [1]], acting.model.denormalize_value(value))
    assert torch.equal(worker.live_state[3], before[3])
    assert not torch.equal(worker.live_state[0], before[0])
    assert not t.policy_version[3].any()


def test_row_0_does_not_value_final_observations_again() -> None:
    acting = acting_of(SAME_STEP)
    end_rows(acting, 0, [0, 1, 2], seed=3)
    acting.world.trajectories.recorded["final_value"][:] = -7
    list(acting.worker.answer([request(0, 0)]))
    assert (acting.world.trajectories.recorded["final_value"] == -7).all()


@pytest.mark.parametrize("config", [GRU, PLAIN])  # with and without torch
def test_a_policy_acts_only_for_its_rows(config: ModelConfig) -> None:
    acting = acting_of(config=config, policy=1, num_policies=2)
    t, worker = acting.world.trajectories, acting.worker
    t.policy_id[:] = 0
    t.policy_id[0, 0], t.policy_id[2, 0] = [1, 0, 1], [0, 1, 0]
    t.rnn_state[:] = -7
    before = worker.live_state.clone()
    mine = np.zeros((GROUPS, ROWS), bool)
    mine[0, [0, 2]] = mine[2, 1] = True
    expected = {group: expected_act(acting, group, 0, before[group]) for group in (0, 2)}
    replies = list(worker.answer([request(0, 0, 1), request(2, 0, 1), request(3, 0, 1)]))
    assert replies == [ActionsReady(1, group, group, 0, 0) for group in (0, 2, 3)]
    for group, (logits, value, after) in expected.items():
        assert close(t.recorded["logits"][group, 0][mine[group]], logits[mine[group]])
        assert close(t.recorded["value"][group, 0][mine[group]], value[mine[group]])
        assert close(worker.live_state[group][mine[group]], after[mine[group]])
    for field in (t.action, t.recorded["logits"], t.recorded["log_prob"], t.recorded["value"], t.policy_version):
        assert not field[:, 0][~mine].any()
    assert torch.equal(worker.live_state[~mine], before[~mine])
    assert np.array_equal(t.rnn_state[:, 0][mine], before.numpy()[mine])
    assert (t.rnn_state[:, 0][~mine] == -7).all()


def test_a_policy_without_a_row_still_answers() -> None:
    acting = acting_of(policy=1, num_policies=2)
    acting.world.trajectories.policy_id[:] = 0
    before = acting.worker.live_state.clone()
    assert list(acting.worker.answer([request(0, 0, 1)])) == [ActionsReady(1, 0, 0, 0, 0)]
    assert torch.equal(acting.worker.live_state, before)


def test_final_values_are_those_of_the_policy_that_acted() -> None:
    acting = acting_of(SAME_STEP, policy=1, num_policies=2)
    t = acting.world.trajectories
    t.policy_id[0, 0], t.policy_id[0, 1] = [1, 0, 1], [0, 1, 1]  # rows 0 and 1 are played by the other one from now on
    t.recorded["final_value"][:] = -7
    state = acting.worker.live_state[0].clone()
    end_rows(acting, 0, [0, 1], seed=4)
    final_obs = {key: torch.from_numpy(a[0][[0]]) for key, a in acting.world.finals.final_obs.items()}
    with torch.inference_mode():
        _, value, _ = acting.model.act(final_obs, torch.zeros(1, dtype=torch.bool), state[[0]])
    list(acting.worker.answer([request(0, 1, 1)]))
    assert close(t.recorded["final_value"][0, 0, [0]], acting.model.denormalize_value(value))
    assert (t.recorded["final_value"][0, 0, 1:] == -7).all()


@pytest.mark.parametrize("steps", range(ROLLOUT + 1))
def test_a_policy_worker_in_the_place_of_a_dead_one_rebuilds_recurrent_states(steps: int) -> None:
    """From the slot in which the group is, or the one before; the same weights give the same states."""
    acting = acting_of()
    t = acting.world.trajectories
    t.first[:, 0], t.continues[:] = True, (-1, -1, 0, -1)
    for step in range(steps):
        list(acting.worker.answer([request(0, step)]))
    flat = FlatModule(build_model(GRU, SPEC).eval())
    successor = worker_of(flat, replace(acting.worker.plan, replaces=True), acting.ring, acting.world)
    waits_for = request(0, steps) if steps < ROLLOUT else ActionRequest(0, 0, 2, 0, 0)
    t.first[waits_for.slot, waits_for.step] = False
    for worker in (acting.worker, successor):
        list(worker.answer([waits_for]))
    if steps:
        assert close(successor.live_state[0], acting.worker.live_state[0])
    assert close(successor.live_state[1:], torch.zeros_like(successor.live_state[1:]))


def test_in_lockstep_it_makes_no_difference_who_asks_first() -> None:
    if not lockstep:
        return
    worlds = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        acting = acting_of()
        for step in range(ROLLOUT):
            list(acting.worker.answer([request(group, step) for group in order]))
        worlds.append(arrays_of(acting.world.trajectories))
    for name, found in worlds[0].items():
        assert np.array_equal(found, worlds[1][name]), name
    assert not np.array_equal(worlds[0]["action"][0], worlds[0]["action"][1])


class Draws(NamedTuple):
    generator: torch.Generator


class Adder:
    """A policy that is no actor-critic: its action is 1, and it records sums of its own and the numbers of its rows."""

    rnn_state_size = 1

    def __init__(self) -> None:
        self.flat = FlatModule(torch.nn.Linear(1, 1))

    def random(self, seed: int, rows: int) -> Draws:
        return Draws(torch.Generator().manual_seed(seed))

    def act(
        self, obs: dict[str, torch.Tensor], first: torch.Tensor, state: torch.Tensor, rows: torch.Tensor | None,
        random: Draws | None, **how: object,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
        state = torch.where(first[:, None], 0.0, state) + obs["obs"].sum(dim=1, keepdim=True)
        pair = torch.cat((state, -state), dim=1)
        row = torch.zeros(len(first)) if rows is None else rows
        return {"pair": pair, "row": row, "action": torch.ones(len(first), 1, dtype=torch.int32)}, state

    def final(self, obs: dict[str, torch.Tensor], first: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last": obs["obs"].sum(dim=1)}

    def fast(self, trajectories: object, random: object) -> None:
        return None


def test_another_policy_records_what_it_declares() -> None:
    fields = {"pair": Recorded(("T", "R", 2)), "row": Recorded(("T", "R"), "int64"), "last": Recorded(("F", "R"))}
    world = world_of(
        SAME_STEP, rnn_state_size=1, recurrence=RECURRENCE, groups_per_actor=GROUPS, slots_per_group=1,
        rows=ROWS, rollout=ROLLOUT, recorded=fields, more=tuple(WeightRing.declare(0, 2)),
    )  # fmt: skip
    plan = ActingPlan(SAME_STEP, GROUPS, RECURRENCE, 1, "cpu", seed=7, group_seeds=tuple(range(GROUPS * lockstep)))
    engine, ring, t = ENGINES[kind](Adder(), plan, world.trajectories), WeightRing(world.arena, 0), world.trajectories
    worker = PolicyWorker(Address("policy_worker"), plan, engine, ring, t, world.finals)
    ring.publish(np.zeros(2, np.float32), 1)
    t.obs["obs"][:] = np.random.default_rng(0).standard_normal(t.obs["obs"].shape)
    t.first[:] = False
    world.finals.has_final[2] = True
    world.finals.final_obs["obs"][2] = 1.0
    for step in range(ROLLOUT):
        list(worker.answer([request(group, step) for group in (0, 2, 3)]))
    sums = t.obs["obs"][:, :ROLLOUT].sum(axis=-1).cumsum(axis=1)
    for group in (0, 2, 3):
        assert close(t.recorded["pair"][group, :, :, 0], sums[group])
        assert close(t.recorded["pair"][group, :, :, 1], -sums[group])
        assert (t.recorded["row"][group] == group * ROWS + np.arange(ROWS)).all()
        assert (t.action[group] == 1).all()
    assert not any(array[1].any() for array in t.recorded.values())
    assert (t.recorded["last"][2, :-1] == 4.0).all()
    assert not t.recorded["last"][[0, 3]].any()


def test_only_the_newest_request_of_a_group_is_answered() -> None:
    acting = acting_of()
    for one in (request(1, 2), request(0, 0), ActionRequest(0, 1, 1, 0, 1)):
        list(acting.worker.handle(one))
    assert list(acting.worker.work()) == [ActionsReady(0, 1, 1, 0, 1), ActionsReady(0, 0, 0, 0, 0)]


def test_weights_stay_for_a_whole_rollout_where_the_plan_says_so() -> None:
    acting = acting_of()
    worker, t = acting.worker, acting.world.trajectories
    worker.plan = replace(worker.plan, whole_rollouts=True)
    weights = FlatModule(acting.model).flat.numpy()
    for step, published in [(1, 2), (2, 3), (0, 4), (1, 5)]:  # the first one loads weights wherever it is
        acting.ring.publish(weights, published)
        list(worker.answer([request(0, step)]))
        expected = {1: 2, 2: 2, 0: 4}[step] if published < 5 else 4
        assert (t.policy_version[0, step] == expected).all()
    worker.plan = replace(worker.plan, whole_rollouts=False)
    list(worker.answer([request(0, 2)]))
    assert (t.policy_version[0, 2] == 5).all()
