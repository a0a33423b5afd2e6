"""Environments whose actions are far from [-1, 1], or tiny, or without an end."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

ENV = "tests.reaching:Reach"
DUEL = "tests.reaching:Duel"
NUM_STEPS = 20

LOW, HIGH = np.array([10.0, -0.01, 0.0]), np.array([30.0, 0.01, np.inf])
BEST, RANGE = np.array([25.0, 0.004, 3.0]), np.array([20.0, 0.02, 4.0])
"""Bounds, best action and the distance that costs the whole reward: far away, tiny, and without an upper bound."""
FIRST_CHOICE, NUM_CHOICES, BEST_CHOICE = 7, 3, 9

Numbers = NDArray[np.float32]


class Reach(gymnasium.Env[Numbers, Any]):
    """Always shows 0; rewards an action by 1 - |action - best| / range, the mean where it has several parts.

    Args:
        numbers: which of those above are asked for.
        nested: each as a Box of its own, in a Dict.
        chooses: a choice beside them is right or wrong, in a Tuple or the same Dict.
        render_mode: `rgb_array` draws the last reward as brightness.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self, numbers: list[int], nested: bool = False, chooses: bool = False, render_mode: str | None = None
    ) -> None:
        self.numbers, self.nested, self.chooses = list(numbers), nested, chooses
        self.render_mode, self._step, self._reward = render_mode, 0, 0.0
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space: spaces.Space[Any] = self._box(self.numbers)
        choice = spaces.Discrete(NUM_CHOICES, start=FIRST_CHOICE)
        if nested:
            boxes = {f"n{number}": self._box([number]) for number in self.numbers}
            self.action_space = spaces.Dict({**boxes, **({"choice": choice} if chooses else {})})
        elif chooses:
            self.action_space = spaces.Tuple((choice, self.action_space))

    @staticmethod
    def _box(numbers: list[int]) -> spaces.Box:
        return spaces.Box(LOW[numbers].astype(np.float32), HIGH[numbers].astype(np.float32), dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Numbers, dict[str, Any]]:
        """Begin an episode of `NUM_STEPS`."""
        super().reset(seed=seed)
        self._step, self._reward = 0, 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Numbers, float, bool, bool, dict[str, Any]]:
        """Reward an action; one outside its space is refused.

        Raises:
            ValueError: it is none of the action space.
        """
        if action not in self.action_space:
            raise ValueError(f"{action!r} is none of {self.action_space}")
        self._step += 1
        choice = BEST_CHOICE
        if self.nested:
            taken = np.concatenate([action[f"n{number}"] for number in self.numbers])
            choice = action.get("choice", choice)
        elif self.chooses:
            choice, taken = action
        else:
            taken = action
        parts = (1.0 - np.abs(taken - BEST[self.numbers]) / RANGE[self.numbers]).tolist()
        if self.chooses:
            parts.append(float(choice == BEST_CHOICE))
        self._reward = float(np.mean(parts))
        return np.zeros(1, np.float32), self._reward, False, self._step >= NUM_STEPS, {}

    def render(self) -> Any:
        """Return a picture [8, 8, 3], white for the best action."""
        return np.full((8, 8, 3), round(255 * max(0.0, self._reward)), np.uint8)


class Duel(gymnasium.Env[Any, Any]):
    """Two agents that reach for 25 of Box(10, 30), as `Reach` rewards it."""

    def __init__(self) -> None:
        self.num_agents, self._step = 2, 0
        self.observation_space, self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32), Reach([0]).action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode of `NUM_STEPS`."""
        super().reset(seed=seed)
        self._step = 0
        return [np.zeros(1, np.float32)] * 2, [{}, {}]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Reward each agent's action."""
        self._step += 1
        rewards = [1.0 - float(abs(taken[0] - BEST[0]) / RANGE[0]) for taken in action]
        return [np.zeros(1, np.float32)] * 2, rewards, [False] * 2, [self._step >= NUM_STEPS] * 2, [{}, {}]
