"""Base of optimizers over one vector of weights: the scheduled learning rate, and running means in a state."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.parts.config import OptimizerConfig, scheduled
from appo.algorithms.runtime.learning.rollback import SKIPPED_IN_A_ROW
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import WEIGHTS, StateLayout, Vector


def as_given(value: float) -> float:
    """Return the shortest decimal with the same float32 value; a number that is no float32 stays unchanged."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


class FlatOptimizer:
    """An optimizer of all weights at once.

    Args:
        weights: [P] vector trained in place.
        config: learning flags.
        names: names of the running means in a state.
        rate: flag of the learning rate.

    Attributes:
        gradient: [P] target of `backward`.
        learning_rate: scalar on the device.
        empty: steps skipped for want of a valid step, scalar on the device.
        skipped_in_a_row: steps lost to numbers that are not finite, since the last good step; scalar on the device.
    """

    config: OptimizerConfig

    def __init__(
        self, weights: Tensor, config: OptimizerConfig, names: tuple[str, ...], rate: str = "learning_rate"
    ) -> None:
        self.config, self.weights, self.rate, self._names = config, weights, rate, names
        self.gradient, self._means = torch.zeros_like(weights), weights.new_zeros(len(names), len(weights))
        self.learning_rate = torch.tensor(self.asked_rate, dtype=torch.float32, device=weights.device)
        self.skipped_in_a_row, self.empty = (torch.zeros_like(self.learning_rate) for _ in range(2))
        self._used_rate = self.learning_rate.clone()

    @property
    def asked_rate(self) -> float:
        """Return the learning rate of the flags."""
        return float(getattr(self.config, self.rate))

    def configure(self, config: OptimizerConfig) -> None:
        """Follow other flags; a scheduled rate stays unless the flag of the rate changes."""
        before, self.config = self.asked_rate, config
        if self.asked_rate != before:
            self.learning_rate.fill_(self.asked_rate)

    def follow(self, progress: float) -> None:
        """Set the rate of the linear schedule, when this share of the training budget is used up, in [0, 1]."""
        if self.config.lr_schedule == "linear":
            self.learning_rate.fill_(scheduled(self.asked_rate, "linear", progress))

    def note_rate(self) -> None:
        """Note the rate of the next step for `rate_in_use`, before the step changes an adaptive rate."""
        self._used_rate.copy_(self.learning_rate)

    def rate_in_use(self) -> float:
        """Return the rate of the last step after `note_rate`; exactly the flag, if the rate is the flag in float32."""
        asked, used = self.asked_rate, float(self._used_rate)
        return asked if np.float32(asked) == np.float32(used) else as_given(used)

    def layout(self, num_weights: int, others: Mapping[str, Vector]) -> StateLayout:
        """Return the layout of a state with P weights, the running means and other vectors."""
        means = {name: Vector(num_weights) for name in self._names}
        vectors = {WEIGHTS: Vector(num_weights, inherited=True), **means, **others}
        return StateLayout(vectors, {"learning_rate": self.asked_rate})

    def save(self, vectors: Mapping[str, Array]) -> None:
        """Write the running means into vectors [P] by name, with zeros behind the parameters."""
        for name, mean in zip(self._names, self._means, strict=True):
            vectors[name][: len(mean)] = mean.cpu().numpy()
            vectors[name][len(mean) :] = 0

    def meta(self) -> dict[str, float]:
        """Return the learning rate and the steps skipped in a row as plain values."""
        return {"learning_rate": float(self.learning_rate), SKIPPED_IN_A_ROW: float(self.skipped_in_a_row)}

    def _load(self, vectors: Mapping[str, Array]) -> None:
        self.skipped_in_a_row.zero_()
        for name, mean in zip(self._names, self._means, strict=True):
            mean.copy_(torch.from_numpy(vectors[name][: len(mean)]))
