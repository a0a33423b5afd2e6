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
        if config.use_spectral_norm:
            raise UsageError(
                "--use_spectral_norm: values of actions must reach any return, and normalized layers bound them"
            )
        self.keys = tuple(observations)
        self.encoder: nn.Module | None = None
        names = set(encoder_names(ModelConfig() if config.encoder_custom else config, observations).values())
        units = config.encoder_mlp_layers
        if names == {MLP} and not custom_class(config, "encoder"):
            size = sum(torch.Size(one.shape).numel() for one in observations.values())
        else:
            self.encoder = build_tower(config, observations).encoder
            size = size_of(self.encoder, "output_size")
            units = (size,)
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
        if self.encoder is None:
            features = [obs[key].flatten(1) if obs[key].dim() > 1 else obs[key][:, None] for key in self.keys]
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                features = [self.encoder(obs)]
        if frozen:
            weights, biases = ([x.detach() for x in tensors] for tensors in (weights, biases))
        x = torch.cat((*features, action), dim=-1).expand(len(weights[0]), -1, -1)
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            x = torch.baddbmm(bias, x, weight)
            x = self.activation(layer_norm(x, x.shape[-1:]) if self.layer_norm else x)
        # A product with a matrix of one column is slow; the sum is not.
        q: Tensor = (x * weights[-1].transpose(1, 2)).sum(-1) + biases[-1].squeeze(-1)
        return q
