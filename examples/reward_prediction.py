"""An auxiliary loss: a second head predicts the next reward from the features that the critic reads.

Source: after Jaderberg et al. 2017, arXiv:1611.05397, section 3.2.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.config import METRICS, APPOConfig
from appo.algorithms.appo.learner import APPOLearner, Whole
from appo.algorithms.models.build import build_model
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.ops.losses import masked_mean
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch
from appo.utils.flags import flag


@dataclass(frozen=True)
class PredictionConfig(APPOConfig):
    """Learning."""

    reward_loss_coeff: float = flag(0.1, "weight of the squared error of predicted rewards", minimum=0)


class PredictingLearner(APPOLearner):
    """Adds the error of predicted rewards to APPO's loss and metrics."""

    config: PredictionConfig

    def loss(self, batch: Batch, whole: Whole | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return loss, value targets and metrics; features [T+1, B, F] come from the forward pass of APPO's loss."""
        seen: list[Tensor] = []
        with self.model.value_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            loss, target, metrics = super().loss(batch, whole)
        predicted = self.model.get_submodule("reward_head")(seen[-1][:-1]).squeeze(-1)
        error = masked_mean((predicted - batch.reward).square(), batch.valid)
        return loss + self.config.reward_loss_coeff * error, target, {**metrics, "reward_loss": error}


class RewardPrediction(APPO):
    """APPO with a reward head in the network. The head is trained, saved and published; acting ignores the head."""

    name, flags = "RewardPrediction", PredictionConfig
    metrics = METRICS | {"reward_loss": "squared error of the predicted rewards"}

    def make_model(self, context: Context) -> FlatModule:
        """Make the network of the flags and add the reward head."""
        model = build_model(context.model, context.spec)
        model.reward_head = nn.Linear(model.value_head.in_features, 1)
        return FlatModule(model.to(context.device))

    def learner_class(self) -> type[APPOLearner]:
        """Return the class of the learner."""
        return PredictingLearner
