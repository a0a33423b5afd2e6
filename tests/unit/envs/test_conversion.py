from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from hypothesis import given, settings
from hypothesis import strategies as st

from appo.envs.config import EnvConfig
from appo.envs.conversion import ActionConverter, ObservationWriter, row_of_batched, scale_rewards
from appo.envs.finite import FiniteCheck
from appo.envs.infos import InfoReader
from appo.envs.make import make_group, with_precision
from appo.envs.precision import Precision
from appo.envs.spaces import spec_of
from appo.envs.spec import EpisodeStats
from appo.utils.errors import EnvironmentFailure, NotFinite
from tests.patience import HANG_SECONDS

BOX = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 0.5]), dtype=np.float64)
ACTION_SPACES = [
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([3, 2]),
    spaces.MultiDiscrete([[3, 2], [4, 5]], start=[[1, 1], [0, 9]]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 2]),
    BOX,
    spaces.Box(-1.0, 1.0, (2, 3)),
    spaces.Box(-np.inf, np.inf, (1,)),
    spaces.Tuple([spaces.Discrete(3, start=5), spaces.Tuple([BOX, spaces.MultiBinary(2)])]),
    spaces.Dict({"pick": spaces.Discrete(3), "move": BOX}),
    spaces.Dict({"b": spaces.MultiDiscrete([2, 3]), "a": spaces.Tuple([BOX, spaces.Dict({"x": spaces.Discrete(2)})])}),
]


def stored_actions(space: spaces.Space, num_rows: int, seed: int) -> np.ndarray:
    """Random stored values of every part; gaussian ones far outside the bounds too."""
    spec, rng, columns = spec_of(BOX, space).action, np.random.default_rng(seed), []
    for part in spec.parts:
        if part.kind == "gaussian":
            columns.append(rng.normal(0, 3, (num_rows, part.size)))
        else:
            high = part.size if part.kind == "categorical" else 2
            columns.append(rng.integers(high, size=(num_rows, part.num_values)))
    return np.concatenate(columns, 1).astype(spec.dtype)


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_converted_actions_belong_to_the_space(space: spaces.Space, seed: int) -> None:
    stored = stored_actions(space, 5, seed)
    kept = stored.copy()
    converter = ActionConverter(space)
    rows = converter.rows(stored)
    assert len(rows) == 5
    assert all(space.contains(row) for row in rows)
    assert batch_space(space, 5).contains(converter.batch(stored))
    np.testing.assert_array_equal(stored, kept)


def test_converted_values() -> None:
    stored = np.array([[0], [3]], np.int32)
    assert ActionConverter(spaces.Discrete(4, start=-2)).rows(stored) == [-2, 1]
    assert all(type(row) is int for row in ActionConverter(spaces.Discrete(4)).rows(stored))
    box = ActionConverter(BOX).rows(np.array([[-9.0, 9.0], [0.25, 0.25]], np.float32))
    np.testing.assert_array_equal(np.array(box), [[-1.0, 0.5], [0.25, 0.25]])
    assert box[0].dtype == np.float64
    mixed = ActionConverter(spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(3)]))
    bits, choice = mixed.rows(np.array([[1, 0, 2]], np.int32))[0]
    assert (bits.tolist(), choice) == ([1, 0], 2)


def test_a_dict_action_takes_its_values_in_the_order_of_the_space() -> None:
    space = spaces.Dict(
        {"move": spaces.Box(-1.0, 1.0, (2,)), "pick": spaces.Discrete(5, start=1), "press": spaces.MultiBinary(1)}
    )
    converter = ActionConverter(space)
    stored = np.array([[0.5, -3.0, 4, 1], [0.0, 0.25, 0, 0]], np.float32)
    first, second = converter.rows(stored)
    assert (first["move"].tolist(), first["pick"], first["press"].tolist()) == ([0.5, -1.0], 5, [1])
    assert (second["move"].tolist(), second["pick"], second["press"].tolist()) == ([0.0, 0.25], 1, [0])
    batch = converter.batch(stored)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "move": [[0.5, -1.0], [0.0, 0.25]], "pick": [5, 1], "press": [[1], [0]]
    }  # fmt: skip


def test_the_parts_of_a_tuple_inside_a_dict() -> None:
    space = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 2], start=[4, 0])])})
    assert [
        (choice, pair.tolist())
        for choice, pair in (row["a"] for row in ActionConverter(space).rows(np.array([[2, 1, 0]])))
    ] == [(2, [5, 0])]


IMAGE = spaces.Box(0, 255, (2, 2), np.uint8)
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
NESTED = spaces.Dict({"image": IMAGE, "inner": spaces.Dict({"cell": spaces.Discrete(4, start=1), "x": VECTOR})})


def test_nested_observation_is_written_by_key() -> None:
    writer = ObservationWriter("Env", NESTED)
    out = writer.empty(2)
    image = np.arange(4, dtype=np.uint8).reshape(2, 2)
    writer.write_row(out, 1, {"inner": {"x": np.ones(3), "cell": 3}, "image": image})
    assert list(out) == ["image", "inner.cell", "inner.x"]
    np.testing.assert_array_equal(out["image"], [np.zeros((2, 2)), image])
    np.testing.assert_array_equal(out["inner.cell"], [[0, 0, 0, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(out["inner.x"], [[0, 0, 0], [1, 1, 1]])


def test_batch_and_chosen_rows() -> None:
    writer = ObservationWriter("Env", spaces.Discrete(3))
    out = writer.empty(3)
    writer.write_batch(out, np.array([2, 0, 1]))
    np.testing.assert_array_equal(out["obs"], np.eye(3)[[2, 0, 1]])
    writer.write_batch(out, np.array([0, 99, 0]), rows=np.array([True, False, True]))
    np.testing.assert_array_equal(out["obs"], np.eye(3)[[0, 0, 0]])


TUPLE = spaces.Tuple([spaces.Discrete(2), spaces.Tuple([VECTOR, spaces.MultiBinary(2)])])


def test_the_parts_of_a_tuple_are_written_by_number() -> None:
    writer = ObservationWriter("Env", TUPLE)
    out = writer.empty(2)
    writer.write_row(out, 1, (1, [np.ones(3), np.array([0, 1], np.int8)]))
    assert {key: array.tolist() for key, array in out.items()} == {
        "0": [[0, 0], [0, 1]], "1.0": [[0, 0, 0], [1, 1, 1]], "1.1": [[0, 0], [0, 1]]
    }  # fmt: skip
    batch = (np.array([0, 1]), (np.arange(6.0).reshape(2, 3), np.array([[1, 1], [0, 0]], np.int8)))
    writer.write_batch(out, batch)
    assert {key: array.tolist() for key, array in out.items()} == {
        "0": [[1, 0], [0, 1]], "1.0": [[0, 1, 2], [3, 4, 5]], "1.1": [[1, 1], [0, 0]]
    }  # fmt: skip


def test_several_choices_are_one_hot_side_by_side() -> None:
    writer = ObservationWriter("Env", spaces.MultiDiscrete([[2, 3], [2, 2]], start=[[0, 5], [0, 0]]))
    out = writer.empty(1)
    writer.write_row(out, 0, np.array([[1, 7], [0, 1]]))
    assert out["obs"].tolist() == [[0, 1, 0, 0, 1, 1, 0, 0, 1]]
    writer.write_row(out, 0, [[0, 5], [1, 0]])  # nothing is left of what was there
    assert out["obs"].tolist() == [[1, 0, 1, 0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64])
def test_bits_of_any_integer_type(dtype: type) -> None:
    writer = ObservationWriter("Env", spaces.MultiBinary([2, 2]))
    out = writer.empty(1)
    writer.write_row(out, 0, np.array([[0, 1], [1, 1]], dtype))
    assert out["obs"].tolist() == [[[0, 1], [1, 1]]]


@pytest.mark.parametrize("space", [TUPLE, spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3], start=[4, -1]), NESTED])
def test_samples_of_a_space_are_written(space: spaces.Space) -> None:
    writer, batched = ObservationWriter("Env", space), batch_space(space, 3)
    space.seed(1)
    batched.seed(2)
    out = writer.empty(3)
    for _ in range(20):
        writer.write_row(out, 0, space.sample())
        writer.write_batch(out, batched.sample())


@pytest.mark.parametrize(
    ("space", "observation", "words"),
    [
        (TUPLE, np.zeros(2), ["observation: expected a tuple, got ndarray"]),
        (TUPLE, (1,), ["observation: expected 2 entries, got 1"]),
        (TUPLE, (1, (np.zeros(3), np.zeros(2, int), 5)), ["observation key 1: expected 2 entries, got 3"]),
        (TUPLE, (1, {"0": np.zeros(3)}), ["observation key 1: expected a tuple, got dict"]),
        (TUPLE, (1, (np.zeros(4), np.zeros(2, int))), ["key 1.0: expected shape (3,), got shape (4,)"]),
        (TUPLE, (0.5, (np.zeros(3), np.zeros(2, int))), ["key 0:", "integer"]),
        (spaces.MultiBinary(2), np.zeros(2), ["key obs", "uint8", "float64", "integer"]),
        (spaces.MultiBinary(2), np.array([0, 2]), ["bits are 0 or 1", "[[0, 2]]"]),
        (spaces.MultiBinary(2), np.array([0, -1], np.int8), ["bits are 0 or 1"]),
        (spaces.MultiBinary(2), np.zeros(3, int), ["shape (2,)", "shape (3,)"]),
        (spaces.MultiDiscrete([2, 3]), np.array([0, 3]), ["choices are 0..1, 0..2", "[[0, 3]]"]),
        (spaces.MultiDiscrete([2, 3]), np.array([0.0, 1.0]), ["integer"]),
        (spaces.MultiDiscrete([2, 3]), 1, ["shape (2,)", "shape ()"]),
        (VECTOR, np.zeros(4, np.float32), ["key obs", "shape (3,)", "shape (4,)"]),
        (VECTOR, np.zeros((1, 3), np.float32), ["shape (3,)", "shape (1, 3)"]),
        (VECTOR, np.float32(1), ["shape (3,)", "shape ()"]),
        (VECTOR, np.zeros(3, complex), ["float32", "complex128"]),
        (VECTOR, {"obs": np.zeros(3, np.float32)}, ["shape (3,)"]),
        (IMAGE, np.full((2, 2), 0.9), ["key obs", "uint8", "float64"]),
        (IMAGE, np.zeros((2, 2), np.int64), ["uint8", "int64"]),
        (IMAGE, np.full((2, 2), 300, np.uint16), ["uint8", "uint16"]),
        (spaces.Discrete(3), 3, ["choices are 0..2", "3"]),
        (spaces.Discrete(3), -1, ["choices are 0..2"]),
        (spaces.Discrete(3), 1.5, ["integer"]),
        (NESTED, np.zeros(3), ["expected a dict", "ndarray"]),
        (NESTED, {"image": np.zeros((2, 2), np.uint8)}, ["key inner", "none"]),
        (NESTED, {"image": np.zeros((2, 2), np.uint8), "inner": {"cell": 1}}, ["key inner.x", "none"]),
        (NESTED, {"image": np.zeros((2, 2), np.uint8), "inner": 3}, ["key inner", "expected a dict"]),
        (NESTED, {"image": np.zeros((2, 2), np.uint8), "inner": {"cell": 1, "x": np.zeros(3)}, "new": 1},
         ["key new", "no such key"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(space: spaces.Space, observation: object, words: list) -> None:
    writer = ObservationWriter("Env", space)
    with pytest.raises(EnvironmentFailure) as caught:
        writer.write_row(writer.empty(2), 0, observation)
    text = str(caught.value)
    assert all(word in text for word in ["Env", *words]), text
    assert "\n" not in text


@pytest.mark.parametrize("value", [[1.0, 2.0, 3.0], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.float64)])
def test_other_numbers_go_into_float_rows(value: object) -> None:
    writer = ObservationWriter("Env", VECTOR)
    out = writer.empty(1)
    writer.write_row(out, 0, value)
    np.testing.assert_array_equal(out["obs"], [[1, 2, 3]])


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int64, np.float32])
def test_masks_of_any_type(dtype: type) -> None:
    writer = ObservationWriter("Env", spaces.Dict({"action_mask": spaces.MultiBinary(3)}))
    out = writer.empty(1)
    writer.write_row(out, 0, {"action_mask": np.array([1, 0, 1], dtype)})
    np.testing.assert_array_equal(out["action_mask"], [[1, 0, 1]])


def test_a_batch_of_the_wrong_size_is_not_broadcast() -> None:
    writer = ObservationWriter("Env", VECTOR)
    with pytest.raises(EnvironmentFailure, match="key obs"):
        writer.write_batch(writer.empty(2), np.zeros((1, 3), np.float32))


def test_episode_stats() -> None:
    assert InfoReader("Env").stats(2, {}) is None
    assert InfoReader("Env").stats(2, {"other": 1}) is None
    info = {"episode_extra_stats": {"kills": np.int64(3)}, "true_reward": np.float32(0.5)}
    assert InfoReader("Env").stats(2, info) == EpisodeStats(2, {"kills": 3.0, "true_reward": 0.5})


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_row_of_batched_infos_follows_masks(array: Any) -> None:
    yes = array([True, False])
    infos = {
        "episode_extra_stats": {"kills": array([3, 0]), "_kills": yes},
        "_episode_extra_stats": yes,
        "true_reward": array([0.5, 0.0]),
        "_true_reward": yes,
        "dense": array([7, 8]),
        "scalar": 1,
        "numpy_scalar": np.float32(1.0),
    }
    assert row_of_batched(infos, 0) == {"episode_extra_stats": {"kills": 3}, "true_reward": 0.5, "dense": 7}
    assert row_of_batched(infos, 1) == {"dense": 8}


def test_of_an_episode_with_more_statistics_than_anybody_counts_the_first_are_taken() -> None:
    info = {"episode_extra_stats": {f"n{number}": number for number in range(50_000)}, "true_reward": 5.0}
    found = InfoReader("Env").stats(3, info)
    assert found is not None
    assert found.stats == {**{f"n{number}": float(number) for number in range(1000)}, "true_reward": 5.0}


# --- numbers that float32 cannot hold


class Offset(gymnasium.Env[Any, Any]):
    """Shows an offset and a bit, or noise, in any type and form; never ends."""

    def __init__(self, offset: float = 0.0, dtype: str = "float64", form: str = "box", noise: float = 1.0) -> None:
        self.offset, self.dtype, self.form, self.noise = offset, np.dtype(dtype).type, form, noise
        least, most = (-1e300, 1e300) if self.dtype is np.float64 else (-(2**30), 2**30)
        if self.dtype is np.int64:
            least, most = -(2**60), 2**60
        box = spaces.Box(least, most, (2,), self.dtype)
        self.observation_space: Any = spaces.Dict({"a": VECTOR, "b": box}) if form == "dict" else box
        self.action_space = spaces.Discrete(2)
        self.is_multiagent, self.num_agents = form == "agents", 2

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._shown(), [{}] * 2 if self.is_multiagent else {}

    def step(self, action: Any) -> Any:
        if self.is_multiagent:
            return self._shown(), [0.0] * 2, [False] * 2, [False] * 2, [{}] * 2
        return self._shown(), 0.0, False, False, {}

    def _shown(self) -> Any:
        bits = self.np_random.integers(2, size=2)
        shown = (self.offset + (bits if self.noise == 1.0 else self.noise * bits)).astype(self.dtype)
        if self.form == "dict":
            return {"a": np.zeros(VECTOR.shape, np.float32), "b": shown}
        return [shown, shown] if self.is_multiagent else shown


@pytest.mark.parametrize("form", ["box", "dict", "agents"])
@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({"offset": 1e9}, "1000000001.0 is stored as 1000000000"),
        ({"offset": 1.7e9 + 0.25}, "is stored as 1.7e9"),
        ({"offset": 2**24, "dtype": "int64"}, "16777217 is stored as 16777216"),
        ({"offset": 2**24, "dtype": "int32"}, "16777217 is stored as 16777216"),
        ({"offset": 1e5, "noise": 1e-3}, "100000.001 is stored as 100000"),
        ({"offset": 0}, None),
        ({"offset": 1e6}, None),
        ({"offset": 1.0, "noise": 1e-12}, None),  # what a simulator has of noise
        ({"offset": 2**20, "dtype": "int64"}, None),
        ({"offset": 1 << 24, "dtype": "float64", "noise": 1024.0}, None),
    ],
)
def test_numbers_that_float32_cannot_hold_are_named(
    kwargs: dict[str, Any], shown: str | None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appo.envs.make.PRECISION_SECONDS", float(HANG_SECONDS))
    config = EnvConfig(env=f"{__name__}:Offset", env_kwargs={**kwargs, "form": form})
    group = make_group(config, 1)
    plain = group._observations.plain_types  # type: ignore[attr-defined]
    notes = with_precision(group).notes
    assert len(notes) == (shown is not None)
    key = "b" if form == "dict" else "obs"
    for note in notes:
        assert note.startswith(f"observation key {key}: ")
        assert (shown or "").replace("1.7e9", "1700000000") in note
        assert note.endswith("as float32 cannot hold it: subtract an offset in the environment, before it is rounded")
    assert group._observations.plain_types == plain  # type: ignore[attr-defined]


@pytest.mark.parametrize(("step", "lost"), [(1e-3, False), (1e-5, True)])
def test_rounding_is_compared_with_all_that_a_number_went_through(step: float, lost: bool) -> None:
    precision = Precision()
    for time in range(100):
        shown = np.array([[3e4 + step * time, 0.0]])
        precision.look("obs", shown, shown.astype(np.float32))
    assert bool(precision.lines()) == lost


def test_an_environment_whose_steps_take_long_is_not_looked_at_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(EnvConfig(env=f"{__name__}:Offset", env_kwargs={"offset": 1e9}), 1)
    clock = iter(range(100))
    monkeypatch.setattr("appo.envs.make.time.monotonic", lambda: float(next(clock)))
    with_precision(group)
    assert next(clock) == 3


# --- numbers whose squares are beyond float32


@pytest.mark.parametrize("size", [3e38, -1e30, 1e20])
def test_huge_observations_are_said_once_and_huge_rewards_pass(size: float, caplog: pytest.LogCaptureFixture) -> None:
    name = f"Huge{size}-v0"
    spec = spec_of(
        spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,)), "y": spaces.Box(-1.0, 1.0)}), spaces.Discrete(2)
    )
    obs = {"x": np.array([[size, 0.0]], np.float32), "y": np.zeros((1, 1), np.float32)}
    for _ in range(2):  # of two groups in one process
        assert FiniteCheck(name, spec)(obs, np.array([1e30], np.float32)) == {}
    said = (
        f"{name}: observation key x is as large as {abs(size):.3g}: float32 cannot hold its square, let it be smaller"
    )
    assert [record.getMessage() for record in caplog.records] == [said]
    obs["y"][0] = np.nan
    [failure] = FiniteCheck(name, spec)(obs, np.array([1e30], np.float32)).values()
    assert str(failure) == f"{name}: env 0: observation key y is not finite: nan at [0]"
    obs["y"][0] = np.inf
    [failure] = FiniteCheck(name, spec)(obs, np.array([np.inf], np.float32)).values()
    assert str(failure) == f"{name}: env 0: reward is not finite: inf"
    with pytest.raises(
        NotFinite, match=r"key y is not finite: inf at \[0\]; float32, which keeps observations, ends a"
    ):
        FiniteCheck(name, spec).require(obs)


def test_scaled_rewards_that_leave_float32_are_infinite_without_a_warning() -> None:
    reward = np.array([1e30, -1.0], np.float32)
    scale_rewards(reward, 1e10, 0.0)
    assert reward.tolist() == [np.inf, np.float32(-1e10)]
