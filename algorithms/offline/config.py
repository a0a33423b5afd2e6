"""The flags of BC and MARWIL. Imports neither torch nor numpy."""

from dataclasses import dataclass

from appo.algorithms.datasets.config import EvaluatedInputConfig
from appo.algorithms.parts.config import ACTOR_CRITIC_METRICS, STEP_METRICS, ColumnsConfig, SurrogateConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class CloningConfig(EvaluatedInputConfig, ColumnsConfig):
    """Learning."""

    learning_rate: float = same_flag(ColumnsConfig, "learning_rate", default=1e-3)
    rollout: int = same_flag(
        ColumnsConfig, "rollout", "steps of the datasets that are read in a row, as one trajectory of a batch"
    )
    batch_size: int = same_flag(
        ColumnsConfig, "batch_size", "samples (steps of the datasets) of a batch, a multiple of rollout"
    )
    num_batches_per_iteration: int = same_flag(
        ColumnsConfig, "num_batches_per_iteration", "batches that are read for one optimizer step on all of them"
    )
    gamma: float = same_flag(ColumnsConfig, "gamma", "discount per step; BC estimates no return and has no use for it")
    normalize_returns: bool = same_flag(
        ColumnsConfig,
        "normalize_returns",
        "let the critic predict returns in units of their running standard deviation; BC trains no critic",
    )

    def check(self) -> None:
        """Refuse contradictory flags, and a missing dataset (UsageError)."""
        super().check()
        if self.mix.sampler and self.input:
            raise UsageError("--input: datasets alone are cloned, without sampler")
        if not self.input:
            raise UsageError("--input is required: a dataset to learn from; appo record writes some")


@dataclass(frozen=True)
class MarwilConfig(CloningConfig):
    """Learning."""

    beta: float = flag(
        1.0,
        "factor of the advantage in the exponent of a step's weight: what turned out better is imitated more; 0 = all"
        " steps alike",
        minimum=0,
        maximum=100,
    )
    max_weight: float = flag(20.0, "limit of the weight exp(beta * advantage / c) of a step", minimum=1)
    advantage_norm_rate: float = flag(
        0.01, "share of a batch in the running mean square of advantages, c^2", minimum=0, maximum=1
    )
    value_loss_coeff: float = same_flag(SurrogateConfig, "value_loss_coeff", default=1.0)
    gae_lambda: float = same_flag(
        SurrogateConfig,
        "gae_lambda",
        "mixing of n-step estimates by GAE; 1 = rewards to the end of the trajectory, then the critic's value",
        default=1.0,
    )


CLONING_METRICS = {
    "loss": "mean cross entropy of the recorded actions, in nats",
    "entropy": ACTOR_CRITIC_METRICS["entropy"],
    "agreement": "share of steps whose most probable action is the recorded action; of continuous actions, 0",
    **STEP_METRICS,
}

MARWIL_METRICS = {
    **{name: text for name, text in ACTOR_CRITIC_METRICS.items() if name != "value_mean"},
    "policy_loss": "mean cross entropy of the recorded actions, weighted by exp(beta * advantage / c)",
    "advantage_norm": "c, by which advantages are divided, in units of return",
    "weight_mean": "mean weight of a step",
    "weight_max": "largest weight of a step",
}
