"""`PPOLearner.differentiate` without torch, for small MLPs: with 64 samples, torch spends nearly all time on dispatch.

`PPOLearner.loss` defines the objective: read and change the objective there. The twin repeatedly compares gradients
with `PPOLearner.loss`, and retires after two differences in a row. With options that the twin lacks, torch computes
the gradient (`numpy_gradient`).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from appo.algorithms.models.actor_critic import TowerActorCritic
from appo.algorithms.models.numpy_mlp import NumpyMlpTraining, has_numpy_twin
from appo.algorithms.ops import numpy_surrogate as surrogate
from appo.algorithms.ops.numpy_twins import PolicyTerms, is_supported
from appo.algorithms.parts.config import EXPLAINED
from appo.algorithms.parts.learner import KL, NOISE, Metrics
from appo.algorithms.parts.twin_check import TwinCheck
from appo.algorithms.ppo.learner import PPOLearner
from appo.algorithms.runtime.learning.batches import Batch


class NumpyGradient:
    """Differentiates the loss of a learner; `numpy_gradient` makes the object."""

    def __init__(self, learner: PPOLearner) -> None:
        assert isinstance(learner.model, TowerActorCritic)
        self.learner, self.model, self.config = learner, learner.model, learner.config
        self._networks: dict[int, NumpyMlpTraining] = {}
        self._check = TwinCheck("ppo/numpy_learner.py")

    def __call__(self, minibatch: Batch) -> Metrics:
        """Compute the results of `PPOLearner.differentiate`; some minibatches are compared with torch."""
        learner = self.learner
        # Of all ranks, which add up equally often, whichever compares.
        moments = learner.mean_and_std(minibatch.recorded["advantage"], minibatch.valid) if learner.ranks else None
        found: Metrics = self.differentiate(minibatch, moments)
        return self._check.compare(learner, found, minibatch, moments) if self._check.is_due() else found

    @np.errstate(over="ignore", invalid="ignore")  # a loss that is not finite makes no step, as with torch
    def differentiate(self, m: Batch, moments: tuple[Tensor, Tensor] | None = None) -> dict[str, float]:
        """Set the gradient of a minibatch of single steps; return its metrics.

        Args:
            m: minibatch.
            moments: mean and deviation of the advantages of all ranks; None: of the minibatch.
        """
        c, learner, model = self.config, self.learner, self.model
        valid, names = m.valid[0].numpy(), ("log_prob", "advantage", "value", "target")
        log_prob, advantage, acted_value, target = (m.recorded[name][0].numpy() for name in names)
        if len(valid) not in self._networks:
            self._networks[len(valid)] = NumpyMlpTraining(model, len(valid), len(valid))
        network = self._networks[len(valid)]
        logits, value = network.unroll({key: m.obs[key][0].numpy() for key in network.keys})
        action = m.action[0].numpy()
        current = policy = PolicyTerms(learner.parts, logits, action)
        _, ratio = surrogate.ratios(current, log_prob, valid)
        if NOISE in m.recorded:
            policy = PolicyTerms(learner.parts, logits + m.recorded[NOISE][0].numpy(), action)
        pooled = None if moments is None else (moments[0].item(), moments[1].item())
        normalized, deviation = surrogate.normalized(advantage, valid, pooled)
        if c.normalize_advantages == "batch":
            advantage = normalized
        mean, std, e = model.return_mean.item(), model.return_std.item(), learner.clip_ratio.item()
        metrics, *gradients = surrogate.differentiate(
            policy,
            surrogate.Steps(valid, log_prob, advantage, value, (acted_value - mean) / std, (target - mean) / std),
            surrogate.Weights(1 - e, 1 + e, c.ppo_clip_value, c.value_loss_coeff, learner.exploration_coeff.item()),
            KL,
            {KL: (ratio - 1) - np.log(ratio), "value_mean": value * std + mean},
        )
        network.backward(*gradients)
        explained = surrogate.explained_variance(acted_value, target, valid)
        return {**metrics, "advantage_std": deviation, EXPLAINED: explained}


def numpy_gradient(learner: PPOLearner) -> NumpyGradient | None:
    """Return the twin of a learner's `differentiate`, or None if the twin lacks the network, actions or objective.

    A subclass may compute another loss, and therefore has no twin.
    """
    simple = type(learner) is PPOLearner and not (learner.config.microbatch_size or learner.masked)
    return NumpyGradient(learner) if simple and is_supported(learner.parts) and has_numpy_twin(learner.model) else None
