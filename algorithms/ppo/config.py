"""The flags of synchronous PPO; where Stable-Baselines3 has the flag too, its default is the one here."""

from dataclasses import dataclass, replace

from appo.algorithms.parts.config import ACTOR_CRITIC_METRICS, CLIPPING_METRICS, OptimizerConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag


@dataclass(frozen=True)
class PPOConfig(OptimizerConfig):
    """Learning."""

    learning_rate: float = flag(3e-4, "step size of Adam", minimum=0, mutation="scale", mutation_range=(1e-8, 1.0))
    adam_eps: float = flag(1e-5, "epsilon of Adam; above about 1e-3 nothing is learned", minimum=0)
    max_grad_norm: float = flag(
        0.5,
        "limit of the L2 norm of the whole gradient; 0 = off",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-2, 1e3),
    )
    rollout: int = flag(128, "steps of a trajectory, the unit handed from actors to the learner", minimum=1)
    recurrence: int = flag(
        0,
        "steps of a segment of backpropagation through time, dividing rollout; 1 = none, 0 = rollout; without a"
        " recurrent core every step is a segment of its own",
        minimum=0,
        needs="memory",
    )
    batch_size: int = flag(
        64, "samples (env steps of an agent) per optimizer step; may be smaller than rollout", minimum=1
    )
    num_batches_per_iteration: int = flag(
        32,
        "minibatches collected before training on them; times batch_size, a multiple of rollout",
        minimum=1,
    )
    ppo_epochs: int = flag(10, "passes over the collected minibatches", minimum=1)
    microbatch_size: int = flag(
        0,
        "samples differentiated at a time, a divisor of batch_size, to save memory; 0 = batch_size; with ppo_epochs=1"
        " and num_batches_per_iteration=1 a batch streams: samples are dropped as soon as they are in the gradient",
        minimum=0,
    )
    shuffle_minibatches: bool = flag(
        True, "draw steps, or segments, into new minibatches in every epoch", needs="num_batches_per_iteration>1"
    )
    recompute_advantages: bool = flag(
        False,
        "estimate advantages and value targets anew before every epoch instead of once per iteration",
        needs="ppo_epochs>1",
    )
    gamma: float = flag(0.99, "discount per step", minimum=0, maximum=1)
    gae_lambda: float = flag(0.95, "mixing of n-step estimates by GAE", minimum=0, maximum=1)
    normalize_returns: bool = flag(
        False, "let the critic predict returns in units of their running standard deviation", fixed_on_resume=True
    )
    normalize_advantages: str = flag(
        "batch",
        "mean and standard deviation that advantages are normalized by: of the minibatch, of the last iterations, or"
        " off = none, in units of the critic",
        choices=("batch", "running", "off"),
    )
    ppo_clip_ratio: float = flag(
        0.2,
        "e of the clip of the probability ratio to [1-e, 1+e]",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-2, 1.0),
    )
    ppo_clip_schedule: str = flag(
        "constant",
        "change of ppo_clip_ratio: linear falls to 0 at train_for_env_steps",
        choices=("constant", "linear"),
    )
    ppo_clip_value: float = flag(
        0.0,
        "largest change of the value from its behaviour estimate, in units of the critic; 0 = off",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-2, 1e3),
    )
    exploration_loss_coeff: float = flag(
        0.0, "weight of the entropy bonus", minimum=0, mutation="scale", mutation_range=(1e-7, 1.0)
    )
    value_loss_coeff: float = flag(
        0.5, "weight of the value loss", minimum=0, mutation="scale", mutation_range=(1e-3, 1e2)
    )
    target_kl: float = flag(
        0.0,
        "an iteration ends before the minibatch whose KL divergence is 1.5 times this; 0 = off",
        minimum=0,
    )

    @property
    def segment_steps(self) -> int:
        """Steps of one segment of backpropagation through time."""
        return self.recurrence or self.rollout

    def one_update(self, size: int) -> "PPOConfig":
        """Return flags with which an iteration is one pass over so many samples, for measuring its time."""
        batch_size = self.batch_size if size % self.batch_size == 0 else size
        count = size // batch_size
        return replace(self, batch_size=batch_size, num_batches_per_iteration=count, ppo_epochs=1, microbatch_size=0)

    @property
    def streams(self) -> bool:
        """Whether nothing is used twice, so that a microbatch is dropped as soon as it is differentiated."""
        return self.microbatch_size > 0 and self.ppo_epochs == 1 and self.num_batches_per_iteration == 1

    @property
    def macro_batch_columns(self) -> int:
        """Trajectories collected before training on them: those of a microbatch, if batches stream."""
        if self.streams:
            return self.microbatch_size // self.rollout
        return self.num_batches_per_iteration * self.batch_size // self.rollout

    def check(self, *, recurrent: bool) -> None:
        """Refuse flags that contradict each other.

        Args:
            recurrent: whether the network has a memory, so that minibatches are made of segments.

        Raises:
            UsageError: with the numbers.
        """
        size, count, rollout = self.batch_size, self.num_batches_per_iteration, self.rollout
        if size * count % rollout:
            raise UsageError(
                f"--batch_size={size} times --num_batches_per_iteration={count} is no multiple of --rollout={rollout}"
            )
        if rollout % self.segment_steps:
            raise UsageError(f"--rollout={rollout} is not a multiple of --recurrence={self.recurrence}")
        if recurrent and size % self.segment_steps:
            raise UsageError(
                f"--batch_size={size} is no multiple of --recurrence={self.segment_steps}, the steps of a segment that"
                " a recurrent network is trained on"
            )
        if self.lr_adaptive_min > self.lr_adaptive_max:
            raise UsageError(
                f"--lr_adaptive_min={self.lr_adaptive_min:g} is above --lr_adaptive_max={self.lr_adaptive_max:g}"
            )
        if self.microbatch_size:
            self._check_microbatch(recurrent=recurrent)

    def _check_microbatch(self, *, recurrent: bool) -> None:
        """Refuse a microbatch that is no part of a batch, or of which the whole must be known (UsageError)."""
        size, segment = self.microbatch_size, self.segment_steps
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
    **CLIPPING_METRICS,
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

PANEL = {
    "policy_loss": "policy",
    "value_loss": "value",
    "entropy": "entropy",
    "kl_divergence": "kl",
    "grad_norm": "gradient",
    "learning_rate": "rate",
}
