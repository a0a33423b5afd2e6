"""The SAC learner: critics, policy and temperature on batches drawn from a replay.

`SACLearner.learn` is the algorithm; `ops/soft_q.py` has the losses. The module is independent of processes.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import model_inputs
from appo.algorithms.models.categorical_critics import CategoricalCritics
from appo.algorithms.models.critics import Critics
from appo.algorithms.models.encoders import Observations
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.policy_network import PolicyNetwork
from appo.algorithms.ops import categorical, soft_q
from appo.algorithms.ops.distributions import ActionDistribution, squashed
from appo.algorithms.ops.q_learning import n_step_target
from appo.algorithms.parts.learner import LOSS, FlatLearner
from appo.algorithms.parts.pooling import pool_mean
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch, Feedback
from appo.algorithms.sac.config import SACConfig
from appo.utils.errors import UsageError

SMALLEST = 1e-30
"""By which weights and gradients may be divided."""
Found = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Errors of the critics [B], log-probabilities of drawn actions [B], and metrics: name -> scalar."""


def policy_weights(weight: Tensor) -> Tensor:
    """Return the weights of steps in the policy's loss, of mean 1, from the importance weights of the draws, [B].

    They correct draws by priority in full: steps with large errors of the critics mislead the policy.
    """
    return weight / weight.mean().clamp_min(SMALLEST)  # the batch of a late rank is empty, with weights of 0


def _halves(obs: Observations) -> list[Observations]:
    """Return observations {key} [B, *] of the steps, and after the n steps."""
    return [{key: x.chunk(2)[i] for key, x in obs.items()} for i in (0, 1)]


class CriticPass(NamedTuple):
    """Values of a batch by N critics.

    Attributes:
        loss: of the critics, scalar.
        of_drawn: [N, B] values of drawn actions, through which the policy learns.
        q: [N, B] values of the actions played, without a gradient, as returns.
        target: [B], as returns.
    """

    loss: Tensor
    of_drawn: Tensor
    q: Tensor
    target: Tensor


class Draws(NamedTuple):
    """Actions drawn for the steps of a batch, and for the states after the n steps.

    Attributes:
        action, action_later: [B, A] in [-1, 1].
        log_prob, log_prob_later: [B].
    """

    action: Tensor
    action_later: Tensor
    log_prob: Tensor
    log_prob_later: Tensor


class Temperature(nn.Module):
    """The logarithm of the temperature as a parameter, [1]."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((1,), math.log(temperature)))


class Gradients(Protocol):
    """Sets both gradients of a batch, see `SACLearner`."""

    def differentiate(self, batch: Batch, obs: Observations) -> Found:
        """Compute the results of `SACLearner.differentiate`."""


class SACLearner(FlatLearner):
    """Trains one policy (Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1).

    Args:
        flat: network of the policy with all weights in one vector, on the device.
        context: see `FlatLearner`.

    Attributes:
        critics: networks of the values, in one module with an Adam.
        targets: slow copies of the critics.
        entropy_weight: learned temperature with an Adam; None: `--temperature`.
        beta: exponent of the weights of the steps, scalar on the device.
        categorical: critics that predict distributions (`--categorical_critics`), or None.
        gradients: faster equivalent of `differentiate`, or None.
        quick: faster equivalent of `update`, or None.
    """

    config: SACConfig
    gradients: "Gradients | None" = None
    quick: Callable[[Batch], Tensor] | None
    categorical: CategoricalCritics | None = None

    def __init__(self, flat: FlatModule, context: Context) -> None:
        super().__init__(flat, context)
        assert isinstance(flat.module, PolicyNetwork)
        self.model, self.parts, device = flat.module, context.spec.action.parts, flat.flat.device
        num_actions, c = context.spec.action.num_values, self.config
        sizes = (model_inputs(context.spec), context.model, num_actions, c.num_critics)
        units = c.categorical_critics
        critics = (CategoricalCritics(*sizes, units) if units else Critics(*sizes)).to(device)
        self.targets = self.keep_network("targets", copy.deepcopy(critics))
        self.critics = self.add_network("critics", critics, rate="critic_learning_rate")
        if isinstance(critics, CategoricalCritics):
            if type(self).target is not SACLearner.target:
                raise UsageError("--categorical_critics: the learner's own `target` is a number, not a distribution")
            self.categorical = critics
        self.entropy_weight = None
        if c.learn_temperature:
            self.entropy_weight = self.add_network("entropy_weight", Temperature(c.temperature).to(device))
        self.beta = flat.flat.new_zeros(())

    @property
    def target_entropy(self) -> float:
        """Entropy of an action that the temperature aims at, in nats."""
        asked = self.config.target_entropy
        return -float(self.context.spec.action.num_values) if asked is None else asked

    @property
    def temperature(self) -> Tensor:
        """Return the temperature, [1]."""
        if self.entropy_weight is None:
            return self.flat.flat.new_full((1,), self.config.temperature)
        return self.entropy_weight.flat.flat.exp()

    def logits(self, obs: Observations) -> Tensor:
        """Return the logits [B, L] of the policy for scaled observations {key} [B, *]."""
        nothing = self.flat.flat.new_zeros(len(next(iter(obs.values()))), 0)
        return self.model.act_scaled(obs, nothing.new_zeros(len(nothing), dtype=torch.bool), nothing)[0]

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions [B, A] in [-1, 1] for logits [B, L], and their log-probability [B]."""
        action, log_prob = ActionDistribution(self.parts, logits).rsample(self.device_generator)
        return squashed(self.parts, action), log_prob

    @torch.no_grad()
    def target(self, batch: Batch, later: Observations, action: Tensor, log_prob: Tensor) -> Tensor:
        """Return the targets [B] of a batch.

        Args:
            batch: see `learn`.
            later: scaled observations {key} [B, *] after the n steps.
            action: actions [B, A] drawn for them, in [-1, 1].
            log_prob: [B] of these actions.
        """
        q = self.targets.module(later, action)
        return soft_q.soft_target(batch.reward[0], batch.recorded["discount"][0], q, log_prob, self.temperature)

    def critic_pass(self, batch: Batch, obs: Observations, draws: Draws) -> CriticPass:
        """Return the loss of the critics, and the values of a batch, see `differentiate`."""
        weight, played = batch.recorded["weight"][0] ** self.beta, squashed(self.parts, batch.action[0])
        if self.categorical is not None:
            return self._categorical_pass(self.categorical, batch, obs, played, draws, weight)
        now, later = _halves(obs)
        target = self.target(batch, later, draws.action_later, draws.log_prob_later)
        q = self.critics.flat.module(now, played)
        of_drawn = self.critics.flat.module(now, draws.action, frozen=True)
        return CriticPass(soft_q.critic_loss(q, target, weight), of_drawn, q.detach(), target)

    def _categorical_pass(
        self, critics: CategoricalCritics, batch: Batch, obs: Observations, action: Tensor, draws: Draws, weight: Tensor
    ) -> CriticPass:
        """Return the cross-entropy of the critics to projected targets, weighted by step, and the values of a batch."""
        atoms, size = critics.atoms(self.config.gamma**self.config.n_steps), critics.reward_size
        played = torch.cat((action, draws.action_later.detach()))
        with torch.no_grad():
            chosen = categorical.least(self.targets.module(obs, played)[0].chunk(2, 1)[1], atoms)
            ahead = atoms - (self.temperature * draws.log_prob_later)[:, None]
            value = n_step_target((batch.reward[0] / size)[:, None], batch.recorded["discount"][0][:, None], ahead)
            target = categorical.projected(chosen.exp(), value, atoms)
        log_probability, moments = critics(obs, played)
        predicted = log_probability.chunk(2, 1)[0]
        loss = -((target * predicted).sum(-1) * weight).mean(-1).sum()
        of_drawn = categorical.mean_of(critics(_halves(obs)[0], draws.action, moments)[0], atoms)
        q = categorical.mean_of(predicted.detach(), atoms) * size
        return CriticPass(loss, of_drawn, q, (target * atoms).sum(-1) * size)

    def differentiate(self, batch: Batch, obs: Observations) -> Found:
        """Set the gradients of critics and policy; return mean absolute errors over the critics, and more.

        Args:
            batch: see `learn`.
            obs: scaled observations {key} [2B, *] of the steps, then after the n steps.
        """
        (now, later), temperature = _halves(obs), self.temperature
        with torch.no_grad():
            logits_later = self.logits(later)
        drawn, log_probs = self.draw(torch.cat((self.logits(now), logits_later)))
        draws = Draws(*drawn.chunk(2), *log_probs.chunk(2))
        critic_loss, of_drawn, q, target = self.critic_pass(batch, obs, draws)
        weight = policy_weights(batch.recorded["weight"][0])
        policy_loss = soft_q.policy_loss(of_drawn, draws.log_prob, temperature, weight)
        self.critics.optimizer.gradient.zero_()
        self.optimizer.gradient.zero_()
        (critic_loss + policy_loss).backward()  # type: ignore[no-untyped-call]
        log_prob = draws.log_prob.detach()
        means = {"critic_loss": critic_loss.detach(), "q_mean": q.mean(), "target_mean": target.mean()}
        means |= {LOSS: policy_loss.detach(), "entropy": -log_prob.mean(), "temperature": temperature.squeeze(0)}
        return (q - target).abs().mean(0), log_prob, means

    def update(self, batch: Batch) -> Tensor:
        """Make one step of critics, policy, temperature and targets; return absolute errors [1, B]."""
        obs = self.model.scaled({key: batch.obs[key].flatten(0, 1) for key in self.model.keys})
        if self.categorical is not None:
            square, count = batch.reward[0].square().mean(), batch.valid.sum()
            pooled = pool_mean(self.ranks, square, count) if self.ranks else square
            self.categorical.note_rewards(pooled)
        error, log_prob, means = (self.gradients or self).differentiate(batch, obs)
        if self.entropy_weight is not None:
            gradient = soft_q.temperature_gradient(log_prob, self.target_entropy)
            self.entropy_weight.optimizer.gradient.copy_(gradient)
        self.step(batch.valid, means, [*self.networks.values()])
        if self.categorical is not None:
            self.categorical.project()
        self.targets.flat.lerp_(self.critics.flat.flat, self.config.target_rate)
        return error.unsqueeze(0)

    def learn(self, batch: Batch, progress: float) -> Iterator[Feedback]:
        """Make one update; yield errors [1, B], and the flags in use.

        Args:
            batch: batch of single steps of a `ReplaySource`, on the device of the model.
            progress: used share of the training budget, in [0, 1]; drives schedules.
        """
        c = self.config
        self.follow(progress)
        self.beta.fill_(c.beta(progress))
        error = (self.quick or self.update)(batch)
        self.statistics.update(batch, [])
        self.count_update()
        if self.updates % c.updates_per_version == 0:
            self.version += 1
        yield {"priority": error.cpu().numpy(), "flags": c}
