"""Toys of several agents with known right answers; the methods use lists, with an entry per agent."""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from appo.envs.spec import FloatArray


class Pair(gymnasium.Env[Any, Any]):
    """Two agents answer one question: both get 1 for a step with two right answers, and 1/4 with a single right answer.

    An observation contains the question, which equals the right answer, and the agent's index. Episodes are cut off
    after `num_steps`; the best return of an agent is `num_steps`, chance reaches 2/9 of the best. With a reward for two
    right answers alone, the agents could settle on two wrong answers.
    """

    NUM_ANSWERS = 3
    num_agents = 2

    def __init__(self, num_steps: int = 8) -> None:
        self.num_steps = num_steps
        self.observation_space = spaces.Box(0.0, 1.0, (self.NUM_ANSWERS + self.num_agents,), np.float32)
        self.action_space = spaces.Discrete(self.NUM_ANSWERS)
        self._question = self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Ask the first question."""
        super().reset(seed=seed)
        self._step = 0
        return self._ask(), [{}, {}]

    def step(self, action: Any) -> Any:
        """Value both answers together and ask the next question."""
        right = sum(int(answer) == self._question for answer in action)
        self._step += 1
        return self._ask(), [right**2 / 4] * 2, [False] * 2, [self._step == self.num_steps] * 2, [{}, {}]

    def _ask(self) -> list[FloatArray]:
        self._question = int(self.np_random.integers(self.NUM_ANSWERS))
        answers, agents = np.eye(self.NUM_ANSWERS, dtype=np.float32), np.eye(self.num_agents, dtype=np.float32)
        return [np.concatenate([answers[self._question], agent]) for agent in agents]


class RockPaperScissors(gymnasium.Env[Any, Any]):
    """Two agents choose at the same time: paper beats rock, scissors paper, rock scissors; 1 for the winner, else -1.

    The observation is the opponent's choice in the round before, nothing in the first. The only strategy that cannot be
    exploited is to choose evenly by chance; a pure strategy beats every other strategy. Gradients alone run in circles
    around the even choice. An episode has `num_rounds`.
    """

    CHOICES = ("rock", "paper", "scissors")
    num_agents = 2

    def __init__(self, num_rounds: int = 1) -> None:
        self.num_rounds = num_rounds
        self.observation_space = spaces.Box(0.0, 1.0, (len(self.CHOICES),), np.float32)
        self.action_space = spaces.Discrete(len(self.CHOICES))
        self._round = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin the first round."""
        super().reset(seed=seed)
        self._round = 0
        return [np.zeros(len(self.CHOICES), np.float32) for _ in range(self.num_agents)], [{}, {}]

    def step(self, action: Any) -> Any:
        """Value both choices."""
        first, second = (int(choice) for choice in action)
        reward = (0.0, 1.0, -1.0)[(first - second) % 3]
        self._round += 1
        over = self._round == self.num_rounds
        shown = np.eye(len(self.CHOICES), dtype=np.float32)
        return [shown[second], shown[first]], [reward, -reward], [over] * 2, [False] * 2, [{}, {}]


class Shift(NamedTuple):
    """The first step of an agent, the step before which the agent has ended, and the kind of end."""

    begin: int
    end: int
    truncates: bool


def shift_of(agent: int, episode: int) -> Shift:
    """The first agent takes part from the start for at least 3 steps; by then all others have come, some have left."""
    if agent == 0:
        return Shift(0, 3 + episode % 2, episode % 2 == 0)
    begin = (agent + episode) % 3
    return Shift(begin, begin + 1 + (2 * agent + episode) % 4, (agent + episode) % 2 == 0)


def shift_reward(agent: int, step: int, action: int) -> float:
    """Return the reward of an agent for a step; exact in float32."""
    return agent + (step + 1) / 256 + action / 1024


class Shifts(gymnasium.Env[Any, Any]):
    """Agents that come late and leave early, by a known plan (`shift_of`).

    An agent's observation is [env id, episode, step, agent, last action]; the env id is the seed of the last seeded
    reset (modulo 2^16). Nothing is random. An agent that takes no part has no observation.
    """

    NUM_ACTIONS = 4

    def __init__(self, num_agents: int = 3) -> None:
        self.num_agents = num_agents
        self.observation_space = spaces.Box(0.0, 2.0**16, (5,), np.float32)
        self.action_space = spaces.Discrete(self.NUM_ACTIONS)
        self._env_id = self._step = 0
        self._episode = -1
        self._returns = [0.0] * num_agents

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin the next episode, or with a seed episode 0 of the env it names."""
        super().reset(seed=seed)
        if seed is not None:
            self._env_id, self._episode = seed % 2**16, -1
        self._episode, self._step, self._returns = self._episode + 1, 0, [0.0] * self.num_agents
        present = [shift.begin == 0 for shift in self._shifts()]
        shown = [self._observation(agent, 0) if here else None for agent, here in enumerate(present)]
        return shown, [{} if here else {"is_active": False} for here in present]

    def step(self, action: Any) -> Any:
        """Take the actions of the present agents; the end of a shift reports length and return."""
        said: list[tuple[Any, ...]] = []
        before, self._step = self._step, self._step + 1
        for agent, shift in enumerate(self._shifts()):
            acted, here = shift.begin <= before < shift.end, shift.begin <= self._step < shift.end
            choice = int(action[agent]) if acted else 0
            reward = shift_reward(agent, before, choice) if acted else 0.0
            self._returns[agent] += reward
            info: dict[str, Any] = {} if here else {"is_active": False}
            ended = acted and not here
            if ended:
                info["episode_extra_stats"] = {"length": shift.end - shift.begin}
                info["true_reward"] = self._returns[agent]
            shown = self._observation(agent, choice) if acted or here else None
            said.append((shown, reward, ended and not shift.truncates, ended and shift.truncates, info))
        return tuple(map(list, zip(*said, strict=True)))

    def _shifts(self) -> list[Shift]:
        return [shift_of(agent, self._episode) for agent in range(self.num_agents)]

    def _observation(self, agent: int, action: int) -> FloatArray:
        return np.array([self._env_id, self._episode, self._step, agent, action], np.float32)
