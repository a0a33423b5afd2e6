"""The flags of A3C; values that the paper leaves open come from Stable-Baselines3's A2C."""

from dataclasses import dataclass
from typing import ClassVar

from appo.algorithms.parts.config import ACTOR_CRITIC_METRICS, STEP_METRICS, OptimizerConfig, SurrogateConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class A3CConfig(OptimizerConfig):
    """Learning."""

    optimizer: str = flag(
        "rmsprop",
        "optimizer whose statistics all actors share: rmsprop, or adam",
        choices=("rmsprop", "adam"),
        fixed_on_resume=True,
    )
    learning_rate: float = same_flag(OptimizerConfig, "learning_rate", "step size of the optimizer", default=7e-4)
    lr_schedule: str = same_flag(
        OptimizerConfig,
        "lr_schedule",
        "change of the learning rate: linear falls to 0 with the budget, train_for_env_steps or train_for_seconds",
        choices=("constant", "linear"),
    )
    rmsprop_alpha: float = flag(
        0.99, "decay of RMSProp's mean of squared gradients", minimum=0, maximum=0.99999999, needs="optimizer=rmsprop"
    )
    rmsprop_eps: float = flag(1e-5, "epsilon of RMSProp, under the root", minimum=1e-30, needs="optimizer=rmsprop")
    adam_eps: float = same_flag(OptimizerConfig, "adam_eps", default=1e-5)
    max_grad_norm: float = same_flag(OptimizerConfig, "max_grad_norm", default=0.5)
    rollout: int = same_flag(
        SurrogateConfig, "rollout", "steps of a trajectory, of which an actor computes one gradient", default=20
    )
    recurrence: int = same_flag(
        SurrogateConfig,
        "recurrence",
        "steps of a segment of backpropagation through time, dividing rollout; 1 = none, 0 = rollout",
    )
    grads_per_step: int = flag(100, "gradients that the losses of a report are means of, at least", minimum=1)
    gamma: float = same_flag(SurrogateConfig, "gamma")
    gae_lambda: float = same_flag(
        SurrogateConfig,
        "gae_lambda",
        "mixing of n-step estimates by GAE; 1 = the return to the end of the trajectory",
        default=1.0,
    )
    normalize_returns: bool = same_flag(SurrogateConfig, "normalize_returns", default=False)
    exploration_loss_coeff: float = same_flag(
        SurrogateConfig, "exploration_loss_coeff", "weight of the entropy bonus", default=0.01
    )
    value_loss_coeff: float = same_flag(SurrogateConfig, "value_loss_coeff")

    # Sampling reads these names of every algorithm. A gradient belongs to a slot with any number of columns.
    num_batches_per_iteration: ClassVar[int] = 1
    ppo_epochs: ClassVar[int] = 1
    macro_batch_columns: ClassVar[int] = 1

    @property
    def batch_size(self) -> int:
        """Samples of the gradient of one environment."""
        return self.rollout

    @property
    def segment_steps(self) -> int:
        """Steps of a segment of backpropagation through time."""
        return self.recurrence or self.rollout

    def check(self) -> None:
        """Refuse contradictory flags (UsageError)."""
        if self.rollout % self.segment_steps:
            raise UsageError(f"--rollout={self.rollout} is not a multiple of --recurrence={self.recurrence}")


COMPUTED = {
    **{name: text for name, text in ACTOR_CRITIC_METRICS.items() if name not in STEP_METRICS},
    "policy_loss": "log-probability of the actions times the advantage, negated",
    "advantage_std": "standard deviation of the advantages of a trajectory, in units of the critic",
    "reproduction_error": "largest difference of log-probabilities and values between acting and differentiating",
}
"""Metrics that an actor's worker sends with a gradient, in this order."""

METRICS = {
    **COMPUTED,
    **STEP_METRICS,
    "wait_ms": "milliseconds in which the learner waited for a gradient",
    "apply_ms": "milliseconds in which the learner applied a gradient",
    "dispatch_ms": "milliseconds in which the learner published the weights",
}

PANEL = {
    "policy_loss": "policy",
    "value_loss": "value",
    "entropy": "entropy",
    "grad_norm": "gradient",
    "learning_rate": "rate",
    "wait_ms": "wait ms",
}
