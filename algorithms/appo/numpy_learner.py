"""`APPOLearner.update` without torch, for small MLPs: with 1,000 samples, torch spends half of the time on dispatch.

`APPOLearner.loss` defines the objective: read and change the objective there. The twin repeatedly compares gradients
with `APPOLearner.loss`, and retires after two differences in a row. With options that the twin lacks, torch makes the
update (`numpy_update`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from appo.algorithms.appo.learner import NOISE, APPOLearner
from appo.algorithms.models.actor_critic import TowerActorCritic
from appo.algorithms.models.numpy_mlp import NumpyMlpTraining, has_numpy_twin
from appo.algorithms.ops.losses import ADVANTAGE_STD_MIN, EXPLAINED_MIN, RATIO_MAX, RATIO_MIN
from appo.algorithms.ops.numpy_returns import TrajectoryTerms, gae, vtrace
from appo.algorithms.ops.numpy_twins import PolicyTerms, is_supported
from appo.algorithms.parts.config import EXPLAINED
from appo.algorithms.parts.learner import Metrics
from appo.algorithms.parts.twin_check import TwinCheck
from appo.algorithms.runtime.learning.batches import IS_READ, Batch

Array = NDArray[Any]
ZERO = np.float32(0.0)


class NumpyUpdate:
    """Makes the optimizer steps of a learner; `numpy_update` makes the object."""

    def __init__(self, learner: APPOLearner) -> None:
        assert isinstance(learner.model, TowerActorCritic)
        self.learner, self.model, self.config = learner, learner.model, learner.config
        self._networks: dict[tuple[int, ...], NumpyMlpTraining] = {}
        self._check = TwinCheck("appo/numpy_learner.py")

    def __call__(self, batch: Batch) -> Tensor:
        """Make one optimizer step on a minibatch [T, B]; return value targets [T, B] in units of return."""
        learner, gradient = self.learner, self.learner.optimizer.gradient
        found: tuple[Tensor, Metrics] = self.differentiate(batch)
        if self._check.is_due():
            mine, names = gradient.clone(), found[1].keys()
            found = learner.differentiate(batch)
            if self._check.retires(mine, gradient, names, found[1].keys()):
                learner.quick_update = None
        learner.shared_moments = None
        learner.step(batch.valid, found[1])
        return found[0]

    @np.errstate(over="ignore", invalid="ignore")  # a loss that is not finite makes no step, as with torch
    def differentiate(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Compute the results of `APPOLearner.differentiate`."""
        c, valid = self.config, batch.valid.numpy()
        (steps, columns), count = valid.shape, max(1, int(np.count_nonzero(valid)))
        if (steps, columns) not in self._networks:
            self._networks[steps, columns] = NumpyMlpTraining(self.model, (steps + 1) * columns, steps * columns)
        network = self._networks[steps, columns]
        logits, value = network.unroll(batch.obs[network.key].numpy().reshape(-1, *batch.obs[network.key].shape[2:]))
        value = value.reshape(steps + 1, columns)
        acted = [x.flatten(0, 1).numpy() for x in (batch.action, batch.recorded["logits"])]  # [T*B, *]
        current = policy = PolicyTerms(self.learner.parts, logits, *acted)
        log_ratio, exact_ratio = _ratios(batch, current)
        ratio = exact_ratio
        if NOISE in batch.recorded:  # see `with_noise`
            policy = PolicyTerms(self.learner.parts, logits + batch.recorded[NOISE].flatten(0, 1).numpy(), *acted)
            log_ratio, ratio = _ratios(batch, policy)
        return_value = value * self.model.return_std.item() + self.model.return_mean.item()
        advantage, target = self._returns(batch, np.where(valid, exact_ratio, ZERO), return_value)
        normalized, deviation = _normalized(advantage, valid, count, self._whole_moments(batch, advantage))
        e, weight = self.learner.clip_ratio.item(), self.learner.exploration_coeff.item()
        limits = 1.0 / (1.0 + e), 1.0 + e
        free, held = ratio * normalized, np.clip(ratio, *limits) * normalized
        value_loss, slope = self._value_loss(batch, value[:-1], target)
        terms = {
            "policy_loss": -np.minimum(free, held),
            "value_loss": value_loss,
            "entropy": policy.entropy.reshape(valid.shape),
            "kl_divergence": current.kl.reshape(valid.shape),
            "ratio_mean": ratio,
            "fraction_clipped": (ratio < limits[0]) | (ratio > limits[1]),
            "value_mean": return_value[:-1],
        }
        m = {name: float(np.where(valid, x, ZERO).sum(dtype=np.float32)) / count for name, x in terms.items()}
        loss = m["policy_loss"] + c.value_loss_coeff * m["value_loss"] - weight * m["entropy"]
        loss += c.kl_loss_coeff * m["kl_divergence"]
        share = valid * np.float32(1.0 / count)
        inside = (log_ratio >= math.log(RATIO_MIN)) & (log_ratio <= math.log(RATIO_MAX)) & (free <= held)
        of_log_prob = np.where(valid & inside, -normalized * ratio, ZERO) * share
        of_value = np.where(valid, slope, ZERO) * share * np.float32(c.value_loss_coeff)
        of_entropy = share * np.float32(-weight)
        network.backward(policy.gradient(of_log_prob.reshape(-1), of_entropy.reshape(-1)), of_value.reshape(-1))
        ratio_max = float(np.where(valid, ratio, ZERO).max())
        explained = _explained(_acted_value(batch, return_value[:-1]), target, valid)
        others = {"ratio_max": ratio_max, "advantage_std": deviation, EXPLAINED: explained}
        return torch.from_numpy(target), {"loss": loss, **m, **others}

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

    def _value_loss(self, batch: Batch, value: Array, target: Array) -> tuple[Array, Array]:
        """Compute `losses.clipped_value_loss` and its derivative for values [T, B] in the units of the value head."""
        mean, std, limit = self.model.return_mean.item(), self.model.return_std.item(), self.config.ppo_clip_value
        error = value - (target - mean) / std
        squared = np.square(error)
        if limit <= 0:
            return squared, 2.0 * error
        move = value - (_acted_value(batch, value * std + mean) - mean) / std
        beyond = np.clip(move, -limit, limit) - move
        moved = np.square(error + beyond)
        return np.maximum(squared, moved), np.where((beyond == 0.0) | (squared >= moved), 2.0 * error, ZERO)


def numpy_update(learner: APPOLearner) -> NumpyUpdate | None:
    """Return the twin of a learner's `update`, or None if the twin lacks the network, actions or objective.

    A subclass may compute another loss, and therefore has no twin.
    """
    c = learner.config
    simple = type(learner) is APPOLearner and not (c.kl_loss_coeff or c.microbatch_size or learner.masked)
    simple &= c.exploration_loss == "entropy" or not c.exploration_loss_coeff
    return NumpyUpdate(learner) if simple and is_supported(learner.parts) and has_numpy_twin(learner.model) else None


def _ratios(batch: Batch, policy: PolicyTerms) -> tuple[Array, Array]:
    """Return the logarithms [T, B] of probability ratios to the acting policy, and the clamped ratios."""
    valid = batch.valid.numpy()
    log_prob = policy.log_prob.reshape(valid.shape)
    log_ratio = log_prob - np.where(valid, batch.recorded["log_prob"].numpy(), log_prob)
    return log_ratio, np.exp(np.clip(log_ratio, math.log(RATIO_MIN), math.log(RATIO_MAX)))


def _acted_value(batch: Batch, value: Array) -> Array:
    """Return the values [T, B] of the acting policy; of steps of datasets, the current ones. Units of return."""
    read = batch.recorded[IS_READ].numpy() if IS_READ in batch.recorded else np.False_
    return np.where(read, value, np.where(batch.valid.numpy(), batch.recorded["value"].numpy(), ZERO))


def _explained(value: Array, target: Array, valid: Array) -> float:
    """Return the result of `losses.explained_variance`."""
    target = target[valid].astype(np.float64)
    error = target - value[valid]
    count = max(1, len(target))  # a third of the time of `var`; the first value as origin makes equal targets exactly 0
    whole, unexplained = (x.dot(x) - x.sum() ** 2 / count for x in (target - target[:1], error - error[:1]))
    return max(EXPLAINED_MIN, float(1.0 - unexplained / whole)) if whole > 0 else 0.0


def _normalized(advantage: Array, valid: Array, count: int, moments: tuple[float, float] | None) -> tuple[Array, float]:
    """Return the result of `losses.normalize_advantage`, and the standard deviation, of these steps or as given."""
    advantage = np.where(valid, advantage, ZERO)
    if moments is not None:
        mean_of_all, deviation = moments
        centered = np.where(valid, advantage - np.float32(mean_of_all), ZERO)
        return centered / np.float32(max(deviation, ADVANTAGE_STD_MIN)), deviation
    mean = advantage.sum(dtype=np.float32) / np.float32(count)
    centered = np.where(valid, advantage - mean, ZERO)
    deviation = math.sqrt(float(np.square(centered, dtype=np.float64).sum()) / count)
    return centered / np.float32(max(deviation, ADVANTAGE_STD_MIN)), deviation
