"""Games of the policy that learns against its past: who plays which agents against whom, and how it ends.

Policy 0 learns. Every other policy number is a place for one of its past versions, whose weights main publishes; a
place gets another version only when every group has said that nobody plays there (`Casts`, `PlacesLeft`).
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from algorithms.runtime.arena import Array
from algorithms.runtime.casting import Casting
from algorithms.runtime.messages import Casts, GamesDone, PlacesLeft
from envs.spec import StepRow

REPORT_SECONDS = 0.2
LEARNER = 0
"""The policy that learns."""

NOBODY = -1
"""Instead of a version: the learner plays alone."""


def sides_of(num_agents: int) -> Array:
    """[A] the side on which each agent of an environment plays: 0 and 1 in turn."""
    return np.arange(num_agents) % 2


class GameCasting(Casting):
    """Draws for every game whether, on which side and against which past version the learner plays it.

    A game begins when all agents of an environment begin an episode, and is played to its end by who began it. Without
    an opponent the learner plays all agents. A group draws its opponent for as many games as it has environments, since
    every policy that acts in a step costs a forward pass.

    Args:
        num_policies: the learner and all places.
        num_agents: rows of one environment, at least 2.
        num_envs: of the group.
        past_share: probability that a game is one against the past.
        random: of the group.

    Attributes:
        casts: who may be drawn; None until main has said so.
    """

    def __init__(
        self, num_policies: int, num_agents: int, num_envs: int, past_share: float, random: np.random.Generator
    ) -> None:
        super().__init__(num_policies, num_agents, per_row=True, mapping="", random=random)
        self.past_share = past_share
        self.casts: Casts | None = None
        self._versions: dict[int, int] = {}
        self._answered, self._place, self._games_left = 0, LEARNER, 0
        self._results = GameResults(num_envs, num_agents)

    def recast(self, casts: Casts) -> None:
        """As `Casting.recast`."""
        self.casts, self._versions = casts, dict(zip(casts.places, casts.versions, strict=True))
        if self._place not in casts.places:
            self._games_left = 0

    def draw(self, policy: Array, first: Array, first_env: int, envs: object) -> None:
        """As `Casting.draw`, a game at a time; late agents join the game."""
        begins = np.flatnonzero(first.reshape(-1, self.num_agents).all(axis=1))
        side = self.random.integers(2, size=(len(begins), 1))
        opponent = np.array([self._opponent() for _ in begins], np.int32)
        is_past = (sides_of(self.num_agents) != side) & (opponent != LEARNER)[:, None]
        policy.reshape(-1, self.num_agents)[begins] = np.where(is_past, opponent[:, None], LEARNER)
        self._results.begin(begins, is_past, [self._versions.get(int(place), NOBODY) for place in opponent])
        self.present = tuple(int(p) for p in np.unique(policy))
        self._playing = policy.copy()

    def record(self, row: StepRow, valid: Array, policy: Array) -> None:
        """As `Casting.record`."""
        self._results.record(row, valid, policy != LEARNER)

    def report(self, now: bool = False) -> Iterator[GamesDone]:
        """As `Casting.report`."""
        yield from self._results.flush(now)

    def answer(self, group: int) -> Iterator[PlacesLeft]:
        """As `Casting.answer`."""
        if self.casts is None or self._answered == self.casts.number:
            return
        if set(self.present) <= {LEARNER, *self.casts.places}:
            self._answered = self.casts.number
            yield PlacesLeft(group, self.casts.number)

    def _opponent(self) -> int:
        """The place that plays the next game against the learner; that of the learner itself if it plays alone."""
        if self.casts is None or not self.casts.places or self.random.random() >= self.past_share:
            return LEARNER
        if not self._games_left:
            self._place = int(self.random.choice(self.casts.places, p=self.casts.probabilities))
            self._games_left = self._results.num_envs
        self._games_left -= 1
        return self._place


class GameResults:
    """What agents have gathered in the games of a group, and how games against the past have ended.

    Args:
        num_envs: of the group.
        num_agents: of an environment.
    """

    def __init__(self, num_envs: int, num_agents: int) -> None:
        shape = self.num_envs, self.num_agents = num_envs, num_agents
        self._return = np.zeros(shape, np.float64)
        self._played, self._ended, self._is_past = (np.zeros(shape, np.bool_) for _ in range(3))
        self._opponent = np.full(num_envs, NOBODY, np.int64)
        self._done: list[tuple[Array, Array]] = []
        self._past_steps = 0
        self._flushed = time.monotonic()

    def record(self, row: StepRow, valid: Array, is_past: Array) -> None:
        """Take in a step, [R]."""
        shape = self._return.shape
        self._return += row.reward.reshape(shape)
        self._played |= valid.reshape(shape)
        self._ended |= (row.terminated | row.truncated).reshape(shape)
        self._past_steps += int(np.count_nonzero(valid & is_past))

    def begin(self, envs: Array, is_past: Array, opponent: Sequence[int]) -> None:
        """Games begin; those before have ended, unless their environments have failed.

        Args:
            envs: [E] numbers in the group.
            is_past: [E, A] agents that a past version plays.
            opponent: that version, of each; or `NOBODY`.
        """
        played, was_past = self._played[envs], self._is_past[envs]
        own, other = played & ~was_past, played & was_past
        over = (self._ended[envs] | ~played).all(axis=1) & (self._opponent[envs] != NOBODY)
        counts = over & own.any(axis=1) & other.any(axis=1)
        if counts.any():
            own_mean, other_mean = (self._mean(envs[counts], side[counts]) for side in (own, other))
            self._done.append((self._opponent[envs[counts]], own_mean - other_mean))
        self._return[envs] = 0.0
        self._played[envs] = self._ended[envs] = False
        self._is_past[envs], self._opponent[envs] = is_past, opponent

    def _mean(self, envs: Array, side: Array) -> Array:
        """[E] mean return of the agents for which `side` [E, A] holds."""
        mean: Array = (self._return[envs] * side).sum(axis=1) / side.sum(axis=1)
        return mean

    def flush(self, now: bool) -> Iterator[GamesDone]:
        """Report what has ended, if the last report is old enough or `now`."""
        if (self._done or self._past_steps) and (now or time.monotonic() - self._flushed >= REPORT_SECONDS):
            nothing = np.zeros(0, np.int64), np.zeros(0, np.float64)
            versions, differences = map(np.concatenate, zip(nothing, *self._done, strict=True))
            yield GamesDone(versions, differences, self._past_steps)
            self._done, self._past_steps, self._flushed = [], 0, time.monotonic()
