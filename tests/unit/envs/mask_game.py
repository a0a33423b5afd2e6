"""A game with one legal pair of 5 x 4 in every step, which says in many forms which one that is."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEPS = 8

A, B = spaces.MultiBinary(5), spaces.MultiBinary(4)
DISCRETE = (spaces.Discrete(5), spaces.Discrete(4))
ACTIONS: dict[str, spaces.Space[Any]] = {
    "multi": spaces.MultiDiscrete([5, 4]),
    "tuple": spaces.Tuple(DISCRETE),
    "dict": spaces.Dict({"a": DISCRETE[0], "b": DISCRETE[1]}),
}

BACKWARDS = spaces.Dict()
BACKWARDS.spaces = {"b": B, "a": A}  # in another order than the action space

SHOWN: dict[str, spaces.Space[Any]] = {
    "flat": spaces.MultiBinary(9),
    "float": spaces.Box(0, 1, (9,), np.float32),
    "numbers": spaces.Box(-np.inf, np.inf, (9,), np.float64),
    "choices": spaces.MultiDiscrete([2] * 9),
    "tuple": spaces.Tuple((A, B)),
    "dict": spaces.Dict({"a": A, "b": B}),
    "backwards": BACKWARDS,
    "additive": spaces.Box(-np.inf, 0, (9,), np.float32),
    "additive tuple": spaces.Tuple((spaces.Box(-1e9, 0, (5,)), spaces.Box(-1e9, 0, (4,)))),
}
"""Spaces of masks in observations, by form."""

FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "flat": lambda mask: mask.astype(np.int8),
    "bool": lambda mask: mask,
    "list": lambda mask: mask.astype(int).tolist(),
    "float": lambda mask: mask.astype(np.float32),
    "numbers": lambda mask: mask.astype(np.float64),
    "choices": lambda mask: mask.astype(np.int64),
    "tuple": lambda mask: (mask[:5].astype(np.int8), mask[5:].astype(np.int8)),
    "dict": lambda mask: {"a": mask[:5].astype(np.int8), "b": mask[5:].astype(np.int8)},
    "backwards": lambda mask: {"b": mask[5:].astype(np.int8), "a": mask[:5].astype(np.int8)},
    "additive": lambda mask: np.where(mask, 0, -np.inf).astype(np.float32),
    "additive tuple": lambda mask: tuple(np.where(part, 0, -1e9).astype(np.float32) for part in (mask[:5], mask[5:])),
}


class Game(gymnasium.Env[Any, Any]):
    """Rewards the legal pair of a step by 1, and any other by -1.

    Args:
        where: the mask stands: observation, nested, deep, info or method.
        form: of the mask.
        action: the kind of the action space.
    """

    def __init__(self, where: str = "observation", form: str = "flat", action: str = "multi") -> None:
        self.where, self.form, self.action_space = where, form, ACTIONS[action]
        x = spaces.Box(0.0, 1.0, (9,), np.float32)
        inner = {"x": x} if where in ("info", "method") else {"x": x, "action_mask": SHOWN[form]}
        self.observation_space: spaces.Space[Any] = x if where in ("info", "method") else spaces.Dict(inner)
        if where in ("nested", "deep"):
            self.observation_space = spaces.Dict({"observation": self.observation_space})
        if where == "deep":
            self.observation_space = spaces.Tuple((self.observation_space, spaces.Discrete(2)))
        if where == "method":
            self.action_masks = lambda: FORMS[form](self._mask)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin with the first pair."""
        super().reset(seed=seed)
        self.count = 0
        return self._show()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pay for the pair, and show the next one."""
        chosen = tuple(action[key] for key in ("a", "b")) if isinstance(action, dict) else tuple(int(a) for a in action)
        reward = 1.0 if chosen == self.pair else -1.0
        self.count += 1
        observation, info = self._show()
        return observation, reward, self.count == STEPS, False, info

    def _show(self) -> tuple[Any, dict[str, Any]]:
        self.pair = int(self.np_random.integers(5)), int(self.np_random.integers(4))
        self._mask = np.zeros(9, np.bool_)
        self._mask[[self.pair[0], 5 + self.pair[1]]] = True
        mask, x = FORMS[self.form](self._mask), np.zeros(9, np.float32)
        if self.where in ("info", "method"):
            return x, {"action_mask": mask} if self.where == "info" else {}
        shown: Any = {"x": x, "action_mask": mask}
        if self.where in ("nested", "deep"):
            shown = {"observation": shown}
        return ((shown, 1) if self.where == "deep" else shown), {}


class Games(gymnasium.Env[Any, Any]):
    """Two agents that play a game each, side by side."""

    num_agents = 2

    def __init__(self, **arguments: Any) -> None:
        self.games = [Game(**arguments) for _ in range(2)]
        self.observation_space, self.action_space = self.games[0].observation_space, self.games[0].action_space
        if arguments["where"] == "method":
            self.action_masks = lambda: [game.action_masks() for game in self.games]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin both games."""
        shown = [game.reset(seed=None if seed is None else seed + i) for i, game in enumerate(self.games)]
        return [one for one, _ in shown], [info for _, info in shown]

    def step(self, action: Any) -> Any:
        """Step both games."""
        return tuple(
            list(part) for part in zip(*(game.step(a) for game, a in zip(self.games, action, strict=True)), strict=True)
        )
