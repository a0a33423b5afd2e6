"""Fitted Q evaluation: the values of a policy that is given, learned from steps of others."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from appo.algorithms.models.actor_critic import ActingNetwork, ActorCritic
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.q_network import build_q_network
from appo.envs.spec import EnvSpec


@dataclass(frozen=True)
class Transitions:
    """N steps, by what was seen: M observations, of which each step has its own and the one after it.

    Attributes:
        obs: [M, *] by key.
        here: [N] which observation a step has; the one after it is the next.
        action: [N] what was chosen.
        reward: [N].
        terminated: [N] bool.
        probabilities: [M, L] of the policy that is evaluated, of every choice in every observation.
    """

    obs: Mapping[str, Tensor]
    here: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    probabilities: Tensor


class FittedQ:
    """A network of the values of choices under a policy.

        minimize  mean (r + gamma (1 - terminated) sum_a' pi(a'|s') Q'(s', a') - Q(s, a))^2      Q' an older Q

    Args:
        spec: of the environment, whose action is one choice.
        config: of the network; it is without a memory and spectral normalization.
        scaled_as: a model whose running statistics of observations are taken over.
        seed: of the first weights and of what is drawn.

    Source: Le, Voloshin, Yue 2019, arXiv:1903.08738, algorithm 3.
    """

    def __init__(self, spec: EnvSpec, config: ModelConfig, scaled_as: ActingNetwork, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = build_q_network(replace(config, use_rnn=False, use_spectral_norm=False), spec, dueling=False)
        for key in self.network.normalized_keys:
            scaling: Any = scaled_as.scaling_of(key)
            self.network.set_observation_statistics(key, scaling.mean, scaling.inv_std)
        self.scale = 1.0

    def fit(self, data: Transitions, gamma: float, updates: int) -> float:
        """Learn from transitions; the mean loss of the last tenth of the updates, in units of reward squared.

        Args:
            data: what is drawn from, evenly.
            gamma: discount per step.
            updates: optimizer steps.
        """
        self.scale = max(1e-3, float(data.reward.abs().mean()) / max(1.0 - gamma, 1e-2))
        target = copy.deepcopy(self.network).requires_grad_(False)
        optimizer = torch.optim.Adam(self.network.parameters(), 1e-3)
        last, total = max(1, updates // 10), 0.0
        for update in range(updates):
            if update % 100 == 0:
                target.load_state_dict(self.network.state_dict())
            drawn = torch.randint(len(data.here), (256,), generator=self.generator)
            here, after = data.here[drawn], data.here[drawn] + 1
            with torch.no_grad():
                following = (data.probabilities[after] * self._q(target, data.obs, after)).sum(-1)
                goal = data.reward[drawn] / self.scale + gamma * following.masked_fill(data.terminated[drawn], 0.0)
            found = self._q(self.network, data.obs, here).gather(-1, data.action[drawn].unsqueeze(-1)).squeeze(-1)
            loss = (goal - found).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if update >= updates - last:
                total += float(loss.detach()) / last
        return total * self.scale**2

    @torch.no_grad()
    def values(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Return Q [M, L] of observations [M, *], in units of reward."""
        rows = torch.split(torch.arange(len(next(iter(obs.values())))), 4096)
        return self.scale * torch.cat([self._q(self.network, obs, part) for part in rows])

    @staticmethod
    def _q(network: ActorCritic, obs: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        seen, first = {key: values[rows] for key, values in obs.items()}, torch.ones(len(rows), dtype=torch.bool)
        return network.act(seen, first, torch.zeros(len(rows), network.rnn_state_size))[0]
