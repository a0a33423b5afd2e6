"""REINFORCE: one optimizer step per batch; the weight of an action is the return minus a baseline.

Where a trajectory ends before the episode ends, the critic's value replaces the rest of the return.

Source: Williams 1992, Machine Learning 8; Sutton and Barto 2018, section 13.4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from appo.algorithms.ops.losses import masked_means, zero_invalid
from appo.algorithms.ops.returns import gae
from appo.algorithms.parts.algorithm import ActorCriticAlgorithm
from appo.algorithms.parts.config import STEP_METRICS, ColumnsConfig
from appo.algorithms.parts.learner import ActorCriticLearner
from appo.algorithms.runtime.learning.batches import Batch
from appo.utils.flags import flag, same_flag

METRICS = {"loss": "sum of both losses", "policy_loss": "-log pi(a|s) times the weight", "value_loss": "squared error"}


@dataclass(frozen=True)
class REINFORCEConfig(ColumnsConfig):
    """Learning."""

    learning_rate: float = same_flag(ColumnsConfig, "learning_rate", default=1e-3)
    baseline: bool = flag(True, "weigh actions by the return less the critic's value, not by the return")


class REINFORCELearner(ActorCriticLearner):
    """Makes one step of Adam per batch."""

    config: REINFORCEConfig

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Ascend log pi(a|s) * (return - baseline), and fit the critic to the return."""
        self.follow(progress)
        policy, value = self.unroll(batch)
        estimate = self.model.denormalize_value(value.detach())
        returns = gae(value=estimate, gamma=self.config.gamma, gae_lambda=1.0, **batch.signals())
        weight = (returns.advantage if self.config.baseline else returns.target) / self.model.return_std
        log_prob = policy.log_prob(zero_invalid(batch.action, batch.valid))
        error = (value[:-1] - self.model.normalize_value(returns.target)).square()
        means = masked_means({"policy_loss": -log_prob * weight, "value_loss": error}, batch.valid)
        self.descend(batch, means["policy_loss"] + 0.5 * means["value_loss"], means)
        self.statistics.update(batch, [(returns.target, batch.valid)])
        yield


class REINFORCE(ActorCriticAlgorithm):
    """REINFORCE; acting and sampling are inherited."""

    name, flags, metrics = "REINFORCE", REINFORCEConfig, METRICS | STEP_METRICS

    def learner_class(self) -> type[ActorCriticLearner]:
        """Return the class of the learner."""
        return REINFORCELearner
