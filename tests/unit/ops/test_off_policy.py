"""Off-policy estimates: against slow ones written from the papers, and a toy whose values are known exactly."""

import numpy as np
import pytest
from numpy.typing import NDArray

from appo.algorithms.ops import off_policy
from appo.algorithms.ops.off_policy import Terms

Floats = NDArray[np.float64]

# A toy of 3 states and 2 actions that always ends after 4 steps.
STATES, ACTIONS, LENGTH, GAMMA = 3, 2, 4, 0.9
BEHAVIOUR = np.array([[0.5, 0.5], [0.7, 0.3], [0.4, 0.6]])
TARGET = np.array([[0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
MOVES = np.random.default_rng(1).dirichlet(np.ones(STATES), size=(STATES, ACTIONS))
REWARDS = np.random.default_rng(2).normal(size=(STATES, ACTIONS))


def exact_values(policy: Floats) -> tuple[Floats, Floats]:
    """The values [L+1, S] of all states and [L, S, A] of all choices, by dynamic programming."""
    value, q = np.zeros((LENGTH + 1, STATES)), np.zeros((LENGTH, STATES, ACTIONS))
    for t in range(LENGTH - 1, -1, -1):
        q[t] = REWARDS + GAMMA * MOVES @ value[t + 1]
        value[t] = (policy * q[t]).sum(axis=1)
    return value, q


VALUE, Q = exact_values(TARGET)
TRUE_VALUE = float(VALUE[0].mean())


def played(episodes: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats, Floats]:
    """States [E, L], actions, rewards with noise, and log ratios, of the behaviour policy from states drawn evenly."""
    random = np.random.default_rng(seed)
    states, actions = np.zeros((2, episodes, LENGTH), np.int64)
    now = random.integers(STATES, size=episodes)
    for t in range(LENGTH):
        states[:, t] = now
        actions[:, t] = random.random(episodes) > BEHAVIOUR[now, 0]
        chances = MOVES[now, actions[:, t]].cumsum(axis=1)
        now = (random.random((episodes, 1)) > chances).sum(axis=1)
    rewards = REWARDS[states, actions] + random.normal(size=states.shape)
    return states, actions, rewards, np.log(TARGET[states, actions] / BEHAVIOUR[states, actions])


def different_lengths(seed: int) -> tuple[list[int], Floats, Floats, Floats, Floats]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 7, size=9).tolist()
    arrays = [np.zeros((9, 6)) for _ in range(3)]
    value = np.zeros((9, 7))
    for e, length in enumerate(lengths):
        for array in arrays:
            array[e, :length] = random.normal(size=length)
        value[e, : length + 1] = random.normal(size=length + 1)
        value[e, length] *= e % 2  # every other episode was cut
    return lengths, *arrays, value


@pytest.mark.parametrize("seed", range(5))
def test_estimates_are_those_of_the_papers(seed: int) -> None:
    lengths, log_ratio, reward, q_taken, value = different_lengths(seed)
    weight = [[np.exp(log_ratio[e, : min(t + 1, n)].sum()) for t in range(6)] for e, n in enumerate(lengths)]
    plain = np.mean([sum(GAMMA**t * weight[e][t] * reward[e, t] for t in range(n)) for e, n in enumerate(lengths)])
    weighted = sum(
        GAMMA**t * sum(weight[e][t] * reward[e, t] for e in range(9)) / sum(weight[e][t] for e in range(9))
        for t in range(6)
    )
    robust = []
    for e, n in enumerate(lengths):
        following = value[e, n]
        for t in reversed(range(n)):
            ratio = np.exp(log_ratio[e, t])
            following = value[e, t] + ratio * (reward[e, t] + GAMMA * following - q_taken[e, t])
        robust.append(following)
    assert off_policy.importance_sampling(log_ratio, reward, GAMMA).value() == pytest.approx(plain)
    assert off_policy.weighted_importance_sampling(log_ratio, reward, GAMMA).value() == pytest.approx(weighted)
    assert off_policy.doubly_robust(log_ratio, reward, value, q_taken, GAMMA).value() == pytest.approx(np.mean(robust))
    final = np.array([row[-1] for row in weight])
    assert off_policy.effective_episodes(log_ratio) == pytest.approx(final.sum() ** 2 / (final**2).sum())


def test_of_the_policy_that_acted_all_are_the_mean_return() -> None:
    _, _, rewards, log_ratio = played(50, 3)
    mean = float((rewards @ off_policy.discounts(LENGTH, GAMMA)).mean())
    same = np.zeros_like(log_ratio)
    assert off_policy.importance_sampling(same, rewards, GAMMA).value() == pytest.approx(mean)
    assert off_policy.weighted_importance_sampling(same, rewards, GAMMA).value() == pytest.approx(mean)
    assert off_policy.effective_episodes(same) == pytest.approx(50)


def test_many_episodes_find_the_true_value() -> None:
    states, actions, rewards, log_ratio = played(200_000, 4)
    time = np.arange(LENGTH)
    value, q_taken = np.zeros((len(states), LENGTH + 1)), Q[time, states, actions]
    value[:, :LENGTH] = VALUE[time, states]
    for terms in (
        off_policy.importance_sampling(log_ratio, rewards, GAMMA),
        off_policy.weighted_importance_sampling(log_ratio, rewards, GAMMA),
        off_policy.doubly_robust(log_ratio, rewards, value, q_taken, GAMMA),
        off_policy.doubly_robust(log_ratio, rewards, 0 * value, 0 * q_taken, GAMMA),  # wrong values, right ratios
    ):
        assert terms.value() == pytest.approx(TRUE_VALUE, abs=0.02)


def test_values_that_are_right_take_away_the_variance() -> None:
    """With exact values and rewards without noise what is left is where episodes begin."""
    states, actions, _, log_ratio = played(300, 5)
    time = np.arange(LENGTH)
    value = np.zeros((300, LENGTH + 1))
    value[:, :LENGTH] = VALUE[time, states]
    rewards = Q[time, states, actions] - GAMMA * value[:, 1:]  # each as its state after the step makes it
    terms = off_policy.doubly_robust(log_ratio, rewards, value, Q[time, states, actions], GAMMA)
    np.testing.assert_allclose(terms.numerator[:, 0], VALUE[0][states[:, 0]])


def test_intervals_hold_the_true_value_as_often_as_they_say() -> None:
    covered = {"is": 0, "wis": 0}
    for seed in range(100):
        _, _, rewards, log_ratio = played(200, 100 + seed)
        for name, estimate in (
            ("is", off_policy.importance_sampling),
            ("wis", off_policy.weighted_importance_sampling),
        ):
            found = estimate(log_ratio, rewards, GAMMA).interval(300, seed=seed)
            assert found.low < found.value < found.high
            covered[name] += found.low <= TRUE_VALUE <= found.high
    assert covered["is"] >= 90
    assert covered["wis"] >= 90


def test_intervals_are_the_same_for_the_same_seed() -> None:
    terms = off_policy.of_episodes(np.random.default_rng(0).normal(size=30))
    assert terms.interval(200, seed=1) == terms.interval(200, seed=1)
    assert terms.interval(200, seed=1) != terms.interval(200, seed=2)
    expected = 1.96 * terms.numerator.std() / np.sqrt(30)
    assert terms.interval(5_000).high - terms.value() == pytest.approx(expected, rel=0.1)


def test_weights_beyond_all_numbers_do_not_overflow() -> None:
    log_ratio = np.full((3, 4), 500.0)
    log_ratio[0] = -2000.0
    found = off_policy.weighted_importance_sampling(log_ratio, np.ones((3, 4)), 1.0)
    assert found.value() == pytest.approx(4.0)
    assert off_policy.effective_episodes(log_ratio) == pytest.approx(2.0)


def test_a_term_without_weight_counts_as_nothing() -> None:
    assert Terms(np.ones((2, 1)), np.zeros((2, 1))).value() == 0.0
