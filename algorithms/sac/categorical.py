"""Losses of SAC with critics that predict distributions (`--categorical_critics`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from appo.algorithms.models.categorical_critics import CategoricalCritics
from appo.algorithms.models.encoders import Observations
from appo.algorithms.ops import categorical
from appo.algorithms.ops.q_learning import n_step_target
from appo.algorithms.runtime.learning.batches import Batch


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


class LossWeights(NamedTuple):
    """Weights and discount in the losses.

    Attributes:
        of_step: [B] in the loss of the critics.
        temperature: [1], of entropy against rewards divided by their size.
        gamma: discount of the n steps of a target.
    """

    of_step: Tensor
    temperature: Tensor
    gamma: float


class Distributions(NamedTuple):
    """The critics and their targets."""

    critics: CategoricalCritics
    targets: CategoricalCritics

    def critic_pass(
        self, batch: Batch, obs: Observations, action: Tensor, draws: Draws, losses: LossWeights
    ) -> CriticPass:
        """Return the cross-entropy of the critics to projected targets, and the values of a batch.

        Args:
            batch: batch of single steps.
            obs: scaled observations {key} [2B, *] of the steps, then after the n steps.
            action: [B, A] played, in [-1, 1].
            draws: drawn actions.
            losses: weights of the losses.
        """
        critics, atoms, size = self.critics, self.critics.atoms(losses.gamma), self.critics.reward_size
        played = torch.cat((action, draws.action_later.detach()))
        with torch.no_grad():
            chosen = categorical.least(self.targets(obs, played)[0].chunk(2, 1)[1], atoms)
            ahead = atoms - (losses.temperature * draws.log_prob_later)[:, None]
            value = n_step_target((batch.reward[0] / size)[:, None], batch.recorded["discount"][0][:, None], ahead)
            target = categorical.projected(chosen.exp(), value, atoms)
        log_probability, moments = critics(obs, played)
        predicted = log_probability.chunk(2, 1)[0]
        loss = -((target * predicted).sum(-1) * losses.of_step).mean(-1).sum()
        now = {key: x.chunk(2)[0] for key, x in obs.items()}
        of_drawn = categorical.mean_of(critics(now, draws.action, moments)[0], atoms)
        q = categorical.mean_of(predicted.detach(), atoms) * size
        return CriticPass(loss, of_drawn, q, (target * atoms).sum(-1) * size)
