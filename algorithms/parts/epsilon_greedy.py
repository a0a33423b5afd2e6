"""The policy of Q-learning: the greedy action, or a random action with the probability of the row."""

import sys
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.q_network import QNetwork
from appo.algorithms.ops import q_learning
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.sampling.policy import FastPolicy
from appo.envs.spec import EnvSpec


class ExploringRandom(NamedTuple):
    """A source of random numbers."""

    generator: Generator


class EpsilonGreedyPolicy:
    """Acts by a Q-network, and records values, means over branches in units of return.

    Args:
        flat: network, ready to act, with all weights in one vector.
        spec: spaces of the environment.
        epsilon: probability [N] of a random action, per row of the run; None for a player, greedy before `explore`.
        rescaled: whether the network predicts h(return).
        records: records of a step, "q_taken" [N] and "q_max" [N], and "final_value" [N] of true final observations.
    """

    def __init__(
        self,
        flat: FlatModule,
        spec: EnvSpec,
        epsilon: Tensor | None,
        *,
        rescaled: bool,
        records: Collection[str] = ("q_taken", "q_max"),
    ) -> None:
        assert isinstance(flat.module, QNetwork)
        self.flat, self.model, self.rescaled, self.records = flat, flat.module, rescaled, frozenset(records)
        self.epsilon = None if epsilon is None else epsilon.to(flat.flat.device)
        self.rnn_state_size = flat.module.rnn_state_size
        self._dtype = getattr(torch, spec.action.dtype)
        self._of_player = 0.0
        self._learns = torch.ones((), device=flat.flat.device)  # a tensor: a captured pass repeats no Python

    def follow(self, samples: int) -> None:
        """Note whether a learner counts steps: without a learner, the network's share of random actions is 0."""
        self._learns.fill_(samples < sys.maxsize)

    def explore(self, epsilon: float) -> None:
        """Set the probability of a random action for rows without numbers, the rows of a player."""
        self._of_player = epsilon

    def random(self, seed: int, rows: int) -> ExploringRandom:
        """Make a source of random numbers for acting in groups of R rows."""
        return ExploringRandom(torch.Generator(self.flat.flat.device).manual_seed(seed))

    def act(
        self,
        obs: dict[str, Tensor],
        first: Tensor,
        state: Tensor,
        rows: Tensor | None,
        random: ExploringRandom | None,
        *,
        greedy: bool | Tensor = False,
        whole_groups: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Act in N rows; see `Policy.act` for arguments and results."""
        sizes = self.model.sizes
        q, state = self.model.q_values(obs, first, state)
        q = q_learning.allowed_only(q, self.model.allowed(obs, 1))
        best = action = q_learning.greedy_action(q, sizes)
        epsilon = None
        if rows is not None and self.epsilon is not None:
            # A network can have a share of random actions that falls while it learns, see `QNetwork.exploration`.
            epsilon, share = self.epsilon[rows], self.model.exploration
            epsilon = epsilon if share is None else epsilon + (1 - epsilon) * share * self._learns
        elif self._of_player:
            epsilon = q.new_full((len(q),), self._of_player)
        if greedy is not True and epsilon is not None:
            assert random is not None
            # Every call draws equally many numbers, so rows do not depend on other rows.
            noise = torch.rand(q.shape, generator=random.generator, device=q.device)
            explores = torch.rand(len(q), generator=random.generator, device=q.device) < epsilon
            chance = q_learning.greedy_action(q_learning.allowed_only(noise, q > q_learning.FORBIDDEN), sizes)
            action = torch.where(explores.unsqueeze(1), chance, best)  # a row explores in all branches
            if isinstance(greedy, Tensor):
                action = torch.where(greedy, best, action)
        chosen = {"q_taken": action, "q_max": best}
        values = {name: self._value(q, choice) for name, choice in chosen.items() if name in self.records}
        return {"action": action.to(self._dtype), **values}, state

    def final(self, obs: dict[str, Tensor], first: Tensor, state: Tensor) -> dict[str, Tensor]:
        """Return the largest values of allowed choices [N] of true final observations, if recorded."""
        if "final_value" not in self.records:
            return {}
        q = q_learning.allowed_only(self.model.q_values(obs, first, state)[0], self.model.allowed(obs, 1))
        return {"final_value": self._value(q, q_learning.greedy_action(q, self.model.sizes))}

    def _value(self, q: Tensor, choice: Tensor) -> Tensor:
        value = q_learning.taken(q, choice, self.model.sizes).mean(-1)
        return q_learning.unscaled_value(value) if self.rescaled else value

    def fast(self, trajectories: Trajectories, random: ExploringRandom) -> FastPolicy | None:
        """Return None: the policy has no twin without torch."""
        return None
