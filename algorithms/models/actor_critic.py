"""The network that acts: probabilities of actions, and values of states in an actor-critic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.cores import Core, autocast_off
from appo.algorithms.models.encoders import DictEncoder, Observations
from appo.algorithms.models.images import InputScaling
from appo.algorithms.ops.checks import require_shape
from appo.envs.spec import MASK_KEY, SINGLE_KEY, ActionPart, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError


def model_inputs(env_spec: EnvSpec) -> dict[str, ObservationSpec]:
    """Return the observations of a model: all except the action mask (UsageError: no observation)."""
    observations = {key: spec for key, spec in env_spec.observations.items() if key != MASK_KEY}
    if not observations:
        raise UsageError(f"the environment shows nothing but {MASK_KEY}; a model needs an observation")
    return observations


class Tower(nn.Module):
    """An encoder and the core behind it.

    Args:
        encoder: maps scaled observations [N,*] to [N,core's input size].
        core: memory.

    Attributes:
        bf16: whether matrix products and convolutions are computed in bf16; weights, states and results stay float32.
    """

    bf16 = False

    def __init__(self, encoder: nn.Module, core: Core) -> None:
        super().__init__()
        self.encoder, self.core = encoder, core
        self.output_size, self.state_size = core.output_size, core.state_size

    def step(self, obs: Observations, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step of N rows: features [N,output_size] and the next state [N,state_size]."""
        with self._autocast(first):
            return self.core.step(self.encoder(obs), first, state)

    def unroll(self, obs: Observations, first: Tensor, state: Tensor) -> Tensor:
        """Unroll obs{key} [(T+1)*B,*], first [T+1,B], state [T/recurrence,B,state_size] to [T+1,B,output_size]."""
        with self._autocast(first):
            return self.core.unroll(self.encoder(obs).reshape(*first.shape, -1), first, state)

    def _autocast(self, tensor: Tensor) -> AbstractContextManager[object]:
        return torch.autocast(tensor.device.type, torch.bfloat16) if self.bf16 else nullcontext()


class UnitScale(nn.Module):
    """Multiplies a weight by a number that is not trained, for units that the weight itself cannot take up."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        """Scale a weight of any shape."""
        return weight * self.scale


class PolicyHead(nn.Module):
    """The layer that maps features to the logits of all action parts, side by side.

    Args:
        input_size: number of features per row.
        parts: factors of the action distribution.
        adaptive_stddev: whether log standard deviations of gaussian parts are outputs; otherwise they are free
            parameters, equal in every state.
        initial_log_stddev: initial value in both cases (the layer's weights must start small).
    """

    def __init__(
        self, input_size: int, parts: Sequence[ActionPart], *, adaptive_stddev: bool, initial_log_stddev: float
    ) -> None:
        super().__init__()
        self.initial_log_stddev = initial_log_stddev
        self.gaussian_sizes = [part.size if part.is_real else 0 for part in parts]
        self.output_sizes = [part.size if part.is_real and not adaptive_stddev else part.num_logits for part in parts]
        self.linear = nn.Linear(input_size, sum(self.output_sizes))
        self.log_stddev: nn.Parameter | None = None
        if not adaptive_stddev and any(self.gaussian_sizes):
            self.log_stddev = nn.Parameter(torch.full((sum(self.gaussian_sizes),), initial_log_stddev))

    def initialize_biases(self) -> None:
        """Set the biases to zero, but those of adaptive standard deviations to their initial value."""
        with torch.no_grad():
            self.linear.bias.zero_()
        self.initialize_stddev()

    def initialize_stddev(self) -> None:
        """Let the biases of adaptive standard deviations be their initial value; a free parameter is that already."""
        if self.log_stddev is not None:
            return
        with torch.no_grad():
            for bias, size in zip(torch.split(self.linear.bias, self.output_sizes), self.gaussian_sizes, strict=True):
                bias[len(bias) - size :].fill_(self.initial_log_stddev)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits [...,L] of features [...,input_size]."""
        logits: Tensor = self.linear(features)
        if self.log_stddev is None:
            return logits
        outputs = torch.split(logits, self.output_sizes, dim=-1)
        log_stddevs = torch.split(self.log_stddev.expand(*logits.shape[:-1], -1), self.gaussian_sizes, dim=-1)
        return torch.cat([piece for pair in zip(outputs, log_stddevs, strict=True) for piece in pair], dim=-1)


class ActingNetwork(nn.Module, ABC):
    """The network that acts: the interface of a model for acting and playing, with or without values of states.

    A subclass defines the path from scaled observations to outputs in `act_scaled`. All parameters and buffers are
    float32. Observations are scaled here; only `ActionDistribution` applies an action mask, so acting and learning
    cannot differ. Use `eval()` for a model that only acts.

    Args:
        env_spec: spec of the environment.
        config: flags of the network, with the scaling of observations.
        rnn_state_size: H, numbers in the memory of a row; 0 without a memory.

    Attributes:
        has_value: whether `act` estimates values of states.
        keys: observation keys that the model reads.
        normalized_keys: keys with running statistics, set by `set_observation_statistics`.
        keys_scaled_later: keys that `act` leaves to the encoders to scale.
        logits_name, logits_meaning: name and description of the first output of `act`, for people.
    """

    has_value: ClassVar[bool] = False
    logits_name: ClassVar[str] = "logits"
    logits_meaning: ClassVar[str] = (
        "of every part of the action: one per choice or bit; means, then log standard deviations"
    )

    def __init__(self, env_spec: EnvSpec, config: ModelConfig, rnn_state_size: int = 0) -> None:
        super().__init__()
        scalings = {key: _scaling(config, key, spec) for key, spec in model_inputs(env_spec).items()}
        self.keys = tuple(scalings)
        self.normalized_keys = tuple(key for key, scaling in scalings.items() if scaling.running)
        self.scalings = nn.ModuleList(scalings.values())
        self.keys_scaled_later: frozenset[str] = frozenset()
        self.rnn_state_size = rnn_state_size

    @abstractmethod
    def act_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Act on observations {key} [N,*] that are `scaled` already; the state counts as zero where `first`."""

    def act(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Answer N rows, one step each; return logits [N,L], value [N] (None: no values) and next state [N,H], float32.

        Args:
            obs: {key} [N,*] from the environment; not modified.
            first: [N] bool: the observation starts an episode.
            rnn_state: [N,H] from the previous call for the same rows; not modified.
        """
        return self.act_scaled(self._scaled_now(obs), first, rnn_state)

    def value_of(self, obs: Observations, logits: Tensor, value: Tensor | None) -> Tensor | None:
        """Return the values [N] in units of return of what `act` has computed for {key} [N, *]; None: no values."""
        return None

    @property
    def towers(self) -> list[Tower]:
        """Return encoders with their cores, which do most of the arithmetic; none in a custom model."""
        return []

    def leave_bytes_to_encoders(self, env_spec: EnvSpec) -> None:
        """Let the encoders of the towers scale images of bytes."""
        encoders = [tower.encoder for tower in self.towers if isinstance(tower.encoder, DictEncoder)]
        for key, encoder in (item for found in encoders for item in found.items()):
            if encoder.num_image_layers and not env_spec.observations[key].dtype.startswith("float"):
                encoder.scale_with(self.scaling_of(key))
                self.keys_scaled_later |= {key}

    def compute_in_bf16(self) -> list[nn.Parameter]:
        """Let the towers compute in bf16; return the weights that may become bf16 copies in a model that only acts.

        The heads stay in float32, and on a GPU the core too.
        """
        for tower in self.towers:
            tower.bf16 = True
        on_cpu = next(self.parameters()).device.type == "cpu"
        kinds = (nn.Linear, nn.Conv2d, nn.GRU) if on_cpu else (nn.Linear, nn.Conv2d)
        modules = [module for tower in self.towers for module in tower.modules() if isinstance(module, kinds)]
        return [parameter for module in modules for parameter in module.parameters(recurse=False)]

    @torch.no_grad()
    def set_observation_statistics(self, key: str, mean: Tensor, inv_std: Tensor) -> None:
        """Copy the statistics of the raw observation `key`, both [*shape], into the buffers, in place."""
        scaling = self.scaling_of(key)
        scaling.mean.copy_(mean)
        scaling.inv_std.copy_(inv_std)

    def scaling_of(self, key: str) -> InputScaling:
        """Return the module that scales the observation `key` before the encoders."""
        scaling = self.get_submodule(f"scalings.{self.keys.index(key)}")
        assert isinstance(scaling, InputScaling)
        return scaling

    def scaled(self, obs: Observations) -> Observations:
        """Return observations {key} [N,*] as the networks see them; new tensors."""
        return {key: scaling(obs[key]) for key, scaling in zip(self.keys, self.scalings, strict=True)}

    def _scaled_now(self, obs: Observations) -> Observations:
        later = self.keys_scaled_later
        scalings = zip(self.keys, self.scalings, strict=True)
        return {key: obs[key] if key in later else scaling(obs[key]) for key, scaling in scalings}


class ActorCritic(ActingNetwork):
    """Policy and value function: the interface of a model for acting, learning and playing.

    A subclass defines the path from scaled observations to outputs in `act_scaled` and `unroll_scaled`, and calls the
    last, linear layer of its values `value_head`.

    Attributes:
        return_mean, return_std: scalars: `value` is in units of (return - return_mean) / return_std.
    """

    has_value: ClassVar[bool] = True

    return_mean: Tensor
    return_std: Tensor
    value_head: nn.Linear

    def __init__(self, env_spec: EnvSpec, config: ModelConfig, rnn_state_size: int = 0) -> None:
        super().__init__(env_spec, config, rnn_state_size)
        self.register_buffer("return_mean", torch.zeros(()))
        self.register_buffer("return_std", torch.ones(()))

    @abstractmethod
    def act_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Act on observations {key} [N,*] that are `scaled` already; the state counts as zero where `first`."""

    @abstractmethod
    def unroll_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        """Unroll observations {key} [(T+1)*B,*] that are `scaled` already; the state is reset as in `act_scaled`."""

    def act(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Answer N rows, one step each; return logits [N,L], normalized value [N] and next state [N,H], float32."""
        return self.act_scaled(self._scaled_now(obs), first, rnn_state)

    def unroll(self, obs: Observations, first: Tensor, rnn_state: Tensor, recurrence: int) -> tuple[Tensor, Tensor]:
        """Repeat `act` on whole trajectories, differentiably; return logits [T,B,L] and normalized value [T+1,B].

        Args:
            obs: {key} [T+1,B,*]; not modified.
            first: [T+1,B] bool.
            rnn_state: [T/recurrence,B,H], state before every BPTT segment of `recurrence` steps; gets no gradient. Step
                T continues from the last segment.
            recurrence: steps per segment; divides T.

        Raises:
            ValueError: the number of states differs from segments and columns.
        """
        num_steps, num_columns = first.shape[0] - 1, first.shape[1]
        require_shape("rnn_state", rnn_state, (num_steps // recurrence, num_columns, self.rnn_state_size))
        if num_steps % recurrence:
            raise ValueError(f"recurrence {recurrence} does not divide the {num_steps} steps of a trajectory")
        rows = {key: obs[key].flatten(0, 1) for key in self.keys}
        return self.unroll_scaled(self._scaled_now(rows), first, rnn_state)

    def normalize_value(self, value: Tensor) -> Tensor:
        """Convert values from reward units to those of the value head."""
        return (value - self.return_mean) / self.return_std

    def denormalize_value(self, value: Tensor) -> Tensor:
        """Convert values from the units of the value head to reward units."""
        return value * self.return_std + self.return_mean

    def value_of(self, obs: Observations, logits: Tensor, value: Tensor | None) -> Tensor:
        """Return the values [N] in units of return of what `act` has computed for observations {key} [N, *]."""
        assert value is not None
        return self.denormalize_value(value)

    @torch.no_grad()
    def set_return_statistics(self, mean: Tensor | float, std: Tensor | float) -> None:
        """Change the units of the values and their layer, so that values in units of return stay equal.

        Values bootstrap returns, and returns set the units; without the last step both could grow without end. Tensors
        change in place, because they may be views of a flat vector.

        Source: van Hasselt et al. 2016, arXiv:1602.07714, eq. 6 and 7.
        """
        mean, std = (torch.as_tensor(x, device=self.return_std.device) for x in (mean, std))
        weight, bias = self.value_layer()
        weight.mul_(self.return_std / std)
        bias.mul_(self.return_std).add_(self.return_mean - mean).div_(std)
        self.return_mean.copy_(mean)
        self.return_std.copy_(std)

    def value_layer(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the last layer of the values: `value_head`, unless a subclass has another one."""
        return self.value_head.weight, self.value_head.bias


class TowerActorCritic(ActorCritic):
    """The built-in model: policy and value share a tower or have one each.

    Args:
        env_spec, config: as in `ActorCritic`.
        actor: tower of the policy, and of the value without a critic; its state comes first.
        critic: tower of the value alone.
        policy_head: layer from the actor's features to logits.
    """

    def __init__(
        self, env_spec: EnvSpec, config: ModelConfig, actor: Tower, critic: Tower | None, policy_head: PolicyHead
    ) -> None:
        super().__init__(env_spec, config, actor.state_size + (critic.state_size if critic else 0))
        self.actor, self.critic, self.policy_head = actor, critic, policy_head
        self.value_head = nn.Linear((critic or actor).output_size, 1)
        self.leave_bytes_to_encoders(env_spec)

    def value_layer(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the value head; the scale and the bias, if its weight is normalized spectrally."""
        if not parametrize.is_parametrized(self.value_head, "weight"):
            return super().value_layer()
        scale = next(module for module in self.value_head.modules() if isinstance(module, UnitScale))
        return scale.scale, self.value_head.bias

    @property
    def towers(self) -> list[Tower]:
        """Return the tower of the policy, and the tower of the value if it has one of its own."""
        return [tower for tower in (self.actor, self.critic) if tower is not None]

    def act_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute one step of the tower or of both."""
        if self.critic is None:
            features, rnn_state = self.actor.step(obs, first, rnn_state)
            return *self._heads(features, features), rnn_state
        actor_state, critic_state = self._split(rnn_state)
        actor_features, actor_state = self.actor.step(obs, first, actor_state)
        critic_features, critic_state = self.critic.step(obs, first, critic_state)
        return *self._heads(actor_features, critic_features), torch.cat((actor_state, critic_state), dim=-1)

    def unroll_scaled(self, obs: Observations, first: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all steps of the tower or of both."""
        if self.critic is None:
            features = self.actor.unroll(obs, first, rnn_state)
            return self._heads(features[:-1], features)
        actor_state, critic_state = self._split(rnn_state)
        actor_features = self.actor.unroll(obs, first, actor_state)
        return self._heads(actor_features[:-1], self.critic.unroll(obs, first, critic_state))

    def _split(self, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the recurrent states [...,H] of the actor and of the critic."""
        return rnn_state[..., : self.actor.state_size], rnn_state[..., self.actor.state_size :]

    def _heads(self, actor_features: Tensor, critic_features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [...,L] and value [...], in float32 even under autocast: bf16 has two to three digits."""
        with autocast_off(actor_features.device.type):
            return self.policy_head(actor_features.float()), self.value_head(critic_features.float()).squeeze(-1)


def _scaling(config: ModelConfig, key: str, spec: ObservationSpec) -> InputScaling:
    is_main = key == SINGLE_KEY
    scale = config.obs_scale if is_main else None
    return InputScaling(
        spec.shape,
        subtract_mean=config.obs_subtract_mean if is_main else 0.0,
        scale=scale or (float(spec.high) if spec.dtype == "uint8" else 1.0),
        running=config.normalizes(spec),
    )
