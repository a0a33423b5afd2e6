"""The interface of matchmaking: the choice of a policy for every row of a group."""

from collections.abc import Iterator, Mapping
from typing import Any

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import MatchResults, OpponentsReleased, OpponentTable
from appo.envs.spec import StepRow


class Matchmaker:
    """Assigns policies to rows. This base class is for a single policy, `population.matchmaking` has the others.

    Attributes:
        present: policies that play in the group now.
        shaping: reward coefficients of every policy; {}: coefficients of the environment.
    """

    def __init__(self) -> None:
        self.present: tuple[int, ...] = (0,)
        self.shaping: list[Mapping[str, Any]] = [{}]

    def draw(self, policy: Array, first: Array, first_env: int, envs: object) -> None:
        """Draw the policy [R] of the rows in which an episode starts, `first` [R], in place."""

    def leave_out(self, cut: Array) -> None:
        """Give no result to the present games of the rows `cut` [R], which have begun with random steps."""

    def shape(self, policy: int, shaping: Mapping[str, Any], envs: object) -> None:
        """Use these reward coefficients for a policy from now on."""

    def record(self, row: StepRow, valid: Array, policy: Array) -> None:
        """Record a step of every row, [R], with unscaled rewards."""

    def take_table(self, table: OpponentTable) -> None:
        """Draw past versions by this table from now on; games in progress continue."""

    def answer(self, group: int) -> Iterator[OpponentsReleased]:
        """Report once that nothing plays any more in the places that the last `OpponentTable` omits."""
        yield from ()

    def report(self, now: bool = False) -> Iterator[MatchResults]:
        """Yield results of games since the last report, if that report is old enough or `now` is set."""
        yield from ()

    def finish(self, policy: Array, valid: Array) -> None:
        """Finish at the end of a run.

        Args:
            policy: policies [S, R] of the steps in a slot that is not handed over.
            valid: mask [S, R] of the steps that were taken.
        """
