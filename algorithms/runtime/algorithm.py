"""The interface of an algorithm: a base class with everything that the runtime calls.

Torch-free at import: main reads names, flags, metrics and recorded fields of an algorithm and never makes a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

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
    """The arguments of every `make_*` method of an algorithm.

    Attributes:
        spec: spaces of the environment.
        flags: flags of the algorithm, with the values of the policy.
        model: flags of the network.
        precision: value of `--precision`.
        device: torch's name of the device.
        policy: number of the policy.
        num_policies: number of policies that act in one group.
        seeds: seeds for the new parts.
        buffered: whether networks read their inputs from fixed buffers, as GPUs require.
        verify: whether the learner compares recorded values of acting with its own values, see
            `--verify_reproduction`.
        arena: shared memory of the run; None for parts that share no memory.
        rnn_state_size: H, size of the recurrent state of the network; 0 before the network exists.
        directory: directory of the run; None without a run, as in tuning.
        reward_scale, reward_clip: scale and limit of the rewards for learning, see `EnvConfig`.
        acting_rows: rows for which policies on this machine act, before rows of other machines; 0: all.
        max_policy_lag: value of `--max_policy_lag`.
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
    acting_rows: int = 0
    max_policy_lag: int = 100

    def torch_seed(self) -> int:
        """Return a seed for one of torch's generators; 0 without seeds, for parts that are made to be measured."""
        return 0 if self.seeds is None else int(self.seeds.generate_state(1, "uint64")[0] >> 1)


Companion = TypeVar("Companion")


def companion(others: Mapping[Address, Worker], address: Address, role: Role, kind: type[Companion]) -> Companion:
    """Return the worker of a role beside the worker with this address, see `Algorithm.workers`."""
    found = others[replace(address, role=role.name)]
    found = getattr(found, "worker", found)  # a GPU's workers are each inside a stream
    assert isinstance(found, kind)
    return found


class Presets(NamedTuple):
    """Flags of learning of known environments, by the names of `envs.presets`, and of all others by their kind."""

    known: Mapping[str, Mapping[str, object]] = {}
    numbers: Mapping[str, object] = {}
    images: Mapping[str, object] = {}
    continuous: Mapping[str, object] = {}


class Algorithm(ABC):
    """Makes all parts of a run that learn. Stateless; can be pickled; imports torch inside methods only.

    A subclass sets `name`, `flags` and `metrics`, and writes the five abstract methods. All other members have defaults
    for an algorithm with actors and without shared memory or workers of its own.

    Attributes:
        name: name of the algorithm in messages.
        flags: dataclass of the flags of the algorithm.
        metrics: metrics of the learner, name -> meaning.
        panel: metrics on the panel, name -> word.
        needs_actors: actors play environments. Without actors a run has learners only: no slots, no policy workers, no
            returns. The source then reads in the learner's process, and the budget counts steps as the source reads
            them.
        synchronous: sampling stops while a single policy trains: no step is of older weights, if an iteration takes a
            multiple of the trajectories that are played at once; otherwise some are an iteration old.
        replays: the learner uses steps long after acting, so the policy lag has no meaning.
        presets: flags that `preset` and `preset_by_kind` return.
        sample_efficient: flags of `--preset=sample_efficient`, by the pattern (`fnmatch`) of names of environments as
            `envs.presets.public_name` returns; the first matching pattern counts. The flags replace `preset` whole, and
            flags of the environment's own network.
        values: source of the estimates of returns: "critic" of an actor-critic, "actions" = largest value of an action,
            empty = no estimate.
        whole_rollouts: one set of weights acts a whole trajectory and stays until the slot is released, for further
            workers that compute with these weights. Actors then act themselves (`local`), in one group with one slot.
        with_ranks: several learners may each train on a part of every batch: the learner has a method `join`, see
            `parts.learner.FlatLearner`, and all of its optimizer steps add up over the learners. Not inherited.
        smallest_gpu_batch: `--batch_size` from which `--device=auto` takes a GPU for networks without images.
    """

    name: ClassVar[str]
    flags: ClassVar[type[Any]]
    metrics: ClassVar[Mapping[str, str]]
    panel: ClassVar[Mapping[str, str]] = {}
    needs_actors: ClassVar[bool] = True
    synchronous: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    presets: ClassVar[Presets] = Presets()
    sample_efficient: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    values: ClassVar[str] = "critic"
    whole_rollouts: ClassVar[bool] = False
    with_ranks: ClassVar[bool] = False
    smallest_gpu_batch: ClassVar[int] = 1024

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards and their discount have an effect; default: where returns are estimated."""
        return bool(self.values)

    # Flags, without torch.

    def variant(self, flags: Any) -> Algorithm:
        """Return the algorithm for these flags, such as a variant without actors; default: `self`."""
        return self

    def check(self, flags: Any, spec: EnvSpec | None) -> None:  # noqa: B027 (most need no check)
        """Refuse contradictory flags, and an unsuitable environment once the environment is known (UsageError)."""

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a known environment, or a family of them."""
        return self.presets.known.get(name, self.presets.numbers)

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return flag -> value of learning for an unknown environment.

        Args:
            images: whether observations contain images.
            continuous: whether actions contain numbers.
            rollout: number of steps of a trajectory.
        """
        of_observations = self.presets.images if images else self.presets.numbers
        return {**of_observations, **(self.presets.continuous if continuous else {})}

    def preset_by_cost(self, *, images: bool, rollout: int) -> Mapping[str, object]:
        """Return flags that replace `preset_by_kind` where a step costs many times as much as learning from the step.

        Args:
            images: whether observations contain images.
            rollout: number of steps of a trajectory.
        """
        return {}

    def find_spec(self, flags: Any, env: EnvConfig) -> EnvSpec | None:
        """Return the spaces of the datasets of a run without actors; None: the environment declares the spaces.

        A run with such spaces needs no `--env`; a given environment must have equal spaces, and as many frames per step
        unless these are 0, which is unknown.

        Args:
            flags: flags of the algorithm.
            env: flags of the environment, which determine the stored form of actions.

        Raises:
            UsageError: the flags name no readable data.
        """
        return None

    def streams(self, flags: Any) -> bool:
        """Return whether the learner trains on parts of a batch as the parts arrive: one trajectory per env is stored.

        Otherwise the learner trains on whole batches.
        """
        return False

    def explores(self, row: int, rows: int) -> bool:
        """Return whether a row, of all rows of the run, explores so much that its returns are reported separately."""
        return False

    def resumes(self, flags: Any, directory: Path, topology: Topology) -> str:
        """Return what a resumed run lacks or keeps of the previous start, for the log; empty: nothing to report.

        Raises:
            UsageError: the flags would lose data of the previous start.
        """
        return ""

    # Acting and learning.

    @abstractmethod
    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the fields of slots that `Policy.act` and `Policy.final` fill, by name."""

    @abstractmethod
    def make_model(self, context: Context) -> FlatModule:
        """Make the network on its device, with weights drawn from torch's global generator."""

    @abstractmethod
    def make_policy(self, context: Context, flat: FlatModule) -> Policy:
        """Make the policy that acts with a network; no learner trains the network in this process."""

    @abstractmethod
    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of a learner's batches."""

    @abstractmethod
    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Make the learner that trains a network."""

    def layout(self, context: Context, flat: FlatModule) -> StateLayout:
        """Return names, sizes and types of a learner's state; default: `Learner.layout` of a new learner."""
        from numpy.random import SeedSequence

        from appo.algorithms.runtime.device_of import device_of

        return self.make_learner(replace(context, seeds=SeedSequence(0)), flat, device_of(context.device)).layout

    # Shared memory and workers beside the runtime's.

    def fields(self, context: Context, topology: Topology, num_weights: int) -> Sequence[Field]:
        """Declare shared memory of a policy that learns; zeros at first, and kept when workers die.

        Policies share a field that all policies declare with the same name and shape.

        Args:
            context: context of the policy.
            topology: numbers of processes, groups and slots, including the workers of `workers`.
            num_weights: P, number of weights of the policy.
        """
        return ()

    def processes(self, flags: Any, *, alone: bool) -> Mapping[Role, int]:
        """Declare roles whose workers have processes of their own: role -> number of workers per policy.

        Only a policy that is `alone` in the run may have any; asked for by flags beside others, they are refused.

        The index of an address is the policy, the member counts the workers. A run in a single process, and a run that
        repeats itself, has no such workers. A role that takes trajectories (`Role.takes_trajectories`) takes the
        place of the learner there: the worker that hands a slot over draws one worker of the role, notes the worker in
        the slot and wakes the worker.
        """
        return {}

    def workers(self, topology: Topology) -> Mapping[Role, Role]:
        """Declare further roles: role -> role of the runtime beside whose workers the new workers stand.

        Two workers side by side share a process. Beside every actor stands one worker per policy that learns; the index
        of the address is the policy, the member is the actor. Beside a policy worker or a learner stands one worker
        with the same index and member. A role beside actors may take over the trajectories
        (`Role.takes_trajectories`): the role then notes and sends the releases of slots in place of the learner.
        """
        return {}

    def make_worker(
        self, address: Address, context: Context, trajectories: Trajectories, others: Mapping[Address, Worker]
    ) -> Worker:
        """Make a worker of a role that `workers` or `processes` declares.

        Args:
            address: address of the worker.
            context: context of the policy.
            trajectories: shared arrays of the slots.
            others: workers of the process so far; workers of the runtime come first.
        """
        raise NotImplementedError(f"{type(self).__name__} declares {address.role} and does not make it")
