"""Encoders as a user might write them, right and wrong."""

import torch
from torch import Tensor, nn

from appo.algorithms.models.config import ModelConfig
from appo.envs.spec import ObservationSpec


class SumOfMeans(nn.Module):
    def __init__(self, observations: dict[str, ObservationSpec], config: ModelConfig) -> None:
        super().__init__()
        self.keys = list(observations)
        self.output_size = config.hidden_size
        self.linear = nn.Linear(1, self.output_size)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        total = torch.stack([obs[key].flatten(1).mean(dim=1) for key in self.keys]).sum(dim=0)
        return self.linear(total.unsqueeze(1))


class Flat(nn.Module):
    def __init__(self, observations: dict[str, ObservationSpec], config: ModelConfig) -> None:
        super().__init__()
        self.output_size = sum(torch.Size(spec.shape).numel() for spec in observations.values())
        self.scale = nn.Parameter(torch.ones(self.output_size))

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return torch.cat([value.flatten(1) for value in obs.values()], dim=1) * self.scale


class WithoutOutputSize(nn.Module):
    def __init__(self, observations: object, config: object) -> None:
        super().__init__()

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        return next(iter(obs.values())).flatten(1)


class FloatOutputSize(WithoutOutputSize):
    output_size = 5.0


class WrongOutputSize(WithoutOutputSize):
    output_size = 7


class NotATensor(WithoutOutputSize):
    output_size = 5

    def forward(self, obs: dict[str, Tensor]) -> list[float]:
        return [0.0]


class Raises(WithoutOutputSize):
    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        raise RuntimeError("first line\nsecond line")


class WithCounter(WithoutOutputSize):
    output_size = 5

    def __init__(self, observations: object, config: object) -> None:
        super().__init__(observations, config)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class TakesNothing(nn.Module):
    pass


class NotAModule:
    def __init__(self, observations: object, config: object) -> None: ...
