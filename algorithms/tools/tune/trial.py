"""One run of a trial, in a process forked from a server that has loaded torch and appo."""

from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from appo.algorithms.run.training import Training
from appo.algorithms.run.tuning.measure import enter, send_failures
from appo.algorithms.runtime.callbacks import Callbacks
from appo.algorithms.runtime.messages import EpisodesDone
from appo.utils.errors import NothingTrained

POINTS = 10
"""Points of a learning curve; the last one is the score."""
FEWEST_EPISODES = 20
LOOK_SECONDS = 0.05


class Point(NamedTuple):
    """A point of a learning curve: number from 1 to `POINTS` - 1, and the mean return since the point before."""

    number: int
    score: float


class Outcome(NamedTuple):
    """The end of a run: the score (`Returns.since` the last point), trained env steps, and seconds of training."""

    score: float
    env_steps: int
    seconds: float


class Returns(Callbacks):
    """Returns of episodes in the order of their ends, without rows that explore much, and within the budget.

    A last batch may be larger than the rest of the budget. Every policy has a budget of its own.
    """

    def __init__(self, most_env_steps: float) -> None:
        super().__init__()
        self.most_env_steps, self.played = most_env_steps, Counter[int]()
        self.values: list[float] = []

    def on_episodes(self, episodes: EpisodesDone) -> None:
        """Add the episodes of a report."""
        for place, length in enumerate(episodes.length.tolist()):
            policy = int(episodes.policy[place])
            self.played[policy] += length
            is_within = self.played[policy] <= self.most_env_steps
            if is_within and (episodes.exploring is None or not episodes.exploring[place]):
                self.values.append(float(episodes.episode_return[place]))

    def since(self, count: int) -> float | None:
        """Return the mean return after so many episodes, but at least of the last 20; None without an episode."""
        recent = self.values[max(0, min(count, len(self.values) - FEWEST_EPISODES)) :]
        return fmean(recent) if recent else None


def run_trial(pipe: Connection, log_path: Path, flags: Mapping[str, Any]) -> None:
    """Train; send a `Point` for every tenth of the budget and at the end the `Outcome`, or a `WorkerFailed`."""
    enter("trial", log_path)
    with send_failures(pipe):
        returns, number, before = Returns(flags.get("train_for_env_steps", float("inf"))), 0, 0
        with Training(flags, callbacks=[returns], report_seconds=LOOK_SECONDS) as run:
            for _ in run:
                if (reached := int(POINTS * (run.share or 0))) in (number, POINTS):
                    continue
                if (score := returns.since(before)) is not None:
                    pipe.send(Point(reached, score))
                number, before = reached, len(returns.values)
        if (score := returns.since(before)) is None:
            raise NothingTrained("no episode has ended within the budget of a run: raise it")
        pipe.send(Outcome(score, run.result.report.env_steps, run.result.report.seconds))
