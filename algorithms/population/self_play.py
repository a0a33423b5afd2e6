"""Self-play in main: adds versions of the policy to a pool, rates the versions, and sets their probabilities."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from appo.algorithms.population.config import PopulationConfig
from appo.algorithms.population.matchmaking import LEARNER
from appo.algorithms.population.past_versions import PastVersions
from appo.algorithms.population.ratings import Record, probabilities, rating_of
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


@dataclass
class Opponent:
    """A version in the pool.

    Attributes:
        slot: policy number of the version.
        env_steps: env steps that the version has learned from.
        rating: rating of the learner at that time.
        scores: scores of the learner in the last games against the version: 1, 0.5 or 0.
    """

    slot: int
    env_steps: int
    rating: float
    scores: deque[float] = field(default_factory=deque)

    @property
    def record(self) -> Record:
        """Return the results against the version."""
        return Record(self.rating, len(self.scores), sum(self.scores))


class Pool(NamedTuple):
    """The places of versions: slots, blocks and files.

    Attributes:
        block: state of the learner, the origin of versions.
        rings: weights of each slot.
        past: versions on disk.
    """

    block: StateBlock
    rings: Mapping[int, WeightRing]
    past: PastVersions


class SelfPlay:
    """The pool of past versions. It never waits: it takes reports and yields messages.

    The pool has one slot more than versions. A version that leaves the pool is no longer drawn; its slot is free when
    no group plays there, and no version joins before. Every game is played to the end by the policies that began it.
    """

    def __init__(
        self,
        config: PopulationConfig,
        topology: Topology,
        pool: Pool,
        monitor: Monitor,
        resumed: int | None = None,
    ) -> None:
        self.config, self.topology, self.pool, self.monitor = config, topology, pool, monitor
        self.window = monitor.config.stats_avg
        self.opponents: list[Opponent] = []
        self._leaving: dict[int, int] = {}  # slot -> number of the table that has left it out
        self._answers = dict.fromkeys(range(topology.num_groups), 0)
        self._number = self._games = self._past_steps = 0
        self._outbox: list[Message] = []
        self._changed, self._told_at = False, 0.0
        for version in pool.past.load(-1 if resumed is None else resumed, self.config.self_play_pool_size):
            self._join(version.env_steps, version.rating, version.weights)
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
        if self._due and self.pool.block.writes and self._free_slots():
            self._take()
        if self._changed and time.monotonic() - self._told_at >= TABLE_SECONDS:
            self._tell()
        messages, self._outbox = self._outbox, []
        yield from messages

    def close(self) -> None:
        """Wait until the pool is on disk."""
        self.pool.past.close()

    @property
    def rating(self) -> float:
        """Return the rating of the learner."""
        return rating_of([one.record for one in self.opponents])

    def _free_slots(self) -> list[int]:
        taken = {one.slot for one in self.opponents} | self._leaving.keys()
        return [slot for slot in self.pool.rings if slot not in taken]

    def _take(self) -> None:
        """Add the learner's latest state to the pool, and remove the oldest version."""
        state = self.pool.block.read()
        assert state is not None
        self._due, env_steps, rating = False, int(state.meta["env_steps"]), self.rating
        if self.opponents and env_steps <= self.opponents[-1].env_steps:
            return
        self.pool.past.add(state, rating)
        self._join(env_steps, rating, state.weights)
        if len(self.opponents) > self.config.self_play_pool_size:
            oldest = self.opponents.pop(0)
            self._leaving[oldest.slot] = self._number + 1
            self.pool.past.remove(oldest.env_steps)
        self._tell()
        self._show()
        log.info("policy at %d env steps joins the %d past versions", env_steps, len(self.opponents) - 1)

    def _join(self, env_steps: int, rating: float, weights: Any) -> None:
        slot = self._free_slots()[0]
        ring = self.pool.rings[slot]
        ring.publish(weights, ring.published + 1)
        self.opponents.append(Opponent(slot, env_steps, rating, deque(maxlen=self.window)))

    def _tell(self) -> None:
        self._number += 1
        self._changed, self._told_at = False, time.monotonic()
        self._say(range(self.topology.num_actors))

    def _say(self, actors: Sequence[int]) -> None:
        slots, versions = ([getattr(one, name) for one in self.opponents] for name in ("slot", "env_steps"))
        chances = probabilities([one.record for one in self.opponents], self.config.self_play_opponents)
        self._outbox += [
            OpponentTable(actor, self._number, tuple(slots), tuple(versions), tuple(chances)) for actor in actors
        ]

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
