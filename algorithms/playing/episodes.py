"""The episodes of an environment with one agent or several, as they are played."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from appo.envs.spec import TEAM_RETURN, BoolArray, EpisodeStats, StepRow


class Episode(NamedTuple):
    """One played episode of an environment."""

    episode_return: float  # undiscounted sum of the rewards as the environment gave them; the mean of its agents
    length: int  # env steps of the environment
    stats: dict[str, float]  # what the environment reported of it; the mean of its agents
    agent_returns: tuple[float | None, ...] = ()  # of each of several agents; None for one that never took part

    def as_plain(self) -> dict[str, object]:
        """Return it as JSON takes it, without what is empty."""
        more: dict[str, object] = {"stats": self.stats, "agent_returns": list(self.agent_returns)}
        return {"return": self.episode_return, "length": self.length} | {name: x for name, x in more.items() if x}


class EpisodeRecorder:
    """Gathers what the agents of one environment do in the episode that goes on.

    Args:
        num_agents: of the environment.

    Attributes:
        over: whether the episode has ended with the last step; of several agents, when all of theirs have.
    """

    def __init__(self, num_agents: int) -> None:
        self.num_agents, self.over = num_agents, False
        self._begin()

    def _begin(self) -> None:
        self._returns, self._played, self._frames = np.zeros(self.num_agents), np.zeros(self.num_agents, np.bool_), 0
        self._stats: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, row: StepRow, valid: BoolArray, stats: Sequence[EpisodeStats]) -> int:
        """Add a step that was taken in the `valid` rows [R]; its frames."""
        self._returns += row.reward
        self._played |= valid
        frames = int(row.num_frames[valid].max(initial=0))
        self._frames += frames
        for _, reported in stats:
            for name, value in reported.items():
                self._stats[name].append(value)
        alone = self.num_agents == 1
        self.over = bool((row.terminated | row.truncated).any()) if alone else TEAM_RETURN in self._stats
        return frames

    def episode(self) -> Episode:
        """The episode that has ended; the next one begins."""
        returns, played = self._returns, self._played
        stats = {name: statistics.fmean(values) for name, values in self._stats.items()}
        of_agents = tuple(float(r) if p else None for r, p in zip(returns, played, strict=True))
        mean = float(returns.sum() / max(1, played.sum()))
        episode = Episode(mean, self._frames, stats, of_agents if self.num_agents > 1 else ())
        self._begin()
        return episode


def agent_means(episodes: Sequence[Episode]) -> list[float | None]:
    """The mean return of each of several agents, None for one that never took part; empty for one agent."""
    returns = ([r for r in own if r is not None] for own in zip(*(e.agent_returns for e in episodes), strict=True))
    return [statistics.fmean(own) if own else None for own in returns]


def team_mean(episodes: Sequence[Episode]) -> float:
    """The mean of what all agents together got."""
    return statistics.fmean(episode.stats[TEAM_RETURN] for episode in episodes)
