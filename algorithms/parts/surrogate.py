"""Base of learners of PPO's clipped surrogate."""

import torch

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.parts.config import SurrogateConfig, scheduled
from appo.algorithms.parts.learner import ActorCriticLearner
from appo.algorithms.runtime.algorithm import Context


class SurrogateLearner(ActorCriticLearner):
    """A learner whose rate, clip and weight of exploration can follow the budget.

    Attributes:
        clip_ratio, exploration_coeff: numbers in use. Scalars on the device, because a captured update keeps every
            Python number of its capture.
    """

    config: SurrogateConfig

    def __init__(self, flat: FlatModule, context: Context) -> None:
        super().__init__(flat, context)
        self.clip_ratio, self.exploration_coeff = torch.zeros(2, device=flat.flat.device).unbind()
        self._set_numbers(0.0)

    def follow(self, progress: float) -> None:
        """Set rate, clip and weight of exploration, when this share of the training budget is used up, in [0, 1]."""
        super().follow(progress)
        self._set_numbers(progress)

    def _set_numbers(self, progress: float) -> None:
        c = self.config
        self.clip_ratio.fill_(scheduled(c.ppo_clip_ratio, c.ppo_clip_schedule, progress))
        self.exploration_coeff.fill_(scheduled(c.exploration_loss_coeff, c.exploration_loss_schedule, progress))
