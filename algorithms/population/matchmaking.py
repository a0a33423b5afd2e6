"""Matchmaking: draws the policy of each row of a group, shapes rewards by coefficients, and counts games."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import MatchResults, OpponentsReleased, OpponentTable
from appo.algorithms.runtime.sampling.env_group import GroupPlan
from appo.algorithms.runtime.sampling.matchmaker import Matchmaker
from appo.envs.spec import GroupEnv, StepRow
from appo.utils.errors import UsageError
from appo.utils.user_modules import find_function

LEARNER = 0
"""Number of the policy that learns."""
REPORT_SECONDS = 0.2
NOBODY = -1
"""Version of a game without an opponent, or without a result."""


@runtime_checkable
class ShapesRewards(Protocol):
    """Environments with adjustable coefficients of rewards."""

    def shape_rewards(self, row: int, shaping: Mapping[str, Any]) -> None:
        """Set the coefficients of a row's rewards."""


class PolicyMatchmaker(Matchmaker):
    """Draws the policy of every row that starts an episode: an episode is played, and scored, by one policy.

    Only policies with no more steps than the average are drawn. Otherwise, policies with the longest episodes would get
    nearly all steps, and the rest would never learn.

    Args:
        num_policies: number of policies.
        num_agents: rows of an environment.
        per_row: whether agents of an environment may have different policies.
        mapping: name of the user's function, see `--policy_mapping`; empty: the rule above.
        random: generator of the group.

    Attributes:
        present: policies that play in the group now.
        shaping: coefficients of every policy; {}: the environment's own.

    Raises:
        UsageError: the function does not exist.
    """

    def __init__(
        self, num_policies: int, num_agents: int, *, per_row: bool, mapping: str, random: np.random.Generator
    ) -> None:
        self.num_policies, self.num_agents, self.per_row, self.random = num_policies, num_agents, per_row, random
        self.present = (0,)
        self.shaping = [{}] * num_policies
        self._mapping_name = mapping
        self._mapping = find_function("policy_mapping", mapping) if mapping else None
        self._playing: Array = np.zeros(0, np.int32)
        self._steps: Array = np.zeros(num_policies, np.int64)

    def draw(self, policy: Array, first: Array, first_env: int, envs: object) -> None:
        """Draw a policy where an episode starts.

        A policy shared by all agents of an environment stays until all agents begin; late agents join.

        Args:
            policy: [R] policy of every row; changed in place.
            first: [R] whether an episode starts.
            first_env: number of the group's first environment in the run.
            envs: environments of the group.

        Raises:
            UsageError: the user's function returned no policy.
        """
        if self.num_policies == 1:
            return
        if self._mapping is not None:
            for row in np.flatnonzero(first):
                policy[row] = self._map_policy(self._mapping, int(row), first_env)
        else:
            behind = np.flatnonzero(self._steps <= self._steps.mean()).astype(np.int32)
            drawn = self.random.choice(behind, size=first.shape)
            if not self.per_row:
                drawn = np.repeat(drawn[:: self.num_agents], self.num_agents)
                first = np.repeat(first.reshape(-1, self.num_agents).all(axis=1), self.num_agents)
            policy[first] = drawn[first]
        self.present = tuple(int(p) for p in np.unique(policy))
        self._playing = policy.copy()
        self._shape(np.flatnonzero(first), envs)

    def shape(self, policy: int, shaping: Mapping[str, Any], envs: object) -> None:
        """Set the coefficients of a policy's rewards, also in open episodes."""
        self.shaping[policy] = shaping
        self._shape(np.flatnonzero(self._playing == policy), envs)

    def record(self, row: StepRow, valid: Array, policy: Array) -> None:
        """Take in a step of every row, [R], with the environment's rewards."""
        if self.num_policies > 1:
            self._steps += np.bincount(policy[valid], minlength=self.num_policies)

    def _map_policy(self, function: Callable[..., Any], row: int, first_env: int) -> int:
        env, agent = divmod(row, self.num_agents)
        chosen: object = function(agent, first_env + env, self.random)
        if not isinstance(chosen, (int, np.integer)) or not 0 <= chosen < self.num_policies:
            raise UsageError(
                f"--policy_mapping={self._mapping_name} returned {chosen!r}, not a policy below {self.num_policies}"
            )
        return int(chosen)

    def _shape(self, rows: Sequence[int] | Array, envs: object) -> None:
        if not any(self.shaping) or not isinstance(envs, ShapesRewards):
            return
        for row in rows:
            if shaping := self.shaping[int(self._playing[row])]:
                envs.shape_rewards(int(row), shaping)


class GameResults:
    """Returns of agents in the games of a group, and results against past versions."""

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
        """Begin games; the previous games count as ended, unless their environments have failed.

        Args:
            envs: [E] numbers in the group.
            is_past: [E, A] whether a past version plays the agent.
            opponent: version of each game, or `NOBODY`.
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

    def leave_out(self, cut: Array) -> None:
        """Count no result of the present games of the rows `cut` [R]; the steps of past versions count."""
        self._opponent[cut.reshape(self._return.shape).any(axis=1)] = NOBODY

    def _mean(self, envs: Array, side: Array) -> Array:
        """Return the mean return [E] of the agents in `side` [E, A]."""
        return np.asarray((self._return[envs] * side).sum(axis=1) / side.sum(axis=1))

    def finish(self, not_handed_over: int) -> None:
        """Count ended games without a successor; discount steps that are never handed over.

        Args:
            not_handed_over: valid steps of past versions in a slot that stays behind.
        """
        self._past_steps -= not_handed_over
        over = np.flatnonzero(self._ended.all(axis=1))
        self.begin(over, np.zeros((len(over), self.num_agents), np.bool_), [NOBODY] * len(over))

    def flush(self, now: bool) -> Iterator[MatchResults]:
        """Report results if the last report is old enough or `now`."""
        if (self._done or self._past_steps) and (now or time.monotonic() - self._flushed >= REPORT_SECONDS):
            nothing = np.zeros(0, np.int64), np.zeros(0, np.float64)
            versions, differences = map(np.concatenate, zip(nothing, *self._done, strict=True))
            yield MatchResults(versions, differences, self._past_steps)
            self._done, self._past_steps, self._flushed = [], 0, time.monotonic()


def sides_of(num_agents: int) -> Array:
    """Return the side of each agent of an environment, [A]: 0 and 1 in turn."""
    return np.arange(num_agents) % 2


class SelfPlayMatchmaker(PolicyMatchmaker):
    """Draws for every game the opponent and the side of the learner.

    Policy 0 learns; each other number is a seat for a past version, whose weights main publishes. A seat gets another
    version only after every group has reported that no game uses the seat (`OpponentTable`, `OpponentsReleased`).

    A game begins when all agents of an environment begin an episode, and keeps its policies to the end. Without an
    opponent the learner plays all agents. A group keeps an opponent for as many games as environments, because every
    policy in a step costs a forward pass.

    Attributes:
        table: opponents to draw from; None before main's first table.
    """

    def __init__(
        self, num_policies: int, num_agents: int, num_envs: int, past_share: float, random: np.random.Generator
    ) -> None:
        super().__init__(num_policies, num_agents, per_row=True, mapping="", random=random)
        self.past_share = past_share
        self.table: OpponentTable | None = None
        self._versions: dict[int, int] = {}
        self._answered, self._slot, self._games_left = 0, LEARNER, 0
        self._results = GameResults(num_envs, num_agents)

    def take_table(self, table: OpponentTable) -> None:
        """Draw past versions from these slots from now on; a series of games in another slot ends."""
        self.table, self._versions = table, dict(zip(table.slots, table.versions, strict=True))
        if self._slot not in table.slots:
            self._games_left = 0

    def draw(self, policy: Array, first: Array, first_env: int, envs: object) -> None:
        """Draw for every game that starts; late agents join the game."""
        begins = np.flatnonzero(first.reshape(-1, self.num_agents).all(axis=1))
        side = self.random.integers(2, size=(len(begins), 1))
        opponent = np.array([self._opponent() for _ in begins], np.int32)
        is_past = (sides_of(self.num_agents) != side) & (opponent != LEARNER)[:, None]
        policy.reshape(-1, self.num_agents)[begins] = np.where(is_past, opponent[:, None], LEARNER)
        self._results.begin(begins, is_past, [self._versions.get(int(slot), NOBODY) for slot in opponent])
        self.present = tuple(int(p) for p in np.unique(policy))
        self._playing = policy.copy()

    def leave_out(self, cut: Array) -> None:
        """Count no result of the present games of the rows `cut` [R]."""
        self._results.leave_out(cut)

    def record(self, row: StepRow, valid: Array, policy: Array) -> None:
        """Take in a step of every row, [R]; rewards as the environment gave them."""
        self._results.record(row, valid, policy != LEARNER)

    def report(self, now: bool = False) -> Iterator[MatchResults]:
        """Yield how games against past versions have ended since the last report, if that is old enough or `now`."""
        yield from self._results.flush(now)

    def finish(self, policy: Array, valid: Array) -> None:
        """Close the books at the end of a run, see `GameResults.finish`; arguments as in `PolicyMatchmaker`."""
        self._results.finish(int(np.count_nonzero(valid & (policy != LEARNER))))

    def answer(self, group: int) -> Iterator[OpponentsReleased]:
        """Say once that nobody plays any more in slots that the last `OpponentTable` has left out."""
        if self.table is None or self._answered == self.table.number:
            return
        if set(self.present) <= {LEARNER, *self.table.slots}:
            self._answered = self.table.number
            yield OpponentsReleased(group, self.table.number)

    def _opponent(self) -> int:
        """Return the seat of the learner's next opponent; the learner's own if it plays alone."""
        if self.table is None or not self.table.slots or self.random.random() >= self.past_share:
            return LEARNER
        if not self._games_left:
            self._slot = int(self.random.choice(self.table.slots, p=self.table.probabilities))
            self._games_left = self._results.num_envs
        self._games_left -= 1
        return self._slot


def matchmaker_of(plan: GroupPlan, envs: GroupEnv, random: np.random.Generator) -> PolicyMatchmaker:
    """Return the matchmaker for the plan of a group."""
    num_agents = envs.spec.num_agents
    if plan.num_past:
        return SelfPlayMatchmaker(plan.num_policies, num_agents, envs.num_rows // num_agents, plan.past_share, random)
    return PolicyMatchmaker(
        plan.num_policies, num_agents, per_row=plan.per_row_policy, mapping=plan.policy_mapping, random=random
    )
