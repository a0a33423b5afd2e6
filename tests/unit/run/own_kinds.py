"""Algorithms of a user whose presets by the kind of observation choose flags of the environment, and an environment."""

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from appo.algorithms.appo.algorithm import APPO


class Line(gymnasium.Env[Any, Any]):
    """Counts its steps in all of three numbers; pays 8 in each, and takes two numbers."""

    observation_space = spaces.Box(-100.0, 100.0, (3,))
    action_space = spaces.Box(-2.0, 2.0, (2,))

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.all(np.abs(action) <= 2.0)
        self.steps += 1
        return np.full(3, self.steps, np.float32), 8.0, self.steps >= 30, False, {}


class Chooses(APPO):
    """Chooses flags beside those of APPO."""

    chosen: ClassVar[Mapping[str, object]] = {}

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return those of APPO and its own."""
        return {**super().preset_by_kind(images=images, continuous=continuous, rollout=rollout), **self.chosen}


class Squashed(Chooses):
    """What is drawn is squashed; frames are skipped and stacked, rewards scaled."""

    chosen: ClassVar[Mapping[str, object]] = {
        "action_distribution": "tanh_gaussian", "env_frameskip": 2, "env_framestack": 3, "reward_scale": 0.5,
    }  # fmt: skip


class Binned(Chooses):
    """Numbers are choices, where actions are numbers."""

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return those of APPO, and bins."""
        found = super().preset_by_kind(images=images, continuous=continuous, rollout=rollout)
        return {**found, **({"continuous_as_bins": 5} if continuous else {})}


class Late(Chooses):
    """Chooses what is read at the start."""

    chosen: ClassVar[Mapping[str, object]] = {"device": "cpu"}


class LatePlacement(Chooses):
    """Chooses what processes are planned by."""

    chosen: ClassVar[Mapping[str, object]] = {"inference": "serial"}


class Misspelt(Chooses):
    """Chooses nothing that there is."""

    chosen: ClassVar[Mapping[str, object]] = {"frame_skip": 2}
