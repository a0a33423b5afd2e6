"""The base class of algorithms that learn from a replay; torch-free at import."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from appo.algorithms.parts.algorithm import FlatAlgorithm
from appo.algorithms.replay.config import ReplayConfig
from appo.algorithms.runtime.algorithm import Algorithm, Context, companion
from appo.algorithms.runtime.roles import LEARNER, Role
from appo.utils.errors import UsageError
from appo.utils.run_folder import RunFolder, rename_own

if TYPE_CHECKING:
    from appo.algorithms.models.actor_critic import ActingNetwork
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.replay.storage import ReplayPlan
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import Batch, BatchSource
    from appo.algorithms.runtime.memory.arena import Array, Field
    from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
    from appo.algorithms.runtime.messages import Address, Worker
    from appo.algorithms.runtime.sampling.policy import Policy
    from appo.algorithms.runtime.topology import Topology
    from appo.envs.config import EnvConfig
    from appo.envs.spec import EnvSpec

REPLAY_KEEPER = LEARNER.variant("replay_keeper", ("keeper", "keepers"), has_network=False, trains=False)
"""Role of the workers that write the replay to disk."""

REPLAY = Role(
    name="replay",
    singular="replay shard",
    plural="replay shards",
    console="replay",
    panel=("replay", "replay"),
    worker="replay_{member}",
    takes_trajectories=True,
    when_full="raise --num_replay_shards",
    extra_niceness=1,  # the learner waits for batches
    oom_score=100,  # a lost shard costs a batch, and time
    stop_share=0.8,
)
"""Role of the processes that each hold a share of the replay."""


@dataclass(frozen=True)
class ReplayAlgorithm(FlatAlgorithm):
    """Acts, keeps all steps in a replay, and trains on batches drawn from the replay.

    A subclass sets `name`, `flags` (a `ReplayConfig`) and `metrics`, and writes `learner_class`, `network` and
    `policy`.
    """

    replays: ClassVar[bool] = True

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards and their discount have an effect: always."""
        return True

    @abstractmethod
    def network(self, context: Context) -> ActingNetwork:
        """Make the network that acts, with weights drawn from torch's global generator."""

    @abstractmethod
    def policy(self, context: Context, flat: FlatModule) -> Policy:
        """Make the policy of a network that is ready to act; without an arena in the context, for a player."""

    def plan(self, flags: Any) -> ReplayPlan:
        """Return the plan of the replay for these flags; a subclass may change the plan, for example by `relabel`."""
        from appo.algorithms.replay.storage import ReplayPlan

        return ReplayPlan(
            capacity=flags.replay_capacity,
            alpha=flags.priority_alpha,
            priority_epsilon=flags.priority_epsilon,
            prioritized=flags.prioritized_replay,
            n_steps=flags.n_steps,
            gamma=flags.gamma,
            batch_size=flags.batch_size,
            replay_ratio=flags.uses_per_step,
            learning_starts=flags.learning_starts,
            sequences=flags.sequences,
            compressed_share=flags.replay_compressed_share if flags.replay_compression == "lz4" else None,
        )

    def check(self, flags: Any, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags (UsageError)."""
        flags.check()
        if flags.replay_compression == "lz4" and find_spec("lz4") is None:
            raise UsageError('--replay_compression=lz4 needs the package lz4: pip install "appo[lz4]"')

    def variant(self, flags: Any) -> Algorithm:
        """Return the variant without actors if datasets are the only source of steps."""
        return self.without_actors() if flags.mix.datasets and not flags.mix.sampler else self

    def without_actors(self) -> Algorithm:
        """Return the variant that reads datasets alone, see `WithoutActors`."""
        raise UsageError(f"--input: --algo={self.name} plays, too: mix datasets in, as in sampler:0.5,DATASET:0.5")

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the recorded fields: none."""
        return {}

    def make_model(self, context: Context) -> FlatModule:
        """Make the network on the device.

        Raises:
            UsageError: the network has a memory, but batches consist of single steps.
        """
        from appo.algorithms.models.custom import custom_class
        from appo.algorithms.models.flat_module import FlatModule

        if context.verify:
            raise UsageError(
                f"--verify_reproduction compares trajectories in their order, which --algo={self.name} has not"
            )
        model = self.network(context)
        if model.rnn_state_size and not context.flags.sequences:
            own = custom_class(context.model, "core")
            other = f"a network without {context.model.encoder_custom}" if own else "--use_rnn=False"
            can = hasattr(context.flags, "batch_replay") and not context.flags.mix.datasets
            raise UsageError(
                f"--algo={self.name} learns from single steps, from which a memory cannot learn: take"
                f" {'--batch_replay, or ' if can else ''}{other}"
            )
        return FlatModule(model.to(context.device))

    def make_policy(self, context: Context, flat: FlatModule) -> Policy:
        """Make the policy that acts with a network; no learner trains the network from now on."""
        from appo.algorithms.models.build import let_act

        let_act(flat, context.model, context.precision, context.device)
        return self.policy(context, flat)

    def fields(self, context: Context, topology: Topology, num_weights: int) -> Sequence[Field]:
        """Declare the memory of the replay."""
        from appo.algorithms.replay.storage import replay_fields

        plan, size = self.plan(context.flags), context.rnn_state_size
        if shards := dict(topology.apart).get(REPLAY, 0):
            from appo.algorithms.replay.shards import shard_fields

            return shard_fields(plan, context.spec, topology, size, (context.policy, shards))
        return replay_fields(plan, context.spec, topology, size, context.policy)

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the replay in the learner's process, or the source that reads batches from shards."""
        from appo.algorithms.replay.shards import num_shards
        from appo.algorithms.replay.source import ReplaySource, ShardedSource

        assert context.arena is not None
        plan, flags = self.plan(context.flags), context.flags
        if num_shards(context.arena, context.policy):
            return ShardedSource(plan, context, trajectories, REPLAY)
        source = ReplaySource(plan, context, trajectories, sampling.lockstep, _path(context))
        if not flags.mix.datasets:
            return source
        from appo.algorithms.datasets.mix import mixed_in

        read = read_transitions(context, trajectories, lambda: source.part.plan)
        return mixed_in(source, read, context, trajectories, units=flags.rollout, resize=source.draw_of)

    def resumes(self, flags: ReplayConfig, directory: Path, topology: Topology) -> str:
        """Return the fate of the replay in a resumed run; the learner and a single shard have the same file.

        Raises:
            UsageError: a file would be lost because the replay now has other columns, or lies in other processes.
        """
        folder, shards = RunFolder(directory), dict(topology.apart).get(REPLAY, 0)
        numbers = range(shards) if shards > 1 else [None]
        if shards < 2 and folder.replays() == [former := folder.replay(0, 0)]:  # its name in older runs
            rename_own(former, folder.replay(0).name)
        mine = {folder.replay(policy, shard) for policy in range(topology.num_policies) for shard in numbers}
        saved = set(folder.replays())
        if flags.save_replay and mine <= saved:
            from appo.algorithms.replay.keeper import kept_shape
            from appo.algorithms.replay.storage import num_columns

            plan = self.plan(flags).share(shards) if shards else self.plan(flags)
            asked = num_columns(plan, topology.rollout, topology.num_policies), topology.rollout
            for path in sorted(mine):
                kept = kept_shape(path)
                if kept is not None and kept != asked:
                    raise UsageError(
                        f"--replay_capacity={flags.replay_capacity} --rollout={flags.rollout}: the saved replay has"
                        f" {kept[0]} trajectories of {kept[1]} steps and not {asked[0]} of {asked[1]}; give the values"
                        f" of before, or remove {path.name} to let it fill again"
                    )
            return ""
        if flags.save_replay and saved and saved.isdisjoint(mine):
            raise UsageError(
                f"{', '.join(sorted(path.name for path in saved))}: saved by another number of processes, which"
                " --num_replay_shards, --n_steps, --input and --inference decide: give them as before, or remove the"
                " files to let the replay fill again"
            )
        why = "no replay has been saved yet" if flags.save_replay else "the replay was not saved (--save_replay)"
        if flags.save_replay and saved:
            why = "a part of the replay was not saved"
        return f"{why}: it fills again, training goes on when it holds --learning_starts={flags.learning_starts} steps"

    def processes(self, flags: ReplayConfig, *, alone: bool) -> Mapping[Role, int]:
        """Declare the shards of the replay."""
        shards = flags.shards if alone else flags.num_replay_shards
        return {REPLAY: shards} if shards else {}

    def workers(self, topology: Topology) -> Mapping[Role, Role]:
        """Declare a keeper of the replay beside every learner or shard."""
        return {REPLAY_KEEPER: REPLAY if topology.apart else LEARNER}

    def make_worker(
        self, address: Address, context: Context, trajectories: Trajectories, others: Mapping[Address, Worker]
    ) -> Worker:
        """Make a shard of the replay, or the keeper beside a learner or a shard."""
        from appo.algorithms.replay.keeper import ReplayKeeper
        from appo.algorithms.replay.shards import ReplayShard, make_shard, num_shards

        if address.role == REPLAY.name:
            assert context.arena is not None
            path = _path(context, address.member if num_shards(context.arena, context.policy) > 1 else None)
            return make_shard(address, context, self.plan(context.flags), trajectories, path)
        if any(other.role == REPLAY.name for other in others):
            shard = companion(others, address, REPLAY, ReplayShard)
            return ReplayKeeper(shard.file, context.flags.save_replay_every_sec, name=str(shard.address))
        from appo.algorithms.replay.source import ReplaySource
        from appo.algorithms.runtime.learning.learner_worker import LearnerWorker

        learner = companion(others, address, LEARNER, LearnerWorker)
        source = getattr(learner.batches, "source", learner.batches)  # of a mix with datasets
        assert isinstance(source, ReplaySource)
        return ReplayKeeper(source.file, context.flags.save_replay_every_sec, name=str(learner.address))


@dataclass(frozen=True)
class WithoutActors(ReplayAlgorithm):
    """A replayed algorithm without replay and actors, whose learner reads datasets; stands before the algorithm."""

    needs_actors: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    # Without a replay there is no shared memory, no shard and no keeper.
    fields, processes, workers, resumes = Algorithm.fields, Algorithm.processes, Algorithm.workers, Algorithm.resumes

    def find_spec(self, flags: ReplayConfig, env: EnvConfig) -> EnvSpec:
        """Return the spaces of the datasets (UsageError: a dataset is missing or damaged)."""
        from appo.algorithms.datasets.reader import spec_of_input

        return spec_of_input(flags, env)

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the source of batches of single steps, which reads in the process of the learner."""
        from appo.algorithms.runtime.learning.read_batches import ReadBatches
        from appo.algorithms.runtime.memory.ownership import LearnerLedger

        flags, read = context.flags, read_transitions(context, trajectories)
        ledger = LearnerLedger(trajectories, context.policy)
        return ReadBatches(
            lambda samples, columns: read(samples, columns * flags.rollout), flags.macro_batch_columns, ledger
        )


def read_transitions(
    context: Context, trajectories: Trajectories, plan: Callable[[], ReplayPlan] | None = None
) -> Callable[[int, int], Batch]:
    """Return a reader of batches of single steps, each with n rewards, scaled like rewards of actors.

    `plan` returns the present plan of the replay beside the datasets, whose n and discount a population may change.
    """
    from appo.algorithms.datasets.columns import Needs, Stream, transitions_of
    from appo.algorithms.datasets.mix import reader_of

    flags, state_size = context.flags, trajectories.rnn_state.shape[-1]
    needs = Needs((), context.reward_scale, context.reward_clip)

    def gather(stream: Stream, units: Array) -> dict[str, Array]:
        now = flags if plan is None else plan()
        return transitions_of(now.n_steps, now.gamma, state_size)(stream, units)

    return reader_of(flags, context.spec, 1, gather, needs)


def _path(context: Context, shard: int | None = None) -> Path | None:
    """Return the file of the replay of a policy, or of a shard; None: the replay is not saved."""
    if not context.flags.save_replay or context.directory is None:
        return None
    return RunFolder(context.directory).replay(context.policy, shard)
