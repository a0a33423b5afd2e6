import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appo.algorithms.population.exploit_explore import (
    RESET_PROBABILITY,
    Selection,
    Tuned,
    mutate,
    mutate_shaping,
    rank_policies,
)

RULE = Selection(replace_fraction=0.3, relative_gap=0.1, absolute_gap=1e-6)
SCORE = st.floats(allow_nan=True, allow_infinity=True)


def random_of(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("fraction", "policies", "expected"),
    [
        (0.3, 2, 1), (0.3, 3, 1), (0.3, 4, 2), (0.3, 8, 3), (0.3, 10, 3), (0.3, 11, 4), (0.5, 5, 2), (1.0, 7, 3),
        (0.0, 8, 0), (0.3, 1, 0), (0.7, 10, 5), (0.1, 30, 3),
    ],
)  # fmt: skip
def test_how_many_are_replaced(fraction: float, policies: int, expected: int) -> None:
    assert Selection(fraction, 0, 0).num_replaced(policies) == expected


@given(st.floats(0, 1), st.integers(1, 64))
def test_best_and_worst_never_overlap(fraction: float, policies: int) -> None:
    rule, objectives = Selection(fraction, 0, 0), {p: float(p % 5) for p in range(policies)}
    best, worst = set(rule.best(objectives)), set(rule.worst(objectives))
    assert not best & worst
    assert len(best) == len(worst) == rule.num_replaced(policies)


@given(st.lists(SCORE, min_size=1, max_size=12))
def test_what_is_not_finite_ranks_worst(scores: list[float]) -> None:
    order = rank_policies(dict(enumerate(scores)))
    assert sorted(order) == list(range(len(scores)))
    finite = [scores[p] for p in order if math.isfinite(scores[p])]
    assert finite == sorted(finite, reverse=True)
    assert all(math.isfinite(scores[p]) for p in order[: len(finite)])


def test_equals_keep_their_order() -> None:
    assert rank_policies({0: 1.0, 1: 2.0, 2: 1.0, 3: math.nan, 4: -math.inf}) == [1, 0, 2, 3, 4]


@pytest.mark.parametrize(
    ("best", "worst", "expected"),
    [
        (100.0, 91.0, False), (100.0, 89.0, True),  # 10 % of the larger
        (-91.0, -100.0, False), (-89.0, -100.0, True),  # the same gain below zero
        (0.0, -5.0, True), (5.0, 0.0, True), (0.0, 0.0, False),
        (1.0, -1.0, True), (5e-7, 0.0, False), (2e-6, 0.0, True),
        (math.nan, 1.0, False), (1.0, math.nan, True), (math.nan, math.nan, False), (-1e9, math.nan, True),
        (math.inf, 1.0, False), (1.0, -math.inf, True), (1e308, -1e308, True),
    ],
)  # fmt: skip
def test_when_a_copy_is_worth_it(best: float, worst: float, expected: bool) -> None:
    assert RULE.is_worth_it(best, worst) is expected


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_the_sign_of_rewards_decides_nothing(one: float, other: float) -> None:
    high, low = max(one, other), min(one, other)
    assert RULE.is_worth_it(high, low) == RULE.is_worth_it(-low, -high)


@given(st.dictionaries(st.integers(0, 9), SCORE, min_size=1, max_size=10), st.integers(0, 2**32))
def test_only_the_worst_copy_and_only_the_best_are_copied(objectives: dict[int, float], seed: int) -> None:
    for policy, objective in objectives.items():
        source = RULE.source(policy, objectives, random_of(seed))
        if source != policy:
            assert policy in RULE.worst(objectives)
            assert source in RULE.best(objectives)
            assert RULE.is_worth_it(objectives[source], objective)


def test_every_one_of_the_best_is_copied_by_chance() -> None:
    objectives = {0: 10.0, 1: 9.0, 2: 1.0, 3: 0.0}
    sources = {RULE.source(3, objectives, random_of(seed)) for seed in range(20)}
    assert sources == {0, 1}
    assert RULE.source(0, objectives, random_of()) == 0


VALUES = {"rate": 1e-3, "clip": 0.1, "off": 0.0, "gamma": 0.99}
TUNED = {"rate": Tuned(1e-3, 1e-8, 1.0), "clip": Tuned(0.1, 0.05, 0.12), "off": Tuned(0.0, 1e-3, 1.0)}


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_mutations_stay_within_their_limits(seed: int, rate: float) -> None:
    values, random = dict(VALUES), random_of(seed)
    for _ in range(20):
        values = mutate(values, TUNED, rate, random)
        assert 1e-8 <= values["rate"] <= 1.0
        assert 0.05 <= values["clip"] <= 0.12
        assert values["off"] == 0.0
        assert values["gamma"] == 0.99


def test_mutations_change_what_they_say_as_often_as_they_say() -> None:
    random, one = random_of(1), Tuned(1.0, 0.0, 100.0)
    changed = Counter()
    for _ in range(10_000):
        value = one.mutate(2.0, 0.15, random)
        kind = "same" if value == 2.0 else "reset" if value == 1.0 else "up" if value > 2.0 else "down"
        assert kind in ("same", "reset") or 1.01 <= max(value / 2.0, 2.0 / value) <= 1.5
        changed[kind] += 1
    assert changed["same"] == pytest.approx(8500, abs=150)
    assert changed["reset"] == pytest.approx(1500 * RESET_PROBABILITY, abs=35)
    assert changed["up"] == pytest.approx(changed["down"], abs=120)
    assert mutate(VALUES, TUNED, 0.0, random) == VALUES


@given(st.integers(0, 2**32))
def test_batches_are_whole_rollouts(seed: int) -> None:
    one, random, size = Tuned(256, 32, 384, unit=32), random_of(seed), 256
    for _ in range(30):
        size = one.mutate(size, 1.0, random)
        assert isinstance(size, int)
        assert size % 32 == 0
        assert 32 <= size <= 384


def test_small_batches_grow_and_shrink_alike() -> None:
    one, random = Tuned(64, 32, 384, unit=32), random_of(2)
    assert {one.mutate(64, 1.0, random) for _ in range(50)} == {32, 96}
    grown = Counter(one.mutate(160, 1.0, random) for _ in range(10_000))
    assert grown.keys() == {64, 128, 192}
    assert grown[64] == pytest.approx(10_000 * RESET_PROBABILITY, abs=100)
    assert grown[128] == pytest.approx(grown[192], abs=250)


def test_a_value_that_is_off_stays_off_and_none_goes_off_by_chance() -> None:
    random = random_of(3)
    assert {Tuned(0.003, 1e-4, 1.0).mutate(0.0, 1.0, random) for _ in range(1000)} == {0.0}
    assert all(Tuned(0.0, 1e-4, 1.0).mutate(0.01, 1.0, random) for _ in range(1000))


SHAPING = {"delta": {"health": [1.0, -2.0], "ammo": 0}, "dies": True, "name": "x"}


@given(st.integers(0, 2**32))
def test_coefficients_of_rewards_keep_their_signs_and_their_form(seed: int) -> None:
    random, shaping = random_of(seed), SHAPING
    for _ in range(20):
        shaping = mutate_shaping(shaping, SHAPING, 0.5, random)
        (up, down), zero = shaping["delta"]["health"], shaping["delta"]["ammo"]
        assert 0.01 <= up <= 100
        assert -200 <= down <= -0.02
        assert zero == 0
        assert isinstance(shaping["dies"], bool)
        assert shaping["name"] == "x"
    assert mutate_shaping(SHAPING, SHAPING, 0.0, random) == SHAPING
