"""Matchmaking: draws the policy of each row of a group, and shapes rewards by coefficients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from appo.algorithms.population.game_results import NOBODY, GameResults
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import MatchResults, OpponentsReleased, OpponentTable
from appo.algorithms.runtime.sampling.env_group import GroupPlan
from appo.algorithms.runtime.sampling.matchmaker import Matchmaker
from appo.envs.spec import GroupEnv, StepRow
from appo.utils.errors import UsageError
from appo.utils.user_modules import find_function

LEARNER = 0
"""Number of the policy that learns."""


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
            name = self._mapping_name
            raise UsageError(f"--policy_mapping={name} returned {chosen!r}, not a policy below {self.num_policies}")
        return int(chosen)

    def _shape(self, rows: Sequence[int] | Array, envs: object) -> None:
        if not any(self.shaping) or not isinstance(envs, ShapesRewards):
            return
        for row in rows:
            if shaping := self.shaping[int(self._playing[row])]:
                envs.shape_rewards(int(row), shaping)


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
    mapping = plan.policy_mapping
    return PolicyMatchmaker(plan.num_policies, num_agents, per_row=plan.per_row_policy, mapping=mapping, random=random)
