"""A network that acts without values of states: the policy of algorithms whose critics never act."""

from __future__ import annotations

from torch import Tensor

from appo.algorithms.models.actor_critic import ActingNetwork, PolicyHead, Tower, model_inputs
from appo.algorithms.models.build import build_tower, initialize_policy_head, policy_head_of
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.cores import autocast_off
from appo.algorithms.models.encoders import Observations
from appo.envs.spec import EnvSpec
from appo.utils.errors import UsageError


class PolicyNetwork(ActingNetwork):
    """One tower and the layer of the logits."""

    def __init__(self, env_spec: EnvSpec, config: ModelConfig, tower: Tower, policy_head: PolicyHead) -> None:
        super().__init__(env_spec, config, tower.state_size)
        self.tower, self.policy_head = tower, policy_head
        self.leave_bytes_to_encoders(env_spec)

    @property
    def towers(self) -> list[Tower]:
        """Return the only tower."""
        return [self.tower]

    def act_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return logits [N, L], no values, and the next state."""
        features, rnn_state = self.tower.step(obs, first, rnn_state)
        return self._logits(features), None, rnn_state

    def unroll_all(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> Tensor:
        """Return logits [T, B, L] of observations {key} [T, B, *], from the states [1, B, H] before the first."""
        rows = {key: obs[key].flatten(0, 1) for key in self.keys}
        return self._logits(self.tower.unroll(self._scaled_now(rows), first, rnn_state))

    def _logits(self, features: Tensor) -> Tensor:
        with autocast_off(features.device.type):
            logits: Tensor = self.policy_head(features.float())
        return logits


def build_policy_network(config: ModelConfig, env_spec: EnvSpec) -> PolicyNetwork:
    """Make the network of an environment; torch's global generator draws the weights.

    Raises:
        UsageError: the encoder cannot read the observations, or flags name a whole model or spectral normalization.
    """
    if config.use_spectral_norm:
        raise UsageError("--use_spectral_norm: only a network with both policy and values is normalized")
    tower = build_tower(config, model_inputs(env_spec))
    head = policy_head_of(config, env_spec, tower.output_size)
    initialize_policy_head(config, head)
    return PolicyNetwork(env_spec, config, tower, head)
