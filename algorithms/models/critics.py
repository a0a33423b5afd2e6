"""Values of actions that are numbers: several networks at once, on inputs of states and actions."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from appo.algorithms.models.build import build_tower, initialize_layers
from appo.algorithms.models.config import MLP, ModelConfig, encoder_names
from appo.algorithms.models.custom import custom_class, size_of
from appo.algorithms.models.encoders import Observations, nonlinearity
from appo.envs.spec import ObservationSpec
from appo.utils.errors import UsageError


def shared_encoder(observations: dict[str, ObservationSpec], config: ModelConfig) -> tuple[nn.Module | None, int]:
    """Return the encoder that all critics share, None if numbers enter the layers as they are, and its output size.

    Raises:
        UsageError: the encoder cannot read the observations, or flags bound the values.
    """
    if config.use_spectral_norm:
        raise UsageError(
            "--use_spectral_norm: values of actions must reach any return, and normalized layers bound them"
        )
    names = set(encoder_names(ModelConfig() if config.encoder_custom else config, observations).values())
    if names == {MLP} and not custom_class(config, "encoder"):
        return None, sum(torch.Size(one.shape).numel() for one in observations.values())
    encoder = build_tower(config, observations).encoder
    return encoder, size_of(encoder, "output_size")


def joined(
    obs: Observations, action: Tensor, keys: tuple[str, ...], encoder: nn.Module | None, *, frozen: bool
) -> Tensor:
    """Return the features of scaled observations {key} [B, *], and actions [B, A], as [B, F+A].

    With `frozen` no gradient flows to the encoder.
    """
    if encoder is None:
        features = [obs[key].flatten(1) if obs[key].dim() > 1 else obs[key][:, None] for key in keys]
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            features = [encoder(obs)]
    return torch.cat((*features, action), dim=-1)


class Critics(nn.Module):
    """N networks Q(s, a), whose layers are products of matrices [N, inputs, units]: one call per layer for all.

    Numbers enter the layers of `--encoder_mlp_layers` beside the action. Images, and encoders with another structure,
    pass an encoder that all N networks share; its features enter a last layer beside the action. `--layer_norm`
    normalizes without further weights.

    Args:
        observations: observations of the environment by key, without masks.
        config: flags of the network.
        num_actions: A, numbers of an action.
        num_critics: N.

    Raises:
        UsageError: the encoder cannot read the observations, or flags bound the values.
    """

    def __init__(
        self, observations: dict[str, ObservationSpec], config: ModelConfig, num_actions: int, num_critics: int
    ) -> None:
        super().__init__()
        self.keys = tuple(observations)
        self.encoder, size = shared_encoder(observations, config)
        units = config.encoder_mlp_layers if self.encoder is None else (size,)
        layers = [[nn.Linear(a, b) for _ in range(num_critics)] for a, b in pairwise((size + num_actions, *units, 1))]
        for layer in layers:
            initialize_layers(config, nn.ModuleList(layer))
        self.weights = nn.ParameterList([torch.stack([one.weight.detach().T for one in layer]) for layer in layers])
        self.biases = nn.ParameterList([torch.stack([one.bias.detach()[None] for one in layer]) for layer in layers])
        self.layer_norm = config.layer_norm
        self.activation = nonlinearity(config.nonlinearity, inplace=True)

    def forward(self, obs: Observations, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Return the values [N, B] of actions [B, A] in scaled observations {key} [B, *].

        With `frozen` gradients flow to the action alone.
        """
        weights, biases = list(self.weights), list(self.biases)
        if frozen:
            weights, biases = ([x.detach() for x in tensors] for tensors in (weights, biases))
        x = joined(obs, action, self.keys, self.encoder, frozen=frozen).expand(len(weights[0]), -1, -1)
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            x = torch.baddbmm(bias, x, weight)
            x = self.activation(layer_norm(x, x.shape[-1:]) if self.layer_norm else x)
        # A product with a matrix of one column is slow; the sum is not.
        q: Tensor = (x * weights[-1].transpose(1, 2)).sum(-1) + biases[-1].squeeze(-1)
        return q
