"""One run of a trial, in a process forked from a server that has loaded torch and appo."""

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from multiprocessing.connection import Connection
from operator import itemgetter
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
LOOK_SECONDS, ALIVE_SECONDS = 0.05, 1.0


class Alive(NamedTuple):
    """A sign of life, one each `ALIVE_SECONDS`."""


class Point(NamedTuple):
    """A point of a learning curve: number from 1 to `POINTS` - 1, and the mean return of this tenth of the budget."""

    number: int
    score: float


class Outcome(NamedTuple):
    """The end of a run: the score (`Returns.score` of the last tenth), trained env steps, and seconds of training."""

    score: float
    env_steps: int
    seconds: float


class Returns(Callbacks):
    """Returns of episodes by tenth of the budget, in the order of their ends, without rows that explore much.

    A tenth of a budget of env steps follows from the lengths of the episodes, so the same episodes have the same score
    however often main looks. Every policy has a budget of its own. A last batch may be larger than the rest of it.

    Attributes:
        tenth: tenth of a budget of time, from 1 to `POINTS`.
        learners: policies whose returns count; frozen ones and past versions learn nothing.
        values: tenth and return of each episode.
    """

    def __init__(self, most_env_steps: int | None) -> None:
        super().__init__()
        self.most_env_steps, self.played = most_env_steps, Counter[int]()
        self.tenth = 1
        self.learners: Collection[int] = ()
        self.values: list[tuple[int, float]] = []

    def on_episodes(self, episodes: EpisodesDone) -> None:
        """Add the episodes of a report."""
        for place, length in enumerate(episodes.length.tolist()):
            policy, tenth = int(episodes.policy[place]), self.tenth
            self.played[policy] += length
            if self.most_env_steps:
                tenth = -(-POINTS * self.played[policy] // self.most_env_steps)
            if (
                policy in self.learners
                and tenth <= POINTS
                and (episodes.exploring is None or not episodes.exploring[place])
            ):
                self.values.append((tenth, float(episodes.episode_return[place])))

    def score(self, tenth: int) -> float | None:
        """Return the mean return of the episodes of a tenth, but at least of the last 20; None without an episode."""
        until = sorted((one for one in self.values if one[0] <= tenth), key=itemgetter(0))
        count = max(FEWEST_EPISODES, sum(one[0] == tenth for one in until))
        return fmean(value for _, value in until[-count:]) if until else None


def run_trial(pipe: Connection, log_path: Path, flags: Mapping[str, Any]) -> None:
    """Train; send a `Point` for every tenth of the budget and at the end the `Outcome`, or a `WorkerFailed`."""
    enter("trial", log_path)
    with send_failures(pipe):
        returns = Returns(flags.get("train_for_env_steps"))
        with Training(flags, callbacks=[returns], report_seconds=LOOK_SECONDS) as run:
            returns.learners = set(range(run.config.sampling.num_policies)) - run.config.frozen
            told = -math.inf
            for _ in run:
                if pipe.poll():  # closed: the run has been ended early
                    return
                if (now := time.monotonic()) > told + ALIVE_SECONDS:
                    told = now
                    pipe.send(Alive())
                for number in range(returns.tenth, min(POINTS, int(POINTS * (run.share or 0)) + 1)):
                    if (score := returns.score(number)) is not None:
                        pipe.send(Point(number, score))
                    returns.tenth = number + 1
        if (score := returns.score(POINTS)) is None:
            raise NothingTrained("no episode has ended within the budget of a run: raise it")
        pipe.send(Outcome(score, run.result.report.env_steps, run.result.report.seconds))
