"""Playing small networks without torch: evaluating them beside training would be little else than torch's dispatch."""

import numpy as np

from algorithms.evaluation import Acts, Player
from algorithms.models.numpy_mlp import NumpyMlp, numpy_mlp
from algorithms.ops.numpy_distributions import ActionSampler, is_supported, most_probable
from algorithms.runtime.arena import Array
from envs.spec import EnvSpec


class NumpyPlayer:
    """Acts as a `Player` of one environment does, but for rounding and the random numbers; made by `cheapest`.

    Args:
        mlp: the network.
        spec: of the environment.
        generator: of the random numbers; None: actions are the most probable ones.
    """

    def __init__(self, mlp: NumpyMlp, spec: EnvSpec, generator: np.random.Generator | None) -> None:
        rows, self._mlp, self._parts = spec.num_agents, mlp, spec.action.parts
        self._sampler = None if generator is None else ActionSampler(self._parts, rows, generator)
        self._logits = np.empty((rows, spec.action.num_logits), np.float32)
        self._value, self._log_prob = np.empty((2, rows), np.float32)
        self._action = np.empty((rows, spec.action.num_values), spec.action.dtype)

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Actions [R, A] for observations [R, *], overwritten by the next call; `first` says nothing to an MLP."""
        self._mlp.act(obs[self._mlp.key], self._logits, self._value)
        if self._sampler is None:
            most_probable(self._parts, self._logits, self._action)
        else:
            self._sampler.sample(self._logits, self._action, self._log_prob)
        return self._action


def cheapest(player: Player, seed: int, *, deterministic: bool) -> Acts:
    """Who acts for a player at the smallest cost: itself, unless its network and its actions are simple."""
    spec = player.spec
    mlp = None if spec.action_mask or not is_supported(spec.action.parts) else numpy_mlp(player.model, spec.num_agents)
    if mlp is None:
        return player
    return NumpyPlayer(mlp, spec, None if deterministic else np.random.default_rng(seed))
