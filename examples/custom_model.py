"""Networks of your own: an encoder, a core and a whole model, each named on the command line.

    python train_appo.py --env=CartPole-v1 --encoder_custom=examples.custom_model:ResidualEncoder
    python train_appo.py --env=toy/Memory-v0 --encoder_custom=examples.custom_model:LeakyCore
    python train_appo.py --env=CartPole-v1 --encoder_custom=examples.custom_model:LinearPolicy

The methods of a class determine the kind: a model has `act` and `unroll`, a core has `step` and `unroll`, any other
class is an encoder. Training first tries the class on a fake batch and reports a fault in one line.
"""

import torch
from torch import Tensor, nn

from appo.algorithms.models.actor_critic import ActorCritic
from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.cores import unroll_segments
from appo.envs.spec import EnvSpec, ObservationSpec

Observations = dict[str, Tensor]


class ResidualEncoder(nn.Module):
    """Flattens and joins all observations, then applies two residual blocks with layer normalization.

    Args:
        observations: shape and type of every key.
        config: flags of the network; only `--hidden_size` is used here.
    """

    def __init__(self, observations: dict[str, ObservationSpec], config: ModelConfig) -> None:
        super().__init__()
        self.keys = list(observations)
        self.output_size = width = config.hidden_size
        size = sum(torch.Size(spec.shape).numel() for spec in observations.values())
        self.input = nn.Linear(size, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(2)
        )

    def forward(self, obs: Observations) -> Tensor:
        """Map scaled observations {key} [N,*] to features [N,output_size]."""
        x: Tensor = self.input(torch.cat([obs[key].flatten(1) for key in self.keys], dim=1))
        for block in self.blocks:
            x = x + block(x)
        return x


class LeakyCore(nn.Module):
    """Returns the features and running means of the features, each mean with a learned rate of forgetting.

    Args:
        input_size: D, number of features per step.
        config: flags of the network, unused here; `--use_rnn` and `--rnn_*` configure the built-in cores.
    """

    def __init__(self, input_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.state_size, self.output_size = input_size, 2 * input_size
        self.rate = nn.Parameter(torch.linspace(-3.0, 3.0, input_size))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run t steps x [t,B,D] without a reset from state [B,D]; return output [t,B,2D] and the last state [B,D]."""
        keep, means = torch.sigmoid(self.rate), []
        for row in x:
            state = keep * state + (1 - keep) * row
            means.append(state)
        return torch.cat((x, torch.stack(means)), dim=-1), state

    def step(self, x: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run one step of N rows, x [N,D], first [N], state [N,D]; return output [N,2D] and the new state."""
        # masked_fill instead of a product: 0 * NaN would carry NaN into the next episode.
        y, state = self(x.unsqueeze(0), state.masked_fill(first.unsqueeze(1), 0.0))
        return y.squeeze(0), state

    def unroll(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        """Run whole trajectories: x [T+1,B,D], first [T+1,B], state [T/recurrence,B,D] before each segment."""
        return unroll_segments(self, x, first, state)


class LinearPolicy(ActorCritic):
    """A linear policy, which acts quickly, and a deeper critic.

    The inherited `act` and `unroll` scale the observations, then call `act_scaled` and `unroll_scaled`.

    Args:
        env_spec: shapes and types of observations and actions.
        config: flags of the network; only `--hidden_size` is used here.
    """

    def __init__(self, env_spec: EnvSpec, config: ModelConfig) -> None:
        super().__init__(env_spec, config, rnn_state_size=0)
        size = sum(torch.Size(env_spec.observations[key].shape).numel() for key in self.keys)
        self.policy = nn.Linear(size, env_spec.action.num_logits)
        self.critic = nn.Sequential(nn.Linear(size, config.hidden_size), nn.Tanh())
        self.value_head = nn.Linear(config.hidden_size, 1)  # the name lets `--normalize_returns` rescale the layer

    def act_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [N,L], value [N] and the state [N,0] of one step."""
        x = self._joined(obs)
        return self.policy(x), self.value_head(self.critic(x)).squeeze(-1), rnn_state

    def unroll_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [T,B,L] and value [T+1,B] of observations {key} [(T+1)*B,*]; first [T+1,B]."""
        x = self._joined(obs).view(*first.shape, -1)
        return self.policy(x[:-1]), self.value_head(self.critic(x)).squeeze(-1)

    def _joined(self, obs: Observations) -> Tensor:
        return torch.cat([obs[key].flatten(1) for key in self.keys], dim=1)
