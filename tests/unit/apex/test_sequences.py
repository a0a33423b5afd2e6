"""Whole trajectories out of the replay, for networks with a memory: what a batch holds, priorities, one update."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.apex.config import ApexConfig
from appo.algorithms.apex.learner import ApexLearner
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import QNetwork, build_q_network
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import EnvSpec
from tests.unit.models.cases import config_of, context_of, env_spec_of
from tests.unit.replay.replays import PLAN, ROLLOUT, ROWS, SPEC, STACKS, Replay, replay_of
from tests.unit.replay.test_storage import assert_same, attach, first_error_of, one_step

T, B = 6, 5


@pytest.mark.parametrize("prioritized", [True, False])
@pytest.mark.parametrize("spec", [SPEC, STACKS], ids=["plain", "stacks"])
def test_batches_hold_whole_columns(spec: EnvSpec, prioritized: bool) -> None:
    """Every column is compared with the slot that it came from."""
    replay = replay_of(spec, sequences=True, replay_ratio=0.0, prioritized=prioritized)
    t, storage = replay.trajectories, replay.source.storage
    for slot in range(4):
        replay.hand_over(slot)
    replay.fill(version=9)
    for _ in range(5):
        batch, drawn = replay.source.take(), replay.source._drawn
        assert batch is not None
        assert drawn is not None
        named = {name: tensor.numpy() for name, tensor in batch.named().items()}
        assert named["valid"].shape == (ROLLOUT, PLAN.batch_size // ROLLOUT)
        for b, column in enumerate(drawn.column.tolist()):
            slot, row = divmod(int(storage._note[column, 0]), ROWS)
            for step in range(ROLLOUT):
                length, reward, discount = one_step(t, slot, row, step, PLAN.n_steps, same_step=False)
                assert named["recorded.length"][step, b] == length
                assert named["valid"][step, b] == t.valid[slot, step, row] == (length > 0)
                assert named["reward"][step, b] == pytest.approx(reward, rel=1e-5, abs=1e-6)
                assert named["recorded.discount"][step, b] == pytest.approx(discount)
            for key, obs in t.obs.items():
                assert np.array_equal(named[f"obs.{key}"][:, b], obs[slot, :, row])
            for name in ("action", "num_frames", "policy_version", "first", "terminated", "truncated", "rnn_state"):
                assert np.array_equal(named[name][:, b], getattr(t, name)[slot, :, row])
        leaf = storage.tree.levels[0][drawn.column]
        expected = leaf.min() / leaf if prioritized else np.ones(len(leaf))
        assert named["recorded.weight"][0] == pytest.approx(expected, rel=1e-6)


def mixed(errors: list[float]) -> float:
    """The leaf of a column whose steps have these errors."""
    error = PLAN.eta * max(errors) + (1 - PLAN.eta) * sum(errors) / len(errors)
    return (error + PLAN.priority_epsilon) ** PLAN.alpha


def test_a_column_has_a_priority_of_its_largest_and_its_mean_error() -> None:
    replay = replay_of(sequences=True, replay_ratio=0.0)
    replay.hand_over(0)
    t, storage = replay.trajectories, replay.source.storage
    error = storage.first_errors(t, 0, t.valid[0])
    replay.fill()
    for row in range(ROWS):
        assert storage.tree.levels[0][row] == pytest.approx(mixed([e for e in error[:, row].tolist() if e >= 0]))
    for slot in (1, 2):
        replay.hand_over(slot)
        replay.fill()
    assert replay.source.take() is not None
    drawn = replay.source._drawn
    assert drawn is not None
    said = replay.random.random((ROLLOUT, len(drawn.column)))
    said[replay.random.random(said.shape) < 0.4] = -1.0
    assert list(replay.source.trained([{"priority": said}])) == []
    expected = {column: mixed([e for e in said[:, b] if e >= 0]) for b, column in enumerate(drawn.column.tolist())}
    for column, leaf in expected.items():
        assert storage.tree.levels[0][column] == pytest.approx(leaf)
    assert_same(attach(replay), storage)
    valid = t.valid[[0, 1, 2]]
    assert storage.size == storage.totals.samples == valid.sum()


def test_errors_are_those_of_the_rescaled_values_that_the_network_predicts() -> None:
    replay = replay_of(rescaled=True)
    replay.hand_over(0, ends=0.0)
    t = replay.trajectories
    t.reward[0] *= 50
    found = replay.source.storage.first_errors(t, 0, t.valid[0])
    for row in range(ROWS):
        for step in range(ROLLOUT - PLAN.n_steps):
            _, total, discount = one_step(t, 0, row, step, PLAN.n_steps, same_step=False)
            target = total + discount * float(t.recorded["q_max"][0, step + PLAN.n_steps, row])
            taken = float(t.recorded["q_taken"][0, step, row])
            assert found[step, row] == pytest.approx(abs(rescaled(target) - rescaled(taken)), rel=1e-5)
            assert found[step, row] != pytest.approx(first_error_of(t, 0, row, step, same_step=False), rel=1e-2)


@pytest.mark.parametrize("ratio", [0.7, 3.0])
def test_uses_per_step_are_what_the_flag_says(ratio: float) -> None:
    replay = replay_of(sequences=True, replay_ratio=ratio, learning_starts=60)
    used = 0
    for number in range(150):
        replay.hand_over(number % 4)
        replay.fill()
        while (batch := replay.source.take()) is not None:
            used += int(batch.valid.sum())
            assert list(replay.source.trained()) == []
    assert replay.source.pace.used == used
    assert replay.source.metrics()["replay/uses_per_step"] == pytest.approx(ratio, rel=0.02)


def test_what_changes_while_it_learns_reaches_returns_and_pace() -> None:
    replay = replay_of()
    for slot in range(3):
        replay.hand_over(slot, ends=0.0)
        replay.fill()
    batch = replay.source.take()
    assert batch is not None
    assert float(batch.recorded["discount"].min()) == pytest.approx(PLAN.gamma**3)
    flags = ApexConfig(gamma=0.5, n_steps=2, replay_ratio=8.0, priority_alpha=0.0)
    error = np.ones((1, PLAN.batch_size), np.float32)
    assert list(replay.source.trained([{"priority": error, "flags": flags}])) == []
    assert replay.source.take() is None  # nothing is owed of what was there before
    replay.hand_over(3, ends=0.0)
    replay.fill()
    batch, batches = replay.source.take(), 0
    assert batch is not None
    assert {0.25} <= set(batch.recorded["discount"].unique().tolist()) <= {0.5, 0.25}
    while batch is not None:
        batches += 1
        assert list(replay.source.trained([{"priority": error, "flags": flags}])) == []
        batch = replay.source.take()
    assert batches == 8 * ROWS * ROLLOUT // PLAN.batch_size
    assert replay.source.storage.plan.alpha == 0.0


# --- one update, step by step and column by column


def learner_of(**flags: object) -> ApexLearner:
    model = {name: flags.pop(name) for name in ("rnn_type", "rnn_num_layers") if name in flags}
    config = ApexConfig(rollout=T, batch_size=T * B, batch_replay=True, learning_rate=1e-2, **flags)  # type: ignore[arg-type]
    torch.manual_seed(0)
    network = build_q_network(
        config_of(use_rnn=True, normalize_input=False, **model), env_spec_of(), dueling=config.dueling
    )
    with torch.no_grad():
        network.q_head.weight.mul_(100.0)
    learner = ApexLearner(FlatModule(network), context_of(config))
    with torch.no_grad():  # or the target network would be the other one
        noise = torch.randn(len(learner.target.flat), generator=torch.Generator().manual_seed(9))
        learner.target.flat.add_(0.2 * noise)
    return learner


def batch_of(state_size: int) -> Batch:
    generator = torch.Generator().manual_seed(1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    valid = uniform(T, B) < 0.85
    left = T - torch.arange(T).unsqueeze(1)
    length = torch.where(valid, (1 + (3 * uniform(T, B)).long()).minimum(left.expand(T, B)), 0)
    flags = torch.zeros(T, B, dtype=torch.bool)
    return Batch(
        obs={"obs": torch.randn(T + 1, B, 5, generator=generator)},
        first=uniform(T + 1, B) < 0.15,
        valid=valid,
        reward=3 * torch.randn(T, B, generator=generator) * valid,
        terminated=flags,
        truncated=flags,
        num_frames=torch.ones(T, B, dtype=torch.int32),
        action=torch.randint(4, (T, B, 1), generator=generator).int(),
        recorded={
            "discount": 0.9**length * (uniform(T, B) < 0.8),
            "length": length,
            "weight": 0.1 + 0.9 * uniform(1, B),
        },
        policy_version=torch.ones(T, B, dtype=torch.int64),
        rnn_state=torch.randn(1, B, state_size, generator=generator),
    )


def act_through(model: QNetwork, batch: Batch, column: int) -> list[Tensor]:
    """Q [4] of every observation of a column, as acting computes it."""
    state, found = batch.rnn_state[0, column : column + 1], []
    for t in range(T + 1):
        obs = {key: x[t, column : column + 1] for key, x in batch.obs.items()}
        q, _, state = model.act(obs, batch.first[t, column : column + 1], state)
        found.append(q[0])
    return found


@pytest.mark.parametrize(
    "flags",
    [
        {"rnn_type": "gru"},
        {"rnn_type": "lstm", "double_q": False, "dueling": False},
        {"rnn_type": "gru", "rnn_num_layers": 2, "burn_in": 3, "value_rescaling": True},
        {"rnn_type": "lstm", "burn_in": 5, "huber_loss": False},
    ],
    ids=["gru", "lstm", "burn-in", "burn-in lstm"],
)
def test_an_update_goes_on_from_the_state_that_acting_had(flags: dict[str, object]) -> None:
    learner = learner_of(**flags)
    batch, config = batch_of(learner.model.rnn_state_size), learner.config
    model, target = copy.deepcopy(learner.model), learner.target.module
    assert isinstance(target, QNetwork)
    total, count, errors = torch.zeros(()), 0, torch.full((T, B), -1.0)
    h = rescaled if config.value_rescaling else float
    inverse = unscaled if config.value_rescaling else float
    for b in range(B):
        q, q_target = act_through(model, batch, b), act_through(target, batch, b)
        begun = False
        for t in range(T):
            begun |= bool(batch.first[t, b])
            if not batch.valid[t, b] or (t < config.burn_in and not begun):
                continue
            later = t + int(batch.recorded["length"][t, b])
            chosen = int((q if config.double_q else q_target)[later].argmax())
            value = inverse(float(q_target[later][chosen]))
            goal = h(float(batch.reward[t, b]) + float(batch.recorded["discount"][t, b]) * value)
            error = goal - q[t][int(batch.action[t, b, 0])]
            is_large = config.huber_loss and float(error.detach().abs()) > 1
            loss = error.abs() - 0.5 if is_large else 0.5 * error**2
            total = total + float(batch.recorded["weight"][0, b]) ** 0.4 * loss
            count, errors[t, b] = count + 1, error.detach().abs()
    assert 0 < count < T * B
    expected = torch.autograd.grad(total / count, list(model.parameters()))
    loss, error, metrics = learner.loss(batch, 0.4)
    learner.optimizer.gradient.zero_()
    loss.backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in learner.model.parameters()]
    assert torch.allclose(loss, total / count, rtol=1e-5)
    assert torch.allclose(error, errors, rtol=1e-4, atol=1e-5)
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a is not None) < 1e-5
    assert all(gradient is not None and gradient.any() for gradient in found)
    assert float(metrics["td_error"].detach()) == pytest.approx(float(errors[errors >= 0].mean()), rel=1e-4)
    (said,) = learner.learn(batch, 0.0)
    assert (said["priority"] == -1).sum() == T * B - count


def rescaled(x: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def unscaled(y: float) -> float:
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if rescaled(middle) < y else (low, middle)
    return low


def test_a_batch_without_a_step_to_learn_from_changes_nothing() -> None:
    learner = learner_of(burn_in=5)
    batch = batch_of(learner.model.rnn_state_size)
    batch.valid[5:], batch.first[:] = False, False
    before = learner.flat.flat.clone()
    (said,) = learner.learn(batch, 0.0)
    assert (said["priority"] == -1).all()
    assert torch.equal(learner.flat.flat, before)
    assert isinstance(said["flags"], ApexConfig)


def test_drawn_columns_count_as_had() -> None:
    replay: Replay = replay_of(sequences=True, replay_ratio=0.0, learning_starts=1)
    replay.hand_over(0, ends=0.0)
    replay.fill()
    replay.source.resize(1)
    assert replay.source.take() is not None
    drawn = replay.source._drawn
    assert drawn is not None
    assert len(drawn.column) == 1
    assert replay.source.storage.arrays["drawn"].sum() == ROLLOUT
