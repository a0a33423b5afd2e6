"""The interface of an algorithm: all that actors, policy workers and learners of the runtime ask of it.

Torch-free at import: main reads an algorithm's name, flags, metrics and recorded fields and never makes a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from appo.algorithms.models.config import ModelConfig
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import BatchSource
    from appo.algorithms.runtime.learning.learner_worker import Learner
    from appo.algorithms.runtime.memory.arena import Arena, Field
    from appo.algorithms.runtime.memory.learner_state import StateLayout
    from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
    from appo.algorithms.runtime.messages import Address, Worker
    from appo.algorithms.runtime.roles import Role
    from appo.algorithms.runtime.sampling.policy import Policy
    from appo.algorithms.runtime.topology import Topology
    from appo.envs.config import EnvConfig
    from appo.envs.spec import EnvSpec


@dataclass(frozen=True)
class Context:
    """The arguments that every `make_*` of an algorithm is given.

    Attributes:
        spec: of the environment.
        flags: the algorithm's own, as the policy has them.
        model: flags of the network.
        precision: value of `--precision`.
        device: torch's name of the device.
        policy: number of the policy.
        num_policies: that act in one group.
        seeds: of what is made.
        buffered: networks are fed through buffers that stay where they are, as a GPU needs it.
        verify: the learner compares what acting recorded with its own, see `--verify_reproduction`.
        arena: the shared memory of the run; None where nothing is made that shares any.
        rnn_state_size: H, of the network, where one has been made before.
        directory: of the run; None where there is none, as in tuning.
        reward_scale, reward_clip: what actors do to the rewards that are learned from, see `EnvConfig`.
    """

    spec: EnvSpec
    flags: Any
    model: ModelConfig
    precision: str
    device: str
    policy: int = 0
    num_policies: int = 1
    seeds: np.random.SeedSequence | None = None
    buffered: bool = False
    verify: bool = False
    arena: Arena | None = None
    rnn_state_size: int = 0
    directory: Path | None = None
    reward_scale: float = 1.0
    reward_clip: float = 0.0

    def torch_seed(self) -> int:
        """Return a seed for one of torch's generators."""
        assert self.seeds is not None
        return int(self.seeds.generate_state(1, "uint64")[0] >> 1)


class Defaults:
    """Declares the needs of most algorithms: actors, and neither shared memory nor workers of their own.

    Attributes:
        needs_actors: environments are played for it. Without, a run has learners alone: no slots, no policy workers,
            no returns; its source reads in the learner's process, and its budget counts the steps that are read.
        synchronous: sampling stops while a single policy trains, so that nothing is learned from older weights.
        replays: steps are used long after they were acted, so that a policy lag says nothing.
        values: the estimate of returns: the critic of an actor-critic, "actions" = the largest value of an action,
            empty = there is none.
        whole_rollouts: one set of weights acts a whole trajectory and stays until its slot is released, for workers of
            the algorithm's own that compute with it. So actors act themselves (`local`), in one group with one slot.
    """

    needs_actors: ClassVar[bool] = True
    synchronous: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    values: ClassVar[str] = "critic"
    whole_rollouts: ClassVar[bool] = False

    def variant(self, flags: Any) -> Algorithm:
        """Return itself, whatever the flags."""
        return cast("Algorithm", self)

    def streams(self, flags: Any) -> bool:
        """Train on whole batches."""
        return False

    def explores(self, row: int, rows: int) -> bool:
        """Return that the returns of every row count."""
        return False

    def resumes(self, flags: Any, directory: Path, topology: Topology) -> str:
        """Say nothing of a later start: it lacks nothing of the one before."""
        return ""

    def find_spec(self, flags: Any, env: EnvConfig) -> EnvSpec | None:
        """Return None: only the environment says what its observations and actions are."""
        return None

    def fields(self, context: Context, topology: Topology, num_weights: int) -> Sequence[Field]:
        """Declare no shared memory beside that of the runtime."""
        return ()

    def processes(self, flags: Any) -> Mapping[Role, int]:
        """Declare no processes beside those of the runtime."""
        return {}

    def workers(self, topology: Topology) -> Mapping[Role, Role]:
        """Declare no workers beside those of the runtime."""
        return {}

    def make_worker(
        self, address: Address, context: Context, trajectories: Trajectories, others: Mapping[Address, Worker]
    ) -> Worker:
        """Make no worker: none is declared."""
        raise NotImplementedError(f"{type(self).__name__} declares {address.role} and does not make it")


Companion = TypeVar("Companion")


def companion(others: Mapping[Address, Worker], address: Address, role: Role, kind: type[Companion]) -> Companion:
    """Return the worker of a role that a worker with this address stands beside, see `Algorithm.workers`."""
    found = others[replace(address, role=role.name)]
    assert isinstance(found, kind)
    return found


class Algorithm(Protocol):
    """Makes all parts of a run that learn. It has no state, can be pickled, and imports torch only inside `make_*`.

    What `Defaults` declares is for algorithms with needs of their own; all others inherit it.
    """

    @property
    def name(self) -> str:
        """Return the name that `--algo` has for it."""
        ...

    @property
    def flags(self) -> type[Any]:
        """Return the dataclass of its flags."""
        ...

    @property
    def metrics(self) -> Mapping[str, str]:
        """Return the metrics that its learner reports, name -> meaning."""
        ...

    @property
    def panel(self) -> Mapping[str, str]:
        """Return the metrics that the panel shows, name -> word."""
        ...

    @property
    def needs_actors(self) -> bool:
        """Return whether environments are played for it, see `Defaults`."""
        ...

    @property
    def values(self) -> str:
        """Return what estimates returns, see `Defaults`."""
        ...

    @property
    def replays(self) -> bool:
        """Return whether steps are used long after they were acted, see `Defaults`."""
        ...

    @property
    def synchronous(self) -> bool:
        """Return whether sampling stops while a single policy trains, see `Defaults`."""
        ...

    def variant(self, flags: Any) -> Algorithm:
        """Return the algorithm that trains with these flags: itself, or one that plays nothing where it need not."""
        ...

    def check(self, flags: Any, spec: EnvSpec | None) -> None:
        """Refuse flags that contradict each other, or the environment as soon as that is known (UsageError)."""
        ...

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a family of known environments; {}: it has none."""
        ...

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return flag -> value of learning for an unknown environment, by what it shows and takes."""
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

    def layout(self, context: Context, flat: FlatModule) -> StateLayout:
        """Return what the state of a learner that trains this network holds."""
        ...

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of a learner's batches."""
        ...

    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Make the learner that trains a network."""
        ...

    @property
    def whole_rollouts(self) -> bool:
        """Return whether one set of weights acts a whole trajectory and stays until its end, see `Defaults`."""
        ...

    def streams(self, flags: Any) -> bool:
        """Return whether batches are trained on in parts, as they come, so that one trajectory per env is stored."""
        ...

    def explores(self, row: int, rows: int) -> bool:
        """Return whether a row explores so much that its returns say little of the policy: they are shown apart.

        Args:
            row: number of the row in the run.
            rows: of the run.
        """
        ...

    def resumes(self, flags: Any, directory: Path, topology: Topology) -> str:
        """Return what a later start of a run lacks or has of the one before, for the log; empty: nothing of note.

        Args:
            flags: of the algorithm.
            directory: of the run.
            topology: of this start.

        Raises:
            UsageError: flags would lose what the one before has kept.
        """
        ...

    def find_spec(self, flags: Any, env: EnvConfig) -> EnvSpec | None:
        """Return the spec of the data that a run without actors learns from; None: its environment says it.

        A run whose algorithm knows it needs no `--env`; one that is given must show and take the same.

        Args:
            flags: of the algorithm.
            env: flags of the environment, which say in which form actions are stored.

        Raises:
            UsageError: the flags name nothing that can be learned from.
        """
        ...

    def fields(self, context: Context, topology: Topology, num_weights: int) -> Sequence[Field]:
        """Declare shared memory of a policy that learns; zero at first, and kept when workers die.

        What all policies declare by the same name, and alike, is theirs together.

        Args:
            context: of the policy.
            topology: how many of everything there is, with the workers of `workers`.
            num_weights: P, of the policy.
        """
        ...

    def processes(self, flags: Any) -> Mapping[Role, int]:
        """Declare roles of its own whose workers have processes of their own, and how many a policy has of each.

        Their addresses have the policy as index and count by member. Where there is but one process, and in runs that
        repeat themselves, there are none of them. A role that takes trajectories (`Role.takes_trajectories`) does so
        in place of the learner: who hands a slot over draws one of its workers, notes that in the slot and wakes it.
        """
        ...

    def workers(self, topology: Topology) -> Mapping[Role, Role]:
        """Declare further roles, each with the role of the runtime beside whose workers it has some.

        A worker shares the process of the one that it is beside. Beside an actor there is one for every policy that
        learns, with the number of the policy as index and that of the actor as member of its address; beside a policy
        worker or a learner there is one with index and member of that. A role beside actors may take over the
        trajectories (`Role.takes_trajectories`): it notes and sends the releases of slots in place of the learner.
        """
        ...

    def make_worker(
        self, address: Address, context: Context, trajectories: Trajectories, others: Mapping[Address, Worker]
    ) -> Worker:
        """Make a worker of a role that `workers` declares.

        Args:
            address: of the worker.
            context: of its policy.
            trajectories: the shared arrays.
            others: workers of the process that are made already: those of the runtime are.
        """
        ...
