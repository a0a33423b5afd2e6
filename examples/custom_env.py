"""An environment of your own: any `gymnasium.Env`, without an import of this framework.

    python train_appo.py --env=examples.custom_env:GridWalk --train_until_return=0.8
    python enjoy_appo.py --env=examples.custom_env:GridWalk --no_render

No preset lists this environment. Observations are numbers, so training uses a small network without a memory; the log
reports the choice.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Observation = NDArray[np.float32]

STEPS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
"""Change of (row, column) by the actions up, down, left and right."""


class GridWalk(gymnasium.Env[Observation, np.int64]):
    """Walk to a goal on a grid: reward 1 on arrival, minus `STEP_COST` for every step.

    A step into a wall does not move the walker. The observation is (row, column) of the walker and of the goal, each
    in [0, 1]. Walker and goal start on random, different cells. `best_return` is the best possible mean return.

    Args:
        size: number of cells per side.
        max_steps: number of steps after which an episode is truncated.
    """

    STEP_COST = 0.05

    def __init__(self, size: int = 5, max_steps: int = 40) -> None:
        self.size, self.max_steps = size, max_steps
        self.observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(len(STEPS))
        self._walker = self._goal = np.zeros(2, np.int64)
        self._taken = self._shortest = 0

    @property
    def best_return(self) -> float:
        """Return the mean return of shortest ways: two random cells are 2/3 `size` steps apart on average."""
        return 1.0 - self.STEP_COST * 2 * self.size / 3

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw two cells from `self.np_random`, the generator that gymnasium seeds."""
        super().reset(seed=seed)
        cells = self.np_random.choice(self.size**2, 2, replace=False)
        self._walker, self._goal = np.stack(np.divmod(cells, self.size), axis=1)
        self._taken, self._shortest = 0, int(np.abs(self._walker - self._goal).sum())
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Walk to the next cell."""
        self._walker = np.clip(self._walker + STEPS[action], 0, self.size - 1)
        self._taken += 1
        arrived = bool((self._walker == self._goal).all())
        truncated = self._taken >= self.max_steps and not arrived
        info = self._report(arrived) if arrived or truncated else {}
        return self._observation(), float(arrived) - self.STEP_COST, arrived, truncated, info

    def _observation(self) -> Observation:
        return (np.concatenate((self._walker, self._goal)) / (self.size - 1)).astype(np.float32)

    def _report(self, arrived: bool) -> dict[str, Any]:
        """Return the last `info` of an episode; the means over episodes appear in metrics.jsonl and TensorBoard.

        `episode_extra_stats` holds any numbers about the episode. `true_reward` is the real goal, where the reward only
        helps learning: here the shortest way divided by the steps taken (at best 1), and 0 without an arrival.
        """
        detour = self._taken - self._shortest
        true_reward = self._shortest / self._taken if arrived else 0.0
        return {"episode_extra_stats": {"arrived": float(arrived), "detour": detour}, "true_reward": true_reward}
