"""The flags of PQN. Imports neither torch nor numpy."""

from dataclasses import dataclass, replace

from appo.algorithms.parts.config import STEP_METRICS, EpsilonConfig, IterationConfig, SurrogateConfig, check_segments
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class PQNConfig(IterationConfig):
    """Learning."""

    learning_rate: float = same_flag(IterationConfig, "learning_rate", default=2.5e-4)
    adam_eps: float = same_flag(IterationConfig, "adam_eps", default=1e-5)
    max_grad_norm: float = same_flag(IterationConfig, "max_grad_norm", default=10.0)
    ppo_epochs: int = same_flag(SurrogateConfig, "ppo_epochs", "passes over the collected minibatches", default=2)
    gae_lambda: float = same_flag(
        SurrogateConfig,
        "gae_lambda",
        "lambda of Q(lambda), which mixes n-step returns: 0 = one reward and the value of the next state, 1 = all"
        " rewards of the trajectory",
        default=0.65,
    )
    epsilon: float = same_flag(EpsilonConfig, "epsilon", default=0.05)
    epsilon_alpha: float = same_flag(EpsilonConfig, "epsilon_alpha", default=0.0)
    epsilon_decay: float = flag(
        0.1,
        "share of the budget over which the probability of a random action falls from 1 to the probability of the row;"
        " 0, or without a budget, the fall takes no time",
        minimum=0,
        maximum=1,
    )

    def one_update(self, size: int) -> "PQNConfig":
        """Return flags for an iteration of a single pass over so many samples, for measuring time."""
        batch_size = self.batch_size if size % self.batch_size == 0 else size
        return replace(self, batch_size=batch_size, num_batches_per_iteration=size // batch_size, ppo_epochs=1)

    def check(self, *, recurrent: bool = False) -> None:
        """Refuse flags that contradict each other, or a network with a memory if `recurrent` (UsageError)."""
        super().check()
        if recurrent:
            check_segments(self.batch_size, self.segment_steps)
        if self.lr_schedule.startswith("kl_adaptive"):
            raise UsageError(f"--lr_schedule={self.lr_schedule}: Q-learning has no policy whose KL divergence it is")

    def exploration(self, progress: float, updates: int) -> float:
        """Return how far the probabilities of random actions are above the probabilities of the rows, from 1 to 0.

        Args:
            progress: used share of the training budget, in [0, 1]; always 0 without a budget.
            updates: optimizer steps so far.
        """
        if not self.epsilon_decay or (updates and not progress):
            return 0.0
        return max(0.0, 1.0 - progress / self.epsilon_decay)


METRICS = {
    "loss": "half the mean squared error of Q",
    "td_error": "mean absolute error of Q",
    "q_mean": "mean value of the actions taken",
    "target_mean": "mean of the lambda-returns",
    "exploration": "share of random actions beyond the share of each row, which `--epsilon_decay` lets fall",
    **STEP_METRICS,
}

PANEL = {"loss": "loss", "td_error": "error", "q_mean": "q", "grad_norm": "gradient", "learning_rate": "rate"}
