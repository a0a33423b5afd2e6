"""The seam between the runtime and what is learned: all that actors, policy workers and learners ask of an algorithm.

Torch-free at import: main reads an algorithm's name, flags, metrics and recorded fields and never makes a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

    from algorithms.models.config import ModelConfig
    from algorithms.models.flat_module import FlatModule
    from envs.spec import EnvSpec


class Recorded(NamedTuple):
    """A field of every slot that acting fills beside observations, actions, rewards and flags.

    Attributes:
        dims: after the slots: T steps, R rows, F steps that can need a final value (0 unless SAME_STEP), or numbers.
        dtype: a numpy name.
    """

    dims: tuple[str | int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Context:
    """What every `make_*` of an algorithm is told.

    Attributes:
        spec: of the environment.
        flags: the algorithm's own, as the policy has them.
        model: flags of the network.
        precision: value of `--precision`.
        device: torch's name of the device.
        policy: number of the policy.
        num_policies: that act in one group.
        seeds: of what is made.
    """

    spec: EnvSpec
    flags: Any
    model: ModelConfig
    precision: str
    device: str
    policy: int = 0
    num_policies: int = 1
    seeds: np.random.SeedSequence | None = None


class FastPolicy(Protocol):
    """Acts without torch for whole groups, straight in the slots."""

    def act(self, slot: int, step: int, version: int) -> None:
        """Act in one step of a slot with weights of this version."""
        ...

    def act_in(self, rows: Any, slot: int, step: int, version: int) -> None:
        """Act in some of the rows, [R] bool, and leave all others as they are."""
        ...


class Random(Protocol):
    """A policy's source of random numbers, hashable; what else is in it only the policy knows.

    Attributes:
        generator: by torch, on the device of the policy; a captured forward pass registers it.
    """

    @property
    def generator(self) -> Generator:
        """The generator."""
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
        """Act in N rows.

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

    def fast(self, trajectories: Any, random: Any) -> FastPolicy | None:
        """Make the twin without torch that fills these slots; None where there is none."""
        ...


class Vector(NamedTuple):
    """A vector of a learner's state. A checkpoint stores one of float32 with a value for every weight by their names.

    Attributes:
        size: number of values.
        dtype: a numpy name.
        inherited: `--init_from` takes it over; all others begin with zeros.
    """

    size: int
    dtype: str = "float32"
    inherited: bool = False


WEIGHTS = "weights"
"""The vector that acts: every layout has it."""


@dataclass(frozen=True)
class StateLayout:
    """What the state of a learner holds beside its counters; memory is reserved and checkpoints are checked by it.

    Attributes:
        vectors: by name, `WEIGHTS` first.
        numbers: plain values with which a new learner begins.
    """

    vectors: Mapping[str, Vector]
    numbers: Mapping[str, float]


Feedback = Mapping[str, Any]
"""What a learner tells the source of a batch after a step, such as priorities."""


class Learner(Protocol):
    """Trains one policy; knows no process.

    Attributes:
        flat: the network with all its weights in one vector.
        version: of the weights, counted from 1.
        updates: optimizer steps so far.
    """

    flat: FlatModule
    version: int
    updates: int

    def learn(self, batch: Any, progress: float) -> Iterator[Feedback | None]:
        """Train on a batch; yields after each optimizer step, having raised `version` and `updates`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Means since the last call; `skipped_in_a_row`, if an update can be skipped, is what it is now."""
        ...


class Algorithm(Protocol):
    """Makes all that a run learns with. It has no state, can be pickled, and imports torch only inside `make_*`."""

    @property
    def name(self) -> str:
        """The name that `--algo` has for it."""
        ...

    @property
    def flags(self) -> type[Any]:
        """The dataclass of its flags."""
        ...

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the fields of slots that `Policy.act` and `Policy.final` fill, by their names."""
        ...

    def make_model(self, context: Context) -> FlatModule:
        """Make the network on its device; its weights are drawn from torch's global generator."""
        ...

    def make_policy(self, context: Context, flat: FlatModule) -> Policy:
        """Make the policy that acts with a network, which nobody trains."""
        ...
