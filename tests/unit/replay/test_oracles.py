"""The sum tree and prioritised sampling beside those of torchrl and cpprb.

cpprb is among what the suite is run with, up to Python 3.12, as it has no wheel for newer ones. torchrl is not: what is
compiled in a release fits the torch that it was made with and no other, 0.14.1 not the one in constraints.txt. Where
both fit, the trees are compared too.
"""

from typing import Any

import numpy as np
import pytest

from appo.algorithms.replay.storage import ReplayStorage
from appo.algorithms.replay.sum_tree import SumTree, padded
from tests.unit.replay.replays import PLAN, replay_of

LEAVES = 70_000  # two levels of sums above them
CHI_SQUARE_999 = 148.2  # quantile of 99.9 % with 99 degrees of freedom


def torchrl_tree(size: int) -> Any:
    compiled = pytest.importorskip("torchrl._torchrl", exc_type=ImportError)
    return compiled.SumSegmentTreeFp64(size)


def test_the_tree_finds_what_that_of_torchrl_finds() -> None:
    random, theirs = np.random.default_rng(0), torchrl_tree(LEAVES)
    ours = SumTree(np.zeros(padded(LEAVES)))
    for _ in range(30):
        index = random.choice(LEAVES, 512, replace=False)
        value = random.random(512) * (random.random(512) < 0.9)
        ours.set(index, value)
        theirs.update(index, value)
        total = theirs.query(0, LEAVES)
        assert ours.total == pytest.approx(total, rel=1e-12)
        target = random.random(1000) * total
        expected = np.asarray(theirs.scan_lower_bound(target))
        found = ours.find(target)
        # The order of additions differs, so a target within a rounding of a border may fall to its other side.
        assert (found != expected).sum() <= 1
        assert ours.levels[0][found] == pytest.approx(np.asarray(theirs[expected]), abs=1.0)


def errors_of(storage: ReplayStorage) -> np.ndarray:
    """Absolute errors that the leaves hold, one a step that can be drawn."""
    leaf = storage._leaf[storage._leaf > 0]
    return leaf ** (1 / PLAN.alpha) - PLAN.priority_epsilon


def filled() -> ReplayStorage:
    replay = replay_of(replay_ratio=0.0)
    for number in range(9):
        replay.hand_over(number % 4)
        replay.fill()
    return replay.source.storage


def test_probabilities_and_weights_are_those_of_cpprb() -> None:
    """Weights there are divided by the largest of the buffer, here by that of the batch: they differ by one factor."""
    cpprb = pytest.importorskip("cpprb")
    storage, random = filled(), np.random.default_rng(1)
    errors = errors_of(storage)
    theirs = cpprb.PrioritizedReplayBuffer(
        len(errors), {"number": {"dtype": np.int64}}, alpha=PLAN.alpha, eps=PLAN.priority_epsilon
    )
    theirs.add(number=np.arange(len(errors)), priorities=errors)
    leaf = storage._leaf[storage._leaf > 0]
    probability = leaf / leaf.sum()
    seen = np.zeros(len(errors))
    for _ in range(200):
        batch = theirs.sample(256, beta=0.4)
        factor = batch["weights"] * probability[batch["indexes"]] ** 0.4
        assert factor == pytest.approx(np.full(256, factor[0]), rel=1e-4)
        seen += np.bincount(batch["indexes"], minlength=len(errors))
    drawn = np.zeros(storage._leaf.size)
    for _ in range(200):
        samples = storage.draw(256, random)
        drawn += np.bincount(samples.column * storage.leaves + samples.step, minlength=drawn.size)
    drawn = drawn[storage._leaf.ravel() > 0]
    expected = probability * seen.sum()
    # In a hundred groups of steps; both draw one from each of equal parts, which is more even than chance.
    for counts in (seen, drawn):
        groups = np.array_split(np.arange(len(errors)), 100)
        sums = np.array([(counts[g].sum(), expected[g].sum()) for g in groups])
        assert ((sums[:, 0] - sums[:, 1]) ** 2 / sums[:, 1]).sum() < CHI_SQUARE_999


def test_steps_are_drawn_in_proportion_after_updates() -> None:
    """Pearson's test for independent draws of single steps, each by a batch of its own, from leaves that changed."""
    storage, random = filled(), np.random.default_rng(2)
    for _ in range(20):
        samples = storage.draw(16, random)
        storage.update(samples, random.random(16) ** 3 * 5)
    leaf = storage._leaf.ravel()
    place = np.argsort(leaf)[-100:]
    draws = [storage.draw(1, random) for _ in range(6000)]
    drawn = np.array([int(one.column[0] * storage.leaves + one.step[0]) for one in draws])
    seen = np.bincount(drawn, minlength=leaf.size)[place]
    others = len(drawn) - seen.sum()
    expected = leaf[place] / leaf.sum() * len(drawn)
    statistic = ((seen - expected) ** 2 / expected).sum() + (others - (rest := len(drawn) - expected.sum())) ** 2 / rest
    assert statistic < 149.4  # the quantile of 99.9 % with 100 degrees of freedom
