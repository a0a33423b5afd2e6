import math

import numpy as np
import pytest

from appo.algorithms.run.observers import comparison, difference
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress


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
    found = difference(first, second)
    assert found is not None
    assert found.mean == pytest.approx(mean)
    assert found.margin == pytest.approx(margin, rel=5e-3)


def test_a_single_episode_says_nothing() -> None:
    assert difference([1.0], [1.0, 2.0]) is None


def test_the_interval_holds_what_it_promises() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(500):
        found = difference(random.normal(0, 1, 8).tolist(), random.normal(1, 5, 20).tolist())
        assert found is not None
        held += abs(found.mean - 1) <= found.margin
    assert 0.92 <= held / 500 <= 0.98


def progress_of(*returns: float) -> PolicyProgress:
    progress = PolicyProgress(100)
    progress.episode_return.append(returns)
    return progress


def test_the_report_says_what_differs() -> None:
    policies = [progress_of(1, 2, 3), progress_of(11, 12, 13), progress_of(2, 2, 3), progress_of()]
    given = [{"gamma": gamma} for gamma in (0.9, 0.95, 0.99, 0.999)]
    assert comparison(policies, given) == [
        "policy 1 (gamma=0.95) against policy 0 (gamma=0.9): return +10.00, 95 % interval [+7.73, +12.27] over their "
        "last 3 and 3 episodes",
        "policy 2 (gamma=0.99) against policy 0 (gamma=0.9): return +0.33, 95 % interval [-1.71, +2.38] over their "
        "last 3 and 3 episodes: no difference that these episodes show",
    ]
