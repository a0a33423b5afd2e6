"""Flags of several algorithms, each declared once. Imports neither torch nor numpy."""

import math
from dataclasses import dataclass, replace
from typing import Self

from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class OptimizerConfig:
    """Flags of `parts.optimizer`: Adam, the schedule of its learning rate and the clip of the gradient."""

    learning_rate: float = flag(1e-4, "step size of Adam", minimum=0, mutation="scale", mutation_range=(1e-8, 1.0))
    lr_schedule: str = flag(
        "constant",
        "change of the learning rate: linear falls to 0 with the budget, train_for_env_steps or train_for_seconds,"
        " kl_adaptive_* keeps the KL divergence of a minibatch or an epoch near lr_schedule_kl_threshold",
        choices=("constant", "linear", "kl_adaptive_minibatch", "kl_adaptive_epoch"),
    )
    lr_schedule_kl_threshold: float = flag(
        0.008, "KL divergence that kl_adaptive_* schedules aim at", minimum=1e-12, needs="lr_schedule=kl_adaptive_*"
    )
    lr_adaptive_min: float = flag(
        1e-6, "smallest learning rate of kl_adaptive_* schedules", minimum=0, needs="lr_schedule=kl_adaptive_*"
    )
    lr_adaptive_max: float = flag(
        1e-2, "largest learning rate of kl_adaptive_* schedules", minimum=0, needs="lr_schedule=kl_adaptive_*"
    )
    adam_eps: float = flag(
        1e-6, "epsilon of Adam; above about 1e-3 nothing is learned", minimum=0, needs="optimizer=adam"
    )
    adam_beta1: float = flag(
        0.9, "decay of Adam's mean of gradients", minimum=0, maximum=0.999999, needs="optimizer=adam"
    )
    adam_beta2: float = flag(
        0.999, "decay of Adam's mean of squared gradients", minimum=0, maximum=0.99999999, needs="optimizer=adam"
    )
    max_grad_norm: float = flag(
        4.0,
        "limit of the L2 norm of the whole gradient; 0 = off",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-2, 1e3),
    )
    max_skipped_updates: int = flag(
        50,
        "updates in a row that are not finite, and therefore skipped, after which training goes back to the last good"
        " state; when that has not helped three times, the run ends",
        minimum=1,
    )

    def check(self) -> None:
        """Refuse flags that contradict each other (UsageError)."""
        if self.lr_adaptive_min > self.lr_adaptive_max:
            raise UsageError(
                f"--lr_adaptive_min={self.lr_adaptive_min:g} is above --lr_adaptive_max={self.lr_adaptive_max:g}"
            )
        follows = self.lr_schedule.startswith("kl_adaptive") and self.learning_rate
        if follows and not self.lr_adaptive_min <= self.learning_rate <= self.lr_adaptive_max:
            raise UsageError(
                f"--learning_rate={self.learning_rate:g} is not between --lr_adaptive_min={self.lr_adaptive_min:g} and"
                f" --lr_adaptive_max={self.lr_adaptive_max:g}, the bounds of --lr_schedule={self.lr_schedule}"
            )


@dataclass(frozen=True)
class RolloutConfig(OptimizerConfig):
    """Flags of batches whose columns are whole trajectories. The runtime reads all of these flags by name."""

    rollout: int = flag(32, "steps of a trajectory, the unit handed from actors to the learner", minimum=1)
    recurrence: int = flag(
        0,
        "steps of a segment of backpropagation through time, dividing rollout; 1 = none, 0 = rollout",
        minimum=0,
        needs="memory",
    )
    batch_size: int = flag(
        1024, "samples (env steps of an agent) per optimizer step, a multiple of rollout", minimum=1, mutation="samples"
    )
    num_batches_per_iteration: int = flag(
        1, "batches collected before training on them; more allow shuffling and add policy lag", minimum=1
    )
    gamma: float = flag(0.99, "discount per step", minimum=0, maximum=1, needs="returns")

    @property
    def ppo_epochs(self) -> int:
        """Passes over the collected batches, for measuring the cost of training; 1 without a flag."""
        return 1

    @property
    def segment_steps(self) -> int:
        """Steps of a segment of backpropagation through time."""
        return self.recurrence or self.rollout

    @property
    def macro_batch_columns(self) -> int:
        """Trajectories of an iteration."""
        return self.num_batches_per_iteration * self.batch_size // self.rollout

    def one_update(self, size: int) -> Self:
        """Return flags for an iteration of a single update on a batch of this size, for measuring time."""
        return replace(self, batch_size=size, num_batches_per_iteration=1)

    def check(self) -> None:
        """Refuse sizes that do not divide each other (UsageError)."""
        self._check_batch_size()
        if self.rollout % self.segment_steps:
            raise UsageError(f"--rollout={self.rollout} is not a multiple of --recurrence={self.recurrence}")
        super().check()

    def _check_batch_size(self) -> None:
        if self.batch_size % self.rollout:
            raise UsageError(f"--batch_size={self.batch_size} is not a multiple of --rollout={self.rollout}")


@dataclass(frozen=True)
class IterationConfig(RolloutConfig):
    """Flags of an iteration whose whole trajectories are drawn, as steps or segments, into minibatches."""

    recurrence: int = same_flag(
        RolloutConfig,
        "recurrence",
        "steps of a segment of backpropagation through time, dividing rollout; 1 = none, 0 = rollout; without a"
        " recurrent core every step is a segment of its own",
    )
    batch_size: int = same_flag(
        RolloutConfig,
        "batch_size",
        "samples (env steps of an agent) per optimizer step; may be smaller than rollout",
        default=128,
        mutation=None,
    )
    num_batches_per_iteration: int = same_flag(
        RolloutConfig,
        "num_batches_per_iteration",
        "minibatches collected before training on them; times batch_size, a multiple of rollout",
        default=8,
    )

    def _check_batch_size(self) -> None:
        check_iteration(self.batch_size, self.num_batches_per_iteration, self.rollout)


def check_iteration(batch_size: int, num_batches: int, rollout: int) -> None:
    """Refuse minibatches of steps that do not add up to whole trajectories (UsageError)."""
    if batch_size * num_batches % rollout:
        raise UsageError(
            f"--batch_size={batch_size} times --num_batches_per_iteration={num_batches} is no multiple of"
            f" --rollout={rollout}"
        )


def check_segments(batch_size: int, segment_steps: int) -> None:
    """Refuse minibatches that are not whole segments of a network with a memory (UsageError)."""
    if batch_size % segment_steps:
        shared = math.gcd(batch_size, segment_steps)
        raise UsageError(
            f"--batch_size={batch_size} is no multiple of --recurrence={segment_steps}, the steps of a segment that a"
            f" recurrent network is trained on, by default --rollout: give --recurrence={shared}"
        )


@dataclass(frozen=True)
class ColumnsConfig(RolloutConfig):
    """Flags of an actor-critic that trains on whole trajectories."""

    normalize_returns: bool = flag(
        True,
        "let the critic predict returns in units of their running standard deviation",
        fixed_on_resume=True,
        needs="returns",
    )


@dataclass(frozen=True)
class EpsilonConfig:
    """Flags of a policy that acts at random with a probability per row."""

    epsilon: float = flag(
        0.4,
        "row i of N acts at random with probability epsilon^(1 + i / (N-1) * epsilon_alpha); a single row, with the"
        " smallest of them",
        minimum=0,
        maximum=1,
        needs="actors",
    )
    epsilon_alpha: float = flag(
        7.0, "how much less the last row explores than the first, see epsilon", minimum=0, needs="actors"
    )


@dataclass(frozen=True)
class SurrogateConfig(ColumnsConfig):
    """Flags of PPO's clipped surrogate, of epochs over a batch, and of the other losses."""

    ppo_epochs: int = flag(1, "passes over the collected batches", minimum=1)
    shuffle_minibatches: bool = flag(
        True, "draw trajectories into new batches in every epoch", needs="num_batches_per_iteration>1"
    )
    microbatch_size: int = flag(
        0,
        "samples per forward and backward pass, a multiple of rollout: saves memory, same result; 0 = batch_size",
        minimum=0,
    )
    gae_lambda: float = flag(0.95, "mixing of n-step estimates by GAE", minimum=0, maximum=1)
    ppo_clip_ratio: float = flag(
        0.1,
        "e of the clip of the probability ratio to [1/(1+e), 1+e]",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-2, 1.0),
    )
    ppo_clip_schedule: str = flag(
        "constant",
        "change of ppo_clip_ratio: linear falls to 0 with the budget, as of lr_schedule",
        choices=("constant", "linear"),
        needs="ppo_clip_ratio",
    )
    ppo_clip_value: float = flag(
        1.0,
        "largest change of the value from its behaviour estimate, in units of the critic; 0 = off",
        minimum=0,
        needs="value_loss_coeff",
        mutation="scale",
        mutation_range=(1e-2, 1e3),
    )
    exploration_loss_coeff: float = flag(
        0.003, "weight of the exploration loss", minimum=0, mutation="scale", mutation_range=(1e-7, 1.0)
    )
    exploration_loss_schedule: str = flag(
        "constant",
        "change of exploration_loss_coeff: linear falls to 0 with the budget, as of lr_schedule",
        choices=("constant", "linear"),
        needs="exploration_loss_coeff",
    )
    value_loss_coeff: float = flag(
        0.5, "weight of the value loss", minimum=0, mutation="scale", mutation_range=(1e-3, 1e2)
    )
    rpo_alpha: float = flag(
        0.0,
        "largest number that the loss adds to, or takes from, the mean of every continuous action, drawn anew for each"
        " sample (RPO); keeps deviations up, and harms tasks of precision; 0 = off",
        minimum=0,
        needs="reals",
    )
    target_kl: float = flag(
        0.0,
        "an iteration ends after the epoch whose mean KL divergence is above this; 0 = off",
        minimum=0,
        needs="ppo_epochs>1",
    )


SCHEDULES = {
    "lr_schedule": "learning_rate",
    "ppo_clip_schedule": "ppo_clip_ratio",
    "exploration_loss_schedule": "exploration_loss_coeff",
}
"""Flag of a schedule -> flag of the number that falls to 0."""


def annealed(flags: object) -> dict[str, float]:
    """Return the numbers of a learner's flags with a linear schedule, by flag; a number that is 0 cannot fall."""
    linear = (name for schedule, name in SCHEDULES.items() if getattr(flags, schedule, "") == "linear")
    return {name: value for name in linear if (value := getattr(flags, name))}


def scheduled(value: float, schedule: str, progress: float) -> float:
    """Return a number of a schedule, `constant` or `linear`, after a share of the budget in [0, 1]."""
    return value * max(0.0, 1.0 - progress) if schedule == "linear" else value


STEP_METRICS = {
    "grad_norm": "L2 norm of the gradient before `--max_grad_norm` limits the norm",
    "learning_rate": "step size of the optimizer, in use now",
    "skipped": "share of updates that were skipped because a number was not finite; should be 0",
}
"""Metrics of an optimizer step, which every learner reports."""


def network_metrics(name: str) -> dict[str, str]:
    """Return the metrics of a network of `FlatLearner.add_network` with their meaning."""
    return {
        f"{name}_grad_norm": f"L2 norm of the gradient of {name} before `--max_grad_norm` limits the norm",
        f"{name}_learning_rate": f"step size of the optimizer of {name}, in use now",
    }


ACTOR_CRITIC_METRICS = {
    "loss": "weighted sum of the losses below",
    "value_loss": "squared error of the critic before the coefficient, in the critic's units",
    "entropy": "mean entropy of the action distribution; falls as the policy decides. If the entropy is near 0 early,"
    " raise `--exploration_loss_coeff`",
    "value_mean": "mean value of the critic, in units of return",
    **STEP_METRICS,
}

EXPLAINED = "explained_variance"
"""The metric that belongs to a whole minibatch: parts have no means that add up to the number."""

SURROGATE_METRICS = {
    "policy_loss": "PPO's clipped surrogate, negated",
    "kl_divergence": "mean KL divergence from the policy that acted to the trained policy, by PPO an estimate; if"
    " large, take smaller steps or fewer epochs",
    "ratio_mean": "mean probability ratio of the actions, trained policy to acting policy; should stay near 1",
    "ratio_max": "largest probability ratio",
    "fraction_clipped": "share of steps whose ratio is outside the clip; if large, take smaller steps or fewer epochs",
    EXPLAINED: "1 - Var(target - value) / Var(target) of a minibatch, by the values of the acting policy, at least -1;"
    " near 1 the critic foresees the returns, at 0 or less the critic is of no use",
}

SURROGATE_PANEL = {
    "value_loss": "value",
    EXPLAINED: "explained",
    "entropy": "entropy",
    "kl_divergence": "kl",
    "grad_norm": "gradient",
    "learning_rate": "rate",
}
