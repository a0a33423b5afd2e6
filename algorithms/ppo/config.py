"""The flags of synchronous PPO; flags that Stable-Baselines3 has too have the defaults of Stable-Baselines3."""

from dataclasses import dataclass, replace

from appo.algorithms.parts.config import (
    ACTOR_CRITIC_METRICS,
    SURROGATE_METRICS,
    IterationConfig,
    SurrogateConfig,
    check_iteration,
    check_segments,
)
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class PPOConfig(SurrogateConfig):
    """Learning."""

    learning_rate: float = same_flag(SurrogateConfig, "learning_rate", default=3e-4)
    adam_eps: float = same_flag(SurrogateConfig, "adam_eps", default=1e-5)
    max_grad_norm: float = same_flag(SurrogateConfig, "max_grad_norm", default=0.5)
    rollout: int = same_flag(SurrogateConfig, "rollout", default=128)
    recurrence: int = same_flag(IterationConfig, "recurrence")
    batch_size: int = same_flag(IterationConfig, "batch_size", default=64)
    num_batches_per_iteration: int = same_flag(IterationConfig, "num_batches_per_iteration", default=32)
    ppo_epochs: int = same_flag(SurrogateConfig, "ppo_epochs", "passes over the collected minibatches", default=10)
    microbatch_size: int = same_flag(
        SurrogateConfig,
        "microbatch_size",
        "samples differentiated at a time, a divisor of batch_size, to save memory; 0 = batch_size; with ppo_epochs=1"
        " and num_batches_per_iteration=1 a batch streams: samples are dropped as soon as they are in the gradient",
    )
    shuffle_minibatches: bool = same_flag(
        SurrogateConfig, "shuffle_minibatches", "draw steps, or segments, into new minibatches in every epoch"
    )
    recompute_advantages: bool = flag(
        False,
        "estimate advantages and value targets anew before every epoch instead of once per iteration",
        needs="ppo_epochs>1",
    )
    normalize_returns: bool = same_flag(SurrogateConfig, "normalize_returns", default=False)
    normalize_advantages: str = flag(
        "batch",
        "mean and standard deviation that advantages are normalized by: of the minibatch, of the last iterations, or"
        " off = none, in units of the critic",
        choices=("batch", "running", "off"),
    )
    ppo_clip_ratio: float = same_flag(
        SurrogateConfig, "ppo_clip_ratio", "e of the clip of the probability ratio to [1-e, 1+e]", default=0.2
    )
    ppo_clip_value: float = same_flag(SurrogateConfig, "ppo_clip_value", default=0.0)
    exploration_loss_coeff: float = same_flag(
        SurrogateConfig, "exploration_loss_coeff", "weight of the entropy bonus", default=0.0
    )
    target_kl: float = same_flag(
        SurrogateConfig,
        "target_kl",
        "an iteration ends before the minibatch whose KL divergence is 1.5 times this; 0 = off",
        needs="",
    )

    def one_update(self, size: int) -> "PPOConfig":
        """Return flags for an iteration of a single pass over so many samples, for measuring time."""
        batch_size = self.batch_size if size % self.batch_size == 0 else size
        count = size // batch_size
        once = replace(self, batch_size=batch_size, num_batches_per_iteration=count, ppo_epochs=1, microbatch_size=0)
        return replace(once, lr_schedule="constant", target_kl=0.0)  # which a single step has no use for

    @property
    def streams(self) -> bool:
        """Whether no step is used twice: the learner then drops a microbatch after computing its gradient."""
        return self.microbatch_size > 0 and self.ppo_epochs == 1 and self.num_batches_per_iteration == 1

    @property
    def macro_batch_columns(self) -> int:
        """Trajectories of an iteration; of a microbatch, if batches stream."""
        if self.streams:
            return self.microbatch_size // self.rollout
        return self.num_batches_per_iteration * self.batch_size // self.rollout

    def _check_batch_size(self) -> None:
        check_iteration(self.batch_size, self.num_batches_per_iteration, self.rollout)

    def check(self, *, recurrent: bool = False) -> None:
        """Refuse flags that contradict each other.

        Args:
            recurrent: whether the network has a memory and trains on minibatches of segments.

        Raises:
            UsageError: flags contradict each other.
        """
        super().check()
        follows_kl = self.lr_schedule.startswith("kl_adaptive")
        if self.ppo_epochs * self.num_batches_per_iteration == 1 and (follows_kl or self.target_kl):
            flag = f"--lr_schedule={self.lr_schedule}" if follows_kl else f"--target_kl={self.target_kl:g}"
            raise UsageError(
                f"{flag}: the only optimizer step of an iteration starts from the weights that acted, so its KL"
                " divergence is 0: take more --ppo_epochs or --num_batches_per_iteration"
            )
        size, segment = self.microbatch_size, self.segment_steps
        if recurrent:
            check_segments(self.batch_size, segment)
        if not size:
            return
        if size >= self.batch_size or self.batch_size % size:
            raise UsageError(
                f"--microbatch_size={size} must be smaller than --batch_size={self.batch_size} and divide it; 0 = whole"
            )
        if recurrent and size % segment:
            raise UsageError(
                f"--microbatch_size={size} is no multiple of --recurrence={segment}, the steps of a segment that a"
                " recurrent network is trained on"
            )
        if self.streams and size % self.rollout:
            raise UsageError(
                f"--microbatch_size={size} is no multiple of --rollout={self.rollout}, and with --ppo_epochs=1 and"
                " --num_batches_per_iteration=1 whole trajectories stream"
            )
        if self.streams and self.normalize_advantages == "batch":
            raise UsageError(
                f"--microbatch_size={size} with --ppo_epochs=1 and --num_batches_per_iteration=1 streams, and a batch"
                " that is never whole has no mean: give --normalize_advantages=running or off"
            )


METRICS = {
    **ACTOR_CRITIC_METRICS,
    **SURROGATE_METRICS,
    "advantage_std": "standard deviation of the advantages of a minibatch, in units of the critic unless running"
    " moments normalize the advantages",
}

STREAMING_METRICS = {
    "sample_seconds": "seconds per streamed batch in which the learner waited for samples",
    "grad_seconds": "seconds per streamed batch for the gradients of all microbatches",
    "update_seconds": "seconds per streamed batch for the optimizer step",
    "sample_peak_per_second": "samples of a streamed batch by `sample_seconds`: the speed if learning took no time",
    "train_peak_per_second": "samples of a streamed batch by `grad_seconds` and `update_seconds`: the speed if samples"
    " were always ready",
}
"""Further metrics of a learner whose batches stream."""
