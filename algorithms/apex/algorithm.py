"""Ape-X as an `Algorithm`; torch-free at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from appo.algorithms.apex import presets
from appo.algorithms.apex.config import METRICS, PANEL, ApexConfig
from appo.algorithms.runtime.algorithm import Algorithm, Context, companion
from appo.algorithms.runtime.roles import LEARNER, Role
from appo.utils.errors import UsageError
from appo.utils.run_folder import RunFolder

if TYPE_CHECKING:
    from appo.algorithms.apex.policy import EpsilonGreedyPolicy
    from appo.algorithms.models.flat_module import FlatModule
    from appo.algorithms.replay.storage import ReplayPlan
    from appo.algorithms.runtime.config import SamplingConfig
    from appo.algorithms.runtime.devices import Device
    from appo.algorithms.runtime.learning.batches import Batch, BatchSource
    from appo.algorithms.runtime.learning.learner_worker import Learner
    from appo.algorithms.runtime.memory.arena import Field
    from appo.algorithms.runtime.memory.learner_state import StateLayout
    from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
    from appo.algorithms.runtime.messages import Address, Worker
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
class APEX(Algorithm):
    """Epsilon-greedy Q-network, trained on steps drawn from a prioritized replay."""

    name: ClassVar[str] = "APEX"
    flags: ClassVar[type[ApexConfig]] = ApexConfig
    metrics: ClassVar[Mapping[str, str]] = METRICS
    panel: ClassVar[Mapping[str, str]] = PANEL
    with_ranks: ClassVar[bool] = True
    replays: ClassVar[bool] = True
    values: ClassVar[str] = "actions"

    def check(self, flags: ApexConfig, spec: EnvSpec | None) -> None:
        """Refuse contradictory flags, and environments whose actions are not choices (UsageError)."""
        flags.check()
        if flags.replay_compression == "lz4" and find_spec("lz4") is None:
            raise UsageError('--replay_compression=lz4 needs the package lz4: pip install "appo[lz4]"')
        if spec is not None and any(spec.action.is_real):
            raise UsageError(
                "--algo=APEX needs choices, the environment has continuous actions: add --continuous_as_bins=N, or take"
                " APPO or PPO"
            )
        if spec is not None and any(part.kind == "bernoulli" for part in spec.action.parts):
            raise UsageError(
                "--algo=APEX needs Discrete or MultiDiscrete actions, the environment has MultiBinary ones"
            )

    def variant(self, flags: ApexConfig) -> APEX:
        """Return the variant without actors if datasets are the only source of steps."""
        return OfflineAPEX() if flags.mix.datasets and not flags.mix.sampler else self

    def preset(self, name: str, device: str) -> Mapping[str, object]:
        """Return flag -> value of learning for a known environment."""
        return presets.PRESETS.get(name, presets.IMAGES)

    def preset_by_kind(self, *, images: bool, continuous: bool, rollout: int) -> Mapping[str, object]:
        """Return flag -> value of learning for an unknown environment."""
        return presets.IMAGES if images else presets.NUMBERS

    def recorded(self, spec: EnvSpec) -> Mapping[str, Recorded]:
        """Declare the recorded fields, which give first priorities; values are in units of return."""
        from appo.algorithms.runtime.memory.slots import Recorded  # late: --help needs no numpy

        return {"q_taken": Recorded(("T", "R")), "q_max": Recorded(("T", "R"))}

    def explores(self, row: int, rows: int) -> bool:
        """Return whether a row belongs to the two thirds of rows that explore most, without reported returns."""
        return row < rows - -(-rows // 3)

    def make_model(self, context: Context) -> FlatModule:
        """Make a Q-network on the device, with weights drawn from torch's global generator.

        Raises:
            UsageError: the network has a memory, but batches consist of single steps.
        """
        from appo.algorithms.models.custom import custom_class
        from appo.algorithms.models.flat_module import FlatModule
        from appo.algorithms.models.q_network import build_q_network

        if context.verify:
            raise UsageError("--verify_reproduction compares trajectories in their order, which --algo=APEX has not")
        model = build_q_network(context.model, context.spec, dueling=context.flags.dueling)
        if model.rnn_state_size and not context.flags.batch_replay:
            own = custom_class(context.model, "core")
            other = f"a network without {context.model.encoder_custom}" if own else "--use_rnn=False"
            way = "" if context.flags.mix.datasets else "--batch_replay, or "
            raise UsageError(
                f"--algo=APEX learns from single steps, from which a memory cannot learn: take {way}{other}"
            )
        return FlatModule(model.to(context.device))

    def make_policy(self, context: Context, flat: FlatModule) -> EpsilonGreedyPolicy:
        """Make the policy; without shared memory of a run the policy does not explore."""
        from appo.algorithms.apex.policy import EpsilonGreedyPolicy
        from appo.algorithms.models.build import let_act
        from appo.algorithms.ops.q_learning import epsilon_ladder

        let_act(flat, context.model, context.precision, context.device)
        epsilon = None
        if context.arena is not None:
            rows = len(context.arena["Trajectories.group_counts"]) * context.arena["Trajectories.valid"].shape[2]
            epsilon = epsilon_ladder(rows, context.flags.epsilon, context.flags.epsilon_alpha)
        return EpsilonGreedyPolicy(flat, context.spec, epsilon, rescaled=context.flags.value_rescaling)

    def layout(self, context: Context, flat: FlatModule) -> StateLayout:
        """Return the layout of a new learner, without preparing the network for training."""
        from appo.algorithms.apex.learner import ApexLearner

        return ApexLearner(flat, context.flags).layout

    def fields(self, context: Context, topology: Topology, num_weights: int) -> Sequence[Field]:
        """Declare the memory of the replay."""
        from appo.algorithms.replay.storage import replay_fields

        plan, size = replay_plan(context.flags), context.rnn_state_size
        if shards := dict(topology.apart).get(REPLAY, 0):
            from appo.algorithms.replay.shards import shard_fields

            return shard_fields(plan, context.spec, topology, size, (context.policy, shards))
        return replay_fields(plan, context.spec, topology, size, policies=[context.policy])

    def make_source(
        self, context: Context, trajectories: Trajectories, sampling: SamplingConfig, device: Device
    ) -> BatchSource:
        """Make the replay in the learner's process, or the source that reads batches from shards."""
        from appo.algorithms.replay.shards import num_shards
        from appo.algorithms.replay.source import ReplaySource, ShardedSource

        assert context.arena is not None
        plan, flags = replay_plan(context.flags), context.flags
        if num_shards(context.arena, context.policy):
            return ShardedSource(plan, context, trajectories, REPLAY)
        source = ReplaySource(plan, context, trajectories, sampling.lockstep, _path(context))
        if not flags.mix.datasets:
            return source
        from appo.algorithms.datasets.mix import mixed_in

        read = read_transitions(context, trajectories)
        return mixed_in(source, read, context, trajectories, units=flags.rollout, resize=source.draw_of)

    def resumes(self, flags: ApexConfig, directory: Path, topology: Topology) -> str:
        """Return the fate of the replay in a resumed run; only files of the same number of shards are loaded.

        Raises:
            UsageError: a file would be lost because the replay now has other columns.
        """
        folder, shards = RunFolder(directory), dict(topology.apart).get(REPLAY, 0)
        numbers = range(shards) if shards else [None]
        mine = {folder.replay(policy, shard) for policy in range(topology.num_policies) for shard in numbers}
        saved = set(folder.replays())
        if flags.save_replay and mine <= saved:
            from appo.algorithms.replay.keeper import kept_shape
            from appo.algorithms.replay.storage import num_columns

            plan = replay_plan(flags).share(shards) if shards else replay_plan(flags)
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
        why = "no replay has been saved yet" if flags.save_replay else "the replay was not saved (--save_replay)"
        if flags.save_replay and saved:
            why = "the replay was saved by another number of processes"
        return f"{why}: it fills again, training goes on when it holds --learning_starts={flags.learning_starts} steps"

    def processes(self, flags: ApexConfig) -> Mapping[Role, int]:
        """Declare the shards of the replay."""
        return {REPLAY: flags.num_replay_shards} if flags.num_replay_shards else {}

    def workers(self, topology: Topology) -> Mapping[Role, Role]:
        """Declare a keeper of the replay beside every learner or shard."""
        return {REPLAY_KEEPER: REPLAY if topology.apart else LEARNER}

    def make_worker(
        self, address: Address, context: Context, trajectories: Trajectories, others: Mapping[Address, Worker]
    ) -> Worker:
        """Make a shard of the replay, or the keeper beside a learner or a shard."""
        from appo.algorithms.replay.keeper import ReplayKeeper
        from appo.algorithms.replay.shards import ReplayShard, make_shard

        if address.role == REPLAY.name:
            plan = replay_plan(context.flags)
            return make_shard(address, context, plan, trajectories, _path(context, address.member))
        if any(other.role == REPLAY.name for other in others):
            shard = companion(others, address, REPLAY, ReplayShard)
            return ReplayKeeper(shard.file, context.flags.save_replay_every_sec, name=str(shard.address))
        from appo.algorithms.replay.source import ReplaySource
        from appo.algorithms.runtime.learning.learner_worker import LearnerWorker

        learner = companion(others, address, LEARNER, LearnerWorker)
        source = getattr(learner.batches, "source", learner.batches)  # of a mix with datasets
        assert isinstance(source, ReplaySource)
        return ReplayKeeper(source.file, context.flags.save_replay_every_sec, name=str(learner.address))

    def make_learner(self, context: Context, flat: FlatModule, device: Device) -> Learner:
        """Make the learner of a network."""
        from appo.algorithms.apex.learner import ApexLearner
        from appo.algorithms.apex.numpy_learner import numpy_update
        from appo.algorithms.models.build import let_learn

        let_learn(flat, context.model, context.precision, context.device)
        return ApexLearner(flat, context.flags, None if context.spec.action_mask else numpy_update)


@dataclass(frozen=True)
class OfflineAPEX(APEX):
    """Ape-X without replay and actors: the learner reads datasets."""

    needs_actors: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    # Without a replay there is no shared memory, no shard and no keeper.
    fields, processes, workers, resumes = Algorithm.fields, Algorithm.processes, Algorithm.workers, Algorithm.resumes

    def find_spec(self, flags: ApexConfig, env: EnvConfig) -> EnvSpec:
        """Return the spaces of the datasets (UsageError: a dataset is missing or damaged)."""
        from appo.algorithms.datasets.reader import open_dataset
        from appo.envs.spaces import ActionForm

        return open_dataset(flags.mix.words, flags.postprocess_inputs, ActionForm.of(env)).spec

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


def read_transitions(context: Context, trajectories: Trajectories) -> Callable[[int, int], Batch]:
    """Return a reader of batches of single steps, each with n rewards, scaled like rewards of actors."""
    from appo.algorithms.datasets.columns import Needs, transitions_of
    from appo.algorithms.datasets.mix import reader_of

    flags, state_size = context.flags, trajectories.rnn_state.shape[-1]
    needs = Needs((), context.reward_scale, context.reward_clip)
    return reader_of(flags, context.spec, 1, transitions_of(flags.n_steps, flags.gamma, state_size), needs)


def _path(context: Context, shard: int | None = None) -> Path | None:
    """Return the file of the replay of a policy, or of a shard; None: the replay is not saved."""
    if not context.flags.save_replay or context.directory is None:
        return None
    return RunFolder(context.directory).replay(context.policy, shard)


def replay_plan(flags: ApexConfig) -> ReplayPlan:
    """Return the plan of the replay for these flags."""
    from appo.algorithms.replay.storage import ReplayPlan

    return ReplayPlan(
        capacity=flags.replay_capacity,
        alpha=flags.priority_alpha,
        priority_epsilon=flags.priority_epsilon,
        prioritized=flags.prioritized_replay,
        n_steps=flags.n_steps,
        gamma=flags.gamma,
        batch_size=flags.batch_size,
        replay_ratio=flags.replay_ratio,
        learning_starts=flags.learning_starts,
        sequences=flags.batch_replay,
        eta=flags.priority_eta,
        rescaled=flags.value_rescaling,
        compressed_share=flags.replay_compressed_share if flags.replay_compression == "lz4" else None,
    )
