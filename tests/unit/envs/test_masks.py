from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from appo.envs.loop.python_loop import PythonLoop
from appo.envs.masks import ActionMasks, mask_of_batched, random_action
from appo.envs.spaces import MaskForm, spec_of
from appo.envs.spec import GroupEnv, ObservationSpec
from appo.envs.toys.spaces import Spaces, spaces_vector
from appo.envs.vectors.gym_vector import GymVector
from appo.utils.errors import EnvironmentFailure, SpaceMismatch, UsageError
from tests.unit.envs.rollouts import collect

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
TUPLE = spaces.Tuple([spaces.Discrete(3), BOX, spaces.MultiDiscrete([2, 4]), spaces.MultiBinary(2)])


PAIRS = spaces.MultiDiscrete([2, 2])


@pytest.mark.parametrize(
    ("mask", "space"),
    [
        ([1, 0, 1, 1], PAIRS),
        (np.array([1, 0, 1, 1], np.int8), PAIRS),
        (np.array([[True, False], [True, True]]), PAIRS),
        (np.array([1.0, 0.0, 1.0, 1.0]), PAIRS),
        (([1, 0], np.array([1, 1])), PAIRS),
        (np.array([np.array([1, 0]), np.array([1, 1])], object), PAIRS),
        (([1, 0], None), PAIRS),  # all, as gymnasium's `sample` has it
        ((np.array([1]), ([0], np.array([True, True]))),
         spaces.Tuple([spaces.Discrete(1), spaces.MultiDiscrete([1, 2])])),
        ({"b": [1, 1], "a": [1, 0]}, spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)})),
        (([1, 0], [1], [1]), spaces.Tuple([spaces.Discrete(2), BOX, spaces.MultiDiscrete([1, 1])])),
        (([1, 0], None, ([1], [1])), spaces.Tuple([spaces.Discrete(2), BOX, spaces.MultiDiscrete([1, 1])])),
        ((([1, 0], [1]), ([1],)), spaces.Tuple([spaces.MultiDiscrete([2, 1]), spaces.MultiDiscrete([1])])),
        (([1, 0], {"x": [1], "y": [1]}),
         spaces.Tuple([spaces.Discrete(2), spaces.Dict(x=spaces.Discrete(1), y=spaces.Discrete(1))])),
    ],
)  # fmt: skip
def test_masks_of_all_forms_are_flattened(mask: object, space: spaces.Space) -> None:
    flat = MaskForm(space).flat(mask)
    assert (flat.dtype, flat.tolist()) == (np.bool_, [True, False, True, True])


NAMED = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(3)})


@pytest.mark.parametrize(
    ("mask", "space", "words"),
    [
        (np.array([0.0, -np.inf, 0, 0]), PAIRS, "expected entries 0 (not now) and 1 (allowed), got -inf; a mask that is"
         " added to logits is given as `mask == 0`"),
        (np.array([0.0, -1e9, 0, 0]), PAIRS, "expected entries 0 (not now) and 1 (allowed), got -1000000000.0; a mask"
         " that is added to logits is given as `mask == 0`"),
        ([1, 2, 0, 1], PAIRS, "expected entries 0 (not now) and 1 (allowed), got 2"),
        ([1, 0.5, 0, 1], PAIRS, "expected entries 0 (not now) and 1 (allowed), got 0.5"),
        ([1, np.nan, 0, 1], PAIRS, "expected entries 0 (not now) and 1 (allowed), got nan"),
        (["1", "0", "0", "1"], PAIRS, "expected entries 0 and 1, got <U1"),
        ([1, 0, 1], PAIRS, "expected 4 entries, got 3"),
        (([1, 0, 1], [1]), PAIRS, "expected 2 + 2 entries, got 3 + 1"),
        (([1, 0, 1], [1, 0]), NAMED, "expected 2 + 3 entries, got 3 + 2"),
        ({"a": [1, 0]}, NAMED, "expected a mask for b, got none"),
        ({"a": [1, 0], "b": [1, 0, 0], "c": [1]}, NAMED, "expected the keys a, b, got c"),
        ({"a": [1, 0]}, PAIRS, "expected the keys of no dict, got a"),
        ((), PAIRS, "expected 4 entries, got 0"),
    ],
)  # fmt: skip
def test_masks_of_no_form_are_refused(mask: object, space: spaces.Space, words: str) -> None:
    with pytest.raises(ValueError, match=r"^expected") as caught:
        MaskForm(space).flat(mask)
    assert str(caught.value) == words


def test_random_actions_belong_to_the_space_and_keep_to_the_mask() -> None:
    action, random = spec_of(BOX, TUPLE).action, np.random.default_rng(0)
    mask = np.array([0, 1, 1, 1, 0, 0, 0, 1, 1], bool)
    drawn = np.concatenate([random_action(action, mask, random) for _ in range(300)])
    assert drawn.dtype == np.float32
    assert [set(drawn[:, column]) for column in (0, 4, 5, 6, 7)] == [{1, 2}, {0}, {2, 3}, {0, 1}, {0, 1}]
    assert (np.abs(drawn[:, 1:4]) <= 1).all()
    assert drawn[:, 1:4].std() > 0.5
    free = np.concatenate([random_action(action, None, random) for _ in range(300)])
    assert [set(free[:, column]) for column in (0, 4, 5)] == [{0, 1, 2}, {0, 1}, {0, 1, 2, 3}]


def test_random_numbers_have_the_bounds_of_their_own_part() -> None:
    largest = float(np.finfo(np.float32).max)
    for high in (np.inf, largest, 1e9):  # all stand for no bound
        space = spaces.Tuple([spaces.Box(5.0, 6.0, (2,)), spaces.Discrete(2), spaces.Box(-high, high, (1,))])
        action, random = spec_of(BOX, space).action, np.random.default_rng(0)
        drawn = np.concatenate([random_action(action, None, random) for _ in range(300)])
        assert ((drawn[:, :2] >= 5) & (drawn[:, :2] <= 6)).all()
        assert 0.8 < drawn[:, 3].std() < 1.2


def test_nothing_random_is_drawn_where_nothing_is_allowed() -> None:
    with pytest.raises(EnvironmentFailure, match="action_mask: expected at least one allowed choice, got all zero"):
        random_action(spec_of(BOX, spaces.Discrete(2)).action, np.zeros(2, bool), np.random.default_rng(0))


def masks_of(action_space: spaces.Space, num_rows: int) -> tuple[ActionMasks, dict[str, np.ndarray]]:
    spec = spec_of(BOX, action_space, mask_in_info=True)
    assert spec.observations["action_mask"] == ObservationSpec((spec.action_mask,), "uint8")
    return ActionMasks("Env", spec, BOX, action_space), {
        "action_mask": np.full((num_rows, spec.action_mask), 77, np.uint8)
    }


def test_rows_are_written_as_zeros_and_ones() -> None:
    masks, obs = masks_of(TUPLE, 2)
    masks.write_row(obs, 1, {"action_mask": (np.array([0, 1, 0]), ([True, False], np.array([0.0, 1.0, 0, 1])))})
    assert obs["action_mask"].tolist() == [[77] * 9, [0, 1, 0, 1, 0, 0, 1, 0, 1]]


def test_batches_are_written_for_the_rows_asked_for() -> None:
    masks, obs = masks_of(spaces.Discrete(2), 3)
    dense = {"action_mask": np.array([[1, 0], [0, 1], [1, 1]])}
    masks.write_batch(obs, dense, [0, 2])
    assert obs["action_mask"].tolist() == [[1, 0], [77, 77], [1, 1]]
    objects = np.array([None, (1, 1), None], object)
    masks.write_batch(obs, {"action_mask": objects, "_action_mask": np.array([False, True, False])}, np.array([1]))
    assert obs["action_mask"].tolist() == [[1, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("infos", "words"),
    [
        ({}, "expected a mask, got none"),
        ({"action_mask": np.ones((1, 2))}, "expected a mask, got none"),
        ({"action_mask": np.ones((2, 2)), "_action_mask": np.array([True, False])}, "expected a mask, got none"),
        ({"action_mask": np.array([(1, 1), None], object)}, "expected a mask, got none"),
        ({"action_mask": np.ones((2, 3))}, "expected 2 entries, got 3"),
        ({"action_mask": np.ones((2, 1))}, "expected 2 entries, got 1"),
    ],
)
def test_a_missing_mask_and_one_of_another_size_are_named(infos: dict[str, Any], words: str) -> None:
    masks, obs = masks_of(spaces.Discrete(2), 2)
    with pytest.raises(EnvironmentFailure) as caught:
        masks.write_batch(obs, infos, [1])
    assert str(caught.value) == f"Env: info key action_mask: {words}"


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ({}, [[1, 1], [77, 77], [1, 1]]),
        ({"action_mask": np.array([[1, 0], [0, 1], [0, 0]])}, [[1, 0], [77, 77], [0, 0]]),
        (
            {"action_mask": np.array([[0, 0], [0, 0], [0, 1]]), "_action_mask": np.array([False, False, True])},
            [[1, 1], [77, 77], [0, 1]],
        ),
        ({"action_mask": np.array([None, None, (1, 0)], object)}, [[1, 1], [77, 77], [1, 0]]),
    ],
)
def test_a_final_observation_without_a_mask_allows_every_choice(infos: dict[str, Any], expected: list[Any]) -> None:
    masks, obs = masks_of(spaces.Discrete(2), 3)
    masks.write_final(obs, infos, np.array([True, False, True]))
    assert obs["action_mask"].tolist() == expected


def test_a_living_row_needs_a_choice_in_every_component() -> None:
    masks, obs = masks_of(spaces.MultiDiscrete([2, 3]), 3)
    obs["action_mask"][:] = [[1, 0, 0, 1, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    failures = masks.stuck(obs, np.zeros(3, bool))
    assert {row: str(failure) for row, failure in failures.items()} == {
        2: "Env: info key action_mask: expected at least one allowed choice, got all zero in env 2"
    }


def test_the_mask_of_an_ended_row_is_filled_up() -> None:
    masks, obs = masks_of(spaces.MultiDiscrete([2, 3]), 3)
    obs["action_mask"][:] = [[0, 0, 0, 0, 0], [1, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
    assert masks.stuck(obs, np.array([True, True, True])) == {}
    assert obs["action_mask"].tolist() == [[1] * 5, [1, 0, 0, 1, 0], [1] * 5]


def test_sums_of_masks_do_not_overflow() -> None:
    masks, obs = masks_of(spaces.Discrete(512), 1)
    obs["action_mask"][:, :256] = 1  # 256 in uint8 would be 0
    obs["action_mask"][:, 256:] = 0
    assert masks.stuck(obs, np.zeros(1, bool)) == {}
    assert obs["action_mask"].sum() == 256


# --- where masks come from


def test_a_mask_in_the_observation_beats_one_in_the_info() -> None:
    spec = spec_of(spaces.Dict({"x": BOX, "action_mask": spaces.MultiBinary(2)}), spaces.Discrete(2), mask_in_info=True)
    assert (spec.action_mask, spec.mask_in_info) == (2, False)


def test_there_is_no_mask_where_there_is_no_choice() -> None:
    with pytest.raises(UsageError, match="3 entries for 0 action choices"):
        spec_of(spaces.Dict({"x": BOX, "action_mask": spaces.MultiBinary(3)}), BOX)


def group_of(kind: str, mask: str, action: str, num_envs: int = 3) -> GroupEnv:
    if kind == "python":
        return PythonLoop([lambda: Spaces("vector", action, mask, 5)] * num_envs, name="Spaces", decorrelate_steps=9)
    arguments = {"action": action, "mask": mask, "num_steps": 5}
    return GymVector(lambda: spaces_vector(num_envs, kind, **arguments), name="Spaces")


KINDS = ["python", *(mode.value for mode in AutoresetMode)]


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "tuple", "dict"])
@pytest.mark.parametrize("mask", ["observation", "info"])
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_keeps_to_the_masks_that_are_stored_is_never_refused(kind: str, mask: str, action: str) -> None:
    """The toy raises at the first forbidden choice; its last mask of an episode allows nothing."""
    group = group_of(kind, mask, action)
    random = np.random.default_rng(0)

    def allowed(obs: dict[str, np.ndarray]) -> np.ndarray:
        assert set(np.unique(obs["action_mask"])) <= {0, 1}
        return np.concatenate([random_action(group.spec.action, mask > 0, random) for mask in obs["action_mask"]])

    assert group.spec.mask_in_info == (mask == "info")
    assert group.spec.action_mask == sum(part.size for part in group.spec.action.parts if part.kind == "categorical")
    rollout = collect(group, 60, [0, 1, 2], allowed)
    group.close()
    ends = rollout.truncated.sum(0)
    assert (ends >= 10).all()
    masks = rollout.obs["action_mask"]
    if kind in ("python", "NextStep"):
        assert masks[1:][rollout.truncated].all()  # filled up
    starts = masks[rollout.first]
    assert 0 < starts.mean() < 1


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_ignores_the_masks_is_caught(kind: str) -> None:
    with pytest.raises(EnvironmentFailure, match="is forbidden; allowed are"):
        collect(group_of(kind, "info", "discrete"), 60, [0, 1, 2], lambda obs: np.zeros((3, 1), np.int32))


class Masked(gymnasium.Env[Any, Any]):
    """Shows masks as told; counts how often it was reset; the third step is the last one."""

    observation_space = BOX
    action_space = spaces.Discrete(2)
    resets = 0

    def __init__(self, masks: list[Any], said_at_reset: bool = True):
        self.masks, self.said_at_reset, self.step_count = masks, said_at_reset, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        Masked.resets += 1
        self.step_count = 0
        return np.zeros(3, np.float32), {"action_mask": np.ones(2, np.int8)} if self.said_at_reset else {}

    def step(self, action: int) -> tuple:
        mask = self.masks[self.step_count]
        self.step_count += 1
        said = {} if mask is None else {"action_mask": np.array(mask, np.int8)}
        return np.zeros(3, np.float32), 0.0, False, self.step_count == 3, said


def masked(kind: str, masks: list[Any], said_at_reset: bool = True) -> GroupEnv:
    """Two well-behaved rows around one that shows the masks."""
    fine = [lambda: Masked([[1, 1]] * 3, said_at_reset)]
    env_fns = [*fine, lambda: Masked(masks, said_at_reset), *fine]
    if kind == "python":
        return PythonLoop(env_fns, name="Masked")
    return GymVector(lambda: SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode(kind)), name="Masked")


def first_choice(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.zeros((3, 1), np.int32)


GOING = [kind for kind in KINDS if kind != "Disabled"]  # that one is already stepped while it is made


@pytest.mark.parametrize("kind", GOING)
@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([0, 0], "expected at least one allowed choice, got all zero in env 1"),
        (None, "expected a mask, got none"),
    ],
)
def test_a_row_that_goes_on_needs_a_mask(kind: str, mask: Any, words: str) -> None:
    group = masked(kind, [[1, 1], mask, [1, 1]])
    with pytest.raises(EnvironmentFailure) as caught:
        collect(group, 10, [0, 1, 2], first_choice)
    assert str(caught.value) == f"Masked: info key action_mask: {words}"


def test_a_mask_of_another_size_in_a_step() -> None:
    with pytest.raises(EnvironmentFailure, match="info key action_mask: expected 2 entries, got 3"):
        collect(masked("python", [[1, 1], [1, 1, 1], [1, 1]]), 10, [0, 1, 2], first_choice)


@pytest.mark.parametrize("last", [[0, 0], None])
@pytest.mark.parametrize("kind", KINDS)
def test_at_the_end_of_an_episode_nothing_needs_to_be_allowed(kind: str, last: Any) -> None:
    rollout = collect(masked(kind, [[0, 1], [1, 0], last]), 9, [0, 1, 2], first_choice)
    expected = [[1, 1], [0, 1], [1, 0], [1, 1]]  # the last one: filled up, or that of the next episode
    assert rollout.obs["action_mask"][:4, 1].tolist() == expected
    assert rollout.truncated[2].all()
    assert rollout.obs["action_mask"][:, [0, 2]].all()


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_looked_for_with_one_reset(kind: str) -> None:
    Masked.resets = 0
    group = masked(kind, [[1, 1]] * 3)
    assert group.spec.mask_in_info
    if kind != "Disabled":
        assert Masked.resets == (1 if kind == "python" else 3)
    Masked.resets = 0
    known = group.spec
    if kind == "python":
        group = PythonLoop([lambda: Masked([[1, 1]] * 3)], name="Masked", spec=known)
    elif kind != "Disabled":
        vector = SyncVectorEnv([lambda: Masked([[1, 1]] * 3)], autoreset_mode=AutoresetMode(kind))
        group = GymVector(lambda: vector, name="Masked", spec=known)
    assert Masked.resets == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_a_step_after_a_reset_without_one_is_refused_at_once(kind: str) -> None:
    with pytest.raises(SpaceMismatch) as caught:
        collect(masked(kind, [[1, 0]] * 3, said_at_reset=False), 1, [0, 1, 2], first_choice)
    assert str(caught.value) == (
        "Masked: info key action_mask: a step gave one and the first reset none: give it with every reset too"
    )


class Continuous(Masked):
    action_space = BOX


def test_no_reset_is_spent_where_there_is_no_choice() -> None:
    Masked.resets = 0
    assert PythonLoop([lambda: Continuous([])], name="Continuous").spec.action_mask == 0
    assert GymVector(lambda: SyncVectorEnv([lambda: Continuous([])]), name="Continuous").spec.action_mask == 0
    assert PythonLoop([lambda: Spaces(mask="observation")], name="Spaces").spec.action_mask == 4
    assert Masked.resets == 0


class DenseMasks(VectorEnv):
    """A vector of its own making whose infos hold one dense array, without gymnasium's "_action_mask"."""

    def __init__(self, masks: list[list[int]], array: Any = np.array):
        self.num_envs, self.metadata, self.array = 2, {"autoreset_mode": AutoresetMode.NEXT_STEP}, array
        self.single_observation_space, self.single_action_space = BOX, spaces.Discrete(2)
        self.masks = masks

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        return np.zeros((2, 3), np.float32), {"action_mask": np.ones((2, 2), np.int8)}

    def step(self, actions: np.ndarray) -> tuple:
        no = np.zeros(2, bool)
        return np.zeros((2, 3), np.float32), np.zeros(2), no, no, {"action_mask": self.array(self.masks)}


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_dense_masks_of_a_vector(array: Any) -> None:
    group = GymVector(lambda: DenseMasks([[1, 0], [0, 1]], array), name="Dense")
    rollout = collect(group, 2, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
    assert rollout.obs["action_mask"].tolist() == [[[1, 1], [1, 1]], [[1, 0], [0, 1]], [[1, 0], [0, 1]]]
    with pytest.raises(EnvironmentFailure, match="expected a mask, got none"):
        collect(
            GymVector(lambda: DenseMasks([[1, 0]]), name="Dense"), 2, [0, 1], lambda obs: np.zeros((2, 1), np.int32)
        )
    parts = array([[1, 0], [0, 1]]), array([[1, 1, 0], [0, 1, 1]])
    found = mask_of_batched({"action_mask": parts}, 1, 5)["action_mask"]
    assert [part.tolist() for part in found] == [[0, 1], [0, 1, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_mask_in_the_observation_of_a_living_row(kind: str) -> None:
    class Stuck(Spaces):
        def step(self, action: Any) -> tuple:
            observation, reward, terminated, _, said = super().step(action)
            return observation, reward, terminated, False, said  # an end that is none

    def make() -> Stuck:
        return Stuck(mask="observation", num_steps=1)

    def run() -> None:
        if kind == "python":
            group: GroupEnv = PythonLoop([make], name="Stuck")
        else:
            vector = SyncVectorEnv([make], autoreset_mode=AutoresetMode(kind))
            group = GymVector(lambda: vector, name="Stuck")
        collect(group, 2, [0], lambda obs: obs["action_mask"].argmax(1)[:, None].astype(np.int32))

    with pytest.raises(EnvironmentFailure, match="Stuck: observation key action_mask: expected at least one allowed"):
        run()


def test_a_random_walk_keeps_to_masks() -> None:
    """Before the first observation every env takes random steps; the toy would raise."""
    for mask in ("observation", "info"):
        loop = PythonLoop([lambda: Spaces(mask=mask, num_steps=4)] * 16, name="Spaces", decorrelate_steps=20)  # noqa: B023
        obs = {key: np.zeros((16, *spec.shape), spec.dtype) for key, spec in loop.spec.observations.items()}
        loop.reset(range(16), obs)
        assert obs["action_mask"].any(1).all()
