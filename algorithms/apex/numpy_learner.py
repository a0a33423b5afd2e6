"""`ApexLearner.differentiate` without torch, for small MLPs: with a few hundred steps, torch mostly dispatches.

`ApexLearner.loss` defines the objective: read and change the objective there. The twin repeatedly compares gradients
with `ApexLearner.loss`, and retires after two differences in a row. With options that the twin lacks, torch computes
the gradient (`numpy_update`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.apex.learner import ApexLearner
from appo.algorithms.models.numpy_mlp import NumpyQNetwork, numpy_q_network
from appo.algorithms.models.q_network import QNetwork
from appo.algorithms.ops.numpy_surrogate import ZERO
from appo.algorithms.parts.learner import Metrics
from appo.algorithms.parts.twin_check import TwinCheck
from appo.algorithms.runtime.learning.batches import Batch


class NumpyUpdate:
    """Differentiates the loss of a learner; `numpy_update` makes the object."""

    def __init__(self, learner: ApexLearner) -> None:
        self.learner, self._check = learner, TwinCheck("apex/numpy_learner.py")
        self._networks: dict[int, tuple[NumpyQNetwork, ...]] = {}

    def __call__(self, batch: Batch, beta: float) -> tuple[Tensor, Metrics]:
        """Compute the results of `ApexLearner.differentiate`; some steps are compared with torch."""
        found: tuple[Tensor, Metrics] = self.differentiate(batch, beta)
        return self._check.compare(self.learner, found, batch, beta) if self._check.is_due() else found

    @np.errstate(over="ignore", invalid="ignore")  # a loss that is not finite makes no step, as with torch
    def differentiate(self, batch: Batch, beta: float) -> tuple[Tensor, dict[str, float]]:
        """Set the gradient of a batch of single steps; return the errors [1, B], and the metrics of `loss`."""
        c, (valid,) = self.learner.config, batch.valid.numpy()
        if len(valid) not in self._networks:
            assert isinstance(self.learner.target.module, QNetwork)
            models = self.learner.model, self.learner.target.module, self.learner.model
            found = [numpy_q_network(model, len(valid)) for model in models]
            self._networks[len(valid)] = tuple(network for network in found if network is not None)
        trained, target, chooser = self._networks[len(valid)]  # the last chooses actions
        now, later = ({key: batch.obs[key][row].numpy() for key in trained.keys} for row in range(2))
        rows, (action,) = np.arange(len(valid)), batch.action.numpy()[..., 0]
        of_later = target.forward(later)
        best = (chooser.forward(later) if c.double_q else of_later).argmax(axis=1)
        discount = batch.recorded["discount"].numpy()[0]
        aim = batch.reward.numpy()[0] + np.where(discount > 0, discount * of_later[rows, best], ZERO)
        q = trained.forward(now)
        value = q[rows, action]
        error = aim - value
        size = np.abs(error)
        loss, slope = 0.5 * np.square(error), error
        if c.huber_loss:
            loss, slope = np.where(size <= 1, loss, size - np.float32(0.5)), np.clip(error, -1, 1)
        weight = batch.recorded["weight"].numpy()[0] ** np.float32(beta)
        share = np.float32(1 / max(1, int(np.count_nonzero(valid))))
        gradient = np.zeros_like(q)
        gradient[rows, action] = np.where(valid, -weight * slope, ZERO) * share
        trained.backward(gradient)
        terms = {"loss": weight * loss, "td_error": size, "q_mean": value, "target_mean": aim, "weight_mean": weight}
        means = {name: float(np.where(valid, term, ZERO).sum() * share) for name, term in terms.items()}
        size = np.nan_to_num(size, nan=0.0, posinf=0.0)
        error = torch.from_numpy(np.where(valid, size, np.float32(-1))[None])
        return error, means | {"conservative_gap": 0.0}


def numpy_update(learner: ApexLearner) -> NumpyUpdate | None:
    """Return the twin for steps without action masks, or None if the twin lacks the network or the objective.

    A subclass may compute another loss, from other targets or networks, and therefore has no twin.
    """
    c = learner.config
    is_simple = type(learner) is ApexLearner and not (c.batch_replay or c.cql_alpha or c.value_rescaling)
    return NumpyUpdate(learner) if is_simple and numpy_q_network(learner.model, 1) is not None else None
