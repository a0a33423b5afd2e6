"""Flags of algorithms that learn from a replay. Imports neither torch nor numpy."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from appo.algorithms.datasets.config import EvaluatedInputConfig
from appo.algorithms.parts.config import ColumnsConfig, OptimizerConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class ReplayConfig(EvaluatedInputConfig, OptimizerConfig):
    """Flags of a replay, and of batches drawn from the replay; a subclass adds the pace, `uses_per_step`.

    `PacedReplayConfig` is the subclass with a number of updates per step.
    """

    rollout: int = same_flag(
        ColumnsConfig, "rollout", "steps of a trajectory, the unit handed from actors to the replay"
    )
    batch_size: int = same_flag(
        ColumnsConfig,
        "batch_size",
        "steps drawn from the replay per optimizer step, a multiple of rollout",
        default=512,
    )
    gamma: float = same_flag(ColumnsConfig, "gamma", needs="")
    n_steps: int = flag(3, "steps whose rewards are summed before a value stands in for the rest", minimum=1)
    replay_capacity: int = flag(
        1_000_000, "agent steps that the replay of the run holds; the oldest leave first", minimum=1, needs="actors"
    )
    replay_compression: str = flag(
        "off",
        "how images lie in the replay: lz4 = each frame compressed, which costs a few microseconds a frame"
        ' and needs pip install "appo[lz4]"; off = as they are',
        choices=("off", "lz4"),
        fixed_on_resume=True,
        needs="actors pixels",
    )
    replay_compressed_share: float = flag(
        0.25,
        "with replay_compression: memory for frames, as a share of what they take as they are; where they need more the"
        " oldest steps leave sooner",
        minimum=0.001,
        maximum=1,
        fixed_on_resume=True,
        needs="replay_compression=lz4",
    )
    save_replay: bool = flag(
        False,
        "keep the replay in the run's folder, once, so that a later start goes on with it; without, that start fills"
        " its replay before it trains",
        needs="actors",
    )
    save_replay_every_sec: int = flag(
        60,
        "with save_replay: seconds after which what is new is written, as it is at the end",
        minimum=1,
        needs="save_replay",
    )
    num_replay_shards: int | None = flag(
        0,
        "processes that hold a share of the replay each, insert into it and draw batches beside the learner; 0 = the"
        " learner does that itself, as ever with inference=serial and lockstep; none = 1, where the flags allow it",
        minimum=0,
        maximum=64,
        fixed_on_resume=True,
        needs="actors processes",
    )
    learning_starts: int = flag(50_000, "agent steps in the replay before the first update", minimum=1, needs="actors")
    prioritized_replay: bool = flag(
        True, "draw steps by their errors; False = every step with the same probability", needs="actors"
    )
    priority_alpha: float = flag(
        0.6,
        "exponent of priorities; 0 = uniform",
        minimum=0,
        maximum=1,
        mutation="scale",
        mutation_range=(0.1, 1.0),
        needs="prioritized_replay actors",
    )
    priority_beta: float = flag(
        0.4,
        "exponent of the importance weights at the start; 1 = full correction",
        minimum=0,
        maximum=1,
        needs="prioritized_replay actors",
    )
    priority_beta_final: float = flag(
        0.4,
        "priority_beta at the end of the budget, linear in between",
        minimum=0,
        maximum=1,
        needs="prioritized_replay actors",
    )
    priority_epsilon: float = flag(
        1e-6,
        "added to the absolute error of a step in its priority",
        minimum=1e-12,
        needs="prioritized_replay actors",
    )
    max_weight_sync_delay: int = flag(
        400, "agent steps that weights act before newer ones are published; 0 = publish after every update", minimum=0
    )
    # Tuning and placement read these names of every algorithm.
    num_batches_per_iteration: ClassVar[int] = 1

    @property
    def uses_per_step(self) -> float:
        """Uses of every agent step in training, on average; 0: as many as the learner manages."""
        raise NotImplementedError(f"{type(self).__name__} has no pace")

    @property
    def updates_per_step(self) -> float:
        """Optimizer steps per agent step, on average; 0: as many as the learner manages.

        A use is a played step of a batch, and steps of datasets are no uses.
        """
        return self.uses_per_step / self.mix.played(self.batch_size)

    @property
    def sequences(self) -> bool:
        """Whether whole trajectories are drawn and not single steps."""
        return False

    @property
    def segment_steps(self) -> int:
        """Steps between recorded recurrent states: a whole trajectory."""
        return self.rollout

    @property
    def shards(self) -> int:
        """Processes that hold the replay."""
        if self.num_replay_shards is not None:
            return self.num_replay_shards
        return int(self.n_steps <= self.rollout and not self.mix.datasets)

    @property
    def ppo_epochs(self) -> float:
        """Steps of batches per agent step, steps of datasets included."""
        return self.updates_per_step * self.batch_size or 1.0

    @property
    def macro_batch_columns(self) -> int:
        """Trajectories with as many steps as a batch."""
        return self.batch_size // self.rollout

    @property
    def waiting_columns(self) -> int:
        """Trajectories that actors may play ahead of the learner: as many as one update needs, at least one."""
        steps = min(self.batch_size, 1 / self.updates_per_step) if self.updates_per_step else self.batch_size
        return max(1, int(steps) // self.rollout)

    @property
    def updates_per_version(self) -> int:
        """Optimizer steps between two published sets of weights, see `--max_weight_sync_delay`."""
        return max(1, round(self.max_weight_sync_delay * (self.updates_per_step or 1 / self.batch_size)))

    def beta(self, progress: float) -> float:
        """Return the exponent of importance weights; `progress` is the used share of the budget, in [0, 1]."""
        return self.priority_beta + min(1.0, progress) * (self.priority_beta_final - self.priority_beta)

    def one_update(self, size: int) -> Self:
        """Return flags for training once on so many new samples, for measuring time; a subclass sets the pace."""
        return replace(self, batch_size=size, learning_starts=1, replay_capacity=16 * size)

    def check(self) -> None:
        """Refuse contradictory flags (UsageError)."""
        if self.batch_size % self.rollout:
            raise UsageError(f"--batch_size={self.batch_size} is not a multiple of --rollout={self.rollout}")
        ends = "--batch_replay" if self.sequences else "--num_replay_shards" if self.shards else ""
        if ends and self.n_steps > self.rollout:
            raise UsageError(
                f"--n_steps={self.n_steps} is above --rollout={self.rollout}: with {ends}, a sum may end with the"
                " trajectory"
            )
        if self.learning_starts > self.replay_capacity:
            raise UsageError(
                f"--learning_starts={self.learning_starts} is above --replay_capacity={self.replay_capacity}"
            )
        if self.mix.sampler and self.n_steps > self.replay_capacity:
            raise UsageError(f"--n_steps={self.n_steps} is above --replay_capacity={self.replay_capacity}")
        if self.mix.datasets and self.shards:
            raise UsageError(
                f"--num_replay_shards={self.num_replay_shards}: datasets are mixed in where the learner has the replay"
            )
        if self.mix.datasets and self.mix.sampler and self.batch_size < 2:
            raise UsageError("--input: a batch of one step cannot be mixed, raise --batch_size")


@dataclass(frozen=True)
class PacedReplayConfig(ReplayConfig):
    """Flags of a replay with a number of updates per agent step."""

    updates_per_step: float = flag(
        1.0,
        "optimizer steps per agent step: actors wait for the learner, and it for them, to keep it; 0 = as many as the"
        " learner manages",
        minimum=0,
        needs="actors",
    )

    @property
    def uses_per_step(self) -> float:
        """Uses of every agent step in training, on average; 0: as many as the learner manages."""
        return self.updates_per_step * self.mix.played(self.batch_size)

    def one_update(self, size: int) -> Self:
        """Return flags for training once on so many new samples, for measuring time."""
        return replace(super().one_update(size), updates_per_step=1.0 / size)


REPLAY_METRICS = {
    "replay/size": "steps that can be drawn",
    "replay/uses_per_step": "uses per step since training began: --replay_ratio, or updates_per_step times the steps of"
    " a batch that come from actors",
    "replay/age_samples": "mean age of what was drawn, in agent steps",
    "replay/age_updates": "the same in versions of the weights",
    "replay/mean_priority": "mean of (error + epsilon)^alpha over all steps that can be drawn",
    "replay/dropped": "steps overwritten before any batch had them, so far",
    "replay/unsampled": "steps never drawn, as what came after them is not known, so far",
    "replay/held": "share of looks at the slots in which some had to wait, as training was behind the uses per step",
    "replay/insert_us": "microseconds of the learner to insert an agent step",
    "replay/sample_ms": "milliseconds to draw and copy a batch",
    "replay/train_ms": "milliseconds from a batch to its errors",
    "replay/update_ms": "milliseconds to bring the priorities of a batch up to date",
    "replay/waiting_slots": "trajectories of a group that wait to be inserted, mean over looks at them",
}
"""Metrics of the replay, tag -> meaning; means since the last report."""

OF_SHARDS = {"replay/shard_<number>/<figure>": "the same of one process of `--num_replay_shards`"}
"""Metrics of each shard, pattern of tags -> meaning."""
