"""Actions in units of [-1, 1]: what is stored, and what the environment gets."""

import numpy as np
import pytest
from gymnasium import spaces

from appo.envs.config import EnvConfig
from appo.envs.conversion import ActionConverter
from appo.envs.make import make_group
from appo.envs.masks import random_action
from appo.envs.spaces import ActionForm, require_spec, spec_of
from appo.envs.spec import MASK_KEY, ActionPart, ActionSpec
from appo.utils.errors import SpaceMismatch, UsageError
from tests.reaching import ENV, Reach

SEEN = spaces.Box(-1.0, 1.0, (1,))
SCALED, SQUASHED = ActionForm(scaled=True), ActionForm(scaled=True, squashed=True)
BINS = ActionForm(scaled=True, bins=5)
LARGEST = np.finfo(np.float32).max


def box(low: list[float], high: list[float]) -> spaces.Box:
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32)


MANY = box([10, -0.01, 0, -np.inf, -np.inf, -LARGEST], [30, 0.01, np.inf, 5, np.inf, LARGEST])


def taken(space: spaces.Space, form: ActionForm, stored: list[float]) -> list[float]:
    (row,) = ActionConverter(space, spec_of(SEEN, space, form=form).action).rows(np.array([stored], np.float32))
    assert row in space
    return [float(value) for value in row]


def test_finite_bounds_are_mapped_single_ones_shifted_and_others_left() -> None:
    assert taken(MANY, SCALED, [-1, -1, -1, 1, 7, 7]) == pytest.approx([10, -0.01, 0, 5, 7, 7])
    assert taken(MANY, SCALED, [0, 0, 0, 0, 0, 0]) == pytest.approx([20, 0, 1, 4, 0, 0])
    assert taken(MANY, SCALED, [1, 1, 9, -9, -9, -9]) == pytest.approx([30, 0.01, 10, -5, -9, -9])
    assert taken(MANY, SCALED, [9, -9, -9, 9, 0, 0]) == pytest.approx([30, -0.01, 0, 5, 0, 0])  # cut at the bounds
    assert taken(MANY, ActionForm(), [9, 9, -9, 9, 9, 9]) == pytest.approx([10, 0.01, 0, 5, 9, 9])


def test_squashed_numbers_are_stored_before_tanh() -> None:
    action = spec_of(SEEN, MANY, form=SQUASHED).action
    assert action.parts == (ActionPart("tanh_gaussian", 2), ActionPart("gaussian", 4))
    assert taken(MANY, SQUASHED, [0.5, -9, 0, 0, 0, 0]) == pytest.approx([20 + 10 * np.tanh(0.5), -0.01, 1, 4, 0, 0])


def test_bounds_of_one_change_nothing() -> None:
    space, rng = box([-1, -1], [1, 1]), np.random.default_rng(0)
    stored = rng.normal(size=(100, 2)).astype(np.float32)
    scaled, plain = ActionConverter(space, spec_of(SEEN, space, form=SCALED).action), ActionConverter(space)
    assert np.array_equal(scaled.batch(stored), plain.batch(stored))


def test_choices_beside_numbers_stay() -> None:
    space = spaces.Tuple((spaces.Discrete(3, start=7), box([10], [30]), spaces.MultiBinary(2)))
    action = spec_of(SEEN, space, form=SCALED).action
    ((choice, number, bits),) = ActionConverter(space, action).rows(np.array([[2, 0.5, 1, 0]], np.float32))
    assert (choice, number.tolist(), bits.tolist()) == (9, [25.0], [1, 0])


def test_numbers_and_choices_nested_at_will() -> None:
    far, half, pick = box([10], [30]), box([0, -0.01], [np.inf, 0.01]), spaces.Discrete(3, start=7)
    space = spaces.Dict(
        {"a": far, "b": spaces.Tuple((pick, spaces.Dict({"c": half}))), "d": spaces.MultiDiscrete([2, 4])}
    )
    stored = np.array([[0.5, 1, 2.0, -1.0, 0, 3], [-1.0, 2, -1.0, 0.5, 1, 0]], np.float32)
    converter = ActionConverter(space, spec_of(SEEN, space, form=SCALED).action)
    for row, expected in zip(converter.rows(stored), ([25, 8, 3, -0.01, 0, 3], [10, 9, 0, 0.005, 1, 0]), strict=True):
        assert row in space
        found = [*row["a"], row["b"][0], *row["b"][1]["c"], *row["d"]]
        assert [float(value) for value in found] == pytest.approx(expected)
    squashed = spec_of(SEEN, space, form=SQUASHED).action
    assert [part.kind for part in squashed.parts] == [
        "tanh_gaussian", "categorical", "gaussian", "tanh_gaussian", "categorical", "categorical"
    ]  # fmt: skip
    units = ActionConverter(space, squashed).rows(stored)[0]["b"][1]["c"]
    assert units.tolist() == pytest.approx([3.0, 0.01 * np.tanh(-1.0)])


@pytest.mark.parametrize("form", [SCALED, SQUASHED])
def test_random_actions_fill_the_bounds(form: ActionForm) -> None:
    space, random = box([10], [30]), np.random.default_rng(0)
    action: ActionSpec = spec_of(SEEN, space, form=form).action
    drawn = ActionConverter(space, action).batch(
        np.concatenate([random_action(action, None, random) for _ in range(2000)])
    )
    assert drawn.min() < 10.2
    assert drawn.max() > 29.8
    assert abs(drawn.mean() - 20) < 0.5


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("scaling", "units"), [("auto", [0.5, 0.4, 2.0]), ("off", [25.0, 0.004, 3.0])])
def test_environments_are_stepped_in_their_units(nested: bool, scaling: str, units: list[float]) -> None:
    config = EnvConfig(ENV, env_kwargs={"numbers": [0, 1, 2], "nested": nested}, action_scaling=scaling)
    group = make_group(config, 1)
    converter = ActionConverter(Reach([0, 1, 2], nested).action_space, group.spec.action)
    (action,) = converter.rows(np.array([units], np.float32))
    reward = Reach([0, 1, 2], nested).step(action)[1]
    assert reward == pytest.approx(1.0, abs=1e-6)
    assert (group.spec.action.scale is None) == (scaling == "off")
    group.close()


@pytest.mark.parametrize("scaled", [True, False])
def test_bins_are_numbers_from_bound_to_bound_whatever_the_scaling(scaled: bool) -> None:
    space = spaces.Dict(
        {
            "a": box([10, -0.01], [30, 0.01]),
            "b": spaces.Tuple((spaces.Discrete(3, start=7), spaces.MultiBinary(2), box([2], [2]))),
        }
    )
    action = spec_of(SEEN, space, form=ActionForm(scaled=scaled, bins=5)).action
    bins = ActionPart("bins", 5)
    assert action.parts == (bins, bins, ActionPart("categorical", 3), ActionPart("bernoulli", 2), bins)
    assert (action.dtype, action.num_values, action.num_logits) == ("int32", 6, 20)
    stored = np.array([[choice, 4 - choice, 1, 1, 0, choice] for choice in range(5)], np.int32)
    rows = ActionConverter(space, action).rows(stored)
    assert all(row in space for row in rows)
    assert [row["a"].tolist() for row in rows] == [
        pytest.approx([10 + 5 * choice, 0.01 - 0.005 * choice]) for choice in range(5)
    ]
    assert [(row["b"][0], row["b"][1].tolist(), row["b"][2].tolist()) for row in rows] == [(8, [1, 0], [2.0])] * 5


def test_bins_reach_both_bounds_exactly() -> None:
    low, high = np.random.default_rng(0).normal(0, 100, (2, 200)).astype(np.float32)
    space = box(np.minimum(low, high).tolist(), np.maximum(low, high).tolist())
    for count in (2, 3, 7, 11):
        converter = ActionConverter(space, spec_of(SEEN, space, form=ActionForm(bins=count)).action)
        (least, most) = converter.rows(np.array([[0] * 200, [count - 1] * 200], np.int32))
        assert np.array_equal(least, space.low)
        assert np.array_equal(most, space.high)


@pytest.mark.parametrize("ends", [([0], [np.inf]), ([-np.inf], [0]), ([-1, -LARGEST], [1, LARGEST])])
def test_a_number_without_two_bounds_has_no_bins(ends: tuple[list[float], list[float]]) -> None:
    space = spaces.Tuple((spaces.Discrete(2), box(*ends)))
    with pytest.raises(UsageError, match=r"--continuous_as_bins=5 needs numbers with two bounds, .* Box"):
        spec_of(SEEN, space, form=BINS)


def test_masks_are_of_choices_and_not_of_bins() -> None:
    shown = spaces.Dict({"obs": SEEN, MASK_KEY: spaces.MultiBinary(3)})
    space = spaces.Tuple((box([0], [1]), spaces.Discrete(3), box([0], [1])))
    spec = spec_of(shown, space, form=BINS)
    assert spec.action_mask == 3
    random = np.random.default_rng(0)
    drawn = np.concatenate([random_action(spec.action, np.array([0, 1, 0], bool), random) for _ in range(200)])
    assert [sorted(set(column)) for column in drawn.T.tolist()] == [[0, 1, 2, 3, 4], [1], [0, 1, 2, 3, 4]]
    assert spec_of(SEEN, space, mask_in_info=True, form=BINS).observations[MASK_KEY].shape == (3,)


def test_environments_that_are_made_later_have_the_same_bins() -> None:
    space = box([10], [30])
    spec = spec_of(SEEN, space, form=BINS)
    require_spec("env", spec, SEEN, space)
    with pytest.raises(SpaceMismatch, match="its actions have another space"):
        require_spec("env", spec, SEEN, box([10], [31]))


@pytest.mark.parametrize("scaling", ["auto", "off"])
def test_environments_are_stepped_with_the_numbers_of_bins(scaling: str) -> None:
    arguments = {"numbers": [0, 1], "nested": True, "chooses": True}
    group = make_group(EnvConfig(ENV, env_kwargs=arguments, action_scaling=scaling, continuous_as_bins=21), 1)
    converter = ActionConverter(Reach(**arguments).action_space, group.spec.action)
    (action,) = converter.rows(np.array([[2, 15, 14]], np.int32))  # the right choice, 25, and 0.004 of [-0.01, 0.01]
    assert Reach(**arguments).step(action)[1] == pytest.approx(1.0, abs=1e-6)
    group.close()
