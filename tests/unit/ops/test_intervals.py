import math
from statistics import stdev

import numpy as np
import pytest

from appo.algorithms.ops.intervals import bootstrap_interval, student_interval, welch_interval, wilson_interval


@pytest.mark.parametrize(
    ("first", "second", "mean", "margin"),
    [
        # Welch by hand; Student's t for 0.95: 2.776445 (4), 2.228139 (10) degrees of freedom
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], 1.0, 2.776445 * math.sqrt(2 / 3)),
        ([1.0, 2, 3, 4, 5, 6], [1.0, 2, 3, 4, 5, 6], 0.0, 2.228139 * math.sqrt(3.5 / 3)),
        ([5.0, 5.0], [7.0, 7.0], 2.0, 0.0),
    ],
)
def test_differences_of_means(first: list[float], second: list[float], mean: float, margin: float) -> None:
    found = welch_interval(first, second)
    assert found is not None
    assert found.mean == pytest.approx(mean)
    assert found.margin == pytest.approx(margin, rel=1e-5)


# Abramowitz and Stegun, table 26.10
@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (120, 1.97993)],
)
def test_the_interval_of_a_difference_has_the_quantile_of_its_degrees_of_freedom(freedom: int, quantile: float) -> None:
    values = [float(number % 2) for number in range(freedom + 1)]
    found = welch_interval(values, [7.0, 7.0])  # constant values add no freedom
    assert found is not None
    assert found.margin == pytest.approx(quantile * stdev(values) / math.sqrt(freedom + 1), rel=1e-5)


def test_degrees_of_freedom_need_not_be_whole() -> None:
    first, second = [0.0, 2.0], [0.0, 2 * math.sqrt(3)]  # variances 2 and 6 of two values each: 1.6 degrees
    found = welch_interval(first, second)
    assert found is not None
    # The integral of the density beyond 5.51724, on both sides, is 0.05.
    assert found.margin == pytest.approx(5.51724 * 2, rel=1e-5)


def test_a_single_value_has_no_difference() -> None:
    assert welch_interval([1.0], [1.0, 2.0]) is None


def test_the_interval_of_a_difference_holds_what_it_promises() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(500):
        found = welch_interval(random.normal(0, 1, 8).tolist(), random.normal(1, 5, 20).tolist())
        assert found is not None
        held += abs(found.mean - 1) <= found.margin
    assert 0.92 <= held / 500 <= 0.98


def test_means_of_few_values_have_the_interval_of_student() -> None:
    assert student_interval([1.0, 3.0]) == (2.0, pytest.approx(12.706, abs=5e-4))
    many = student_interval([float(value) for value in range(100)])
    assert many.margin == pytest.approx(1.984 * math.sqrt(100 * 101 / 12 / 100), rel=1e-3)
    found = student_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.margin == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=2e-4)
    assert math.isnan(student_interval([1.0]).margin)


def test_means_of_many_values_have_an_interval_by_resampling() -> None:
    assert bootstrap_interval([3.0, 3.0, 3.0]) == (3.0, 3.0)
    values = np.random.default_rng(1).normal(10.0, 2.0, 400).tolist()
    low, high = bootstrap_interval(values)
    assert (low, high) == pytest.approx((np.mean(values) - 0.196, np.mean(values) + 0.196), abs=0.03)
    assert bootstrap_interval(values) == (low, high)
    assert np.isnan(bootstrap_interval([])).all()


@pytest.mark.parametrize(("successes", "ends"), [(8, (0.49016, 0.94331)), (10, (0.72247, 1.0)), (0, (0.0, 0.27753))])
def test_shares_have_the_interval_of_wilson(successes: int, ends: tuple[float, float]) -> None:
    assert wilson_interval(successes, 10) == pytest.approx(ends, abs=1e-5)
