"""The gradients of `SACLearner` without a graph, for MLPs.

`SACLearner` defines the objective: read and change the objective there. The twin repeatedly compares gradients with
the learner's, and retires after two differences in a row. For networks and actions that the twin lacks, torch
differentiates (`quick_gradients`).
"""

from __future__ import annotations

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
from appo.algorithms.sac.learner import SMALLEST, Found, SACLearner, policy_weights


class _Networks(NamedTuple):
    """Written passes, and their permanent inputs and gradients, for B steps.

    Attributes:
        policy: the policy at the steps, then after the n steps, 2B rows.
        critics: each critic for the actions of the steps, then for drawn actions, 2B rows.
        targets: each target network after the n steps, B rows.
        inputs: [2, B, D + A] of the critics.
        inputs_later: [B, D + A] of the targets.
        gradients: [N, 2, B] of the critics' values.
    """

    policy: WrittenMlp
    critics: list[WrittenMlp]
    targets: list[WrittenMlp]
    inputs: Tensor
    inputs_later: Tensor
    gradients: Tensor


class QuickGradients:
    """Differentiates both losses of a learner; `quick_gradients` makes the object.

    Args:
        learner: learner whose networks have written passes.
    """

    def __init__(self, learner: SACLearner) -> None:
        self.learner, self._check = learner, TwinCheck("sac/quick_gradients.py")
        self._networks: dict[int, _Networks] = {}

    def differentiate(self, batch: Batch, obs: Observations) -> Found:
        """Compute the results of `SACLearner.differentiate`; some steps are compared with torch."""
        if not self._check.is_due():
            return self._differentiate(batch, obs)
        learner, optimizers = self.learner, (self.learner.critics.optimizer, self.learner.optimizer)
        random = learner.device_generator.get_state()
        names = self._differentiate(batch, obs)[-1].keys()
        mine = [optimizer.gradient.clone() for optimizer in optimizers]
        learner.device_generator.set_state(random)
        found = learner.differentiate(batch, obs)
        exact = [optimizer.gradient for optimizer in optimizers]
        # Each in units of its length, as neither may hide the other.
        lengths = [torch.linalg.vector_norm(x).clamp_min(SMALLEST) for x in exact]
        mine_of, exact_of = (torch.cat([x / n for x, n in zip(xs, lengths, strict=True)]) for xs in (mine, exact))
        if self._check.retires(mine_of, exact_of, names, found[-1].keys()):
            learner.gradients = None
        return found

    @torch.inference_mode()
    def _differentiate(self, batch: Batch, obs: Observations) -> Found:
        learner, count = self.learner, batch.valid.shape[1]
        policy, critics, targets, inputs, inputs_later, gradients = self._networks_of(count)
        seen = obs[learner.model.keys[0]].reshape(2, count, -1)
        width = seen.shape[-1]
        drawn = _Draw(policy.forward(seen.flatten(0, 1)), learner.device_generator)
        log_prob, log_prob_later = drawn.log_prob.chunk(2)
        inputs[..., :width], inputs_later[:, :width] = seen[0], seen[1]
        inputs[0, :, width:], inputs[1, :, width:] = batch.action[0].tanh(), drawn.action[:count]
        inputs_later[:, width:] = drawn.action[count:]
        of_targets = torch.cat([target.forward(inputs_later) for target in targets], dim=1).T
        of_critics = torch.cat([critic.forward(inputs.flatten(0, 1)) for critic in critics], dim=1).T
        q, q_drawn = of_critics.chunk(2, dim=1)
        weight, temperature = batch.recorded["weight"][0], learner.temperature
        reward, discount = batch.reward[0], batch.recorded["discount"][0]
        target = soft_q.soft_target(reward, discount, of_targets, log_prob_later, temperature)
        error, of_error, weight_of_policy = q - target, weight**learner.beta, policy_weights(weight)
        share, is_smallest = weight_of_policy / count, q_drawn == q_drawn.amin(0)
        torch.mul(error, of_error / count, out=gradients[:, 0])
        torch.mul(is_smallest, -share / is_smallest.sum(0), out=gradients[:, 1])
        through = [critic.backward(x.view(-1, 1), count)[count:] for critic, x in zip(critics, gradients, strict=True)]
        of_actions = [critic.to_inputs(x, width) for critic, x in zip(critics, through, strict=True)]
        of_action = torch.stack(of_actions).sum(0)
        policy.backward(drawn.gradient(of_action, share * temperature), count)
        means = {
            "critic_loss": soft_q.critic_loss(q, target, of_error),
            "q_mean": q.mean(),
            "target_mean": target.mean(),
            LOSS: soft_q.policy_loss(q_drawn, log_prob, temperature, weight_of_policy),
            "entropy": -log_prob.mean(),
            "temperature": temperature.squeeze(0),
        }
        return error.abs().mean(0), log_prob, means

    def _networks_of(self, count: int) -> _Networks:
        """Return the passes for batches of B steps."""
        if count not in self._networks:
            found = _networks_of(self.learner, count)
            assert found is not None
            self._networks[count] = found
        return self._networks[count]


class _Draw:
    """Actions drawn for logits [R, 2A], with their derivatives.

    Attributes:
        action: [R, A] in [-1, 1].
        log_prob: [R].
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
        """Return the gradient of the first logits [B, 2A] from that of actions [B, A] and log-probabilities [B]."""
        count = len(action)
        through, a, raw = log_prob.unsqueeze(-1), self.action[:count], self._raw[:count]
        by_value = action * (1.0 - a * a) + through * (2.0 * a)  # d log(1 - tanh(x)^2) = -2 tanh(x), of noise nothing
        is_free = (raw >= LOG_STD_MIN) & (raw <= LOG_STD_MAX)
        return torch.cat((by_value, (by_value * self._distance[:count] - through) * is_free), dim=-1)


def quick_gradients(learner: SACLearner) -> QuickGradients | None:
    """Return the twin for squashed Gaussians of MLPs, or None if the twin lacks the network, actions or objective.

    A subclass may compute other losses, and therefore has no twin.
    """
    (kind, _), *others = learner.parts
    is_known = type(learner) is SACLearner and learner.categorical is None
    is_simple = is_known and kind == "tanh_gaussian" and not others
    return QuickGradients(learner) if is_simple and _networks_of(learner, 1) is not None else None


def _networks_of(learner: SACLearner, count: int) -> _Networks | None:
    own, targets = learner.critics.flat.module, learner.targets.module
    assert isinstance(own, Critics)
    assert isinstance(targets, Critics)
    policy, critics = written_policy(learner.model, 2 * count), written_critics(own, 2 * count)
    slow = written_critics(targets, count)
    if policy is None or critics is None or slow is None:
        return None
    new, width = learner.flat.flat.new_empty, own.weights[0].shape[1]
    inputs, gradients = new(2, count, width), new(len(critics), 2, count)
    return _Networks(policy, critics, slow, inputs, new(count, width), gradients)
