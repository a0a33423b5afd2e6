"""The flags of SAC. Imports neither torch nor numpy."""

from dataclasses import dataclass

from appo.algorithms.parts.config import STEP_METRICS, OptimizerConfig, network_metrics
from appo.algorithms.replay.config import PacedReplayConfig, ReplayConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class SACConfig(PacedReplayConfig):
    """Learning."""

    learning_rate: float = same_flag(
        OptimizerConfig, "learning_rate", "step size of policy and temperature", default=3e-4
    )
    critic_learning_rate: float = flag(
        1e-3, "step size of the critics", minimum=0, mutation="scale", mutation_range=(1e-8, 1.0)
    )
    adam_eps: float = same_flag(OptimizerConfig, "adam_eps", default=1e-8)
    max_grad_norm: float = same_flag(OptimizerConfig, "max_grad_norm", default=0.0)
    rollout: int = same_flag(ReplayConfig, "rollout", default=1)
    batch_size: int = same_flag(ReplayConfig, "batch_size", default=256)
    gamma: float = same_flag(
        ReplayConfig,
        "gamma",
        "discount per step; with categorical_critics fixed when a run resumes",
        fixed_on_resume="categorical_critics",
    )
    n_steps: int = same_flag(
        ReplayConfig,
        "n_steps",
        "steps whose rewards are summed before a value stands in for the rest; with categorical_critics fixed when a"
        " run resumes",
        default=1,
        fixed_on_resume="categorical_critics",
    )
    num_replay_shards: int | None = same_flag(ReplayConfig, "num_replay_shards", default=None)
    learning_starts: int = same_flag(
        ReplayConfig,
        "learning_starts",
        "agent steps in the replay before the first update; until as many are played, actions are uniform",
        default=5000,
    )
    prioritized_replay: bool = same_flag(ReplayConfig, "prioritized_replay", default=False)
    max_weight_sync_delay: int = same_flag(ReplayConfig, "max_weight_sync_delay", default=0)
    num_critics: int = flag(
        2, "networks that value actions; the smallest of their values counts", minimum=1, fixed_on_resume=True
    )
    categorical_critics: int = flag(
        0,
        "width of critics that predict distributions of the return, with normalized layers and rewards; 0 = critics"
        " predict numbers, with the layers of the policy",
        minimum=0,
        maximum=8192,
        fixed_on_resume=True,
        before=0,  # presets have another value
    )
    target_rate: float = flag(
        0.005,
        "share of the way that the target networks go to the critics after every update",
        minimum=0,
        maximum=1,
        mutation="scale",
        mutation_range=(1e-4, 1.0),
    )
    learn_temperature: bool = flag(
        True, "adjust the temperature until the entropy of the policy is target_entropy", fixed_on_resume=True
    )
    temperature: float = flag(
        1.0,
        "weight of entropy against reward; with learn_temperature at the start, and then fixed when a run resumes",
        minimum=1e-9,
        fixed_on_resume="learn_temperature",
        needs="learn_temperature=False|scratch",
    )
    target_entropy: float | None = flag(
        None,
        "entropy of an action in [-1, 1] that learn_temperature aims at; none = one nat less than 0 per number",
        needs="learn_temperature",
    )

    def check(self) -> None:
        """Refuse contradictory flags (UsageError)."""
        super().check()
        if self.lr_schedule.startswith("kl_adaptive"):
            raise UsageError(f"--lr_schedule={self.lr_schedule}: --algo=SAC measures no KL divergence")


METRICS = {
    "loss": "mean of temperature * log-probability - value of drawn actions, which the policy lowers",
    "critic_loss": "half the squared error of the critics, with `--categorical_critics` the cross-entropy, summed over"
    " the critics",
    "q_mean": "mean value of the actions taken, over the critics",
    "target_mean": "mean of the targets",
    "entropy": "mean entropy of the policy by drawn actions in [-1, 1], in nats; approaches `--target_entropy`",
    "temperature": "weight of entropy against reward",
    **STEP_METRICS,
    **network_metrics("critics"),
    **network_metrics("entropy_weight"),
}

PANEL = {
    "critic_loss": "critics",
    "q_mean": "q",
    "entropy": "entropy",
    "temperature": "temperature",
    "learning_rate": "rate",
}
