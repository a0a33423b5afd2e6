"""Flags of algorithms that learn from datasets alone; needs neither torch nor numpy."""

from dataclasses import dataclass

from appo.algorithms.datasets.config import EvaluatedInputConfig
from appo.algorithms.parts.config import ACTOR_CRITIC_METRICS, STEP_METRICS, ColumnsConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag


@dataclass(frozen=True)
class CloningConfig(EvaluatedInputConfig, ColumnsConfig):
    """Learning."""

    learning_rate: float = flag(1e-3, "step size of Adam", minimum=0, mutation="scale", mutation_range=(1e-8, 1.0))
    rollout: int = flag(32, "steps of the datasets that are read in a row, as one trajectory of a batch", minimum=1)
    batch_size: int = flag(
        1024,
        "samples (steps of the datasets) of a batch, a multiple of rollout",
        minimum=1,
        mutation="samples",
    )
    num_batches_per_iteration: int = flag(1, "batches that are read for one optimizer step on all of them", minimum=1)
    gamma: float = flag(
        0.99, "discount per step; BC estimates no return and has no use for it", minimum=0, maximum=1, needs="returns"
    )
    normalize_returns: bool = flag(
        True,
        "let the critic predict returns in units of their running standard deviation; BC trains no critic",
        fixed_on_resume=True,
        needs="returns",
    )

    def check(self) -> None:
        """Refuse flags that contradict each other, or name nothing to learn from (UsageError)."""
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
    value_loss_coeff: float = flag(
        1.0, "weight of the value loss", minimum=0, mutation="scale", mutation_range=(1e-3, 1e2)
    )
    gae_lambda: float = flag(
        1.0,
        "mixing of n-step estimates by GAE; 1 = rewards to the end of the trajectory, then the critic's value",
        minimum=0,
        maximum=1,
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
