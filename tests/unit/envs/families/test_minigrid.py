import zlib
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.envs.config import EnvConfig
from appo.envs.make import make_group, make_single
from appo.envs.spec import ActionPart, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.envs.rollouts import collect

pytest.importorskip("minigrid")

NUM_OBJECTS, NUM_COLORS, NUM_STATES = 11, 6, 3
LEFT, FORWARD = 0, 2


def one_hot_slowly(image: np.ndarray) -> np.ndarray:
    shown = np.zeros((*image.shape[:2], NUM_OBJECTS + NUM_COLORS + NUM_STATES), np.uint8)
    for x in range(image.shape[0]):
        for y in range(image.shape[1]):
            thing, color, state = image[x, y]
            shown[x, y, thing] = 1
            shown[x, y, NUM_OBJECTS + color] = 1
            shown[x, y, NUM_OBJECTS + NUM_COLORS + state] = 1
    return shown


def test_symbols_are_one_hot() -> None:
    from appo.envs.families.minigrid.symbols import one_hot_symbols

    random = np.random.default_rng(0)
    for height, width in ((7, 7), (3, 5), (1, 1)):
        image = random.integers((NUM_OBJECTS, NUM_COLORS, NUM_STATES), size=(height, width, 3)).astype(np.uint8)
        kept = image.copy()
        shown = one_hot_symbols(image)
        assert shown.dtype == np.uint8
        np.testing.assert_array_equal(shown, one_hot_slowly(image))
        np.testing.assert_array_equal(image, kept)


@pytest.mark.parametrize("name", ["MiniGrid-DoorKey-5x5-v0", "BabyAI-GoToObj-v0", "MiniGrid-LavaGapS5-v0"])
def test_what_is_shown_is_what_the_plain_environment_shows(name: str) -> None:
    from appo.envs.families.minigrid.symbols import hashed_words

    env, plain, random = make_single(EnvConfig(env=name)), gymnasium.make(name), np.random.default_rng(0)
    shown, expected = env.reset(seed=3)[0], plain.reset(seed=3)[0]
    missions = set()
    for step in range(300):
        assert env.observation_space.contains(shown)
        np.testing.assert_array_equal(shown["image"], one_hot_slowly(expected["image"]))
        np.testing.assert_array_equal(shown["mission"], hashed_words(expected["mission"]))
        assert shown["direction"] == expected["direction"]
        missions.add(expected["mission"])
        action = int(random.integers(7))
        shown, reward, terminated, truncated, _ = env.step(action)
        expected, *outcome = plain.step(action)
        assert (reward, terminated, truncated) == tuple(outcome[:3])
        if terminated or truncated:
            shown, expected = env.reset(seed=step)[0], plain.reset(seed=step)[0]
    assert name != "BabyAI-GoToObj-v0" or len(missions) > 1


def test_the_spec() -> None:
    group = make_group(EnvConfig(env="MiniGrid-Empty-5x5-v0"), 2)
    assert group.spec.observations == {
        "direction": ObservationSpec((4,), "uint8", high=1),
        "image": ObservationSpec((7, 7, 20), "uint8", high=1),
        "mission": ObservationSpec((64,), "uint8", high=1),
    }
    assert group.spec.action.parts == (ActionPart("categorical", 7),)
    assert group.spec.frames_per_step == 1
    rollout = collect(group, 30, [0, 1], lambda obs: np.full((2, 1), FORWARD, np.int32))
    assert (rollout.obs["direction"].sum(-1) == 1).all()
    assert (rollout.obs["image"].sum(-1) == 3).all()


def entries(mission: str) -> set[int]:
    from appo.envs.families.minigrid.symbols import hashed_words

    return set(np.flatnonzero(hashed_words(mission)).tolist())


def test_a_mission_is_the_bag_of_its_words_and_pairs() -> None:
    terms = ["go", "to", "the", "red", "ball", "go to", "to the", "the red", "red ball"]
    assert entries("go to the red ball") == {zlib.crc32(term.encode()) % 64 for term in terms}
    assert entries("Go to the RED ball") == entries("go to the red ball")
    assert entries("go, then stop") == entries("go then stop")
    assert entries("") == set()


def test_missions_that_differ_in_order_or_a_word_are_told_apart() -> None:
    missions = [
        "put the red ball next to the blue key",
        "put the blue ball next to the red key",
        "put the red key next to the blue ball",
        *(f"go to the {color} {thing}" for color in ("red", "green", "blue") for thing in ("ball", "box", "key")),
    ]
    assert len({frozenset(entries(mission)) for mission in missions}) == len(missions)


def test_what_a_mission_became_cannot_be_changed_by_who_gets_it() -> None:
    """The arrays are remembered: two environments with one mission share one."""
    from appo.envs.families.minigrid.symbols import hashed_words

    first = hashed_words("go to the red ball")
    assert hashed_words("go to the red ball") is first
    group = make_group(EnvConfig(env="BabyAI-GoToObj-v0"), 1)
    before = first.copy()
    collect(group, 5, [0], lambda obs: np.zeros((1, 1), np.int32))
    np.testing.assert_array_equal(first, before)


def test_a_horizon_truncates() -> None:
    env = make_single(EnvConfig(env="MiniGrid-Empty-5x5-v0", horizon=4))
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(4)] == [(False, False)] * 3 + [(False, True)]


def test_without_a_horizon_the_environment_has_its_own() -> None:
    env = make_single(EnvConfig(env="MiniGrid-Empty-5x5-v0"))
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(100)]  # 4 * 5 * 5
    assert ends == [(False, False)] * 99 + [(False, True)]


def test_frames_are_skipped_and_counted() -> None:
    group = make_group(EnvConfig(env="MiniGrid-Empty-5x5-v0", env_frameskip=3), 1)
    rollout = collect(group, 34, [0], lambda obs: np.zeros((1, 1), np.int32))
    assert np.flatnonzero(rollout.truncated[:, 0]).tolist() == [33]
    assert rollout.num_frames[:, 0].tolist() == [3] * 33 + [1]


def test_frames_are_not_stacked() -> None:
    with pytest.raises(UsageError, match=r"^--env_framestack=4 needs an environment that shows one array, not Dict"):
        make_single(EnvConfig(env="MiniGrid-Empty-5x5-v0", env_framestack=4))


SYMBOLS = NUM_OBJECTS + NUM_COLORS + NUM_STATES


@pytest.mark.parametrize(
    ("wrapper", "flags", "shapes"),
    [
        ("ImgObsWrapper", {}, {"obs": (7, 7, 3)}),
        ("ImgObsWrapper", {"env_framestack": 2}, {"obs": (7, 7, 6)}),
        ("FlatObsWrapper", {}, {"obs": (2835,)}),
        ("RGBImgPartialObsWrapper", {}, {"image": (56, 56, 3), "mission": (64,)}),
        ("RGBImgObsWrapper", {}, {"image": (40, 40, 3), "mission": (64,)}),
        ("SymbolicObsWrapper", {}, {"image": (5, 5, 3), "mission": (64,)}),
        ("OneHotPartialObsWrapper", {}, {"image": (7, 7, 20), "mission": (64,)}),
        ("FullyObsWrapper", {}, {"image": (5, 5, SYMBOLS + 1), "mission": (64,)}),
        ("DictObservationSpaceWrapper", {}, {"image": (7, 7, SYMBOLS), "mission": (50 * 52,)}),
    ],
)
def test_only_symbols_and_words_of_a_wrapped_environment_are_changed(
    wrapper: str, flags: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    """An id like those of the family says nothing about what is shown."""
    from minigrid import wrappers
    from minigrid.envs import EmptyEnv

    name = f"MiniGrid-{wrapper}-v0"
    gymnasium.register(name, lambda **kwargs: getattr(wrappers, wrapper)(EmptyEnv(size=5, **kwargs)))
    try:
        group = make_group(EnvConfig(env=name, **flags), 1)
        found = {key: spec.shape for key, spec in group.spec.observations.items() if key != "direction"}
        assert found == shapes
        collect(group, 10, [0], lambda obs: np.full((1, 1), FORWARD, np.int32))
        collect(group, 10, [0], lambda obs: np.full((1, 1), LEFT, np.int32))  # through all directions
    finally:
        del gymnasium.registry[name]


def test_an_environment_without_a_mission() -> None:
    from appo.envs.families.minigrid.symbols import SymbolicObservations

    class Mute(gymnasium.Env[Any, Any]):
        observation_space = spaces.Dict({"image": spaces.Box(0, 10, (2, 3, 3), np.uint8)})
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
            return {"image": np.ones((2, 3, 3), np.uint8)}, {}

    env = SymbolicObservations(Mute())
    assert env.observation_space == spaces.Dict({"image": spaces.Box(0, 1, (2, 3, 20), np.uint8)})
    observation, _ = env.reset()
    assert set(observation) == {"image"}
    np.testing.assert_array_equal(observation["image"], one_hot_slowly(np.ones((2, 3, 3), np.uint8)))
