import numpy as np
import pytest
import torch

from appo.algorithms.ops.losses import (
    clamped_ratio,
    clipped_value_loss,
    explained_variance,
    masked_mean,
    masked_mean_and_std,
    masked_means,
    normalize_advantage,
    ppo_policy_loss,
    symmetric_kl_loss,
    zero_invalid,
)

NAN, INF = float("nan"), float("inf")
ALL = torch.ones(3, dtype=torch.bool)


def gradient(loss: torch.Tensor, of: torch.Tensor) -> list[float]:
    (grad,) = torch.autograd.grad(loss, of)
    return grad.flatten().tolist()


class TestRatio:
    def test_values_and_gradient(self) -> None:
        log_prob = torch.tensor([0.0, 1.0, -10.0, 10.0], requires_grad=True)
        ratio = clamped_ratio(log_prob, torch.zeros(4))
        torch.testing.assert_close(ratio, torch.tensor([1.0, 2.7182817, 0.05, 20.0]), rtol=1e-6, atol=0)
        assert gradient(ratio.sum(), log_prob) == pytest.approx([1.0, 2.7182817, 0.0, 0.0])

    @pytest.mark.parametrize("behavior", [-1000.0, 1000.0, NAN, INF, -INF])
    def test_gradient_is_zero_and_not_nan_where_exp_overflows_or_garbage_stands(self, behavior: float) -> None:
        log_prob = torch.tensor([-1.0], requires_grad=True)
        assert gradient(clamped_ratio(log_prob, torch.tensor([behavior])).sum(), log_prob) == [0.0]


class TestPolicyLoss:
    def test_clip_range_is_symmetric_in_the_logarithm(self) -> None:
        ratio = torch.tensor([2.0, 0.1, 2.0, 0.1], requires_grad=True)
        advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
        loss = ppo_policy_loss(ratio, advantage, clip_ratio=0.25)
        torch.testing.assert_close(loss, torch.tensor([-1.25, -0.1, 2.0, 0.8]))  # 0.8 = 1 / 1.25, not 0.75
        assert gradient(loss.sum(), ratio) == [0.0, -1.0, 1.0, 0.0]

    def test_gradient_at_ratio_one_is_the_advantage(self) -> None:
        ratio = torch.ones(3, requires_grad=True)
        advantage = torch.tensor([2.0, -3.0, 0.5])
        assert gradient(ppo_policy_loss(ratio, advantage, 0.1).sum(), ratio) == [-2.0, 3.0, -0.5]


class TestValueLoss:
    def test_is_the_larger_square_without_a_half(self) -> None:
        value = torch.tensor([3.0, 0.5, -3.0], requires_grad=True)
        loss = clipped_value_loss(value, torch.zeros(3), torch.tensor([3.0, 1.0, 0.0]), clip_value=1.0)
        # moved too far towards the target: (1 - 3)^2 and no gradient; within; away from the target: gradient stays
        torch.testing.assert_close(loss, torch.tensor([4.0, 0.25, 9.0]))
        assert gradient(loss.sum(), value) == [0.0, -1.0, -6.0]

    @pytest.mark.parametrize("clip_value", [0.0, -1.0])
    def test_can_be_switched_off(self, clip_value: float) -> None:
        loss = clipped_value_loss(torch.tensor([3.0]), torch.tensor([NAN]), torch.tensor([1.0]), clip_value)
        assert loss.tolist() == [4.0]


class TestMaskedMean:
    @pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
    def test_invalid_rows_have_no_influence(self, garbage: float) -> None:
        x = torch.tensor([1.0, garbage, 3.0], requires_grad=True)
        valid = torch.tensor([True, False, True])
        mean = masked_mean(x, valid)
        assert mean.item() == 2.0
        assert gradient(mean, x) == [0.5, 0.0, 0.5]
        assert [s.item() for s in masked_mean_and_std(x, valid)] == [2.0, 1.0]

    def test_nothing_valid_is_zero_with_zero_gradient(self) -> None:
        x = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
        mean = masked_mean(x, ~ALL)
        assert mean.item() == 0.0
        assert gradient(mean, x) == [0.0, 0.0, 0.0]
        assert [s.item() for s in masked_mean_and_std(x, ~ALL)] == [0.0, 0.0]

    @pytest.mark.parametrize("size", [1e19, 1e30, 1e38])
    def test_deviations_of_numbers_whose_squares_are_beyond_float32(self, size: float) -> None:
        x = torch.tensor([size, -size])
        mean, std = masked_mean_and_std(x, torch.ones(2, dtype=torch.bool))
        assert mean.item() == 0.0
        assert (std.item(), std.dtype) == (x[0].item(), torch.float32)

    def test_single_step_has_deviation_zero(self) -> None:
        assert [s.item() for s in masked_mean_and_std(torch.tensor([5.0]), torch.tensor([True]))] == [5.0, 0.0]

    def test_zero_invalid_of_trailing_dimensions_and_any_dtype(self) -> None:
        valid = torch.tensor([[True, False]])
        assert zero_invalid(torch.full((1, 2, 2), NAN), ~valid).isnan().tolist() == [[[False] * 2, [True] * 2]]
        assert zero_invalid(torch.tensor([[7, 99]], dtype=torch.int32), valid).tolist() == [[7, 0]]
        assert zero_invalid(torch.tensor([[True, True]]), valid).dtype == torch.bool

    def test_wrong_shape_is_named(self) -> None:
        with pytest.raises(ValueError, match="valid: expected shape"):
            masked_mean(torch.zeros(3, 1), ALL)


class TestAdvantage:
    def test_is_normalized_over_valid_steps(self) -> None:
        advantage = torch.tensor([[1.0, NAN], [3.0, 5.0]])
        valid = torch.tensor([[True, False], [True, True]])
        result = normalize_advantage(advantage, valid)
        deviation = (8.0 / 3.0) ** 0.5
        torch.testing.assert_close(result, torch.tensor([[-2.0 / deviation, 0.0], [0.0, 2.0 / deviation]]))

    def test_noise_is_not_blown_up(self) -> None:
        result = normalize_advantage(torch.tensor([1e-6, -1e-6]), torch.tensor([True, True]))
        torch.testing.assert_close(result, torch.tensor([1e-3, -1e-3]))

    def test_parts_with_the_statistics_of_the_whole_equal_the_whole(self) -> None:
        generator = torch.Generator().manual_seed(1)
        advantage = torch.randn(8, 6, generator=generator)
        valid = torch.rand(8, 6, generator=generator) < 0.7
        whole, statistics = normalize_advantage(advantage, valid), masked_mean_and_std(advantage, valid)
        parts = [
            normalize_advantage(a, v, statistics) for a, v in zip(advantage.split(2, 1), valid.split(2, 1), strict=True)
        ]
        assert torch.equal(torch.cat(parts, 1), whole)

    def test_parts_weighted_by_their_valid_steps_equal_the_whole(self) -> None:
        generator = torch.Generator().manual_seed(2)
        x, valid = torch.randn(8, 6, generator=generator), torch.rand(8, 6, generator=generator) < 0.5
        parts = zip(x.split(2, 1), valid.split(2, 1), strict=True)
        weighted = sum(masked_mean(part, v) * (v.sum() / valid.sum()) for part, v in parts)
        torch.testing.assert_close(weighted, masked_mean(x, valid))


class TestSymmetricKl:
    @pytest.mark.parametrize(("divergence", "expected"), [(2.0, 2.0), (50.0, 30.0), (INF, 0.0), (NAN, 0.0)])
    def test_is_limited_and_finite(self, divergence: float, expected: float) -> None:
        assert symmetric_kl_loss(torch.full((3,), divergence), ALL).item() == expected

    def test_invalid_rows_have_no_influence(self) -> None:
        valid = torch.tensor([True, False, True])
        assert symmetric_kl_loss(torch.tensor([1.0, NAN, 2.0]), valid).item() == 1.5


def test_garbage_of_invalid_rows_reaches_no_gradient_through_the_whole_loss() -> None:
    """Never-written memory of the acting side, in rows the loss masks: log-probability, value and target."""
    valid = torch.tensor([True, False, True])
    garbage = torch.tensor([0.1, NAN, -0.2])
    log_prob, value = (torch.tensor([0.0, 0.5, 0.1], requires_grad=True) for _ in range(2))
    ratio = clamped_ratio(log_prob, garbage)
    loss = masked_mean(ppo_policy_loss(ratio, torch.tensor([1.0, 0.0, -1.0]), 0.1), valid)
    loss = loss + masked_mean(clipped_value_loss(value, garbage, torch.tensor([1.0, 0.0, 2.0]), 0.2), valid)
    loss.backward()
    for x in (log_prob, value):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad[1] == 0.0


def test_several_means_at_once_are_the_means_one_by_one() -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    valid = torch.rand(4, 5) < 0.6
    valid[0, 0], x.data[1, 0, 0] = False, torch.nan  # what is not valid has no influence, whatever it is
    means = masked_means(dict(zip("abc", x.unbind(), strict=True)), valid)
    expected = torch.stack([masked_mean(one, valid) for one in x.detach()])
    assert tuple(means) == ("a", "b", "c")
    torch.testing.assert_close(torch.stack((*means.values(),)).detach(), expected)
    torch.stack((*means.values(),)).sum().backward()
    assert torch.equal(x.grad != 0, valid.expand(3, 4, 5))
    assert masked_means({"a": x[0]}, torch.zeros(4, 5, dtype=torch.bool))["a"] == 0


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.2, 30.0])
def test_the_explained_variance_is_numpys(noise: float) -> None:
    generator = torch.Generator().manual_seed(7)
    target, error = (100.0 + 2.0 * torch.randn(2, 20, 30, generator=generator)).unbind()
    value = target + noise * (error - 100.0) + 5.0  # an offset of all values costs nothing
    valid = torch.rand(20, 30, generator=generator) < 0.7
    target[~valid], value[~valid] = NAN, INF
    seen, foreseen = target[valid].double().numpy(), value[valid].double().numpy()
    expected = max(-1.0, 1 - np.var(seen - foreseen) / np.var(seen))
    assert float(explained_variance(value, target, valid)) == pytest.approx(expected, abs=1e-5)
    assert (expected == -1.0) == (noise == 30.0)


def test_targets_that_are_equal_leave_nothing_to_explain() -> None:
    value = torch.tensor([1.0, 2.0, 3.0])
    assert float(explained_variance(value, torch.full((3,), 2.0), ALL)) == 0.0
    assert float(explained_variance(value, value, ~ALL)) == 0.0
