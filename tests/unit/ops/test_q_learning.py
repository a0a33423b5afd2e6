"""Maths of Q-learning against loops over numbers, and values worked out by hand."""

import math

import pytest
import torch

from appo.algorithms.ops import q_learning
from appo.algorithms.ops.q_learning import FORBIDDEN, RESCALING_EPS

SIZES = (3, 2)


def q_values(*leading: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*leading, sum(SIZES), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_greedy_choice_of_every_branch_is_the_first_of_the_largest() -> None:
    q = torch.tensor([[1.0, 3.0, 3.0, 5.0, 4.0], [FORBIDDEN, -2.0, -9.0, FORBIDDEN, -7.0]])
    assert q_learning.greedy_action(q, SIZES).tolist() == [[1, 0], [1, 1]]
    assert q_learning.taken(q, torch.tensor([[2, 1], [1, 1]]), SIZES).tolist() == [[3.0, 4.0], [-2.0, -7.0]]


def test_what_a_mask_forbids_is_below_everything_and_finite() -> None:
    allowed = torch.tensor([[True, False, True, False, True]])
    q = q_learning.allowed_only(torch.full((1, 5), -1e20), allowed)
    assert q_learning.greedy_action(q, SIZES).tolist() == [[0, 1]]
    assert q.isfinite().all()
    assert q_learning.allowed_only(q, None) is q


def test_dueling_values_have_the_mean_of_the_state_in_every_branch() -> None:
    advantage, value = q_values(7), q_values(7, seed=1)[:, :1]
    q = q_learning.dueling(value, advantage, SIZES)
    for row in range(7):
        for start, end in ((0, 3), (3, 5)):
            mean = sum(advantage[row, start:end].tolist()) / (end - start)
            expected = [float(value[row]) + a - mean for a in advantage[row, start:end].tolist()]
            assert q[row, start:end].tolist() == pytest.approx(expected, abs=1e-12)
            assert float(q[row, start:end].mean()) == pytest.approx(float(value[row]), abs=1e-12)


@pytest.mark.parametrize("double", [False, True])
def test_bootstrap_values_are_those_of_a_loop(double: bool) -> None:
    target, online = q_values(50), q_values(50, seed=1)
    found = q_learning.bootstrap_value(target, online if double else None, SIZES)
    differs = 0
    for row in range(50):
        values = []
        for start, end in ((0, 3), (3, 5)):
            chooser = (online if double else target)[row, start:end].tolist()
            best = chooser.index(max(chooser))
            values.append(float(target[row, start + best]))
            differs += values[-1] < float(target[row, start:end].max())
        assert float(found[row]) == pytest.approx(sum(values) / 2, abs=1e-12)
    assert (differs > 20) == double


def test_targets_leave_out_what_comes_after_the_end_whatever_it_is() -> None:
    reward, discount = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.729, 0.0, 0.0])
    bootstrap = torch.tensor([10.0, math.nan, math.inf])
    assert q_learning.n_step_target(reward, discount, bootstrap).tolist() == pytest.approx([8.29, 2.0, 3.0])


def test_rescaled_targets_are_h_of_the_return() -> None:
    reward, discount, q = torch.tensor([5.0]), torch.tensor([0.9]), torch.tensor([2.0])
    # sqrt(x + 1) - 1 + x / 1000 = 2, so x + 1 = (3 - x / 1000)^2: 1.006 x = 8 + x^2 / 10^6.
    after = float(q_learning.unscaled_value(q))
    assert after == pytest.approx(7.952349, abs=2e-6)
    expected = math.sqrt(5 + 0.9 * after + 1) - 1 + RESCALING_EPS * (5 + 0.9 * after)
    assert float(q_learning.n_step_target(reward, discount, q, rescaled=True)) == pytest.approx(expected, rel=1e-6)


def test_rescaling_and_its_inverse_undo_each_other() -> None:
    x = torch.cat((-torch.logspace(-4, 5, 200), torch.zeros(1), torch.logspace(-4, 5, 200)))
    h = q_learning.rescaled_value(x)
    assert (h.diff()[200:] > 0).all()
    assert h[200] == 0
    assert torch.equal(h, -q_learning.rescaled_value(-x))
    assert torch.allclose(q_learning.unscaled_value(h), x, rtol=1e-5, atol=1e-6)
    assert float(q_learning.rescaled_value(torch.tensor(99.0))) == pytest.approx(9.099)


def test_huber_is_linear_beyond_one() -> None:
    error = torch.tensor([-3.0, -0.5, 0.0, 1.0, 4.0])
    assert q_learning.td_loss(error, huber=True).tolist() == [2.5, 0.125, 0.0, 0.5, 3.5]
    assert q_learning.td_loss(error, huber=False).tolist() == [4.5, 0.125, 0.0, 0.5, 8.0]


def test_the_ladder_is_that_of_the_paper() -> None:
    ladder = q_learning.epsilon_ladder(8, 0.4, 7.0).tolist()
    assert ladder == pytest.approx([0.4 ** (1 + i) for i in range(8)])
    assert q_learning.epsilon_ladder(1, 0.4, 7.0).tolist() == pytest.approx([0.4**8])
