"""Cores and whole models as a user might write them, right and wrong."""

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActorCritic, PolicyHead, Tower, TowerActorCritic
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.cores import RecurrentCore
from appo.envs.spec import EnvSpec
from tests.unit.models.custom_encoders import SumOfMeans


class Sum(nn.Module):
    """What the row has seen in this episode, summed; a core without parameters."""

    def __init__(self, input_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.output_size = self.state_size = input_size

    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state.masked_fill(first.unsqueeze(1), 0.0) + x
        return state, state

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        length, outputs, now = (len(x) - 1) // len(state), [], state[0]
        for t in range(len(x)):
            if t % length == 0 and t < len(x) - 1:
                now = state[t // length]
            y, now = self.step(x[t], first[t], now)
            outputs.append(y)
        return torch.stack(outputs)


class Stateless(nn.Module):
    """A core that remembers nothing."""

    state_size = 0

    def __init__(self, input_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.output_size = input_size

    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x, state

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return x


class SumWithoutReset(Sum):
    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state + x, state + x


class SumWithLateReset(Sum):
    """Acts on the old state where an episode starts, and forgets it only then."""

    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state + x, super().step(x, first, state)[1]


class SumFromZero(Sum):
    """Unrolls as if nothing had been before the trajectory."""

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, first, torch.zeros_like(state))


class SumThroughResets(Sum):
    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, torch.zeros_like(first), state)


class SumDetached(Sum):
    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, first, state).detach()


class SumToNan(Sum):
    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, first, state) * torch.nan


class SumWithoutLast(Sum):
    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        return super().unroll(x, first, state)[:-1]


class WrongState(Sum):
    def __init__(self, input_size: int, config: ModelConfig) -> None:
        super().__init__(input_size, config)
        self.state_size = 3


class WithoutStateSize(Sum):
    def __init__(self, input_size: int, config: ModelConfig) -> None:
        super().__init__(input_size, config)
        del self.state_size


class DoubleOutput(Sum):
    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = super().step(x, first, state)
        return y.double(), state


class DoubleCore(Sum):
    def __init__(self, input_size: int, config: ModelConfig) -> None:
        super().__init__(input_size, config)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))


class CoreNotAModule:
    def __init__(self, input_size: int, config: ModelConfig) -> None: ...

    def step(self) -> None: ...

    def unroll(self) -> None: ...


class Remembering(ActorCritic):
    """One GRU from observations to everything, and dropout, which must not act."""

    def __init__(self, env_spec: EnvSpec, config: ModelConfig) -> None:
        size, width = env_spec.observations["obs"].shape[0], config.hidden_size
        super().__init__(env_spec, config, rnn_state_size=width)
        self.core = RecurrentCore("gru", size, width, 1)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, env_spec.action.num_logits + 1)

    def value_layer(self) -> tuple[Tensor, Tensor]:
        return self.head.weight[0], self.head.bias[0]

    def act_scaled(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, rnn_state = self.core.step(obs["obs"], first, rnn_state)
        outputs = self.head(self.dropout(y))
        return outputs[..., 1:], outputs[..., 0], rnn_state

    def unroll_scaled(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.head(self.dropout(self.core.unroll(obs["obs"].unflatten(0, first.shape), first, rnn_state)))
        return outputs[:-1, :, 1:], outputs[..., 0]


class Joined(TowerActorCritic):
    """An encoder and a core of the user's own in the built-in model."""

    def __init__(self, env_spec: EnvSpec, config: ModelConfig) -> None:
        encoder = SumOfMeans({"obs": env_spec.observations["obs"]}, config)
        tower = Tower(encoder, Sum(encoder.output_size, config))
        head = PolicyHead(tower.output_size, env_spec.action.parts, adaptive_stddev=True, initial_log_stddev=0.0)
        super().__init__(env_spec, config, tower, None, head)


class ValueOfThePast(Remembering):
    """Its value is one step late when it learns."""

    def unroll_scaled(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = super().unroll_scaled(obs, first, rnn_state)
        return logits, value.roll(1, dims=0)


class LogitsOfTheEnd(Remembering):
    """Gives logits for the bootstrap observation too."""

    def unroll_scaled(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = super().unroll_scaled(obs, first, rnn_state)
        return torch.cat((logits, logits[-1:])), value


class ValueAsColumn(Remembering):
    def act_scaled(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, value, rnn_state = super().act_scaled(obs, first, rnn_state)
        return logits, value.unsqueeze(1), rnn_state


class ValueWithoutGradient(Remembering):
    def unroll_scaled(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = super().unroll_scaled(obs, first, rnn_state)
        return logits, value.detach()


class Incomplete(ActorCritic):
    """Cannot unroll."""

    def act_scaled(self, obs: dict[str, Tensor], first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class Stranger(nn.Module):
    """Has the methods of a model and is none of ours."""

    def __init__(self, env_spec: EnvSpec, config: ModelConfig) -> None:
        super().__init__()

    def act(self) -> None: ...

    def unroll(self) -> None: ...
