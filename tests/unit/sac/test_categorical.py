"""Critics that predict distributions: against float64, one network and one sample after the other; and their state."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from appo.algorithms.models.categorical_critics import ATOMS, CategoricalCritics
from appo.algorithms.ops import categorical
from appo.algorithms.sac.learner import SACLearner, policy_weights
from appo.envs.spec import EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.sac.test_learner import NUM_ACTIONS, SIZE, SPEC, batch_of, learn, learner_of

WIDTH = 5
OF_REWARDS = ("networks.critics.reward_square", "networks.critics.batches")


def categorical_learner(spec: EnvSpec = SPEC, **flags: Any) -> SACLearner:
    return learner_of(spec, categorical_critics=WIDTH, **{"temperature": 0.1, **flags})


def critics_of(learner: SACLearner) -> CategoricalCritics:
    critics = learner.critics.flat.module
    assert isinstance(critics, CategoricalCritics)
    return critics


def reference(critics: CategoricalCritics, n: int, x: Tensor) -> Tensor:
    """Log-probabilities [B, K] by network n of inputs [B, F + A], in float64."""
    double = [tensor.detach().double()[n] for tensor in (*critics.weights, critics.head)]
    for layer, (gain, shift) in enumerate(zip(critics.gains, critics.shifts, strict=True)):
        x = x @ double[layer - 1] if layer else x
        scale = [one.detach().double()[n, 0] for one in (gain, shift)]
        x = batch_norm(x, None, None, *scale, training=True)
        x = torch.tanh(x) if layer else x
    return (x @ double[-1] + critics.bias.detach().double()[n]).log_softmax(-1)


def test_projected_distributions_are_those_of_the_definition() -> None:
    atoms, generator = torch.linspace(-2.0, 2.0, 9), torch.Generator().manual_seed(1)
    probability = torch.rand(20, 9, generator=generator).softmax(-1)
    value = 2 * torch.randn(20, 9, generator=generator)
    value[0], value[1, :2] = atoms, torch.tensor([-1e9, 1e9])
    expected = np.zeros((20, 9))
    for row in range(20):
        for column in range(9):
            place = (min(max(float(value[row, column]), -2.0), 2.0) + 2.0) / 0.5
            below = int(place)
            for index, share in ((below, 1 - (place - below)), (below + 1, place - below)):
                expected[row, min(index, 8)] += share * float(probability[row, column])
    found = categorical.projected(probability, value, atoms)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert torch.equal(found[0], probability[0])
    value[3, 4] = torch.nan
    value[4, 5] = -torch.inf
    found = categorical.projected(probability, value, atoms)
    assert found.isnan().any(1).tolist() == [row in {3, 4} for row in range(20)]
    value[3:5] = 0.0
    inside = categorical.projected(probability, value.clamp(-2, 2), atoms)
    means = (probability * value.clamp(-2, 2)).sum(-1)
    torch.testing.assert_close(categorical.mean_of(inside.log(), atoms), means, atol=1e-5, rtol=0)


def test_the_distribution_with_the_smallest_mean_counts() -> None:
    atoms = torch.tensor([-1.0, 0.0, 1.0])
    log = torch.rand(4, 6, 3, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    means = [[float((log[n, b].exp() * atoms).sum()) for n in range(4)] for b in range(6)]
    expected = torch.stack([log[int(np.argmin(row)), b] for b, row in enumerate(means)])
    assert torch.equal(categorical.least(log, atoms), expected)


def test_a_pass_normalizes_by_its_batch_and_a_frozen_one_by_given_moments() -> None:
    critics, batch = critics_of(categorical_learner()), batch_of()
    obs = {"obs": batch.obs["obs"].flatten(0, 1)}
    action = torch.randn(2 * SIZE, NUM_ACTIONS, generator=torch.Generator().manual_seed(3))
    found, moments = critics(obs, action)
    for n in range(2):
        expected = reference(critics, n, torch.cat((obs["obs"], action), 1).double())
        torch.testing.assert_close(found[n].double(), expected, atol=1e-5, rtol=1e-5)
    few = action[:3].requires_grad_()
    again, _ = critics({"obs": obs["obs"][:3]}, few, moments)
    torch.testing.assert_close(again, found[:, :3], atol=1e-6, rtol=1e-5)
    again.sum().backward()
    assert few.grad is not None
    assert all(one.grad is None or not one.grad.any() for one in critics.parameters())


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("prioritized", [True, False])
def test_gradients_are_those_of_the_cross_entropy(prioritized: bool, n_steps: int) -> None:
    learner, batch = categorical_learner(prioritized_replay=prioritized, n_steps=n_steps), batch_of()
    critics, targets = critics_of(learner), learner.targets.module
    assert isinstance(targets, CategoricalCritics)
    targets.head.data += torch.randn(targets.head.shape, generator=torch.Generator().manual_seed(4))
    learner.beta.fill_(0.7)
    critics.note_rewards(batch.reward.square().mean())
    now, later = batch.obs["obs"]
    generator = learner.device_generator.clone_state()
    obs = {"obs": torch.cat((now, later))}
    error, log_prob, means = learner.differentiate(batch, obs)
    learner.device_generator.set_state(generator.get_state())
    with torch.no_grad():
        drawn, log_probs = learner.draw(torch.cat((learner.logits({"obs": now}), learner.logits({"obs": later}))))
    size, top = float(batch.reward.square().mean().sqrt()), 2 / (1 - 0.99**n_steps)
    assert float(critics.reward_size) == pytest.approx(size)
    played = torch.cat((batch.action[0].tanh(), drawn[SIZE:]))
    inputs = torch.cat((obs["obs"], played), 1).double()
    predicted = [reference(critics, n, inputs)[:SIZE] for n in range(2)]
    ahead = [reference(targets, n, inputs)[SIZE:] for n in range(2)]
    atoms = torch.linspace(-top, top, ATOMS).double()
    wanted = torch.zeros(SIZE, ATOMS).double()
    for b in range(SIZE):
        chosen = min((one[b].exp() for one in ahead), key=lambda p: float((p * atoms).sum()))
        discount = float(batch.recorded["discount"][0, b])
        value = float(batch.reward[0, b]) / size + discount * (atoms - 0.1 * float(log_probs[SIZE + b]))
        wanted[b] = categorical.projected(chosen[None], value[None], atoms)[0]
    weight = batch.recorded["weight"][0].double() ** 0.7
    loss = sum(-float(((wanted * one).sum(-1) * weight).mean()) for one in predicted)
    assert float(means["critic_loss"]) == pytest.approx(loss, rel=1e-4)
    differences = torch.stack([((one.exp() - wanted) * atoms).sum(-1) * size for one in predicted])
    torch.testing.assert_close(error.double(), differences.abs().mean(0), atol=1e-3, rtol=1e-3)
    assert torch.equal(log_prob, log_probs[:SIZE])
    # The gradient of the bias of the last layer is softmax minus target.
    share = torch.stack([((one.exp() - wanted) * weight[:, None]).mean(0) for one in predicted])
    assert critics.bias.grad is not None
    torch.testing.assert_close(critics.bias.grad[:, 0].double(), share, atol=1e-5, rtol=1e-3)


def test_the_policy_descends_its_loss_through_frozen_critics() -> None:
    learner, batch = categorical_learner(), batch_of()
    obs = {"obs": batch.obs["obs"].flatten(0, 1)}
    generator = learner.device_generator.clone_state()
    _, _, means = learner.differentiate(batch, obs)
    found = learner.optimizer.gradient.clone()
    learner.device_generator.set_state(generator.get_state())
    now = {"obs": batch.obs["obs"][0]}
    drawn, log_probs = learner.draw(
        torch.cat((learner.logits(now), learner.logits({"obs": batch.obs["obs"][1]}).detach()))
    )
    critics = copy.deepcopy(critics_of(learner))
    played = torch.cat((batch.action[0].tanh(), drawn[SIZE:].detach()))
    _, moments = critics(obs, played)
    q = categorical.mean_of(critics(now, drawn[:SIZE], moments)[0], critics.atoms(0.99)).amin(0)
    loss = (policy_weights(batch.recorded["weight"][0]) * (0.1 * log_probs[:SIZE] - q)).mean()
    learner.optimizer.gradient.zero_()
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(means["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(found, learner.optimizer.gradient, atol=1e-7, rtol=1e-4)


def test_weights_keep_their_norm_and_rewards_set_their_size() -> None:
    learner = categorical_learner()
    critics, batches = critics_of(learner), [batch_of(seed=seed) for seed in range(3)]
    before = critics.weights[0].clone()
    for batch in batches:
        learn(learner, batch)
    for weight in critics.weights:
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(2, WIDTH))
    for gain, shift in zip(critics.gains, critics.shifts, strict=True):
        square = gain.square().sum(-1) + shift.square().sum(-1)
        torch.testing.assert_close(square, torch.full_like(square, gain.shape[-1]))
    assert not torch.equal(critics.weights[0], before)
    mean = np.mean([float(batch.reward.square().mean()) for batch in batches])
    assert float(critics.reward_square) == pytest.approx(mean)
    critics.note_rewards(torch.tensor(torch.nan))
    assert float(critics.reward_square) == pytest.approx(mean)
    assert float(critics.reward_size) == pytest.approx(mean**0.5)
    assert critics.atoms(1.0)[[0, -1]].tolist() == [-2000.0, 2000.0]


@pytest.mark.parametrize("what", ["reward", "obs", "weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_that_is_not_finite_changes_no_network(what: str, value: float) -> None:
    learner, batch = categorical_learner(), batch_of()
    learn(learner, batch_of(seed=1))
    {"reward": batch.reward[0], "obs": batch.obs["obs"][1], "weight": batch.recorded["weight"][0]}[what][1] = value
    before = learner.state()
    learner.metrics()
    learn(learner, batch)
    assert learner.metrics()["skipped"] == 1.0
    after = learner.state()
    names = [name for name in before.vectors if name.startswith("networks.critics") and name not in OF_REWARDS]
    assert len(names) == 10
    for name in names:
        assert np.array_equal(before.vectors[name], after.vectors[name]), name


def test_a_target_of_its_own_is_refused() -> None:
    class Own(SACLearner):
        def target(self, *arguments: Any) -> Tensor:
            raise AssertionError

    learner = categorical_learner()
    with pytest.raises(UsageError, match="--categorical_critics: the learner's own `target` is a number"):
        Own(learner.flat, learner.context)


def test_a_new_learner_goes_on_bit_by_bit() -> None:
    learner, again = categorical_learner(), categorical_learner()
    learn(learner, batch_of(seed=1))
    again.flat.flat.zero_()
    again.restore(learner.state())
    for one in (learner, again):
        learn(one, batch_of(seed=2))
    first, second = learner.state(), again.state()
    assert first.meta == second.meta
    assert first.vectors.keys() == second.vectors.keys()
    assert "networks.critics.reward_square" in first.vectors
    assert all(np.array_equal(first.vectors[name], second.vectors[name]) for name in first.vectors)


def test_images_are_encoded_for_all_critics_together() -> None:
    images = EnvSpec({"obs": ObservationSpec((3, 36, 36), "uint8"), "v": ObservationSpec((2,), "float32")}, SPEC.action)
    learner = categorical_learner(images)
    before = learner.critics.flat.flat.clone()
    assert learn(learner, batch_of(images)).isfinite().all()
    encoder = critics_of(learner).encoder
    assert encoder is not None
    assert not torch.equal(learner.critics.flat.flat, before)
    assert len(critics_of(learner).weights) == 1
