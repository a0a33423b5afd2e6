"""Whole episodes: put together from the steps of rows, and described by spaces from which the same spec follows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from appo.algorithms.datasets.assembler import PIECES, EpisodeAssembler, Steps
from appo.algorithms.datasets.episodes import (
    SQUASHED_BOUND,
    Episode,
    checked,
    episode_of,
    spaces_of,
    stored_actions,
)
from appo.algorithms.datasets.reader import open_dataset
from appo.algorithms.datasets.space_json import space_from_json, space_to_json
from appo.envs.conversion import ActionConverter
from appo.envs.spaces import ActionForm, spec_of
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from tests.unit.datasets.data import SPEC, assert_same, episode, steps_of, written

BOUNDED = ActionSpec((ActionPart("gaussian", 2),), (-1.0, -0.5), (1.0, float("inf")))
MIXED = ActionSpec(
    (ActionPart("categorical", 4), ActionPart("gaussian", 2), ActionPart("bernoulli", 3)), (-1.0, 0.0), (1.0, 2.0)
)
VECTOR = {"obs": ObservationSpec((3,), "float32")}
SPECS = {
    "choice": EnvSpec(VECTOR, ActionSpec((ActionPart("categorical", 5),))),
    "choices": EnvSpec(VECTOR, ActionSpec((ActionPart("categorical", 2), ActionPart("categorical", 3)))),
    "bits": EnvSpec(VECTOR, ActionSpec((ActionPart("bernoulli", 4),))),
    "bounded": EnvSpec(VECTOR, BOUNDED),
    "mixed": EnvSpec(VECTOR, MIXED),
    "image": EnvSpec({"obs": ObservationSpec((2, 3, 1), "uint8")}, ActionSpec((ActionPart("categorical", 2),))),
    "several": EnvSpec(
        {"b.c": ObservationSpec((), "float32"), "a": ObservationSpec((2,), "uint8", high=1)},
        ActionSpec((ActionPart("categorical", 2),)),
    ),
    "masked": EnvSpec(
        {"obs": ObservationSpec((1,), "float32"), "action_mask": ObservationSpec((2,), "uint8")},
        ActionSpec((ActionPart("categorical", 2),)),
        action_mask=2,
    ),
}


def plain(one: Episode) -> Episode:
    """An episode with what `steps_of` tells of it."""
    return Episode(one.obs, one.action, one.reward, one.terminated, {"log_prob": one.infos["log_prob"]})


@pytest.mark.parametrize("length", [1, 2, 3, 8, 24])
def test_episodes_are_whole_wherever_chunks_end(length: int) -> None:
    rows = [
        [episode(1, 5), episode(2, 1, False), episode(3, 9), episode(4, 4), 30],
        [2, episode(5, 3, False), episode(6, 12), 40],
    ]
    assembler = EpisodeAssembler(2)
    found = [one for steps in steps_of(rows, length) for one in assembler.add(steps)]
    by_number = {int(one.obs["obs"][0, 0]): one for one in found}
    assert sorted(by_number) == [1, 2, 3, 4, 5, 6]
    assert len(found) == 6
    for row in rows:
        for one in row:
            if isinstance(one, Episode):
                assert_same(by_number[int(one.obs["obs"][0, 0])], plain(one))
    assembler.close()
    assert (assembler.dropped_episodes, assembler.dropped_steps) == (0, 0)


def test_what_has_no_end_or_no_beginning_is_dropped_and_counted() -> None:
    cut = episode(1, 6)
    (steps,) = steps_of([[cut, episode(2, 4), 3]], 12)
    failed = Steps(
        steps.obs,
        np.where(np.arange(13)[:, None] == 4, True, steps.first),  # made again after its third step
        np.where(np.arange(12)[:, None] == 3, False, steps.valid),
        *(getattr(steps, name) for name in ("reward", "terminated", "truncated", "action", "infos")),
    )
    assembler = EpisodeAssembler(1)
    found = list(assembler.add(failed))
    assert [len(one) for one in found] == [2, 4]  # what was left of the first one, begun anew, and the second
    assert (assembler.dropped_episodes, assembler.dropped_steps) == (1, 3)

    late = EpisodeAssembler(1)
    second = steps_of([[cut, episode(2, 4), 3]], 4)[1:]
    assert [len(one) for one in [e for steps in second for e in late.add(steps)]] == [4]
    late.close()
    assert (late.dropped_episodes, late.dropped_steps) == (0, 2)  # whose beginning was in the chunk not seen


@pytest.mark.parametrize("length", [1, 4])
def test_open_episodes_hold_the_memory_of_their_own_steps(length: int) -> None:
    """However many rows there are beside one whose episode goes on; few arrays, however long it is."""
    rows: list[list[Episode | int]] = [[long := episode(1, 270), 30], *([episode(n, 3) for n in range(2, 71)],) * 15]
    assembler, found = EpisodeAssembler(len(rows)), list[Episode]()
    for steps in steps_of(rows, length):
        found += assembler.add(steps)
        assert held_bytes(assembler) == assembler.held_bytes
        assert len(assembler._pieces[0]) < 2 * PIECES
    (whole,) = [one for one in found if len(one) == 270]
    assert_same(whole, plain(long))


def held_bytes(assembler: EpisodeAssembler) -> int:
    arrays = [array for row in assembler._pieces for piece in row for array in piece.values()]
    whole = [array if array.base is None else array.base for array in arrays]
    return sum({id(array): array.nbytes for array in whole}.values())


def test_open_episodes_are_dropped_at_the_end() -> None:
    (steps,) = steps_of([[episode(1, 2), episode(2, 9)]], 8)
    assembler = EpisodeAssembler(1)
    assert [len(one) for one in assembler.add(steps)] == [2]
    assembler.close()
    assert (assembler.dropped_episodes, assembler.dropped_steps) == (1, 5)


@pytest.mark.parametrize("name", SPECS)
def test_the_same_spec_follows_from_what_is_stored(name: str) -> None:
    spec = SPECS[name]
    texts = [space_to_json(space) for space in spaces_of(spec)]
    found = spec_of(*map(space_from_json, texts))
    assert found == spec
    assert list(found.observations) == list(spec.observations)  # networks read them in this order
    assert tuple(map(space_from_json, texts)) == spaces_of(spec)


@pytest.mark.parametrize("name", SPECS)
def test_actions_come_back_as_they_were_stored(name: str) -> None:
    spec, random = SPECS[name].action, np.random.default_rng(0)
    columns = []
    for part in spec.parts:
        choices = {"categorical": part.size, "bernoulli": 2}.get(part.kind)
        shape = (6, part.num_values)
        columns.append(random.uniform(0.0, 0.9, shape) if choices is None else random.integers(choices, size=shape))
    stored = np.concatenate(columns, axis=1).astype(spec.dtype)
    space = spaces_of(SPECS[name])[1]
    given = ActionConverter(space, spec).batch(stored)
    for t in range(6):
        one = tuple(part[t] for part in given) if isinstance(given, tuple) else given[t]
        assert space.contains(one)
    back = stored_actions(space, given, spec)
    assert back.dtype == stored.dtype
    np.testing.assert_array_equal(back, stored)


def test_continuous_actions_are_given_within_their_bounds() -> None:
    given = ActionConverter(spaces_of(SPECS["bounded"])[1], BOUNDED).batch(np.array([[3.0, -2.0]], np.float32))
    np.testing.assert_array_equal(given, np.array([[1.0, -0.5]], np.float32))


def test_actions_of_other_spaces_are_stored_from_zero_on() -> None:
    space = spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiDiscrete([[2], [4]], start=[[1], [0]])))
    spec = spec_of(spaces.Box(0, 1, (1,)), space).action
    values = (np.array([-1, 1]), np.array([[[1], [3]], [[2], [0]]]))
    np.testing.assert_array_equal(stored_actions(space, values, spec), [[0, 0, 3], [2, 1, 0]])
    with pytest.raises(ValueError, match="an action is none of its space"):
        stored_actions(space, (np.array([2, 0]), values[1]), spec)


def test_spaces_are_read_as_minari_writes_them() -> None:
    from minari.serialization import deserialize_space, serialize_space

    for spec in SPECS.values():
        for space in spaces_of(spec):
            assert deserialize_space(space_to_json(space)) == space
            assert space_from_json(serialize_space(space)) == space


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"type": "Text", "max_length": 3}', "a space of type Text cannot be learned from"),
        ('{"type": "os.system"}', "a space of type os.system cannot be learned from"),
    ],
)
def test_other_spaces_are_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        space_from_json(text)


def raw_of(one: Episode) -> dict[str, object]:
    """An episode under Minari's names."""
    ended = np.arange(len(one)) == len(one) - 1
    return {
        "observations": one.obs["obs"],
        "actions": one.action[:, 0],
        "rewards": one.reward,
        "terminations": ended & one.terminated,
        "truncations": ended & (not one.terminated),
        "infos": one.infos,
    }


def test_an_episode_is_made_of_arrays() -> None:
    for one in (episode(3, 4), episode(2, 1, False)):
        assert_same(episode_of("x", spaces_of(SPEC), SPEC, raw_of(one)), one)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rewards": np.zeros(3)}, "expected shape|its arrays have different lengths"),
        ({"rewards": np.array([0, np.nan, 0, 0])}, "it holds what is not finite"),
        ({"actions": np.array([0, 1, 2, 3])}, "an action is none of its space"),
        ({"actions": np.array([0, 1, 0.5, 0])}, "an action is none of its space"),
        ({"actions": np.zeros(3, np.int64)}, "its arrays have different lengths"),
        ({"terminations": np.array([False, True, False, True])}, "it goes on after its end"),
        ({"infos": {"log_prob": np.zeros(2)}}, "its arrays have different lengths"),
        ({"infos": {"log_prob": np.array([0, np.nan, 0, 0])}}, "it holds what is not finite"),
        ({"infos": {"logits": np.full((4, 3), np.inf)}}, "it holds what is not finite"),
        ({"infos": {"sampled_action": np.array([[0], [3], [0], [0]])}}, "an action is none of its space"),
        ({"infos": {"sampled_action": np.array([[0], [-1], [0], [0]])}}, "an action is none of its space"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, object], error: str) -> None:
    with pytest.raises(Exception, match=error):
        episode_of("x", spaces_of(SPEC), SPEC, raw_of(episode(1, 4)) | changes)


def test_infos_that_are_called_like_what_a_policy_says_and_are_something_else_are_left_out() -> None:
    one = episode(0, 3)
    infos = {"logits": np.zeros((3, 7)), "log_prob": np.full((3, 2), np.nan), "value": np.ones(3), "mine": np.ones(3)}
    made = episode_of("x", spaces_of(SPEC), SPEC, raw_of(one) | {"infos": infos})
    assert made.infos.keys() == {"value", "mine"}
    made = episode_of("x", spaces_of(SPEC), SPEC, raw_of(one) | {"infos": {"log_prob": np.array(["a", "b", "c"])}})
    assert not made.infos


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"obs": {"obs": np.zeros((5, 9), np.float32)}}, r"its observations obs are \[5, 9\] float32 and not \[5, "),
        ({"obs": {}}, "its observations are  and not obs"),
        ({"action": np.full((4, 1), 3, np.int32)}, "an action is none of its space"),
        ({"action": np.zeros((4, 2), np.int32)}, "its actions are"),
        ({"action": np.full((4, 1), "a")}, "its actions are"),
        ({"reward": np.full(4, np.nan)}, "it holds what is not finite"),
        ({"terminated": None}, "terminated is neither true nor false"),
        ({"infos": {"mine": np.zeros(3)}}, "its arrays have different lengths: 4 rewards and 3 mine"),
    ],
)
def test_a_changed_episode_that_does_not_fit_is_refused(changes: dict[str, Any], error: str) -> None:
    one = episode(1, 4)
    with pytest.raises(ValueError, match=error):
        checked(replace(one, **changes), SPEC)
    assert_same(checked(replace(one, reward=one.reward.astype(np.float64)), SPEC), one)


def test_json_has_the_bounds_that_numbers_can_have() -> None:
    text = space_to_json(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    assert json.loads(text)["low"] == [-np.inf, -np.inf]


# Actions of policies that act in other units than the environment.


def box(form: ActionForm) -> EnvSpec:
    """Numbers between -2 and 6, of 0 and more, and of any size; and a choice."""
    numbers = spaces.Box(np.array([-2, 0, -np.inf], np.float32), np.array([6, np.inf, np.inf], np.float32))
    return spec_of(spaces.Box(0, 1, (3,)), spaces.Tuple((numbers, spaces.Discrete(3))), form=form)


FORMS = [ActionForm(), ActionForm(scaled=True), ActionForm(scaled=True, squashed=True)]


@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_describes_actions_in_the_units_of_the_environment(form: ActionForm) -> None:
    space = spaces_of(box(form))[1]
    low, high = (np.concatenate([getattr(one, end) for one in space.spaces[:-1]]) for end in ("low", "high"))
    np.testing.assert_array_equal(low, [-2, 0, -np.inf])
    np.testing.assert_array_equal(high, [6, np.inf, np.inf])
    assert spec_of(spaces.Box(0, 1, (3,)), space, form=form).action == box(form).action


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (FORMS[0], [[-2.0, 0.0, 7.0, 1.0], [6.0, 3.0, -7.0, 2.0]]),
        (FORMS[1], [[-2.0, 0.0, 7.0, 1.0], [6.0, 4.0, -7.0, 2.0]]),
        (FORMS[2], [[2 - 4 * np.tanh(3), 0.0, 7.0, 1.0], [2 + 4 * np.tanh(9), 4.0, -7.0, 2.0]]),
    ],
)
def test_stored_actions_are_given_in_the_units_of_the_environment(
    form: ActionForm, expected: list[list[float]]
) -> None:
    spec = box(form)
    stored = np.array([[-3.0, -2.0, 7.0, 1.0], [9.0, 3.0, -7.0, 2.0]], np.float32)
    space = spaces_of(spec)[1]
    converter = ActionConverter(space, spec.action)
    given = converter.batch(stored)
    columns = np.concatenate([part.reshape(2, -1) for part in given], axis=1)
    np.testing.assert_allclose(columns, expected, rtol=1e-6)
    back = converter.batch(stored_actions(space, given, spec.action))
    again = np.concatenate([part.reshape(2, -1) for part in back], axis=1)
    limit = 4 * (1 - np.tanh(SQUASHED_BOUND)) * form.squashed + 1e-6
    np.testing.assert_allclose(again, np.clip(columns, [-2, 0, -np.inf, 0], [6, np.inf, np.inf, 2]), atol=limit)


@pytest.mark.parametrize("form", FORMS)
def test_a_number_with_a_single_value_is_written_and_read(tmp_path: Path, form: ActionForm) -> None:
    numbers = spaces.Box(np.array([-2, 3], np.float32), np.array([6, 3], np.float32))
    spec = spec_of(spaces.Box(0, 1, (3,)), numbers, form=form)
    given = np.array([[4.0, 3.0], [-1.0, 3.0]], np.float32)
    infos = {"log_prob": np.zeros(2, np.float32)}
    drawn = stored_actions(numbers, given, spec.action)
    one = Episode({"obs": np.zeros((3, 3), np.float32)}, drawn, np.ones(2, np.float32), True, infos)
    written(tmp_path / "d", [one], spec)
    (same,) = open_dataset([str(tmp_path / "d")], form=form)
    assert_same(same, one)
    for other in FORMS:
        (found,) = open_dataset([str(tmp_path / "d")], form=other)
        converter = ActionConverter(numbers, spec_of(spaces.Box(0, 1, (3,)), numbers, form=other).action)
        np.testing.assert_allclose(converter.batch(found.action), given, rtol=1e-6)


def test_probabilities_of_another_form_are_left_out(tmp_path: Path) -> None:
    spec, infos = box(FORMS[1]), {"log_prob": np.array([-1.5], np.float32), "value": np.ones(1, np.float32)}
    action = np.array([[2.5, -0.5, 9.0, 1.0]], np.float32)  # the first is drawn beyond its bound
    one = Episode({"obs": np.zeros((2, 3), np.float32)}, action, np.ones(1, np.float32), True, infos)
    written(tmp_path / "d", [one], spec)
    same = open_dataset([str(tmp_path / "d")], form=FORMS[1])
    assert same.spec.action == spec.action
    assert_same(same[0], one)
    (other,) = open_dataset([str(tmp_path / "d")], form=FORMS[0])
    np.testing.assert_allclose(other.action, [[6.0, 0.5, 9.0, 1.0]])
    assert other.infos.keys() == {"value"}
