"""Environments that fail when it is planned, made one after the other by a factory that remembers them."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from appo.envs.spaces import spec_of

Place = tuple[int, str, int]
"""Number of the environment, what it is asked to do (init, reset, step or close), and for how many times; from 0, 1."""


class Mortals:
    """A factory of environments whose episodes have five steps; they show (own number, episode, step).

    The reward of a step is ten times the environment's number plus the step. What stands in the plan is raised there if
    it is an error, and returned otherwise.
    """

    def __init__(self, plan: Mapping[Place, object]) -> None:
        self.plan, self.attempts = plan, 0
        self.made: list[Mortal] = []

    def __call__(self) -> "Mortal":
        number, self.attempts = self.attempts, self.attempts + 1
        if isinstance(error := self.plan.get((number, "init", 1)), BaseException):
            raise error
        self.made.append(Mortal(number, self.plan))
        return self.made[-1]


class Mortal(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0.0, 100.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, number: int, plan: Mapping[Place, object]) -> None:
        self.number, self.plan = number, plan
        self.calls = {"reset": 0, "step": 0, "close": 0}
        self.episode, self.steps = -1, 0
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._planned("reset", (self._observation(), {}))

    def step(self, action: Any) -> Any:
        self.steps += 1
        usual = (self._observation(), 10.0 * self.number + self.steps, self.steps == 5, False, {})
        return self._planned("step", usual)

    def close(self) -> None:
        self._planned("close", None)

    def _observation(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.steps], np.float32)

    def _planned(self, place: str, usual: Any) -> Any:
        self.calls[place] += 1
        planned = self.plan.get((self.number, place, self.calls[place]), usual)
        if isinstance(planned, BaseException):
            raise planned
        return planned


SPEC = spec_of(Mortal.observation_space, Mortal.action_space)
"""Known beforehand, so that nobody is reset to find it out."""
