"""The policy of SAC: actions of a squashed Gaussian, at first uniform in the box."""

from typing import Any

import torch
from torch import Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.envs.spec import EnvSpec

NEARLY_ONE = 1.0 - 1e-6
"""Largest uniform number: the number before tanh is finite."""


class SACPolicy(StochasticPolicy):
    """Draws from the network's distribution, and uniformly while the learner has counted few steps.

    Args:
        flat: network, ready to act, with all weights in one vector.
        spec: spaces of the environment.
        uniform_steps: agent steps of the policy with uniform actions; 0 for a player.
        is_trained: whether the network has been trained: no action is uniform, though random numbers are drawn alike.
    """

    def __init__(self, flat: FlatModule, spec: EnvSpec, uniform_steps: int, *, is_trained: bool = False) -> None:
        super().__init__(flat, spec, ())
        self._until, self._is_trained = uniform_steps, is_trained
        # A tensor, because a captured pass repeats no Python.
        self._is_uniform = torch.tensor(uniform_steps > 0 and not is_trained, device=flat.flat.device)

    def follow(self, samples: int) -> None:
        """Note the agent steps that the learner has counted."""
        self._is_uniform.fill_(samples < self._until and not self._is_trained)

    def act(self, *arguments: Any, greedy: bool | Tensor = False, **how: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Act in N rows; see `Policy.act` for arguments and results."""
        step, state = super().act(*arguments, greedy=greedy, **how)
        if self._until and greedy is False:
            action, random = step["action"], arguments[4]
            uniform = torch.empty_like(action).uniform_(-NEARLY_ONE, NEARLY_ONE, generator=random.generator)
            step["action"] = torch.where(self._is_uniform, uniform.atanh_(), action)
        return step, state
