"""The interface of a policy for policy workers and players; does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.runtime.memory.slots import Trajectories


class FastPolicy(Protocol):
    """Acts without torch in whole groups, directly in the slots."""

    def act(self, slot: int, step: int, version: int) -> None:
        """Act in one step of a slot with weights of this version."""

    def act_in(self, rows: Any, slot: int, step: int, version: int) -> None:
        """Act in some of the rows, [R] bool, and leave all others unchanged."""


class Random(Protocol):
    """A policy's source of random numbers, hashable; other contents belong to the policy.

    Attributes:
        generator: torch generator on the device of the policy, registered by a captured forward pass.
    """

    @property
    def generator(self) -> Generator:
        """Return the generator."""


@runtime_checkable
class Follows(Protocol):
    """A policy that changes while a run goes on, such as one that begins with random actions."""

    def follow(self, samples: int) -> None:
        """Note the agent steps of the policy that its learner has counted, steps of earlier starts included.

        The count is read from shared memory before every forward pass; steps in slots on the way are not counted yet.
        A policy without a learner, a past version or a frozen policy, is given `sys.maxsize` once. A
        captured pass on a GPU repeats no Python, so `act` must read a tensor that this method changes in place. Players
        never call the method: their policy acts as if training were over.
        """
        ...


class Policy(Protocol):
    """Acts; one object serves players, and policy workers on every device.

    Attributes:
        flat: network with all weights in one vector.
        rnn_state_size: number of recurrent values, H.
    """

    flat: FlatModule
    rnn_state_size: int

    def random(self, seed: int, rows: int) -> Random:
        """Make a source of random numbers for acting in groups of R rows."""

    def act(
        self,
        obs: dict[str, Tensor],
        first: Tensor,
        state: Tensor,
        rows: Tensor | None,
        random: Any,
        *,
        greedy: bool | Tensor = False,
        whole_groups: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Act in N rows; called in torch's inference mode, like `final`.

        Args:
            obs: observations [N, *] by key.
            first: flags [N] of rows that start an episode.
            state: recurrent state [N, H].
            rows: numbers [N] of the rows in the run, for settings that differ by row; None without such settings.
            random: result of `random`; None only if `greedy` is True.
            greedy: take the best action without drawing random numbers; [A]: only in True values of the action.
            whole_groups: whether the rows are K whole groups of R, which allows drawing group by group.

        Returns:
            "action" [N, A] and the other recorded fields [N, ...], and the next state [N, H].
        """

    def final(self, obs: dict[str, Tensor], first: Tensor, state: Tensor) -> dict[str, Tensor]:
        """Return the recorded fields [N, ...] of true final observations [N, *] of a SAME_STEP environment.

        The slot no longer contains these observations.
        """

    def fast(self, trajectories: Trajectories, random: Any) -> FastPolicy | None:
        """Make the twin without torch for these slots; None without a twin."""
