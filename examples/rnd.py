"""Random network distillation: a bonus for observations that a trained network cannot predict yet.

Source: Burda et al. 2018, arXiv:1810.12894. Here a single critic estimates rewards and bonus together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.config import METRICS, APPOConfig
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.ops.losses import masked_mean
from appo.algorithms.parts.config import network_metrics
from appo.algorithms.runtime.learning.batches import Batch
from appo.utils.flags import flag


@dataclass(frozen=True)
class RNDConfig(APPOConfig):
    """Learning."""

    novelty_coeff: float = flag(0.1, "bonus of a step as new as those of the first batch", minimum=0)


class RNDLearner(APPOLearner):
    """Adds the bonus to rewards. Both networks, their Adam and the unit of the bonus are in every checkpoint."""

    config: RNDConfig

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        size = sum(torch.Size(self.context.spec.observations[key].shape).numel() for key in self.model.keys)
        layers = ([torch.nn.Linear(size, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)] for _ in range(2))
        self.target, self.predictor = (torch.nn.Sequential(*one).to(self.flat.flat.device) for one in layers)
        self.further["rnd_unit"] = self.unit = self.flat.flat.new_zeros(1)
        self.keep_network("rnd_target", self.target)
        self.trained = self.add_network("rnd_predictor", self.predictor)

    def learn(self, batch: Batch, progress: float) -> Iterator[None]:
        """Train the predictor on the observation after every step, then the policy on reward plus bonus."""
        seen = self.model.scaled({key: batch.obs[key][1:].flatten(0, 1) for key in self.model.keys})
        x = torch.cat([rows.flatten(1) for rows in seen.values()], dim=1)
        novelty = (self.predictor(x) - self.target(x)).square().mean(1).view_as(batch.reward)
        self.trained.descend(mean := masked_mean(novelty, batch.valid), batch.valid)
        self.unit.copy_(torch.where(self.unit > 0, self.unit, mean.detach()))
        reward = batch.reward + self.config.novelty_coeff * novelty.detach() / self.unit
        yield from super().learn(replace(batch, reward=reward), progress)


class RND(APPO):
    """APPO with the bonus of random network distillation."""

    name, flags, metrics = "RND", RNDConfig, METRICS | network_metrics("rnd_predictor")

    def learner_class(self) -> type[APPOLearner]:
        """Return the class of the learner."""
        return RNDLearner
