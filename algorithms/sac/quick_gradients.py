"""The gradients of `SACLearner` without a graph, for MLPs.

`SACLearner` defines the objective: read and change the objective there. The twin repeatedly compares gradients with
the learner's, and retires after two differences in a row. For networks and actions that the twin lacks, torch
differentiates (`quick_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from appo.algorithms.models.critics import Critics
from appo.algorithms.models.encoders import Observations
from appo.algorithms.models.written_mlp import WrittenMlp, written_critics, written_policy
from appo.algorithms.ops import soft_q
from appo.algorithms.ops.distributions import HALF_LOG_TWO_PI, LOG_STD_MAX, LOG_STD_MIN, log_slope_of_tanh
from appo.algorithms.parts.learner import LOSS
from appo.algorithms.parts.twin_check import TwinCheck
from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.sac.learner import Found, Gradients, SACLearner


class _Networks(NamedTuple):
    policy: WrittenMlp  # 2B rows
    critics: list[WrittenMlp]  # B rows
    targets: list[WrittenMlp]
    inputs: Tensor  # [2, B, D + A] of critics and targets


class QuickGradients:
    """Differentiates both losses of a learner; `quick_gradients` makes the object.

    Args:
        learner: learner whose networks have written passes.
    """

    def __init__(self, learner: SACLearner) -> None:
        self.learner, self._written = learner, _Written(learner)
        self._checks = [TwinCheck("sac/quick_gradients.py") for _ in range(2)]

    def of_critics(self, batch: Batch, obs: Observations) -> Found:
        """Compute the results of `SACLearner.of_critics`; some steps are compared with torch."""
        gradient = self.learner.critics.optimizer.gradient
        return self._checked(self._checks[0], gradient, lambda by: by.of_critics(batch, obs))

    def of_policy(self, batch: Batch, obs: Observations) -> Found:
        """Compute the results of `SACLearner.of_policy`; some steps are compared with torch."""
        gradient = self.learner.optimizer.gradient
        return self._checked(self._checks[1], gradient, lambda by: by.of_policy(batch, obs))

    def _checked(self, check: TwinCheck, gradient: Tensor, differentiate: Callable[[Gradients], Found]) -> Found:
        """Set a gradient [P]; in some steps by torch too, from the same random numbers."""
        if not check.is_due():
            return differentiate(self._written)
        random = self.learner.device_generator.get_state()
        found = differentiate(self._written)
        mine, names = gradient.clone(), found[1].keys()
        self.learner.device_generator.set_state(random)
        found = differentiate(self.learner)
        if check.retires(mine, gradient, names, found[1].keys()):
            self.learner.quick = None
        return found


class _Written:
    """Both gradients, written out. The policy's pass for the critics' targets serves its own gradient too."""

    def __init__(self, learner: SACLearner) -> None:
        self.learner = learner
        self._networks: dict[int, _Networks] = {}

    @torch.inference_mode()
    def of_critics(self, batch: Batch, obs: Observations) -> Found:
        """Compute the results of `SACLearner.of_critics`."""
        learner, count = self.learner, batch.valid.shape[1]
        policy, critics, targets, (inputs, inputs_later) = self._networks_of(count)
        seen = obs[learner.model.keys[0]].reshape(2 * count, -1)
        width = seen.shape[1]
        self._logits = policy.forward(seen)
        later = _Draw(self._logits[count:], learner.device_generator)
        inputs[:, :width], inputs[:, width:] = seen[:count], batch.action[0].tanh()
        inputs_later[:, :width], inputs_later[:, width:] = seen[count:], later.action
        q = torch.cat([target.forward(inputs_later) for target in targets], dim=1).T
        reward, discount = batch.reward[0], batch.recorded["discount"][0]
        target = soft_q.soft_target(reward, discount, q, later.log_prob, learner.temperature)
        q = torch.cat([critic.forward(inputs) for critic in critics], dim=1).T
        error, weight = q - target, batch.recorded["weight"][0] ** learner.beta
        for critic, gradient in zip(critics, error * (weight / count), strict=True):
            critic.backward(gradient.unsqueeze(1))
        loss = soft_q.critic_loss(q, target, weight)
        return error.abs().mean(0), {"critic_loss": loss, "q_mean": q.mean(), "target_mean": target.mean()}

    @torch.inference_mode()
    def of_policy(self, batch: Batch, obs: Observations) -> Found:
        """Compute the results of `SACLearner.of_policy`, after `of_critics` for the batch."""
        learner, count = self.learner, batch.valid.shape[1]
        policy, critics, _, (inputs, _) = self._networks_of(count)
        drawn, temperature = _Draw(self._logits[:count], learner.device_generator), learner.temperature
        width = inputs.shape[1] - drawn.action.shape[1]
        inputs[:, width:] = drawn.action
        q = torch.cat([critic.forward(inputs) for critic in critics], dim=1).T
        weight = batch.recorded["weight"][0]
        weight = weight / weight.mean()
        share, is_smallest = weight / count, q == q.amin(0)
        of_q = is_smallest * (-share / is_smallest.sum(0))
        through = [
            critic.backward_to_inputs(gradient.unsqueeze(1), width)
            for critic, gradient in zip(critics, of_q, strict=True)
        ]
        policy.backward(drawn.gradient(torch.stack(through).sum(0), share * temperature))
        loss = soft_q.policy_loss(q, drawn.log_prob, temperature, weight)
        metrics = {LOSS: loss, "entropy": -drawn.log_prob.mean(), "temperature": temperature.squeeze(0)}
        return drawn.log_prob, metrics

    def _networks_of(self, count: int) -> _Networks:
        """Return the passes for batches of B steps."""
        if count not in self._networks:
            found = _networks_of(self.learner, count)
            assert found is not None
            self._networks[count] = found
        return self._networks[count]


class _Draw:
    """Actions drawn for logits [B, 2A], with their derivatives.

    Attributes:
        action: [B, A] in [-1, 1].
        log_prob: [B].
    """

    def __init__(self, logits: Tensor, generator: torch.Generator) -> None:
        mean, self._raw = logits.chunk(2, dim=-1)
        log_std = self._raw.clamp(LOG_STD_MIN, LOG_STD_MAX)
        noise = torch.empty_like(mean).normal_(generator=generator)
        self._distance = noise * log_std.exp()
        value = mean + self._distance
        self.action = value.tanh()
        density = -0.5 * noise.square() - log_std - HALF_LOG_TWO_PI
        self.log_prob = density.sum(-1) - log_slope_of_tanh(value).sum(-1)

    def gradient(self, action: Tensor, log_prob: Tensor) -> Tensor:
        """Return the gradient of the logits [B, 2A] from gradients of actions [B, A] and log-probabilities [B]."""
        through, a = log_prob.unsqueeze(-1), self.action
        by_value = action * (1.0 - a * a) + through * (2.0 * a)  # d log(1 - tanh(x)^2) = -2 tanh(x), of noise nothing
        is_free = (self._raw >= LOG_STD_MIN) & (self._raw <= LOG_STD_MAX)
        return torch.cat((by_value, (by_value * self._distance - through) * is_free), dim=-1)


def quick_gradients(learner: SACLearner) -> QuickGradients | None:
    """Return the twin for squashed Gaussians of MLPs, or None if the twin lacks the network, actions or objective.

    A subclass may compute other losses, and therefore has no twin.
    """
    (kind, _), *others = learner.parts
    is_simple = type(learner) is SACLearner and kind == "tanh_gaussian" and not others
    return QuickGradients(learner) if is_simple and _networks_of(learner, 1) is not None else None


def _networks_of(learner: SACLearner, count: int) -> _Networks | None:
    own, targets = learner.critics.flat.module, learner.targets.module
    assert isinstance(own, Critics)
    assert isinstance(targets, Critics)
    policy, critics, slow = (
        written_policy(learner.model, 2 * count),
        *(written_critics(x, count) for x in (own, targets)),
    )
    if policy is None or critics is None or slow is None:
        return None
    return _Networks(policy, critics, slow, learner.flat.flat.new_empty(2, count, own.weights[0].shape[1]))
