"""Which policy plays in which row of a group, and by which coefficients its rewards are shaped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from algorithms.runtime.arena import Array
from algorithms.runtime.messages import Casts, GamesDone, PlacesLeft
from envs.spec import StepRow
from utils.errors import UsageError
from utils.functions import find_function


@runtime_checkable
class ShapesRewards(Protocol):
    """Environments whose rewards have coefficients that can be changed."""

    def shape_rewards(self, row: int, shaping: Mapping[str, Any]) -> None:
        """Reward a row by these coefficients from now on."""
        ...


class Casting:
    """Draws the policy of every row that starts an episode: an episode is played, and scored, by one policy.

    Drawn are those that have played no more steps than the average policy: were it anyone, the policies with the
    longest episodes would get nearly all of the steps, and the others never learn.

    Args:
        num_policies: to draw from.
        num_agents: rows of one environment.
        per_row: whether agents of one environment may play under different policies.
        mapping: name of the user's function that chooses, see `--policy_mapping`; empty: as above.
        random: of the group.

    Attributes:
        present: policies that play in the group now.
        shaping: of every policy; {}: the environment's own.

    Raises:
        UsageError: there is no such function.
    """

    def __init__(
        self, num_policies: int, num_agents: int, *, per_row: bool, mapping: str, random: np.random.Generator
    ) -> None:
        self.num_policies, self.num_agents, self.per_row, self.random = num_policies, num_agents, per_row, random
        self.present: tuple[int, ...] = (0,)
        self.shaping: list[Mapping[str, Any]] = [{}] * num_policies
        self._mapping_name = mapping
        self._mapping = find_function("policy_mapping", mapping) if mapping else None
        self._playing: Array = np.zeros(0, np.int32)
        self._steps: Array = np.zeros(num_policies, np.int64)

    def draw(self, policy: Array, first: Array, first_env: int, envs: object) -> None:
        """Draw anew where an episode starts.

        Where all agents of an environment play under one policy, it stays until all of them begin: who comes late joins
        the others.

        Args:
            policy: [R], of every row; changed in place.
            first: [R] whether an episode starts.
            first_env: number of the group's first environment in the run.
            envs: of the group.

        Raises:
            UsageError: the user's function returned what is no policy.
        """
        if self.num_policies == 1:
            return
        if self._mapping is not None:
            for row in np.flatnonzero(first):
                policy[row] = self._mapped(self._mapping, int(row), first_env)
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
        """Reward a policy by these coefficients, in episodes that are being played too."""
        self.shaping[policy] = shaping
        self._shape(np.flatnonzero(self._playing == policy), envs)

    def record(self, row: StepRow, valid: Array, policy: Array) -> None:
        """Take in a step of every row, [R]; rewards as the environment gave them."""
        if self.num_policies > 1:
            self._steps += np.bincount(policy[valid], minlength=self.num_policies)

    def recast(self, casts: Casts) -> None:
        """Draw past versions from these places from now on, where there are any; games that have begun go on."""

    def answer(self, group: int) -> Iterator[PlacesLeft]:
        """Say once when nobody plays any more in places that the last `Casts` have left out."""
        yield from ()

    def report(self, now: bool = False) -> Iterator[GamesDone]:
        """How games against past versions have ended since the last report, if that is old enough or `now`."""
        yield from ()

    def _mapped(self, function: Callable[..., Any], row: int, first_env: int) -> int:
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
