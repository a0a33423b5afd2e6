from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from appo.envs.spaces import frames_per_step, spec_of
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
TWO = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (BOX, {"obs": ObservationSpec((3,), "float32")}),
        (spaces.Box(0, 255, (2, 4, 3), np.uint8), {"obs": ObservationSpec((2, 4, 3), "uint8")}),
        (spaces.Box(0, 7, (4,), np.uint8), {"obs": ObservationSpec((4,), "uint8", high=7)}),
        (spaces.Box(0, 0, (1,), np.uint8), {"obs": ObservationSpec((1,), "uint8", high=1)}),
        (spaces.Box(-1.0, 1.0, (), np.float64), {"obs": ObservationSpec((), "float32")}),
        (spaces.Box(-5, 5, (2,), np.int64), {"obs": ObservationSpec((2,), "float32")}),
        (spaces.Box(-5, 5, (2,), np.int8), {"obs": ObservationSpec((2,), "float32")}),
        (spaces.Discrete(5, start=2), {"obs": ObservationSpec((5,), "uint8", high=1)}),
        (spaces.MultiDiscrete([[3, 2], [4, 5]]), {"obs": ObservationSpec((14,), "uint8", high=1)}),
        (spaces.MultiBinary([2, 3]), {"obs": ObservationSpec((2, 3), "uint8", high=1)}),
        (
            spaces.Tuple([BOX, spaces.Dict({"x": TWO, "y": spaces.Tuple([TWO])})]),
            {"0": ObservationSpec((3,), "float32"), "1.x": ObservationSpec((2,), "uint8", high=1),
             "1.y.0": ObservationSpec((2,), "uint8", high=1)},
        ),
        (
            spaces.Dict({"b": BOX, "a": spaces.Dict({"x": TWO, "y": BOX})}),
            {"b": ObservationSpec((3,), "float32"), "a.x": ObservationSpec((2,), "uint8", high=1),
             "a.y": ObservationSpec((3,), "float32")},
        ),
    ],
)  # fmt: skip
def test_observations(space: spaces.Space, expected: dict[str, ObservationSpec]) -> None:
    assert spec_of(space, TWO).observations == expected


@pytest.mark.parametrize(
    ("space", "parts", "dtype", "num_values", "num_logits"),
    [
        (spaces.Discrete(4), [("categorical", 4)], "int32", 1, 4),
        (spaces.MultiDiscrete([3, 2]), [("categorical", 3), ("categorical", 2)], "int32", 2, 5),
        (spaces.MultiDiscrete([[3, 2], [4, 5]]), [("categorical", n) for n in (3, 2, 4, 5)], "int32", 4, 14),
        (spaces.MultiBinary(3), [("bernoulli", 3)], "int32", 3, 3),
        (spaces.MultiBinary([2, 2]), [("bernoulli", 4)], "int32", 4, 4),
        (BOX, [("gaussian", 3)], "float32", 3, 6),
        (spaces.Tuple([TWO, spaces.Tuple([BOX, TWO])]), [("categorical", 2), ("gaussian", 3), ("categorical", 2)],
         "float32", 5, 10),
        (spaces.Dict({"b": TWO, "a": BOX}), [("gaussian", 3), ("categorical", 2)], "float32", 4, 8),
    ],
)  # fmt: skip
def test_actions(space: spaces.Space, parts: list, dtype: str, num_values: int, num_logits: int) -> None:
    action = spec_of(BOX, space).action
    assert list(action.parts) == [ActionPart(*part) for part in parts]
    assert (action.dtype, action.num_values, action.num_logits) == (dtype, num_values, num_logits)


def test_action_bounds_are_flattened_over_all_gaussian_parts() -> None:
    box = spaces.Box(np.array([[-1.0, -2.0]]), np.array([[3.0, np.inf]]), dtype=np.float64)
    action = spec_of(BOX, spaces.Tuple([box, TWO, BOX])).action
    assert action.low == (-1.0, -2.0, -1.0, -1.0, -1.0)
    assert action.high == (3.0, np.inf, 1.0, 1.0, 1.0)
    assert spec_of(BOX, TWO).action == ActionSpec((ActionPart("categorical", 2),))


def test_fields_are_handed_through() -> None:
    spec = spec_of(BOX, TWO, num_agents=3, frames_per_step=4, same_step=True)
    assert spec == EnvSpec({"obs": ObservationSpec((3,), "float32")}, spec.action, 3, 4, True, 0)


@pytest.mark.parametrize("mask", [spaces.Box(0, 1, (5,), np.int8), spaces.MultiBinary(5)])
def test_action_mask(mask: spaces.Space) -> None:
    spec = spec_of(spaces.Dict({"obs": BOX, "action_mask": mask}), spaces.MultiDiscrete([3, 2]))
    assert spec.action_mask == 5
    assert spec.observations["action_mask"] == ObservationSpec((5,), "uint8")


def test_action_mask_must_cover_the_choices() -> None:
    with pytest.raises(UsageError, match="4 entries for 5 action choices"):
        spec_of(spaces.Dict({"action_mask": spaces.MultiBinary(4)}), spaces.Discrete(5))


@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        (spaces.Text(10), TWO, ["observation", "Text", "key obs", "no fixed size"]),
        (spaces.Dict({"a": BOX, "mission": spaces.Text(10)}), TWO, ["key mission", "no fixed size"]),
        (spaces.Sequence(BOX), TWO, ["Sequence", "length varies"]),
        (spaces.Graph(BOX, None), TWO, ["Graph", "size varies"]),
        (spaces.OneOf([BOX, TWO]), TWO, ["OneOf", "exclude"]),
        (spaces.Dict({}), TWO, ["no key"]),
        (spaces.Dict({"a.b": BOX, "a": spaces.Dict({"b": BOX})}), TWO, ["both called a.b"]),
        (BOX, spaces.Text(3), ["action", "Text"]),
        (BOX, spaces.Box(0, 9, (2,), np.int32), ["action", "int32", "MultiDiscrete"]),
        (BOX, spaces.Box(0.0, 1.0, (0,)), ["nothing to choose"]),
        (BOX, spaces.Tuple([TWO, spaces.Sequence(TWO)]), ["action", "Sequence"]),
    ],
)
def test_unsupported_spaces_say_why_in_one_line(observation: spaces.Space, action: spaces.Space, words: list) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(observation, action)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert len(text) < 300


class Skipping:
    """As a wrapped Atari environment looks from outside."""

    def __init__(self, entry_point: str, frame_skip: object, env: "Skipping | None" = None) -> None:
        self.spec = SimpleNamespace(entry_point=entry_point, kwargs={"frameskip": 5})
        self.env, self.frame_skip = env, frame_skip

    @property
    def unwrapped(self) -> "Skipping":
        return self.env.unwrapped if self.env else self


def test_frames_are_counted_for_atari_and_vizdoom_only() -> None:
    random_skip = Skipping("ale_py.env:AtariEnv", (2, 5))
    assert frames_per_step(random_skip) == 5
    assert frames_per_step(Skipping("vizdoom.x:Y", 3)) == 3
    assert frames_per_step(Skipping("wrapper", 4, random_skip)) == 4
    assert frames_per_step(Skipping("wrapper", 4, Skipping("ale_py.env:AtariEnv", 1))) == 4
    assert frames_per_step(Skipping("gymnasium.envs.mujoco:HalfCheetahEnv", 5)) == 1
    assert frames_per_step(object()) == 1


GYM_BOX = type(
    "Box", (), {"__module__": "gym.spaces.box", "shape": (2,), "dtype": np.dtype("f4"), "__str__": lambda s: "Box"}
)
GYM_DISCRETE = type("Discrete", (), {"__module__": "gym.spaces.discrete", "__str__": lambda s: "Discrete(2)"})
OTHER = type("Range", (), {"__module__": "mine.ranges", "__str__": lambda s: "Range"})
OLD = (
    "it is of gym.spaces, the old package, not of gymnasium.spaces: `import gymnasium as gym` where it is made, or wrap"
    " the environment by shimmy.GymV21CompatibilityV0 or GymV26CompatibilityV0"
)


@pytest.mark.parametrize(
    ("shown", "taken", "line"),
    [
        (GYM_BOX(), spaces.Discrete(2), f"unsupported observation space Box (key obs): {OLD}"),
        (spaces.Box(0, 1, (2,)), GYM_DISCRETE(), f"unsupported action space Discrete(2): {OLD}"),
        (
            OTHER(),
            spaces.Discrete(2),
            "unsupported observation space Range (key obs): mine.ranges.Range is no space of",
        ),
    ],
)
def test_spaces_of_other_packages_are_named(shown: Any, taken: Any, line: str) -> None:
    with pytest.raises(UsageError) as raised:
        spec_of(shown, taken)
    assert str(raised.value).startswith(line)


def test_bytes_with_unlike_bounds_are_told() -> None:
    actions, bounds = spaces.Discrete(2), np.array([1, 250], np.uint8)
    space = spaces.Dict(
        {"a": spaces.Box(0, bounds, dtype=np.uint8), "b": spaces.Box(0, 7, (2,), np.uint8), "c": spaces.Box(0, 1, (2,))}
    )
    (note,) = spec_of(space, actions).notes
    assert note.startswith("bytes of the observation key a are divided by the largest bound, 250: ")
