"""Squashed Gaussians against numerical integration, and their twin in numpy against torch."""

import numpy as np
import pytest
import torch
from torch import distributions as reference

from appo.algorithms.ops.distributions import ActionDistribution, Parts, squashed
from appo.algorithms.ops.numpy_twins import ActionSampler, PolicyTerms

PARTS: Parts = (("tanh_gaussian", 3), ("categorical", 2))


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    logits[:, 3:6] *= 0.5
    return logits


def test_the_density_is_that_of_the_squashed_value() -> None:
    mean, log_std = torch.tensor([0.3, -1.0, 4.0]), torch.tensor([-0.5, 0.0, -1.0])
    squashed = reference.TransformedDistribution(
        reference.Normal(mean.double(), log_std.double().exp()), [reference.TanhTransform()]
    )
    policy = ActionDistribution((("tanh_gaussian", 3),), torch.cat((mean, log_std)).expand(50, 6))
    stored = policy.sample(torch.Generator().manual_seed(1))
    expected = squashed.log_prob(stored.double().tanh()).sum(-1)
    torch.testing.assert_close(policy.log_prob(stored).double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(policy.mode()[0], mean)


def test_the_density_is_finite_where_tanh_rounds_to_one() -> None:
    policy = ActionDistribution((("tanh_gaussian", 1),), torch.tensor([[30.0, 0.0]]))
    expected = -0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - 30)
    assert abs(float(policy.log_prob(torch.tensor([[30.0]]))) - expected) < 1e-4


def test_entropy_agrees_with_integration() -> None:
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * x.square()) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    for mean in (0.0, 0.5, -2.0):
        for std, tolerance in ((0.1, 1e-3), (0.5, 1e-3), (1.5, 1e-3), (3.0, 0.03), (7.389, 0.25)):
            u = mean + std * x
            slope = 2 * (np.log(2) - u - torch.nn.functional.softplus(-2 * u))
            expected = 0.5 * np.log(2 * np.pi * np.e) + np.log(std) + float((weight * slope).sum())
            logits = torch.tensor([[mean, np.log(std)]])
            found = float(ActionDistribution((("tanh_gaussian", 1),), logits).entropy())
            assert abs(found - expected) < tolerance, (mean, std)


def test_the_sampler_without_torch_records_the_density_of_what_it_drew() -> None:
    logits = logits_of(64)
    sampler = ActionSampler(PARTS, 64, np.random.default_rng(0))
    action, log_prob = np.empty((64, 4), np.float32), np.empty(64, np.float32)
    sampler.sample(logits.numpy(), action, log_prob)
    expected = ActionDistribution(PARTS, logits).log_prob(torch.from_numpy(action))
    np.testing.assert_allclose(log_prob, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert np.abs(action[:, :3]).max() > 1  # stored before tanh


def test_training_without_torch_has_the_gradient_of_torch() -> None:
    logits, behavior = logits_of(32).requires_grad_(), logits_of(32, seed=1)
    action = ActionDistribution(PARTS, behavior).sample(torch.Generator().manual_seed(2))
    policy, before = ActionDistribution(PARTS, logits), ActionDistribution(PARTS, behavior)
    by_log_prob, by_entropy = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    (by_log_prob * policy.log_prob(action) + by_entropy * policy.entropy()).sum().backward()
    assert logits.grad is not None
    twin = PolicyTerms(PARTS, logits.detach().numpy(), action.numpy())
    for found, expected in ((twin.log_prob, policy.log_prob(action)), (twin.entropy, policy.entropy())):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(twin.kl_from(behavior.numpy()), before.kl(policy).detach().numpy(), rtol=1e-4, atol=1e-4)
    gradient = twin.gradient(by_log_prob.numpy(), by_entropy.numpy())
    np.testing.assert_allclose(gradient, logits.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_reparameterized_samples_have_value_density_and_gradient_of_torch() -> None:
    parts: Parts = (("tanh_gaussian", 3), ("gaussian", 2))
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 0.7
    mine, exact = logits.float().requires_grad_(), logits.clone().requires_grad_()
    action, log_prob = ActionDistribution(parts, mine).rsample(torch.Generator().manual_seed(3))
    same = torch.Generator().manual_seed(3)
    noise = [torch.empty(40, size).normal_(generator=same).double() for _, size in parts]
    mean, log_std = (torch.cat((exact[:, a : a + 3], exact[:, b : b + 2]), 1) for a, b in ((0, 6), (3, 8)))
    drawn = mean + log_std.exp() * torch.cat(noise, 1)
    normal = reference.Normal(mean, log_std.exp())
    tanh = reference.TransformedDistribution(
        reference.Normal(mean[:, :3], log_std[:, :3].exp()), reference.TanhTransform()
    )
    shown = torch.cat((drawn[:, :3].tanh(), drawn[:, 3:]), 1)
    density = tanh.log_prob(shown[:, :3]).sum(-1) + normal.log_prob(drawn)[:, 3:].sum(-1)
    torch.testing.assert_close(action.double(), drawn, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squashed(parts, action).double(), shown, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_prob.double(), density, rtol=1e-4, atol=1e-4)
    weight = torch.linspace(-1, 1, 40)
    (weight * log_prob + squashed(parts, action).sum(-1)).sum().backward()
    (weight.double() * density + shown.sum(-1)).sum().backward()
    assert mine.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        log_prob, ActionDistribution(parts, mine).log_prob(action), rtol=1e-4, atol=1e-3
    )  # as for a stored action


def test_a_choice_has_no_reparameterized_sample() -> None:
    with pytest.raises(ValueError, match="rsample needs real numbers"):
        ActionDistribution(PARTS, logits_of(2)).rsample()
