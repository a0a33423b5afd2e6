"""The interface of a policy for policy workers and players; torch-free at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.runtime.memory.slots import Trajectories


class FastPolicy(Protocol):
    """Acts without torch for whole groups, straight in the slots."""

    def act(self, slot: int, step: int, version: int) -> None:
        """Act in one step of a slot with weights of this version."""
        ...

    def act_in(self, rows: Any, slot: int, step: int, version: int) -> None:
        """Act in some of the rows, [R] bool, and leave all others as they are."""
        ...


class Random(Protocol):
    """A policy's source of random numbers, hashable; its other contents only the policy knows.

    Attributes:
        generator: by torch, on the device of the policy; a captured forward pass registers it.
    """

    @property
    def generator(self) -> Generator:
        """Return the generator."""
        ...


class Policy(Protocol):
    """Acts; one object serves policy workers on every device and players.

    Attributes:
        flat: the network with all its weights in one vector.
        rnn_state_size: H.
    """

    flat: FlatModule
    rnn_state_size: int

    def random(self, seed: int, rows: int) -> Random:
        """Make a source of random numbers for acting in groups of R rows."""
        ...

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
        """Act in N rows; called in inference mode of torch, as `final` is.

        Args:
            obs: [N, *] observations by key.
            first: [N] whether an episode starts.
            state: [N, H] recurrent state.
            rows: [N] numbers of the rows in the run, for what differs by row; None where nothing does.
            random: of `random`; None only if `greedy` is True.
            greedy: take the best action instead of exploring, and draw no random number; [A]: only where it is True.
            whole_groups: the rows are K whole groups of R, so that each group may be drawn for by itself.

        Returns:
            "action" [N, A] with what else is recorded of the step [N, ...], and the next state [N, H].
        """
        ...

    def final(self, obs: dict[str, Tensor], first: Tensor, state: Tensor) -> dict[str, Tensor]:
        """Return the fields that are recorded of true final observations [N, *] of a SAME_STEP environment, [N, ...].

        The environment has replaced these observations in the slot already.
        """
        ...

    def fast(self, trajectories: Trajectories, random: Any) -> FastPolicy | None:
        """Make the twin without torch that fills these slots; None where there is none."""
        ...
