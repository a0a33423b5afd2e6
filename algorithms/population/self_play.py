"""Self-play in main: adds versions of the policy to a pool, rates the versions, and sets their probabilities.

A version keeps the rating of the learner at the time when the version was taken; the first version has 0. The learner's
rating is the best explanation of the last results. 400 points are odds of 10 to 1 (Elo 1978, The Rating of
Chessplayers).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from appo.algorithms.population.config import PopulationConfig
from appo.algorithms.population.matchmaking import LEARNER
from appo.algorithms.population.past_versions import PastVersions
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import (
    Address,
    MatchResults,
    Message,
    OpponentsReleased,
    OpponentTable,
    VersionDue,
    WorkerRestarted,
)
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.roles import ACTOR
from appo.algorithms.runtime.topology import Topology

log = logging.getLogger(__name__)

TABLE_SECONDS = 1.0
"""Interval between changes of the probabilities by new results."""
SCALE = 400 / math.log(10)
PRIOR_GAMES = 1.0
"""Games added for every version, so that no rating is certain; `prior` is their score."""
DRAWN = 0.5
HARDNESS = 2
"""Exponent of `hard` opponents."""
LARGEST_STEP = 4000.0  # from the highest or lowest rating of a version: odds that no number of games can show
BISECTIONS = 50


class Record(NamedTuple):
    """Recent results of the learner against a version; `score` counts won games, and half of drawn games."""

    rating: float
    games: int
    score: float
    prior: float = DRAWN

    @property
    def win_rate(self) -> float:
        """Return the share of games won, with the prior."""
        return (self.score + PRIOR_GAMES * self.prior) / (self.games + PRIOR_GAMES)


@dataclass
class Opponent:
    """A version in the pool.

    Attributes:
        slot: policy number of the version.
        env_steps: env steps that the version has learned from.
        rating: rating of the learner at that time.
        prior: mean score of the learner in the added games: of a draw, or after a resume as the ratings predict.
        scores: scores of the learner in the last games against the version: 1, 0.5 or 0.
    """

    slot: int
    env_steps: int
    rating: float
    prior: float = DRAWN
    scores: deque[float] = field(default_factory=deque)

    @property
    def record(self) -> Record:
        """Return the results against the version."""
        return Record(self.rating, len(self.scores), sum(self.scores), self.prior)


class SelfPlay:
    """The pool of past versions. It never waits: it takes reports and yields messages.

    The pool has one slot more than versions. A version that leaves the pool is no longer drawn; its slot is free when
    no group plays there, and no version joins before. Every game is played to the end by the policies that began it.

    `resumed` has the env steps of the resumed state; None in a new run.
    """

    def __init__(
        self,
        config: PopulationConfig,
        topology: Topology,
        block: StateBlock,
        rings: Mapping[int, WeightRing],
        past: PastVersions,
        monitor: Monitor,
        resumed: int | None = None,
    ) -> None:
        self.config, self.topology, self.monitor = config, topology, monitor
        self.block, self.rings, self.past = block, rings, past
        self.window = monitor.config.stats_avg
        self.opponents: list[Opponent] = []
        self._leaving: dict[int, int] = {}  # slot -> number of the table that has left it out
        self._answers = dict.fromkeys(range(topology.num_groups), 0)
        self._number = self._games = self._past_steps = 0
        self._outbox: list[Message] = []
        self._changed, self._told_at = False, 0.0
        kept = past.load(-1 if resumed is None else resumed, self.config.self_play_pool_size)
        for version in kept:
            # Added draws would rate the learner amid the pool, and for good a version that joins soon.
            prior = expected_score(kept[-1].rating, version.rating)
            self._join(version.env_steps, version.rating, version.weights, prior)
        self._due = not self.opponents  # the first version is the policy as it begins
        if self.opponents:
            self._tell()

    def handle(self, message: Message) -> None:
        """Take in a report."""
        match message:
            case VersionDue():
                self._due = True
            case MatchResults():
                self._score(message)
            case OpponentsReleased(group, number):
                self._answers[group] = max(number, self._answers[group])
                heard = min(self._answers.values())
                self._leaving = {slot: since for slot, since in self._leaving.items() if since > heard}
            case WorkerRestarted(process):
                self._again(process)

    def tick(self) -> Iterator[Message]:
        """Yield the messages to send now."""
        if self._due and self.block.writes and self._free_slots():
            self._take()
        if self._changed and time.monotonic() - self._told_at >= TABLE_SECONDS:
            self._tell()
        messages, self._outbox = self._outbox, []
        yield from messages

    def close(self) -> None:
        """Wait until the pool is on disk."""
        self.past.close()

    @property
    def rating(self) -> float:
        """Return the rating of the learner."""
        return rating_of([one.record for one in self.opponents])

    def _free_slots(self) -> list[int]:
        taken = {one.slot for one in self.opponents} | self._leaving.keys()
        return [slot for slot in self.rings if slot not in taken]

    def _take(self) -> None:
        """Add the learner's latest state to the pool, and remove the oldest version."""
        state = self.block.read()
        assert state is not None
        self._due, env_steps, rating = False, int(state.meta["env_steps"]), self.rating
        if self.opponents and env_steps <= self.opponents[-1].env_steps:
            return
        self.past.add(state, rating)
        self._join(env_steps, rating, state.weights)
        if len(self.opponents) > self.config.self_play_pool_size:
            oldest = self.opponents.pop(0)
            self._leaving[oldest.slot] = self._number + 1
            self.past.remove(oldest.env_steps)
        self._tell()
        self._show()
        log.info("policy at %d env steps joins the %d past versions", env_steps, len(self.opponents) - 1)

    def _join(self, env_steps: int, rating: float, weights: Any, prior: float = DRAWN) -> None:
        slot = self._free_slots()[0]
        self.rings[slot].publish(weights, self.rings[slot].published + 1)
        self.opponents.append(Opponent(slot, env_steps, rating, prior, deque(maxlen=self.window)))

    def _tell(self) -> None:
        self._number += 1
        self._changed, self._told_at = False, time.monotonic()
        self._say(range(self.topology.num_actors))

    def _say(self, actors: Sequence[int]) -> None:
        slots, versions = (tuple(getattr(one, name) for one in self.opponents) for name in ("slot", "env_steps"))
        chances = tuple(probabilities([one.record for one in self.opponents], self.config.self_play_opponents))
        self._outbox += [OpponentTable(actor, self._number, slots, versions, chances) for actor in actors]

    def _again(self, process: str) -> None:
        """Send the table to a replacement actor, whose groups have answered nothing."""
        for actor in range(self.topology.num_actors):
            if process == str(Address(ACTOR.name, actor)) and self._number:
                self._answers |= dict.fromkeys(self.topology.groups_of(actor), 0)
                self._say([actor])

    def _score(self, done: MatchResults) -> None:
        self._past_steps += done.past_steps
        by_version = {one.env_steps: one for one in self.opponents}
        for version, difference in zip(done.version.tolist(), done.difference.tolist(), strict=True):
            self._games += 1
            if version in by_version:
                by_version[version].scores.append(0.5 + 0.5 * (difference > 0) - 0.5 * (difference < 0))
        self._changed = self.config.self_play_opponents == "hard" and bool(self.opponents)
        self._show()

    def _show(self) -> None:
        """Show the learner's results against the pool in the reports."""
        records = [one.record for one in self.opponents]
        rates = [one.score / one.games for one in records if one.games]
        shown = {"rating": self.rating, "pool": len(records), "games": self._games, "past_steps": self._past_steps}
        if rates:
            shown |= {"win_rate": sum(rates) / len(rates), "win_rate_min": min(rates)}
        self.monitor.policies[LEARNER].metrics |= {f"selfplay/{name}": float(value) for name, value in shown.items()}


def expected_score(rating: float, other: float) -> float:
    """Return the expected score of a game between two ratings."""
    return 1 / (1 + math.exp(-(rating - other) / SCALE))


def rating_of(records: Sequence[Record]) -> float:
    """Return the maximum likelihood rating for all games; 0 without versions.

    Source: Bradley and Terry 1952, Biometrika 39, with one unknown strength.
    """
    if not records:
        return 0.0
    score = sum(one.score + PRIOR_GAMES * one.prior for one in records)
    low = min(one.rating for one in records) - LARGEST_STEP
    high = max(one.rating for one in records) + LARGEST_STEP
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        expected = sum((one.games + PRIOR_GAMES) * expected_score(middle, one.rating) for one in records)
        low, high = (middle, high) if expected < score else (low, middle)
    return (low + high) / 2


def probabilities(records: Sequence[Record], opponents: str) -> list[float]:
    """Return the probability of drawing each version.

    Args:
        records: results against the versions.
        opponents: uniform, or hard: by (1 - win rate)^2 (prioritized fictitious self-play, Vinyals et al. 2019).
    """
    weights = [1.0 if opponents == "uniform" else (1 - one.win_rate) ** HARDNESS for one in records]
    return [weight / sum(weights) for weight in weights]
