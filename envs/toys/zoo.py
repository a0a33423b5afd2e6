"""A toy of PettingZoo, which must be installed: `--env=appo.envs.toys.zoo:Sizes`."""

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from pettingzoo import ParallelEnv

from appo.envs.spec import FloatArray

Dicts = tuple[dict[str, FloatArray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]


class Sizes(ParallelEnv):  # type: ignore[misc]
    """Three agents with 2, 3 and 4 choices; a vector of as many entries shows each agent the right choice.

    A step is worth 1 to an agent with the right choice. A choice that an agent does not have raises a `ValueError`.
    Episodes are cut off after `num_steps`, the best return.
    """

    NUM_CHOICES = {"small": 2, "middle": 3, "large": 4}  # noqa: RUF012
    metadata = {"name": "sizes_v0", "render_modes": []}  # noqa: RUF012

    def __init__(self, num_steps: int = 8) -> None:
        self.num_steps = num_steps
        self.possible_agents = list(self.NUM_CHOICES)
        self.agents: list[str] = []
        self.action_spaces = {agent: spaces.Discrete(size) for agent, size in self.NUM_CHOICES.items()}
        self.observation_spaces = {
            agent: spaces.Box(0.0, 1.0, (size,), np.float32) for agent, size in self.NUM_CHOICES.items()
        }
        self.np_random, _ = seeding.np_random()
        self._step, self._right = 0, dict.fromkeys(self.NUM_CHOICES, 0)

    def observation_space(self, agent: str) -> spaces.Box:
        """Return the space of an agent's observations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        """Return the space of an agent's actions."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, FloatArray], dict[str, dict[str, Any]]]:
        """Show everybody a right choice."""
        if seed is not None:
            self.np_random, _ = seeding.np_random(seed)
        self._step, self.agents = 0, list(self.possible_agents)
        return self._show(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Dicts:
        """Value the choices and show the next right ones."""
        for agent, action in actions.items():
            if not 0 <= action < self.NUM_CHOICES[agent]:
                raise ValueError(f"agent {agent} has no choice {action}")
        rewards = {agent: float(actions[agent] == self._right[agent]) for agent in self.agents}
        self._step += 1
        cut_off, agents = self._step == self.num_steps, self.agents
        if cut_off:
            self.agents = []
        ends = dict.fromkeys(agents, cut_off)
        return self._show(), rewards, dict.fromkeys(agents, False), ends, {agent: {} for agent in agents}

    def _show(self) -> dict[str, FloatArray]:
        self._right = {agent: int(self.np_random.integers(size)) for agent, size in self.NUM_CHOICES.items()}
        return {agent: np.eye(size, dtype=np.float32)[self._right[agent]] for agent, size in self.NUM_CHOICES.items()}
