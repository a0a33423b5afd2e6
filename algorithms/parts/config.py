"""Flags that several algorithms share. Needs neither torch nor numpy."""

from dataclasses import dataclass

from utils.flags import flag


@dataclass(frozen=True)
class OptimizerConfig:
    """Flags of `parts.optimizer`: Adam, the schedule of its learning rate and the clip of the gradient."""

    learning_rate: float = flag(1e-4, "step size of Adam", minimum=0, mutation="scale", mutation_range=(1e-8, 1.0))
    lr_schedule: str = flag(
        "constant",
        "change of the learning rate: linear falls to 0 at train_for_env_steps, kl_adaptive_* keeps the KL divergence"
        " of a minibatch or an epoch near lr_schedule_kl_threshold",
        choices=("constant", "linear", "kl_adaptive_minibatch", "kl_adaptive_epoch"),
    )
    lr_schedule_kl_threshold: float = flag(0.008, "KL divergence that kl_adaptive_* schedules aim at", minimum=1e-12)
    lr_adaptive_min: float = flag(1e-6, "smallest learning rate of kl_adaptive_* schedules", minimum=0)
    lr_adaptive_max: float = flag(1e-2, "largest learning rate of kl_adaptive_* schedules", minimum=0)
    adam_eps: float = flag(1e-6, "epsilon of Adam; above about 1e-3 nothing is learned", minimum=0)
    adam_beta1: float = flag(0.9, "decay of Adam's mean of gradients", minimum=0, maximum=0.999999)
    adam_beta2: float = flag(0.999, "decay of Adam's mean of squared gradients", minimum=0, maximum=0.99999999)
    max_grad_norm: float = flag(
        4.0,
        "limit of the L2 norm of the whole gradient; 0 = off",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-2, 1e3),
    )
