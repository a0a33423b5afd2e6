"""Encoders, a core and a model as a user might write them, which compute something else when they learn."""

import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from appo.envs.spec import ObservationSpec
from tests.unit.models.custom_parts import Sum


class Plain(nn.Module):
    def __init__(self, observations: dict[str, ObservationSpec], config: object) -> None:
        super().__init__()
        size = sum(torch.Size(spec.shape).numel() for spec in observations.values())
        self.layer, self.output_size = nn.Linear(size, 16), 16

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.relu(self.layer(torch.cat([value.flatten(1) for value in obs.values()], dim=1)))


class _With(Plain):
    def extra(self) -> nn.Module:
        raise NotImplementedError

    def __init__(self, observations: dict[str, ObservationSpec], config: object) -> None:
        super().__init__(observations, config)
        self.more = self.extra()

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return self.more(super().forward(obs))


class WithDropout(_With):
    def extra(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))


class WithoutEffect(_With):
    def extra(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.0), nn.LayerNorm(16))


class WithBatchNorm(_With):
    def extra(self) -> nn.Module:
        return nn.BatchNorm1d(16)


class WithBatchNormThatKeepsNothing(_With):
    def extra(self) -> nn.Module:
        return nn.BatchNorm1d(16, track_running_stats=False)


class WithRandomSlopes(_With):
    def extra(self) -> nn.Module:
        return nn.RReLU()


class WithTransformer(_With):
    def extra(self) -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 16)  # its dropout is 0.1 by default


class WithSpectralNorm(_With):
    def extra(self) -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(16, 16)), old_spectral_norm(nn.Linear(16, 16)))


class WithFunctionalDropout(Plain):
    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return nn.functional.dropout(super().forward(obs), 0.05, self.training)


class WithSwitch(Plain):
    """Has a train() of its own."""

    gain = 1.0

    def train(self, mode: bool = True) -> "WithSwitch":
        self.gain = 2.0 if mode else 1.0
        return super().train(mode)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return self.gain * super().forward(obs)


class ForgetfulWhereItLearns(Sum):
    """A core."""

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, first, state) * (0.5 if self.training else 1.0)


class WithHiddenWeights(Plain):
    """Keeps layers in a list, which torch does not search for parameters."""

    def __init__(self, observations: dict[str, ObservationSpec], config: object) -> None:
        super().__init__(observations, config)
        self.layers = [nn.Linear(16, 16)]

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return self.layers[0](super().forward(obs))


class WithHiddenTable(Plain):
    """Draws numbers of its own without `register_buffer`."""

    def __init__(self, observations: dict[str, ObservationSpec], config: object) -> None:
        super().__init__(observations, config)
        self.table = torch.randn(16)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return super().forward(obs) * self.table


class OverRows(Plain):
    """Takes the wrong dimension."""

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.softmax(super().forward(obs), dim=0)


class Detached(Plain):
    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return super().forward(obs).detach()
