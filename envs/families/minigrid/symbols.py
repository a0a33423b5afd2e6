"""MiniGrid's observations as one-hot symbols and bags of words."""

import functools
import itertools
import zlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.core.mission import MissionSpace
from minigrid.wrappers import FullyObsWrapper, RGBImgObsWrapper, RGBImgPartialObsWrapper, SymbolicObsWrapper

from appo.envs.spaces import layers
from appo.envs.spec import Array

MISSION_SIZE = 64
"""Entries of the bag of hashed words."""

OTHERS = (RGBImgObsWrapper, RGBImgPartialObsWrapper, SymbolicObsWrapper)
"""Wrappers of MiniGrid whose images [H,W,3] are pixels, or positions and objects."""


class SymbolicObservations(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Returns the view as one-hot symbols [H,W,20], the direction, and the mission as a bag of hashed words.

    The numbers of objects and colours have no order for a network to learn. Pairs of neighbouring words are hashed too:
    "a red ball and a blue key" differs from "a blue ball and a red key". An image of anything but symbols stays as it
    is, and so does a mission of numbers.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        shown = dict(env.observation_space.spaces)
        self._has_symbols = "image" in shown and _shows_symbols(env, shown["image"])
        # A view of the whole grid shows the direction of the agent as the agent's state: one of four.
        self._num_states = 4 if any(isinstance(layer, FullyObsWrapper) for layer in layers(env)) else len(STATE_TO_IDX)
        if self._has_symbols:
            height, width, _ = shown["image"].shape or ()
            shown["image"] = spaces.Box(0, 1, (height, width, sum(symbol_counts(self._num_states))), np.uint8)
        self._has_words = isinstance(shown.get("mission"), MissionSpace | spaces.Text)
        if self._has_words:
            shown["mission"] = spaces.Box(0, 1, (MISSION_SIZE,), np.uint8)
        self.observation_space = spaces.Dict(shown)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._shown(observation), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take the action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._shown(observation), float(reward), terminated, truncated, info

    def _shown(self, observation: dict[str, Any]) -> dict[str, Any]:
        shown = dict(observation)
        if self._has_symbols:
            shown["image"] = one_hot_symbols(observation["image"], self._num_states)
        if self._has_words:
            shown["mission"] = hashed_words(observation["mission"])
        return shown


def with_symbols(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Wrap an environment that shows a Dict; a user's wrapper may show a single array."""
    return SymbolicObservations(env) if isinstance(env.observation_space, spaces.Dict) else env


def _shows_symbols(env: gymnasium.Env[Any, Any], image: spaces.Space[Any]) -> bool:
    """Return whether the numbers of an image are objects, colours and states: pixels have the same type and bounds."""
    return image.shape is not None and image.shape[2:] == (3,) and not any(isinstance(x, OTHERS) for x in layers(env))


@functools.cache
def symbol_counts(num_states: int = len(STATE_TO_IDX)) -> tuple[int, int, int]:
    """Return the numbers of objects, colours and states."""
    return len(OBJECT_TO_IDX), len(COLOR_TO_IDX), num_states


def one_hot_symbols(image: Array, num_states: int = len(STATE_TO_IDX)) -> Array:
    """Return object, colour and state numbers [H,W,3] as one-hot vectors [H,W,17+S] for S states."""
    counts = symbol_counts(num_states)
    starts = np.cumsum((0, *counts[:-1]))
    shown = np.zeros((*image.shape[:2], sum(counts)), np.uint8)
    np.put_along_axis(shown, image + starts, 1, axis=2)
    return shown


@functools.lru_cache(maxsize=1024)
def hashed_words(mission: str) -> Array:
    """Return which words and pairs of neighbouring words occur, hashed into [MISSION_SIZE]."""
    words = mission.lower().replace(",", " ").split()
    terms = words + [f"{a} {b}" for a, b in itertools.pairwise(words)]
    shown = np.zeros(MISSION_SIZE, np.uint8)
    shown[[zlib.crc32(term.encode()) % MISSION_SIZE for term in terms]] = 1
    return shown
