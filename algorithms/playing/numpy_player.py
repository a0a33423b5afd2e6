"""Playing a small network without torch, whose dispatch takes most of the time of a small forward pass."""

import numpy as np

from appo.algorithms.models.numpy_mlp import NumpyMlp, numpy_mlp
from appo.algorithms.ops.numpy_twins import ActionSampler, most_probable
from appo.algorithms.parts.stochastic_policy import StochasticPolicy
from appo.algorithms.playing.player import Acts, Player
from appo.algorithms.runtime.memory.arena import Array
from appo.envs.spec import EnvSpec


class NumpyPlayer:
    """Acts like a `Player` of one environment, except for rounding and random numbers; made by `cheapest`.

    Args:
        mlp: network.
        spec: spaces of the environment.
        sampler: sampler of actions; None: the most probable actions are taken.
    """

    def __init__(self, mlp: NumpyMlp, spec: EnvSpec, sampler: ActionSampler | None) -> None:
        rows, self._mlp, self._sampler, self._parts = spec.num_agents, mlp, sampler, spec.action.parts
        self._logits = np.empty((rows, spec.action.num_logits), np.float32)
        self._value, self._log_prob = np.empty((2, rows), np.float32)
        self._action = np.empty((rows, spec.action.num_values), spec.action.dtype)

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Return actions [R, A] for observations [R, *], valid until the next call; an MLP ignores `first`."""
        self._mlp.act(obs[self._mlp.key], self._logits, self._value)
        if self._sampler is None:
            most_probable(self._parts, self._logits, self._action)
        else:
            self._sampler.sample(self._logits, self._action, self._log_prob)
        return self._action


def cheapest(player: Player, seed: int, *, deterministic: bool) -> Acts:
    """Return a `NumpyPlayer` for simple networks and actions, else the given player."""
    policy, spec = player.policy, player.spec
    if type(policy) is not StochasticPolicy:  # a subclass may act otherwise
        return player
    sampler, mlp = policy.random(seed, spec.num_agents).sampler, numpy_mlp(policy.model, spec.num_agents)
    if sampler is None or mlp is None:
        return player
    return NumpyPlayer(mlp, spec, None if deterministic else sampler)
