"""The network of Q-learning: a value of every choice, on the encoders and cores of actor-critics."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActorCritic, Tower, model_inputs
from appo.algorithms.models.build import build_tower
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.encoders import Observations
from appo.algorithms.ops import q_learning
from appo.envs.spec import MASK_KEY, EnvSpec
from appo.utils.errors import UsageError

OUTPUT_GAIN = 0.01
"""Gain of the last layers: values begin near 0, so the first maximum overestimates little."""


class QNetwork(ActorCritic):
    """Values of all choices in place of logits: the most probable action is the greedy one.

    Attributes:
        sizes: choices of every branch.
        exploration: share of random actions, beyond the share of the row, that falls while the network learns; a scalar
            that is published with the weights; None: not part of the network.
    """

    logits_name: ClassVar[str] = "q_values"
    logits_meaning: ClassVar[str] = (
        "of every choice of every part of the action: the return that is expected after it, or with --value_rescaling"
        " h of that"
    )

    exploration: Tensor | None

    def __init__(
        self, env_spec: EnvSpec, config: ModelConfig, tower: Tower, *, dueling: bool, explores: bool = False
    ) -> None:
        super().__init__(env_spec, config, tower.state_size)
        self.tower = tower
        self.dueling = dueling
        self.sizes = [part.size for part in env_spec.action.parts]
        self.parts = env_spec.action.parts
        self.q_head = nn.Linear(tower.output_size, sum(self.sizes))
        heads = [self.q_head]
        if dueling:
            self.value_head = nn.Linear(tower.output_size, 1)
            heads.append(self.value_head)
        for head in heads:
            nn.init.orthogonal_(head.weight, gain=OUTPUT_GAIN)
            nn.init.zeros_(head.bias)
        self.register_buffer("exploration", torch.ones(()) if explores else None)
        self.leave_bytes_to_encoders(env_spec)

    @property
    def towers(self) -> list[Tower]:
        """Return its only tower."""
        return [self.tower]

    def allowed(self, obs: Observations, num_batch_dims: int) -> Tensor | None:
        """Return allowed choices [..., L] from the mask in observations [..., *]; None without a mask.

        Bins are always allowed. So is every choice of a branch whose mask allows none: no action follows the last
        observation of an episode, and its value is that of the best choice.
        """
        if MASK_KEY not in obs:
            return None
        mask = obs[MASK_KEY].flatten(num_batch_dims) > 0
        pieces, begin = [], 0
        for part in self.parts:
            if part.kind == "bins":
                pieces.append(mask.new_ones(*mask.shape[:-1], part.size))
            else:
                piece = mask[..., begin : begin + part.size]
                pieces.append(piece | ~piece.any(-1, keepdim=True))
                begin += part.size
        return torch.cat(pieces, dim=-1)

    def act_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q [N, L], greedy values [N] without a mask, and the next state."""
        features, rnn_state = self.tower.step(obs, first, rnn_state)
        q = self._q(features)
        return q, self._greedy_value(q), rnn_state

    def q_values(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q [N, L] and the next state; arguments as in `act`."""
        features, rnn_state = self.tower.step(self._scaled_now(obs), first, rnn_state)
        return self._q(features), rnn_state

    def unroll_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q [T, B, L] and greedy values [T+1, B] without masks."""
        q = self._q(self.tower.unroll(obs, first, rnn_state))
        return q[:-1], self._greedy_value(q)

    def unroll_all(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> Tensor:
        """Return Q [T+1, B, L] of all observations {key} [T+1, B, *], from the states [1, B, H] before the first."""
        rows = {key: obs[key].flatten(0, 1) for key in self.keys}
        return self._q(self.tower.unroll(self._scaled_now(rows), first, rnn_state))

    def value_of(self, obs: Observations, logits: Tensor, value: Tensor | None) -> Tensor:
        """Return the values [N] of the greedy allowed choices, in units of the network."""
        return self._greedy_value(q_learning.allowed_only(logits, self.allowed(obs, 1)))

    def _q(self, features: Tensor) -> Tensor:
        features = features.float()
        q: Tensor = self.q_head(features)
        return q_learning.dueling(self.value_head(features), q, self.sizes) if self.dueling else q

    def _greedy_value(self, q: Tensor) -> Tensor:
        return torch.stack([branch.amax(-1) for branch in torch.split(q, self.sizes, dim=-1)], dim=-1).mean(-1)


def build_q_network(config: ModelConfig, env_spec: EnvSpec, *, dueling: bool, explores: bool = False) -> QNetwork:
    """Make the network of an environment; torch's global generator draws the weights.

    Only with `explores` the network has `QNetwork.exploration`.

    Raises:
        UsageError: the encoder cannot read the observations, or flags bound the values.
    """
    if config.use_spectral_norm:
        raise UsageError(
            "--use_spectral_norm: values of actions must reach any return, and normalized layers bound them"
        )
    return QNetwork(env_spec, config, build_tower(config, model_inputs(env_spec)), dueling=dueling, explores=explores)
