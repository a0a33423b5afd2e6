"""PettingZoo's forms of a toy, as somebody's own module would have them."""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

from appo.envs.toys.agents import Shifts

UNIT = spaces.Box(0.0, 1.0, (1,), np.float32)


class ParallelShifts(ParallelEnv):
    """`Shifts` as a parallel environment: whoever takes no part is in no dict."""

    metadata: ClassVar[dict[str, Any]] = {"name": "shifts_v0", "render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.possible_agents = ["a", "b", "c"]
        self.render_mode, self.shifts, self.agents = render_mode, Shifts(3), []

    def observation_space(self, agent: str) -> spaces.Box:
        return self.shifts.observation_space

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.shifts.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        shown, infos = self.shifts.reset(seed=seed)
        self.agents = [a for a, info in zip(self.possible_agents, infos, strict=True) if info.get("is_active", True)]
        listed = zip(self.possible_agents, zip(shown, infos, strict=True), strict=True)
        parts = {agent: entries for agent, entries in listed if agent in self.agents}
        return {a: o for a, (o, _) in parts.items()}, {a: i for a, (_, i) in parts.items()}

    def step(self, actions: dict[str, int]) -> Any:
        assert set(actions) == set(self.agents)
        acting = self.agents
        said = self.shifts.step([actions.get(agent, 99) for agent in self.possible_agents])
        by_agent = dict(zip(self.possible_agents, zip(*said, strict=True), strict=True))
        self.agents = [agent for agent, (*_, info) in by_agent.items() if info.pop("is_active", True)]
        told = [agent for agent in self.possible_agents if agent in acting or agent in self.agents]
        return tuple({agent: by_agent[agent][i] for agent in told} for i in range(5))

    def render(self) -> Any:
        return np.full((20, 30, 3), 40 * self.shifts._step, np.uint8)


def parallel_env(render_mode: str | None = None) -> ParallelShifts:
    """Made as PettingZoo's modules do it."""
    return ParallelShifts(render_mode)


def parallel_to_aec_env() -> Any:
    """An environment whose agents are stepped one after the other, all of them in one step."""
    return parallel_to_aec(ParallelShifts())


def aec_env_with_one_buffer() -> Any:
    """The same, which shows every agent what it sees in one array."""
    env, buffer = parallel_to_aec(ParallelShifts()), np.zeros(5, np.float32)
    observe = env.observe

    def shown(agent: str) -> Any:
        buffer[:] = observe(agent)
        return buffer

    env.observe = shown
    return env


class Turns(AECEnv):
    """Its agents take turns."""

    metadata: ClassVar[dict[str, Any]] = {"name": "turns_v0"}

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]


class Unlike(ParallelEnv):
    """Two agents that see zeros, of which one has more: one is paid for choice 0, the other for choice 1."""

    metadata: ClassVar[dict[str, Any]] = {"name": "unlike_v0", "render_modes": []}
    NUM_STEPS = 8

    def __init__(self) -> None:
        self.possible_agents, self.agents, self.steps = ["few", "many"], [], 0

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(0.0, 1.0, (1 + self.possible_agents.index(agent),), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)

    def _shown(self) -> dict[str, Any]:
        return {agent: np.zeros(self.observation_space(agent).shape, np.float32) for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        return self._shown(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.steps += 1
        acting, ends = self.agents, self.steps == self.NUM_STEPS
        self.agents = [] if ends else acting
        rewards = {agent: float(actions[agent] == self.possible_agents.index(agent)) for agent in acting}
        return (
            self._shown(),
            rewards,
            dict.fromkeys(acting, False),
            dict.fromkeys(acting, ends),
            {a: {} for a in acting},
        )


class Bounds(Unlike):
    """Two agents, of which one reaches for 25 of Box(10, 30), the other for a half of Box(0, 1): 3/4 and 1/2 of it."""

    def action_space(self, agent: str) -> spaces.Box:  # type: ignore[override]
        low, high = ((10.0, 30.0), (0.0, 1.0))[self.possible_agents.index(agent)]
        return spaces.Box(low, high, (1,), np.float32)

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(actions[agent] in self.action_space(agent) for agent in self.agents)
        places = {"few": float(actions["few"][0] - 10) / 20, "many": float(actions["many"][0])}
        shown, _, *rest = super().step(dict.fromkeys(actions, 0))
        best = {"few": 0.75, "many": 0.5}
        return shown, {agent: 1.0 - abs(places[agent] - best[agent]) for agent in places}, *rest


class Returning(ParallelEnv):
    """Two agents, of which "b" dies, is away for `away` steps, and is back; the step that is the last one is 6.

    It insists on actions of exactly those on its list, pays the number of the step, and shows it as a tenth.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "returning_v0", "render_modes": []}

    def __init__(self, away: int = 2, truncates: bool = False, shows_end: bool = True, stranger: bool = False) -> None:
        self.possible_agents, self.agents, self.steps = ["a", "b"], [], 0
        self.away, self.truncates, self.shows_end, self.stranger = away, truncates, shows_end, stranger

    def observation_space(self, agent: str) -> spaces.Box:
        return UNIT

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)

    def _shown(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.full(1, self.steps / 10, np.float32) for agent in agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        return self._shown(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert set(actions) == set(self.agents), f"actions of {sorted(actions)}"
        self.steps += 1
        acted, over, dies = self.agents, self.steps == 6, self.steps == 2
        self.agents = [] if over else ["a"] if 2 <= self.steps < 2 + self.away else list(self.possible_agents)
        if self.stranger:
            self.agents.append("zed")
        told = sorted({*acted, *self.agents} - {"zed"})
        ends = {agent: over or (dies and agent == "b") for agent in told}
        shown = self._shown([agent for agent in told if self.shows_end or not ends[agent]])
        no = dict.fromkeys(told, False)
        flags = (no, ends) if self.truncates else (ends, no)
        return shown, dict.fromkeys(acted, float(self.steps)), *flags, {agent: {} for agent in told}


def returning_in_turns(**arguments: Any) -> Any:
    """`Returning` as PettingZoo converts it, to agents in turns and, by us, back."""
    return parallel_to_aec(Returning(**arguments))
