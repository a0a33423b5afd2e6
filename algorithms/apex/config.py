"""The flags of Ape-X. Imports neither torch nor numpy."""

from dataclasses import dataclass, replace
from typing import ClassVar

from appo.algorithms.datasets.config import EvaluatedInputConfig
from appo.algorithms.parts.config import STEP_METRICS, ColumnsConfig, EpsilonConfig, OptimizerConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class ApexConfig(EvaluatedInputConfig, OptimizerConfig):
    """Learning."""

    adam_eps: float = same_flag(OptimizerConfig, "adam_eps", default=1.5e-4)
    max_grad_norm: float = same_flag(OptimizerConfig, "max_grad_norm", default=40.0)
    rollout: int = same_flag(
        ColumnsConfig, "rollout", "steps of a trajectory, the unit handed from actors to the replay"
    )
    batch_size: int = same_flag(
        ColumnsConfig,
        "batch_size",
        "steps drawn from the replay per optimizer step, a multiple of rollout",
        default=512,
    )
    gamma: float = same_flag(ColumnsConfig, "gamma")
    n_steps: int = flag(3, "steps whose rewards are summed before a value stands in for the rest", minimum=1)
    double_q: bool = flag(True, "the trained network chooses the next action, the target network values it")
    dueling: bool = flag(True, "Q as the value of the state plus an advantage of every choice", fixed_on_resume=True)
    huber_loss: bool = flag(True, "errors count linearly beyond 1; False = squared errors")
    batch_replay: bool = flag(
        False,
        "draw whole trajectories instead of single steps, as networks with a memory (use_rnn) need them: each is"
        " unrolled from the state that acting had at its start",
        fixed_on_resume=True,
    )
    burn_in: int = flag(
        0,
        "with batch_replay: first steps of a trajectory that only bring the state up to date and have no error, unless"
        " an episode has begun in it by then",
        minimum=0,
        needs="batch_replay",
    )
    priority_eta: float = flag(
        0.9,
        "with batch_replay: share of a trajectory's largest error in its priority, the rest is that of the mean error",
        minimum=0,
        maximum=1,
        needs="batch_replay prioritized_replay actors",
    )
    value_rescaling: bool = flag(
        False, "predict h(return), about its square root, for returns of very different size", fixed_on_resume=True
    )
    cql_alpha: float = flag(
        0.0,
        "weight of a loss that lowers the values of actions which were not taken, for learning from datasets (discrete"
        " conservative Q-learning); 0 = off",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-3, 1e2),
    )
    target_update_interval: int = flag(
        2500, "optimizer steps after which the target network becomes a copy of the trained one", minimum=1
    )
    replay_capacity: int = flag(
        1_000_000, "agent steps that the replay of the run holds; the oldest leave first", minimum=1, needs="actors"
    )
    replay_compression: str = flag(
        "off",
        "how images lie in the replay: lz4 = each frame compressed, which costs a few microseconds a frame"
        ' and needs pip install "appo[lz4]"; off = as they are',
        choices=("off", "lz4"),
        fixed_on_resume=True,
        needs="actors images",
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
    num_replay_shards: int = flag(
        0,
        "processes that hold a share of the replay each, insert into it and draw batches beside the learner; 0 = the"
        " learner does that itself, as ever with inference=serial and lockstep",
        minimum=0,
        maximum=64,
        fixed_on_resume=True,
        needs="actors processes",
    )
    learning_starts: int = flag(50_000, "agent steps in the replay before the first update", minimum=1, needs="actors")
    replay_ratio: float = flag(
        8.0,
        "uses of every agent step in training: actors wait for the learner, and it for them, to keep it; 0 = as many"
        " as the learner manages",
        minimum=0,
    )
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
        1e-6, "added to the absolute error of a step in its priority", minimum=0, needs="prioritized_replay actors"
    )
    epsilon: float = same_flag(EpsilonConfig, "epsilon")
    epsilon_alpha: float = same_flag(EpsilonConfig, "epsilon_alpha")
    max_weight_sync_delay: int = flag(
        400, "agent steps that weights act before newer ones are published; 0 = publish after every update", minimum=0
    )

    # Tuning and placement read these names of every algorithm.
    num_batches_per_iteration: ClassVar[int] = 1

    @property
    def segment_steps(self) -> int:
        """Steps between recorded recurrent states: a whole trajectory."""
        return self.rollout

    @property
    def ppo_epochs(self) -> float:
        """Uses of a step."""
        return self.replay_ratio or 1.0

    @property
    def macro_batch_columns(self) -> int:
        """Trajectories with as many steps as a batch."""
        return self.batch_size // self.rollout

    def one_update(self, size: int) -> "ApexConfig":
        """Return flags for training once on so many new samples, for measuring time."""
        return replace(self, batch_size=size, replay_ratio=1.0, learning_starts=1, replay_capacity=16 * size)

    def check(self) -> None:
        """Refuse contradictory flags (UsageError)."""
        if self.batch_size % self.rollout:
            raise UsageError(f"--batch_size={self.batch_size} is not a multiple of --rollout={self.rollout}")
        if self.batch_replay and self.burn_in >= self.rollout:
            raise UsageError(f"--burn_in={self.burn_in} leaves nothing of --rollout={self.rollout} to learn from")
        if self.mix.sampler and self.n_steps > self.rollout:  # in datasets n steps go on to the end of the episode
            raise UsageError(
                f"--n_steps={self.n_steps} is above --rollout={self.rollout}: a trajectory has no more steps to sum"
            )
        if self.learning_starts > self.replay_capacity:
            raise UsageError(
                f"--learning_starts={self.learning_starts} is above --replay_capacity={self.replay_capacity}"
            )
        if self.mix.datasets and self.batch_replay:
            raise UsageError("--batch_replay: datasets are learned from in single steps with --algo=APEX")
        if self.mix.datasets and self.num_replay_shards:
            raise UsageError(
                f"--num_replay_shards={self.num_replay_shards}: datasets are mixed in where the learner has the replay"
            )
        if self.mix.datasets and self.mix.sampler and self.batch_size < 2:
            raise UsageError("--input: a batch of one step cannot be mixed, raise --batch_size")
        if self.lr_schedule.startswith("kl_adaptive"):
            raise UsageError(f"--lr_schedule={self.lr_schedule}: Q-learning has no policy whose KL divergence it is")


METRICS = {
    "loss": "mean weighted loss of the errors",
    "td_error": "mean absolute error of Q",
    "q_mean": "mean value of the actions taken, in units of the network",
    "target_mean": "mean of the targets, in units of the network",
    "weight_mean": "mean importance weight; the largest of a batch is 1",
    "conservative_gap": "mean of log sum exp Q minus Q of the action taken, lowered by `--cql_alpha`",
    **STEP_METRICS,
}

PANEL = {"loss": "loss", "td_error": "error", "q_mean": "q", "grad_norm": "gradient", "learning_rate": "rate"}

REPLAY_METRICS = {
    "replay/size": "steps that can be drawn",
    "replay/uses_per_step": "uses per agent step since training began, which --replay_ratio sets",
    "replay/age_samples": "mean age of what was drawn, in agent steps",
    "replay/age_updates": "the same in versions of the weights",
    "replay/mean_priority": "mean of (error + epsilon)^alpha over all steps that can be drawn",
    "replay/dropped": "steps overwritten before any batch had them, so far",
    "replay/unsampled": "steps never drawn, as what came after them is not known, so far",
    "replay/held": "share of looks at the slots in which some had to wait, as training was behind --replay_ratio",
    "replay/insert_us": "microseconds of the learner to insert an agent step",
    "replay/sample_ms": "milliseconds to draw and copy a batch",
    "replay/train_ms": "milliseconds from a batch to its errors",
    "replay/update_ms": "milliseconds to bring the priorities of a batch up to date",
    "replay/waiting_slots": "trajectories of a group that wait to be inserted, mean over looks at them",
}
"""Metrics of the replay, tag -> meaning; means since the last report."""

OF_SHARDS = {"replay/shard_<number>/<figure>": "the same of one process of `--num_replay_shards`"}
"""Metrics of each shard, pattern of tags -> meaning."""
