import numpy as np
import pytest
import torch

from appo.algorithms.ops.normalization import Moments, inv_std, merge_batch, normalize, std

NAN = float("nan")


def valid(rows: int) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.bool)


def assert_equal(a: Moments, b: Moments) -> None:
    assert torch.equal(a.count, b.count)
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.m2, b.m2)


class TestMoments:
    @pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
    def test_merging_equals_numpy_over_everything(self, shape: tuple[int, ...]) -> None:
        rng = np.random.default_rng(0)
        moments, seen = Moments.empty(shape), []
        for rows in (1, 7, 0, 64, 1, 500):
            x = rng.normal(5.0, 3.0, size=(rows, *shape))
            keep = rng.random(rows) < 0.7
            moments = merge_batch(moments, torch.tensor(x), torch.tensor(keep))
            seen.append(x[keep])
        everything = np.concatenate(seen)
        assert moments.count.item() == len(everything)
        np.testing.assert_allclose(moments.mean.numpy(), everything.mean(0), rtol=1e-12)
        variance = (moments.m2 / moments.count).numpy()
        np.testing.assert_allclose(variance, everything.var(0), rtol=1e-12)

    def test_large_offset_keeps_its_digits(self) -> None:
        """A sum of squares in float32 loses the variance of 1e6 +- 1 altogether."""
        moments = Moments.empty((1,))
        for _ in range(10):
            moments = merge_batch(moments, torch.tensor([[1e6 - 1.0], [1e6 + 1.0]]), valid(2))
        assert moments.mean.item() == 1e6
        assert (moments.m2 / moments.count).item() == pytest.approx(1.0, rel=1e-12)

    def test_nothing_valid_changes_nothing(self) -> None:
        moments = merge_batch(Moments.empty((2,)), torch.tensor([[1.0, 2.0], [4.0, -3.0]]), valid(2))
        assert_equal(merge_batch(moments, torch.zeros(0, 2), valid(0)), moments)
        assert_equal(merge_batch(moments, torch.full((3, 2), NAN), ~valid(3)), moments)
        assert_equal(merge_batch(Moments.empty((2,)), torch.zeros(0, 2), valid(0)), Moments.empty((2,)))

    @pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e38])
    def test_invalid_rows_have_no_influence(self, garbage: float) -> None:
        x = torch.tensor([[1.0], [garbage], [3.0]])
        with_garbage = merge_batch(Moments.empty((1,)), x, torch.tensor([True, False, True]))
        assert_equal(with_garbage, merge_batch(Moments.empty((1,)), x[::2], valid(2)))

    def test_arguments_are_not_changed(self) -> None:
        moments = merge_batch(Moments.empty((2,)), torch.rand(4, 2), valid(4))
        copy = Moments(*(t.clone() for t in (moments.count, moments.mean, moments.m2)))
        x = torch.rand(5, 2, dtype=torch.float64)
        before = x.clone()
        merge_batch(moments, x, torch.tensor([True, False, True, True, False]))
        assert torch.equal(x, before)
        assert_equal(moments, copy)

    def test_wrong_shapes_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"x: expected shape \[4, 2\], got \[4, 3\]"):
            merge_batch(Moments.empty((2,)), torch.zeros(4, 3), valid(4))
        with pytest.raises(ValueError, match=r"x: expected shape \[5, 2\]"):
            merge_batch(Moments.empty((2,)), torch.zeros(4, 2), valid(5))


class TestStandardDeviation:
    def test_values(self) -> None:
        moments = merge_batch(Moments.empty((2,)), torch.tensor([[0.0, 7.0], [4.0, 7.0]]), valid(2))
        torch.testing.assert_close(std(moments, eps=0.0), torch.tensor([2.0, 0.0]))
        torch.testing.assert_close(inv_std(moments, eps=1e-4), torch.tensor([0.49999374, 100.0]))
        assert std(moments).dtype == inv_std(moments).dtype == torch.float32

    def test_nothing_seen_normalizes_nothing(self) -> None:
        moments = Moments.empty((3,))
        assert std(moments).tolist() == inv_std(moments).tolist() == [1.0, 1.0, 1.0]


class TestNormalize:
    MEAN, INV_STD = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.5])

    def test_values_and_clip(self) -> None:
        result = normalize(torch.tensor([[2.0, 0.0], [100.0, -100.0]]), self.MEAN, self.INV_STD, clip=10.0)
        assert result.tolist() == [[2.0, -1.0], [10.0, -10.0]]
        unlimited = normalize(torch.tensor([[101.0, 2.0]]), self.MEAN, self.INV_STD, clip=float("inf"))
        assert unlimited.tolist() == [[200.0, 0.0]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_never_changes_its_input(self, dtype: torch.dtype) -> None:
        """A batch normalized in place is normalized again by the second epoch."""
        x = torch.tensor([[3.0, 4.0]], dtype=dtype)
        first, second = (normalize(x, self.MEAN, self.INV_STD, 10.0) for _ in range(2))
        assert x.tolist() == [[3.0, 4.0]]
        assert torch.equal(first, second)
        assert first.dtype == torch.float32
        assert first.data_ptr() != x.data_ptr()

    def test_is_differentiable(self) -> None:
        x = torch.tensor([[1.5, 100.0]], requires_grad=True)
        (grad,) = torch.autograd.grad(normalize(x, self.MEAN, self.INV_STD, 10.0).sum(), x)
        assert grad.tolist() == [[2.0, 0.0]]
