"""Simple policy optimization: a parabola pulls the probability ratio r back where PPO's clip removes the gradient.

    J = r * A - |A| / (2 e) * (r - 1)^2,  largest at r = 1 + e * sign(A)

A is the advantage of the step, e is `--spo_epsilon`.

Source: Xie et al. 2024, arXiv:2401.16025.
"""

from dataclasses import dataclass

from torch import Tensor

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.config import APPOConfig
from appo.algorithms.appo.learner import APPOLearner
from appo.utils.flags import flag


@dataclass(frozen=True)
class SPOConfig(APPOConfig):
    """Learning."""

    spo_epsilon: float = flag(0.2, "distance of the best probability ratio from 1", minimum=1e-3, maximum=1)


class SPOLearner(APPOLearner):
    """APPO's learner with the policy loss of SPO."""

    config: SPOConfig

    def policy_loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return -J of every step [T, B], to be minimized."""
        return advantage.abs() / (2 * self.config.spo_epsilon) * (ratio - 1).square() - ratio * advantage


class SPO(APPO):
    """APPO with the policy loss of SPO."""

    name, flags = "SPO", SPOConfig

    def learner_class(self) -> type[APPOLearner]:
        """Return the class of the learner."""
        return SPOLearner
