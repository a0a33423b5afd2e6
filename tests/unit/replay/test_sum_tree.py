import numpy as np
import pytest

from appo.algorithms.replay.sum_tree import CHILDREN, LARGEST_TOP, SumTree, padded

SEVERAL_LEVELS = LARGEST_TOP * CHILDREN + 1  # leaves of a tree with two levels of sums


def tree_of(leaves: np.ndarray) -> SumTree:
    memory = np.zeros(padded(len(leaves)))
    memory[: len(leaves)] = leaves
    return SumTree(memory)


def find_slowly(leaves: np.ndarray, target: float) -> int:
    """Walk over the leaves, as the definition says."""
    total = 0.0
    for index, leaf in enumerate(leaves.tolist()):
        total += leaf
        if total > target:
            return index
    return int(np.flatnonzero(leaves)[-1])


@pytest.mark.parametrize(
    ("leaves", "length", "levels"),
    [(1, 1, 1), (4096, 4096, 1), (4097, 4112, 2), (65_536, 65_536, 2), (65_537, 65_792, 3), (1 << 20, 1 << 20, 3)],
)
def test_levels_of_a_tree(leaves: int, length: int, levels: int) -> None:
    assert padded(leaves) == length
    assert len(SumTree(np.zeros(length)).levels) == levels


def test_a_number_of_leaves_that_is_not_padded_is_refused() -> None:
    with pytest.raises(AssertionError, match="4097 leaves"):
        SumTree(np.zeros(4097))


def test_golden_values() -> None:
    tree = tree_of(np.array([1.0, 0.0, 2.0, 4.0]))
    assert tree.total == 7.0
    targets = np.array([0.0, 0.5, 1.0, 2.5, 3.0, 6.5, 7.0, 99.0])
    assert tree.find(targets).tolist() == [0, 0, 2, 2, 3, 3, 3, 3]
    tree.set(np.array([0, 3, 3]), np.array([0.0, 9.0, 0.5]))  # the last value of a leaf counts
    assert tree.total == 2.5
    assert tree.find(np.array([0.0, 1.9, 2.0])).tolist() == [2, 2, 3]


@pytest.mark.parametrize("count", [1, 100, 4096, 5000, SEVERAL_LEVELS])
def test_leaves_are_found_as_by_walking(count: int) -> None:
    random = np.random.default_rng(count)
    leaves = random.integers(0, 5, count).astype(float)  # whole numbers: sums are exact in any order
    leaves[-1] = 3.0
    tree = tree_of(leaves)
    assert tree.total == leaves.sum()
    targets = random.integers(0, int(leaves.sum()), 20).astype(float)
    assert tree.find(targets).tolist() == [find_slowly(leaves, target) for target in targets.tolist()]


@pytest.mark.parametrize("count", [7, 5000, SEVERAL_LEVELS])
def test_updates_leave_the_tree_as_if_it_were_new(count: int) -> None:
    random = np.random.default_rng(count)
    tree, leaves = tree_of(np.zeros(count)), np.zeros(count)
    for _ in range(20):
        index = random.integers(0, count, 64)  # with duplicates, in the small one many
        value = random.random(64)
        tree.set(index, value)
        for one, new in zip(index.tolist(), value.tolist(), strict=True):
            leaves[one] = new
    for level, expected in zip(tree.levels, tree_of(leaves).levels, strict=True):
        assert np.array_equal(level, expected)


def test_leaves_of_zero_are_never_found() -> None:
    random = np.random.default_rng(3)
    leaves = np.where(random.random(70_000) < 0.001, random.random(70_000) * 1e-9, 0.0)
    leaves[12_345] = 1e9  # beside which the others are roundings
    tree = tree_of(leaves)
    targets = np.concatenate([random.random(5000) * tree.total, np.nextafter(tree.total, np.array([0.0, 2e9]))])
    assert (leaves[tree.find(targets)] > 0).all()


def test_nothing_can_be_drawn_from_zeros() -> None:
    with pytest.raises(ValueError, match="all leaves are 0"):
        tree_of(np.zeros(5000)).sample(4, np.random.default_rng(0))


def test_samples_are_drawn_in_proportion() -> None:
    """The statistic of Pearson's chi-square test stays below the quantile of 99.9 % for 99 degrees of freedom."""
    random = np.random.default_rng(7)
    leaves = np.zeros(70_000)
    place = random.choice(len(leaves), 100, replace=False)
    leaves[place] = random.random(100) ** 3 + 0.01
    tree = tree_of(leaves)
    # One at a time, as samples of one batch are stratified and so more even than independent ones.
    drawn = tree.find(random.random(20_000) * tree.total)
    expected = leaves[place] / leaves.sum() * len(drawn)
    seen = np.bincount(drawn, minlength=len(leaves))[place]
    assert seen.sum() == len(drawn)
    assert ((seen - expected) ** 2 / expected).sum() < 148.2


def test_a_batch_has_one_sample_of_each_part() -> None:
    tree, random = tree_of(np.ones(5000)), np.random.default_rng(1)
    drawn = tree.sample(500, random)
    assert (drawn // 10).tolist() == list(range(500))
