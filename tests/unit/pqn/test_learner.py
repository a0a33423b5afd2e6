"""PQN: lambda-returns and gradients against references written step by step, counts, states, and exploration."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import QNetwork, build_q_network
from appo.algorithms.parts.epsilon_greedy import EpsilonGreedyPolicy
from appo.algorithms.pqn.algorithm import PQN
from appo.algorithms.pqn.config import METRICS, PQNConfig
from appo.algorithms.pqn.learner import PQNLearner
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch
from appo.envs.spec import MASK_KEY, ActionPart, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.appo.batches import COLUMNS, ROLLOUT, batch_of
from tests.unit.models.cases import CORES, GAUSSIAN, VECTOR, config_of, context_of, env_spec_of

SPEC = env_spec_of(ActionPart("categorical", 3), ActionPart("categorical", 2))
MASK = ObservationSpec((5,), "uint8", high=1)
MASKED = replace(env_spec_of(*SPEC.action.parts, obs=VECTOR, **{MASK_KEY: MASK}), action_mask=5, same_step=True)
CASES = [("none", SPEC), ("gru", SPEC), ("lstm", MASKED), ("none", MASKED)]


def learner_of(spec: EnvSpec = SPEC, core: str = "none", **flags: Any) -> PQNLearner:
    """Learners start from the same weights; the small gain of the last layer would hide mistakes."""
    values = {"rollout": ROLLOUT, "recurrence": 4, "batch_size": 16, "num_batches_per_iteration": 3, **flags}
    config = PQNConfig(**{"learning_rate": 1e-2, "max_grad_norm": 0.0, **values})
    torch.manual_seed(1)
    shape = config_of(normalize_input=False, layer_norm=True, **CORES[core])
    model = build_q_network(shape, spec, dueling=False, explores=True)
    with torch.no_grad():
        model.q_head.weight.mul_(100.0)
    return PQNLearner(FlatModule(model), context_of(config, spec))


def batch_for(learner: PQNLearner, spec: EnvSpec, seed: int = 0) -> Batch:
    """Steps with every kind of end; of a state that is not zero, behind invalid steps full of NaN."""
    batch = batch_of(learner.model, spec, seed=seed)
    if spec is MASKED:
        batch.obs[MASK_KEY] = mask = torch.rand(batch.obs[MASK_KEY].shape, generator=torch.Generator()) < 0.6
        mask[..., (0, 3)] = True  # a choice of each part
    batch.reward[~batch.valid] = torch.nan
    return batch


def values_of(model: QNetwork, batch: Batch, b: int) -> list[Tensor]:
    """Q [L] of every observation of a column, step by step, with the stored state before each segment."""
    state, found = torch.zeros(0), []
    for t in range(len(batch.first)):
        if t % 4 == 0 and t < ROLLOUT:
            state = batch.rnn_state[t // 4, b][None]
        obs = {key: x[t, b][None] for key, x in batch.obs.items()}
        q, state = model.q_values(obs, batch.first[t, b][None], state)
        found.append(q[0])
    return found


def best_of(q: Tensor, batch: Batch, t: int, b: int) -> float:
    allowed = batch.obs[MASK_KEY][t, b] > 0 if MASK_KEY in batch.obs else torch.ones(5, dtype=torch.bool)
    parts = q[:3][allowed[:3]].max(), q[3:][allowed[3:]].max()
    return float(sum(parts) / 2)


def returns_of(batch: Batch, values: list[float], b: int, gamma: float, lam: float) -> list[float]:
    """Written from the paper: G_t = r + gamma (lambda G_(t+1) + (1 - lambda) max Q(s_(t+1)))."""
    found = [0.0] * ROLLOUT
    for t in reversed(range(ROLLOUT)):
        if not batch.valid[t, b]:
            continue
        found[t] = float(batch.reward[t, b])
        if batch.terminated[t, b]:
            continue
        if batch.first[t + 1, b]:  # the row shows the next episode already
            found[t] += gamma * float(batch.recorded["final_value"][t, b])
        elif batch.truncated[t, b] or t == ROLLOUT - 1 or not batch.valid[t + 1, b]:
            found[t] += gamma * values[t + 1]
        else:
            found[t] += gamma * (lam * found[t + 1] + (1 - lam) * values[t + 1])
    return found


@pytest.mark.parametrize("lam", [0.0, 0.65, 1.0])
@pytest.mark.parametrize(("core", "spec"), CASES)
def test_returns_are_those_of_the_paper(core: str, spec: EnvSpec, lam: float) -> None:
    learner = learner_of(spec, core, gae_lambda=lam, gamma=0.9)
    for seed in range(3):
        batch = batch_for(learner, spec, seed)
        assert batch.truncated.any()
        found = learner.returns(batch)
        for b in range(COLUMNS):
            with torch.no_grad():
                best = [best_of(q, batch, t, b) for t, q in enumerate(values_of(learner.model, batch, b))]
            expected = returns_of(batch, best, b, 0.9, lam)
            np.testing.assert_allclose(found[:, b], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("core", "spec"), CASES)
def test_an_update_descends_the_squared_error_of_what_was_done(core: str, spec: EnvSpec) -> None:
    """One minibatch of everything: half the mean over valid steps and both choices."""
    learner, plain = (
        learner_of(spec, core, batch_size=ROLLOUT * COLUMNS, num_batches_per_iteration=1, ppo_epochs=1)
        for _ in range(2)
    )
    batch = batch_for(learner, spec)
    target, loss = plain.returns(batch), torch.zeros(())
    for b in range(COLUMNS):
        for t, q in enumerate(values_of(plain.model, batch, b)[:-1]):
            if batch.valid[t, b]:
                first, second = batch.action[t, b].tolist()
                loss = loss + 0.25 * ((q[first] - target[t, b]).square() + (q[3 + second] - target[t, b]).square())
    (loss / batch.valid.sum()).backward()  # type: ignore[no-untyped-call]
    assert sum(1 for _ in learner.learn(batch, 0.0)) == 2
    torch.testing.assert_close(learner.optimizer.gradient, plain.optimizer.gradient, rtol=1e-3, atol=1e-5)
    assert learner.metrics()["loss"] == pytest.approx(float(loss.detach() / batch.valid.sum()), rel=1e-4)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_every_step_is_used_once_per_epoch(core: str) -> None:
    learner = learner_of(core=core, ppo_epochs=3)
    batch, seen = batch_for(learner, SPEC), []
    batch.action[..., 0] = torch.arange(batch.valid.numel()).view_as(batch.valid) % 3
    loss = learner.loss
    learner.loss = lambda minibatch: seen.append(minibatch) or loss(minibatch)  # type: ignore[func-returns-value, method-assign]
    assert sum(1 for _ in learner.learn(batch, 0.0)) == 3 * 3 + 1
    assert (learner.updates, learner.version) == (9, 2)
    assert learner.metrics().keys() == {*METRICS, "skipped_in_a_row"}
    target = torch.cat([m.recorded["target"].flatten() for m in seen[:3]]).sort().values
    for epoch in (1, 2):
        again = torch.cat([m.recorded["target"].flatten() for m in seen[3 * epoch : 3 * epoch + 3]])
        assert torch.equal(again.sort().values, target)
    assert not torch.equal(seen[0].recorded["target"], seen[3].recorded["target"])


@pytest.mark.parametrize("core", ["none", "gru"])
def test_training_goes_on_from_a_state_bit_by_bit(core: str) -> None:
    learner, again = learner_of(core=core), learner_of(core=core)
    batches = [batch_for(learner, SPEC, seed) for seed in range(2)]
    list(learner.learn(batches[0], 0.0))
    again.flat.flat.zero_()
    again.restore(learner.state())
    for one in (learner, again):
        list(one.learn(batches[1], 0.05))
    first, second = learner.state(), again.state()
    assert first.meta == second.meta
    assert all(np.array_equal(first.vectors[name], second.vectors[name]) for name in first.vectors)


def test_random_actions_fade_over_the_budget_and_stay_without_one() -> None:
    config = PQNConfig(epsilon_decay=0.2)
    progress = (0.0, 0.05, 0.1, 0.2, 1.0)
    assert [config.exploration(x, 5 * bool(x)) for x in progress] == pytest.approx([1.0, 0.75, 0.5, 0.0, 0.0])
    assert config.exploration(0.0, 3) == 0.0  # after updates only a run without a budget is at 0
    assert PQNConfig(epsilon_decay=0).exploration(0.0, 0) == 0.0
    learner = learner_of(epsilon_decay=0.2)
    assert learner.model.exploration == 1.0
    batch = batch_for(learner, SPEC)
    list(learner.learn(batch, 0.0))
    list(learner.learn(batch, 0.15))
    assert learner.model.exploration is not None
    assert float(learner.model.exploration) == pytest.approx(0.25)
    assert float(learner.state().weights[-1]) == pytest.approx(0.25)  # published with the weights
    list(learner.learn(batch, 0.02))  # a resume with ten times the budget
    assert float(learner.model.exploration) == pytest.approx(0.25)
    trained = learner.state()
    trained.weights[-1] = 0.0
    learner.restore(trained)  # weights of a program, in the midst of training
    assert float(learner.model.exploration) == pytest.approx(0.25)
    again = learner_of(epsilon_decay=0.2)
    again.restore(trained)  # a resume
    assert again.model.exploration == 0.0


def test_weights_of_another_run_begin_with_the_exploration_of_this_one() -> None:
    learner, new = learner_of(epsilon_decay=0.2), learner_of(epsilon_decay=0.2)
    list(learner.learn(batch_for(learner, SPEC), 0.15))
    state = learner.state()
    learner.restore(state)
    assert float(learner.model.exploration) == pytest.approx(0.25)  # type: ignore[arg-type]
    new.restore(replace(state, meta=state.meta | {"updates": 0}))
    assert new.model.exploration == 1.0
    assert learner_of(epsilon_decay=0).model.exploration == 0.0


def test_a_policy_without_a_learner_explores_no_more_than_its_rows() -> None:
    learner, rows = learner_of(), torch.zeros(3000, dtype=torch.long)
    policy = EpsilonGreedyPolicy(learner.flat, SPEC, torch.tensor([0.0]), rescaled=False, records=())
    obs, first = {"obs": torch.ones(3000, 5)}, torch.ones(3000, dtype=torch.bool)
    differing = []
    for env_steps in (10**9, sys.maxsize):
        policy.follow(env_steps)
        with torch.inference_mode():
            action = policy.act(obs, first, torch.zeros(3000, 0), rows, policy.random(2, 3000))[0]["action"]
        differing.append(bool((action != action[0]).any()))
    assert differing == [True, False]


def test_rows_explore_by_their_own_probability_and_by_what_fades() -> None:
    learner, rows = learner_of(), 6000
    policy = EpsilonGreedyPolicy(learner.flat, SPEC, torch.tensor([0.2]), rescaled=False, records=("final_value",))
    obs, first = {"obs": torch.ones(rows, 5)}, torch.ones(rows, dtype=torch.bool)
    for fading, share in ((1.0, 1.0), (0.5, 0.6), (0.0, 0.2)):
        learner.model.exploration.fill_(fading)  # type: ignore[union-attr]
        with torch.inference_mode():
            best, acted = (
                policy.act(obs, first, torch.zeros(rows, 0), which, policy.random(2, rows))[0]
                for which in (None, torch.zeros(rows, dtype=torch.long))
            )
        assert acted.keys() == {"action"}
        differs = float((acted["action"] != best["action"]).any(1).float().mean())
        assert differs == pytest.approx(share * 5 / 6, abs=5 * (0.25 / rows) ** 0.5)


def test_the_value_of_a_true_final_observation_is_that_of_its_best_allowed_choices() -> None:
    learner = learner_of(MASKED)
    policy = EpsilonGreedyPolicy(learner.flat, MASKED, None, rescaled=False, records=("final_value",))
    batch = batch_for(learner, MASKED)
    obs = {key: x[:, 0] for key, x in batch.obs.items()}
    with torch.inference_mode():
        found = policy.final(obs, batch.first[:, 0], torch.zeros(ROLLOUT + 1, 0))["final_value"]
        expected = [best_of(q, batch, t, 0) for t, q in enumerate(values_of(learner.model, batch, 0))]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # a sum of larger terms may be near 0


def test_what_has_no_effect_or_no_meaning_is_refused() -> None:
    for flags, message in (
        ({"rollout": 32, "batch_size": 24, "num_batches_per_iteration": 1}, "is no multiple of --rollout=32"),
        ({"lr_schedule": "kl_adaptive_epoch"}, "--lr_schedule=kl_adaptive_epoch"),
    ):
        with pytest.raises(UsageError, match=message):
            PQN().check(PQNConfig(**flags), None)
    with pytest.raises(UsageError, match="--batch_size=16 is no multiple of --recurrence=32"):
        PQNConfig(batch_size=16).check(recurrent=True)
    with pytest.raises(UsageError, match="--algo=PQN needs choices"):
        PQN().check(PQNConfig(), env_spec_of(*GAUSSIAN))
    context = replace(Context(SPEC, PQNConfig(), config_of(), "fp32", "cpu"), verify=True)
    with pytest.raises(UsageError, match="--verify_reproduction"):
        PQN().make_model(context)
