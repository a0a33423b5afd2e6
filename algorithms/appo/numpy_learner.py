"""`APPOLearner.update` without torch, for small MLPs: with 1,000 samples, torch spends half of the time on dispatch.

`APPOLearner.loss` defines the objective: read and change the objective there. The twin repeatedly compares gradients
with `APPOLearner.loss`, and retires after two differences in a row. With options that the twin lacks, torch makes the
update (`numpy_update`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.models.actor_critic import TowerActorCritic
from appo.algorithms.models.numpy_mlp import NumpyMlpTraining, has_numpy_twin
from appo.algorithms.ops import numpy_surrogate as surrogate
from appo.algorithms.ops.numpy_returns import TrajectoryTerms, gae, vtrace
from appo.algorithms.ops.numpy_surrogate import ZERO
from appo.algorithms.ops.numpy_twins import PolicyTerms, is_supported
from appo.algorithms.parts.config import EXPLAINED
from appo.algorithms.parts.learner import NOISE, Metrics
from appo.algorithms.parts.twin_check import TwinCheck
from appo.algorithms.runtime.learning.batches import IS_READ, Batch

Array = NDArray[Any]


class NumpyUpdate:
    """Makes the optimizer steps of a learner; `numpy_update` makes the object."""

    def __init__(self, learner: APPOLearner) -> None:
        assert isinstance(learner.model, TowerActorCritic)
        self.learner, self.model, self.config = learner, learner.model, learner.config
        self._networks: dict[tuple[int, ...], NumpyMlpTraining] = {}
        self._check = TwinCheck("appo/numpy_learner.py")

    def __call__(self, batch: Batch) -> Tensor:
        """Make one optimizer step on a minibatch [T, B]; return value targets [T, B] in units of return."""
        learner = self.learner
        found: tuple[Tensor, Metrics] = self.differentiate(batch)
        if self._check.is_due():
            found = self._check.compare(learner, found, batch)
        learner.shared_moments = None
        learner.step(batch.valid, found[1])
        return found[0]

    @np.errstate(over="ignore", invalid="ignore")  # a loss that is not finite makes no step, as with torch
    def differentiate(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Compute the results of `APPOLearner.differentiate`."""
        c, valid, learner = self.config, batch.valid.numpy(), self.learner
        steps, columns = valid.shape
        if (steps, columns) not in self._networks:
            self._networks[steps, columns] = NumpyMlpTraining(self.model, (steps + 1) * columns, steps * columns)
        network = self._networks[steps, columns]
        logits, value = network.unroll({key: batch.obs[key].flatten(0, 1).numpy() for key in network.keys})
        value = value.reshape(steps + 1, columns)
        action, log_prob = batch.action.flatten(0, 1).numpy(), batch.recorded["log_prob"].numpy()
        current = policy = PolicyTerms(learner.parts, logits, action)
        ratio = surrogate.ratios(current, log_prob.reshape(-1), valid.reshape(-1))[1].reshape(valid.shape)
        if NOISE in batch.recorded:  # see `with_noise`
            policy = PolicyTerms(learner.parts, logits + batch.recorded[NOISE].flatten(0, 1).numpy(), action)
        mean, std = self.model.return_mean.item(), self.model.return_std.item()
        return_value = value * std + mean
        advantage, target = self._returns(batch, np.where(valid, ratio, ZERO), return_value)
        advantage, deviation = surrogate.normalized(advantage, valid, self._whole_moments(batch, advantage))
        acted_value, e = _acted_value(batch, return_value[:-1]), learner.clip_ratio.item()
        kl = current.kl_from(batch.recorded["logits"].flatten(0, 1).numpy())
        if IS_READ in batch.recorded:
            kl = np.where(batch.recorded[IS_READ].numpy().reshape(-1), ZERO, kl)
        fields = (valid, log_prob, advantage, value[:-1], (acted_value - mean) / std, (target - mean) / std)
        metrics, *gradients = surrogate.differentiate(
            policy,
            surrogate.Steps(*(x.reshape(-1) for x in fields)),
            surrogate.Weights(
                1.0 / (1.0 + e), 1.0 + e, c.ppo_clip_value, c.value_loss_coeff, learner.exploration_coeff.item()
            ),
            "kl_divergence",
            {
                "kl_divergence": kl,
                "value_mean": return_value[:-1].reshape(-1),
            },
        )
        network.backward(*gradients)
        explained = surrogate.explained_variance(acted_value, target, valid)
        return torch.from_numpy(target), {**metrics, "advantage_std": deviation, EXPLAINED: explained}

    def _returns(self, batch: Batch, ratio: Array, value: Array) -> tuple[Array, Array]:
        """Compute the results of `APPOLearner.returns`."""
        c = self.config
        final_value = batch.recorded["final_value"].numpy() if len(batch.recorded["final_value"]) else None
        names = ("reward", "terminated", "truncated", "valid", "first")
        steps = TrajectoryTerms.of({name: getattr(batch, name).numpy() for name in names}, value, final_value, c.gamma)
        if not c.with_vtrace:
            return gae(steps, c.gamma, c.gae_lambda)
        return vtrace(steps, ratio, c.gamma, c.vtrace_lambda, c.vtrace_rho, c.vtrace_c)

    def _whole_moments(self, batch: Batch, advantage: Array) -> tuple[float, float] | None:
        """Return mean and deviation of the advantages of all ranks, also for a comparison; None: a single learner."""
        if not self.learner.ranks:
            return None
        found = self.learner.shared_moments = self.learner.mean_and_std(torch.from_numpy(advantage), batch.valid)
        return found[0].item(), found[1].item()


def numpy_update(learner: APPOLearner) -> NumpyUpdate | None:
    """Return the twin of a learner's `update`, or None if the twin lacks the network, actions or objective.

    A subclass may compute another loss, and therefore has no twin.
    """
    c = learner.config
    simple = type(learner) is APPOLearner and not (c.kl_loss_coeff or c.microbatch_size or learner.masked)
    simple &= c.exploration_loss == "entropy" or not c.exploration_loss_coeff
    return NumpyUpdate(learner) if simple and is_supported(learner.parts) and has_numpy_twin(learner.model) else None


def _acted_value(batch: Batch, value: Array) -> Array:
    """Return the values [T, B] of the acting policy; of steps of datasets, the current ones. Units of return."""
    read = batch.recorded[IS_READ].numpy() if IS_READ in batch.recorded else np.False_
    return np.where(read, value, np.where(batch.valid.numpy(), batch.recorded["value"].numpy(), ZERO))
