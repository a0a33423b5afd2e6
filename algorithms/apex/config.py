"""The flags of Ape-X. Imports neither torch nor numpy."""

from dataclasses import dataclass, replace
from typing import Self

from appo.algorithms.parts.config import STEP_METRICS, EpsilonConfig, OptimizerConfig
from appo.algorithms.replay.config import ReplayConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag


@dataclass(frozen=True)
class ApexConfig(ReplayConfig):
    """Learning."""

    adam_eps: float = same_flag(OptimizerConfig, "adam_eps", default=1.5e-4)
    max_grad_norm: float = same_flag(OptimizerConfig, "max_grad_norm", default=40.0)
    double_q: bool = flag(True, "the trained network chooses the next action, the target network values it")
    dueling: bool = flag(True, "Q as the value of the state plus an advantage of every choice", fixed_on_resume=True)
    huber_loss: bool = flag(True, "errors count linearly beyond 1; False = squared errors")
    batch_replay: bool = flag(
        False,
        "draw whole trajectories instead of single steps, as networks with a memory (use_rnn) need them: each is"
        " unrolled from the state that acting had at its start",
        fixed_on_resume=True,
    )
    burn_in: int = flag(
        0,
        "with batch_replay: first steps of a trajectory that only bring the state up to date and have no error, unless"
        " an episode has begun in it by then",
        minimum=0,
        needs="batch_replay",
    )
    priority_eta: float = flag(
        0.9,
        "with batch_replay: share of a trajectory's largest error in its priority, the rest is that of the mean error",
        minimum=0,
        maximum=1,
        needs="batch_replay prioritized_replay actors",
    )
    value_rescaling: bool = flag(
        False, "predict h(return), about its square root, for returns of very different size", fixed_on_resume=True
    )
    cql_alpha: float = flag(
        0.0,
        "weight of a loss that lowers the values of actions which were not taken, for learning from datasets (discrete"
        " conservative Q-learning); 0 = off",
        minimum=0,
        mutation="scale",
        mutation_range=(1e-3, 1e2),
    )
    target_update_interval: int = flag(
        2500, "optimizer steps after which the target network becomes a copy of the trained one", minimum=1
    )
    replay_ratio: float = flag(
        8.0,
        "uses of every agent step in training: actors wait for the learner, and it for them, to keep it; 0 = as many"
        " as the learner manages",
        minimum=0,
        needs="actors",
    )
    epsilon: float = same_flag(EpsilonConfig, "epsilon")
    epsilon_alpha: float = same_flag(EpsilonConfig, "epsilon_alpha")

    @property
    def uses_per_step(self) -> float:
        """Uses of every agent step in training, on average; 0: as many as the learner manages."""
        return self.replay_ratio

    @property
    def sequences(self) -> bool:
        """Whether whole trajectories are drawn and not single steps."""
        return self.batch_replay

    def one_update(self, size: int) -> Self:
        """Return flags for training once on so many new samples, for measuring time."""
        return replace(super().one_update(size), replay_ratio=self.mix.played(size) / size)

    def check(self) -> None:
        """Refuse contradictory flags (UsageError)."""
        super().check()
        if self.batch_replay and self.burn_in >= self.rollout:
            raise UsageError(f"--burn_in={self.burn_in} leaves nothing of --rollout={self.rollout} to learn from")
        if self.mix.datasets and self.batch_replay:
            raise UsageError("--batch_replay: datasets are learned from in single steps with --algo=APEX")
        if self.lr_schedule.startswith("kl_adaptive"):
            raise UsageError(f"--lr_schedule={self.lr_schedule}: Q-learning has no policy whose KL divergence it is")


METRICS = {
    "loss": "mean weighted loss of the errors",
    "td_error": "mean absolute error of Q",
    "q_mean": "mean value of the actions taken, in units of the network",
    "target_mean": "mean of the targets, in units of the network",
    "weight_mean": "mean importance weight; the largest of a batch is 1",
    "conservative_gap": "mean of log sum exp Q minus Q of the action taken, lowered by `--cql_alpha`",
    **STEP_METRICS,
}

PANEL = {"loss": "loss", "td_error": "error", "q_mean": "q", "grad_norm": "gradient", "learning_rate": "rate"}
