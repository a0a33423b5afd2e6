"""One run of a trial, in a process forked from a server that has loaded torch and appo."""

import math
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.run.training import Training
from appo.algorithms.run.tuning.measure import enter, send_failures
from appo.algorithms.runtime.callbacks import Callbacks
from appo.algorithms.runtime.messages import EpisodesDone
from appo.utils.errors import NothingTrained

POINTS = 10
"""Points of a learning curve; the last one is the score."""
FEWEST_EPISODES = 20
LOOK_SECONDS = 0.05


class Budget(NamedTuple):
    """The length of a run: env steps or seconds; the other one is infinite."""

    env_steps: float = math.inf
    seconds: float = math.inf

    def share(self, env_steps: int, seconds: float) -> float:
        """Return the spent share, at most 1."""
        return min(1.0, max(env_steps / self.env_steps, seconds / self.seconds))

    @property
    def flags(self) -> dict[str, object]:
        """Return the flags of training that end a run with the budget."""
        limits = {"train_for_env_steps": self.env_steps, "train_for_seconds": self.seconds}
        kinds = {"train_for_env_steps": int, "train_for_seconds": float}
        return {name: kinds[name](limit) for name, limit in limits.items() if math.isfinite(limit)}


class Point(NamedTuple):
    """A point of the learning curve: number from 1 to `POINTS` - 1, and the mean return since the point before."""

    number: int
    score: float


class Outcome(NamedTuple):
    """The end of a run.

    Attributes:
        score: mean return of the episodes that ended in the last tenth of the budget, but at least of the last 20.
        env_steps: env steps that were learned from.
        seconds: seconds of training.
    """

    score: float
    env_steps: int
    seconds: float


class Returns(Callbacks):
    """Returns of episodes, in the order of their ends.

    Episodes of rows that explore much are left out, and episodes beyond the budget: a last batch may be larger than the
    rest of the budget.
    """

    def __init__(self, most_env_steps: float) -> None:
        super().__init__()
        self.most_env_steps, self.played = most_env_steps, 0
        self.values: list[float] = []

    def on_episodes(self, episodes: EpisodesDone) -> None:
        """Add the episodes of a report."""
        returns, lengths = episodes.episode_return.tolist(), episodes.length.tolist()
        aside = episodes.exploring.tolist() if episodes.exploring is not None else [False] * len(returns)
        for value, length, exploring in zip(returns, lengths, aside, strict=True):
            self.played += length
            if not exploring and self.played <= self.most_env_steps:
                self.values.append(value)

    def since(self, count: int) -> float | None:
        """Return the mean return after so many episodes, but at least of the last 20; None without an episode."""
        recent = self.values[max(0, min(count, len(self.values) - FEWEST_EPISODES)) :]
        return math.fsum(recent) / len(recent) if recent else None


def run_trial(pipe: Connection, log_path: Path, flags: Mapping[str, object], budget: Budget) -> None:
    """Train; send a `Point` for every tenth of the budget and at the end the `Outcome`, or a `WorkerFailed`."""
    enter("trial", log_path)
    with send_failures(pipe):
        returns, number, before = Returns(budget.env_steps), 0, 0
        with Training({**flags, **budget.flags}, callbacks=[returns], report_seconds=LOOK_SECONDS) as run:
            for report in run:
                if (reached := int(POINTS * budget.share(report.env_steps, report.seconds))) in (number, POINTS):
                    continue
                if (score := returns.since(before)) is not None:
                    pipe.send(Point(reached, score))
                number, before = reached, len(returns.values)
        last = run.result.report
        if (score := returns.since(before)) is None:
            raise NothingTrained("no episode has ended within the budget of a run: raise it")
        pipe.send(Outcome(score, last.env_steps, last.seconds))
