"""The played episodes of an environment with one agent or several."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from appo.envs.spec import TEAM_RETURN, BoolArray, EpisodeStats, StepRow


class PlayedEpisode(NamedTuple):
    """One played episode of an environment."""

    episode_return: float  # undiscounted sum of unscaled rewards; the mean over agents
    length: int  # env steps of the environment
    stats: dict[str, float]  # figures reported by the environment; the mean over agents
    agent_returns: tuple[float | None, ...] = ()  # returns of several agents; None for an agent without steps

    def as_plain(self) -> dict[str, object]:
        """Return the episode as JSON, without empty parts."""
        more: dict[str, object] = {"stats": self.stats, "agent_returns": list(self.agent_returns)}
        return {"return": self.episode_return, "length": self.length} | {name: x for name, x in more.items() if x}


class EpisodeRecorder:
    """Collects the returns of the agents of one environment in the current episode.

    Attributes:
        over: whether the last step ended the episode of all agents.
    """

    def __init__(self, num_agents: int) -> None:
        self.num_agents, self.over = num_agents, False
        self._begin()

    def _begin(self) -> None:
        self._returns, self._played, self._frames = np.zeros(self.num_agents), np.zeros(self.num_agents, np.bool_), 0
        self._stats: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, row: StepRow, valid: BoolArray, stats: Sequence[EpisodeStats]) -> int:
        """Add a step taken in the `valid` rows [R]; return the frames of the step."""
        self._returns += row.reward
        self._played |= valid
        frames = int(row.num_frames[valid].max(initial=0))
        self._frames += frames
        for _, reported in stats:
            for name, value in reported.items():
                self._stats[name].append(value)
        self.over = bool((row.terminated | row.truncated).any()) if self.num_agents == 1 else TEAM_RETURN in self._stats
        return frames

    def episode(self) -> PlayedEpisode:
        """Return the ended episode, and begin the next episode."""
        returns, played = self._returns, self._played
        stats = {name: statistics.fmean(values) for name, values in self._stats.items()}
        of_agents = tuple(float(r) if p else None for r, p in zip(returns, played, strict=True))
        mean = float(returns.sum() / max(1, played.sum()))
        episode = PlayedEpisode(mean, self._frames, stats, of_agents if self.num_agents > 1 else ())
        self._begin()
        return episode


def agent_means(episodes: Sequence[PlayedEpisode]) -> list[float | None]:
    """Return the mean return of each of several agents, None for an agent without steps; empty for one agent."""
    returns = ([r for r in own if r is not None] for own in zip(*(e.agent_returns for e in episodes), strict=True))
    return [statistics.fmean(own) if own else None for own in returns]


def team_mean(episodes: Sequence[PlayedEpisode]) -> float:
    """Return the mean of the summed returns of all agents."""
    return statistics.fmean(episode.stats[TEAM_RETURN] for episode in episodes)
