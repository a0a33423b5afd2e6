from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as reference

from appo.algorithms.ops.distributions import ActionDistribution, Parts

KINDS = ("categorical", "bernoulli", "gaussian")
MIXED: Parts = (("categorical", 3), ("gaussian", 2), ("bernoulli", 2), ("categorical", 2))  # L = 3 + 4 + 2 + 2

any_parts = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 5)), min_size=1, max_size=4).map(tuple)
deterministic = settings(derandomize=True, deadline=None, max_examples=150)


def widths(kind: str, size: int) -> tuple[int, int]:
    return {"categorical": (size, 1), "bernoulli": (size, size), "gaussian": (2 * size, size)}[kind]


def random_logits(parts: Parts, batch: int, seed: int, scale: float) -> torch.Tensor:
    total = sum(widths(*p)[0] for p in parts)
    return torch.randn(2, batch, total, generator=torch.Generator().manual_seed(seed)) * scale


def references(parts: Parts, logits: torch.Tensor) -> list[reference.Distribution]:
    """The parts as float64 torch.distributions, one event each."""
    result: list[reference.Distribution] = []
    offset = 0
    for kind, size in parts:
        part = logits[..., offset : (offset := offset + widths(kind, size)[0])].double()
        if kind == "categorical":
            result.append(reference.Categorical(logits=part))
        elif kind == "bernoulli":
            result.append(reference.Independent(reference.Bernoulli(logits=part), 1))
        else:
            mean, log_std = part.chunk(2, -1)
            result.append(reference.Independent(reference.Normal(mean, log_std.clamp(-5, 2).exp()), 1))
    return result


def split_action(parts: Parts, action: torch.Tensor) -> list[torch.Tensor]:
    sizes = [widths(*p)[1] for p in parts]
    return [x[..., 0] if p[0] == "categorical" else x for p, x in zip(parts, action.split(sizes, -1), strict=True)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=3e-5)


class TestAgainstTorchDistributions:
    @deterministic
    @given(any_parts, st.integers(1, 4), st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 3.0]))
    def test_log_prob_entropy_and_kl(self, parts: Parts, batch: int, seed: int, scale: float) -> None:
        logits = random_logits(parts, batch, seed, scale)
        p, q = (ActionDistribution(parts, x) for x in logits)
        p_parts, q_parts = (references(parts, x) for x in logits)
        action = p.sample(torch.Generator().manual_seed(seed))
        assert action.shape == (batch, sum(widths(*x)[1] for x in parts))
        values = split_action(parts, action)
        assert_close(p.log_prob(action), sum(d.log_prob(v.double()) for d, v in zip(p_parts, values, strict=True)))
        assert_close(p.entropy(), sum(d.entropy() for d in p_parts))
        kl = sum(reference.kl_divergence(a, b) for a, b in zip(p_parts, q_parts, strict=True))
        assert_close(p.kl(q), kl)
        assert (p.kl(q) >= -1e-5).all()
        assert torch.equal(p.kl(p), torch.zeros(batch))

    @deterministic
    @given(st.lists(st.tuples(st.sampled_from(KINDS[:2]), st.integers(1, 5)), min_size=1, max_size=3).map(tuple),
           st.integers(0, 2**31))  # fmt: skip
    def test_symmetric_kl_to_uniform_sums_over_parts(self, parts: Parts, seed: int) -> None:
        logits = random_logits(parts, 3, seed, 1.0)[0]
        uniform = references(parts, torch.zeros_like(logits))
        expected = sum(
            0.5 * (reference.kl_divergence(p, u) + reference.kl_divergence(u, p))
            for p, u in zip(references(parts, logits), uniform, strict=True)
        )
        assert_close(ActionDistribution(parts, logits).symmetric_kl_to_uniform(), expected)

    @deterministic
    @given(st.integers(2, 6), st.integers(0, 2**31))
    def test_masked_part_equals_the_distribution_over_what_is_allowed(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(size, generator=generator) < 0.5
        mask[torch.randint(size, (1,), generator=generator)] = True
        logits, other = torch.randn(2, size, generator=generator)
        p, q = (ActionDistribution((("categorical", size),), x, mask) for x in (logits, other))
        p_ref, q_ref = (reference.Categorical(logits=x[mask].double()) for x in (logits, other))
        uniform = reference.Categorical(logits=torch.zeros(int(mask.sum()), dtype=torch.float64))
        assert_close(p.entropy(), p_ref.entropy())
        assert_close(p.kl(q), reference.kl_divergence(p_ref, q_ref))
        symmetric = reference.kl_divergence(p_ref, uniform) + reference.kl_divergence(uniform, p_ref)
        assert_close(p.symmetric_kl_to_uniform(), 0.5 * symmetric)
        for i, action in enumerate(mask.nonzero()):
            assert_close(p.log_prob(action), p_ref.log_prob(torch.tensor(i)))


class TestMask:
    PARTS: Parts = (("categorical", 3), ("bernoulli", 1), ("categorical", 2))
    MASK = torch.tensor([True, False, True, False, True])  # 3 of the first part, 2 of the last; none for the bit

    def test_gradient_of_masked_logits_is_exactly_zero(self) -> None:
        other = ActionDistribution(self.PARTS, torch.linspace(-1, 1, 6), self.MASK)
        action = torch.tensor([2, 1, 1], dtype=torch.int32)
        for quantity in (
            lambda d: d.log_prob(action),
            lambda d: d.entropy(),
            lambda d: d.kl(other),
            other.kl,
            lambda d: d.symmetric_kl_to_uniform(),
        ):
            logits = torch.tensor([0.3, 5.0, -1.0, 0.2, 9.0, 0.1], requires_grad=True)
            (grad,) = torch.autograd.grad(quantity(ActionDistribution(self.PARTS, logits, self.MASK)), logits)
            assert grad.isfinite().all()
            assert grad[[1, 4]].tolist() == [0.0, 0.0]
            assert grad[[0, 2]].abs().min() > 0

    def test_masked_choices_are_never_sampled_however_likely(self) -> None:
        logits = torch.tensor([0.0, 50.0, 0.0, 0.0, 50.0, 0.0]).expand(5000, 6)
        p = ActionDistribution(self.PARTS, logits, self.MASK.expand(5000, 5))
        action = p.sample(torch.Generator().manual_seed(0))
        assert set(action[:, 0].tolist()) == {0, 2}
        assert set(action[:, 2].tolist()) == {1}
        assert p.mode()[0].tolist() == [0, 0, 1]

    @pytest.mark.parametrize(("allowed", "masked"), [(0.0, 1 - 2**-24), (0.0, 0.0), (1 - 2**-24, 0.0), (0.0, 1.0)])
    def test_masked_choices_lose_at_the_extremes_of_the_generator(
        self, monkeypatch: pytest.MonkeyPatch, allowed: float, masked: float
    ) -> None:
        """Without limits the noise of a uniform number of exactly 0 or 1 is infinite and beats any logit."""
        mask = torch.tensor([False, True, False])
        draws = torch.where(mask, allowed, masked)
        monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, generator=None: x.copy_(draws))
        p = ActionDistribution((("categorical", 3),), torch.tensor([10.0, -100.0, 10.0]), mask)
        assert p.sample().tolist() == [1]

    def test_log_prob_uses_the_mask_the_action_was_sampled_with(self) -> None:
        """A learner that leaves out the mask sees a ratio below 1 at pi = mu."""
        parts: Parts = (("categorical", 3),)
        logits, action = torch.zeros(3), torch.tensor([0])
        masked = ActionDistribution(parts, logits, torch.tensor([True, False, True])).log_prob(action)
        torch.testing.assert_close(masked, torch.tensor(0.5).log())
        assert ActionDistribution(parts, logits).log_prob(action) < masked

    def test_nothing_allowed_is_finite_and_without_gradient(self) -> None:
        logits = torch.tensor([1.0, 2.0], requires_grad=True)
        p = ActionDistribution((("categorical", 2),), logits, torch.tensor([False, False]))
        total = p.log_prob(p.sample()) + p.entropy() + p.symmetric_kl_to_uniform() + p.kl(p)
        (grad,) = torch.autograd.grad(total, logits)
        assert total.isfinite()
        assert grad.tolist() == [0.0, 0.0]

    def test_divergence_from_a_policy_with_another_mask_is_finite(self) -> None:
        logits = torch.zeros(2)
        p = ActionDistribution((("categorical", 2),), logits)
        q = ActionDistribution((("categorical", 2),), logits, torch.tensor([True, False]))
        assert p.kl(q).isfinite()
        torch.testing.assert_close(q.kl(p), torch.tensor(2.0).log())


class TestSampling:
    def test_frequencies_of_choices(self) -> None:
        draws = 200_000
        p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.0099, 0.0001])
        sample = ActionDistribution((("categorical", 6),), p.log().expand(draws, 6)).sample(
            torch.Generator().manual_seed(3)
        )
        frequency = torch.bincount(sample[:, 0], minlength=6) / draws
        standard_error = (p * (1 - p) / draws).sqrt()
        assert ((frequency - p).abs() < 4 * standard_error).all()

    def test_frequencies_of_bits(self) -> None:
        draws = 100_000
        p = torch.tensor([0.02, 0.5, 0.9])
        sample = ActionDistribution((("bernoulli", 3),), p.logit().expand(draws, 3)).sample(
            torch.Generator().manual_seed(4)
        )
        assert ((sample.float().mean(0) - p).abs() < 4 * (p * (1 - p) / draws).sqrt()).all()

    def test_moments_of_numbers(self) -> None:
        draws = 100_000
        logits = torch.tensor([1.0, -2.0, 0.0, -1.0]).expand(draws, 4)
        sample = ActionDistribution((("gaussian", 2),), logits).sample(torch.Generator().manual_seed(5))
        torch.testing.assert_close(sample.mean(0), torch.tensor([1.0, -2.0]), rtol=0, atol=0.015)
        torch.testing.assert_close(sample.std(0), torch.tensor([1.0, 0.36788]), rtol=0.01, atol=0)

    def test_generator_decides(self) -> None:
        p = ActionDistribution(MIXED, torch.zeros(16, 11))
        first, again, other = (p.sample(torch.Generator().manual_seed(s)) for s in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        torch.manual_seed(9)
        by_default = p.sample()
        torch.manual_seed(9)
        assert torch.equal(by_default, p.sample())

    def test_dtype_and_order_of_values(self) -> None:
        logits = torch.tensor([0.0, 9.0, 0.0, 0.25, -0.5, -5.0, -5.0, -9.0, 9.0, 0.0, 9.0])
        mode = ActionDistribution(MIXED, logits).mode()
        assert mode.tolist() == [1.0, 0.25, -0.5, 0.0, 1.0, 1.0]
        assert mode.dtype == ActionDistribution(MIXED, logits).sample().dtype == torch.float32
        discrete = ActionDistribution((("categorical", 3), ("bernoulli", 2)), torch.zeros(5))
        assert discrete.mode().dtype == discrete.sample().dtype == torch.int32

    def test_carries_no_gradient(self) -> None:
        p = ActionDistribution(MIXED, torch.zeros(2, 11, requires_grad=True))
        assert not p.sample().requires_grad
        assert not p.mode().requires_grad

    def test_sampling_first_leaves_the_gradient_of_log_prob(self) -> None:
        logits = torch.zeros(2, 11, requires_grad=True)
        p = ActionDistribution(MIXED, logits)
        action = p.sample(torch.Generator().manual_seed(0))
        (grad,) = torch.autograd.grad(p.log_prob(action).sum(), logits)
        assert (grad[:, :3] != 0).all()


class TestPrecision:
    def test_log_prob_is_float32_of_the_given_logits_whatever_their_dtype(self) -> None:
        logits = torch.randn(8, 11, generator=torch.Generator().manual_seed(6)).bfloat16()
        half, full = (ActionDistribution(MIXED, x) for x in (logits, logits.float()))
        action = full.sample(torch.Generator().manual_seed(0))
        assert half.log_prob(action).dtype == torch.float32
        assert torch.equal(half.log_prob(action), full.log_prob(action))
        assert torch.equal(half.entropy(), full.entropy())

    def test_extreme_logits_stay_finite(self) -> None:
        parts: Parts = (("categorical", 2), ("bernoulli", 1))
        logits = torch.tensor([1e4, -1e4, 1e4], requires_grad=True)
        p, q = ActionDistribution(parts, logits), ActionDistribution(parts, torch.zeros(3))
        total = p.entropy() + p.kl(q) + q.kl(p) + p.symmetric_kl_to_uniform() + p.log_prob(torch.tensor([0, 1]))
        (grad,) = torch.autograd.grad(total, logits)
        assert total.isfinite()
        assert grad.isfinite().all()

    def test_log_deviation_is_limited_everywhere_alike(self) -> None:
        parts: Parts = (("gaussian", 1),)
        for raw, limit in ((-20.0, -5.0), (20.0, 2.0)):
            p, q = (ActionDistribution(parts, torch.tensor([0.5, x])) for x in (raw, limit))
            action = torch.tensor([0.4])
            assert torch.equal(p.log_prob(action), q.log_prob(action))
            assert torch.equal(p.entropy(), q.entropy())
            assert p.kl(q) == 0
            assert torch.equal(*(d.sample(torch.Generator().manual_seed(0)) for d in (p, q)))


class TestErrors:
    def test_no_uniform_over_real_numbers(self) -> None:
        with pytest.raises(ValueError, match="--exploration_loss=entropy"):
            ActionDistribution((("categorical", 2), ("gaussian", 1)), torch.zeros(4)).symmetric_kl_to_uniform()

    @pytest.mark.parametrize(
        ("parts", "logits", "mask", "message"),
        [
            ((), 0, None, "at least one"),
            ((("poisson", 2),), 2, None, "got 'poisson'"),
            ((("gaussian", 2),), 2, None, r"logits: expected shape \[4\], got \[2\]"),
            ((("categorical", 2),), 2, 3, r"action_mask: expected shape \[2\], got \[3\]"),
            ((("bernoulli", 2),), 2, 2, r"action_mask: expected shape \[0\], got \[2\]"),
        ],
    )
    def test_wrong_arguments_are_named(self, parts: Parts, logits: int, mask: int | None, message: str) -> None:
        allowed = None if mask is None else torch.ones(mask, dtype=torch.bool)
        with pytest.raises(ValueError, match=message):
            ActionDistribution(parts, torch.zeros(logits), allowed)

    def test_wrong_action_and_other_are_named(self) -> None:
        p = ActionDistribution((("categorical", 2),), torch.zeros(3, 2))
        with pytest.raises(ValueError, match=r"action: expected shape \[3, 1\], got \[3\]"):
            p.log_prob(torch.zeros(3))
        with pytest.raises(ValueError, match="other: expected parts"):
            p.kl(ActionDistribution((("bernoulli", 2),), torch.zeros(3, 2)))


def test_parts_may_be_named_tuples() -> None:
    class ActionPart(NamedTuple):
        kind: str
        size: int

    named = ActionDistribution((ActionPart("categorical", 2),), torch.zeros(2))
    plain = ActionDistribution((("categorical", 2),), torch.ones(2))
    assert named.kl(plain) == 0


def test_bins_are_choices_that_no_mask_covers() -> None:
    parts: Parts = (("bins", 4), ("categorical", 3), ("bins", 2))
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True]).expand(50, 3)
    found, plain = ActionDistribution(parts, logits, mask), tuple(("categorical", size) for _, size in parts)
    whole = torch.tensor([True] * 4 + [True, False, True] + [True] * 2).expand(50, 9)
    expected = ActionDistribution(plain, logits, whole)
    action = found.sample(torch.Generator().manual_seed(1))
    assert torch.equal(action, expected.sample(torch.Generator().manual_seed(1)))
    assert set(action[:, 0].tolist()) == {0, 1, 2, 3}
    assert set(action[:, 1].tolist()) == {0, 2}
    assert torch.equal(found.mode(), expected.mode())
    assert torch.equal(found.log_prob(action), expected.log_prob(action))
    assert torch.equal(found.entropy(), expected.entropy())
    assert torch.equal(found.symmetric_kl_to_uniform(), expected.symmetric_kl_to_uniform())
    with pytest.raises(ValueError, match="action_mask"):
        ActionDistribution(parts, logits, whole)
