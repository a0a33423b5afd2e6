"""The flags of A3C; where the paper leaves a choice open, the default is that of Stable-Baselines3's A2C."""

from dataclasses import dataclass
from typing import ClassVar

from appo.algorithms.parts.config import ACTOR_CRITIC_METRICS, STEP_METRICS, OptimizerConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag


@dataclass(frozen=True)
class A3CConfig(OptimizerConfig):
    """Learning."""

    optimizer: str = flag(
        "rmsprop",
        "optimizer whose statistics all actors share: rmsprop, or adam",
        choices=("rmsprop", "adam"),
        fixed_on_resume=True,
    )
    learning_rate: float = flag(
        7e-4, "step size of the optimizer", minimum=0, mutation="scale", mutation_range=(1e-8, 1.0)
    )
    lr_schedule: str = flag(
        "constant",
        "change of the learning rate: linear falls to 0 at train_for_env_steps",
        choices=("constant", "linear"),
    )
    rmsprop_alpha: float = flag(
        0.99, "decay of RMSProp's mean of squared gradients", minimum=0, maximum=0.99999999, needs="optimizer=rmsprop"
    )
    rmsprop_eps: float = flag(1e-5, "epsilon of RMSProp, under the root", minimum=1e-30, needs="optimizer=rmsprop")
    adam_eps: float = flag(
        1e-5, "epsilon of Adam; above about 1e-3 nothing is learned", minimum=0, needs="optimizer=adam"
    )
    max_grad_norm: float = flag(
        0.5,
        "limit of the L2 norm of the whole gradient; 0 = off",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-2, 1e3),
    )
    rollout: int = flag(20, "steps of a trajectory, of which an actor computes one gradient", minimum=1)
    recurrence: int = flag(
        0,
        "steps of a segment of backpropagation through time, dividing rollout; 1 = none, 0 = rollout",
        minimum=0,
        needs="memory",
    )
    grads_per_step: int = flag(100, "gradients that the losses of a report are means of, at least", minimum=1)
    gamma: float = flag(0.99, "discount per step", minimum=0, maximum=1)
    gae_lambda: float = flag(
        1.0, "mixing of n-step estimates by GAE; 1 = the return to the end of the trajectory", minimum=0, maximum=1
    )
    normalize_returns: bool = flag(
        False, "let the critic predict returns in units of their running standard deviation", fixed_on_resume=True
    )
    exploration_loss_coeff: float = flag(
        0.01, "weight of the entropy bonus", minimum=0, mutation="scale", mutation_range=(1e-7, 1.0)
    )
    value_loss_coeff: float = flag(
        0.5, "weight of the value loss", minimum=0, mutation="scale", mutation_range=(1e-3, 1e2)
    )

    # What sampling asks of every algorithm: a gradient is one of a slot, however many columns that has.
    num_batches_per_iteration: ClassVar[int] = 1
    ppo_epochs: ClassVar[int] = 1
    macro_batch_columns: ClassVar[int] = 1

    @property
    def batch_size(self) -> int:
        """Samples of one environment's gradient."""
        return self.rollout

    @property
    def segment_steps(self) -> int:
        """Steps of one segment of backpropagation through time."""
        return self.recurrence or self.rollout

    def check(self) -> None:
        """Refuse flags that contradict each other (UsageError)."""
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
