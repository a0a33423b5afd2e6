"""Makes a model from flags and the spec of an environment, and draws the first weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from appo.algorithms.models import encoders
from appo.algorithms.models.actor_critic import (
    ActingNetwork,
    ActorCritic,
    PolicyHead,
    Tower,
    TowerActorCritic,
    UnitScale,
    model_inputs,
)
from appo.algorithms.models.config import ENCODERS, MLP_RESIDUAL, ModelConfig, check_size, encoder_names, refuse_weights
from appo.algorithms.models.cores import Core, IdentityCore, RecurrentCore
from appo.algorithms.models.custom import custom_class, custom_core, custom_encoder, custom_model, size_of
from appo.algorithms.models.encoders import DictEncoder, Encoder, share_images
from appo.algorithms.models.flat_module import FlatModule
from appo.envs.spec import EnvSpec, ObservationSpec
from appo.utils.errors import UsageError, text_of
from appo.utils.system import machine

Shape = tuple[int, ...]

OUTPUT_GAIN = 0.01
AS_DRAWN = "torch_default"
"""The `--policy_initialization` that keeps weights and biases as torch draws them."""


NORMALIZED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
"""Layers that `--use_spectral_norm` normalizes."""


def build_model(config: ModelConfig, env_spec: EnvSpec) -> ActorCritic:
    """Make the model of an environment; torch's global generator draws the weights.

    `--encoder_custom` may name a class for the whole model, the core or the encoder (`models/custom.py`). The custom
    part is tried on a fake batch here, so the probe reports faults before another process starts. Its weights stay
    unchanged.

    Raises:
        UsageError: the encoder cannot read the observations, or a custom part fails or rejects spectral normalization.
    """
    if make := custom_class(config, "model"):
        if config.use_spectral_norm:
            raise UsageError(
                f"--use_spectral_norm: --encoder_custom={config.encoder_custom} is a whole model, whose values must"
                " take any unit; normalize its layers where they are made"
            )
        return custom_model(make, config, env_spec)
    observations = model_inputs(env_spec)
    actor = build_tower(config, observations)
    critic = None if config.actor_critic_share_weights else build_tower(config, observations)
    model = TowerActorCritic(env_spec, config, actor, critic, policy_head_of(config, env_spec, actor.output_size))
    initialize_policy_head(config, model.policy_head)
    if config.policy_initialization != AS_DRAWN:
        # Values of size 1 would hide small rewards: targets and their statistics would consist of the critic's noise.
        _draw(config, model.value_head.weight, OUTPUT_GAIN)
        nn.init.zeros_(model.value_head.bias)
    if config.use_spectral_norm:
        _normalize_spectrally(config, model)
    return model


def count_weights(config: ModelConfig, observations: dict[str, ObservationSpec]) -> int:
    """Count the weights of built-in encoders and cores without allocation."""
    if custom_class(config, "encoder") or custom_class(config, "core"):
        return 0
    names = encoder_names(config, observations)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        parts: list[nn.Module] = [build_encoder(names[key], one.shape, config) for key, one in observations.items()]
        if config.use_rnn:
            size = sum(size_of(part, "output_size") for part in parts)
            parts.append(RecurrentCore(config.rnn_type, size, config.hidden_size, config.rnn_num_layers))
    towers = 1 if config.actor_critic_share_weights else 2
    return towers * sum(weight.numel() for part in parts for weight in part.parameters())


def build_encoder(subtype: str, shape: Shape, config: ModelConfig) -> Encoder:
    """Make the encoder of a row of `ENCODERS` for a shape; torch draws the weights."""
    builder = next(row.builder for row in ENCODERS if row.subtype == subtype)
    build: Callable[[Shape, ModelConfig], Encoder] = getattr(encoders, builder)
    encoder = build(shape, config)
    return encoders.with_layer_norm(encoder) if config.layer_norm and subtype != MLP_RESIDUAL else encoder


def build_tower(config: ModelConfig, observations: dict[str, ObservationSpec]) -> Tower:
    """Make an encoder of the observations and the core behind it.

    Raises:
        UsageError: `--encoder_custom` names a whole model, which another kind of network cannot contain.
        ResourceError: the weights need more memory than is free.
    """
    check_size(config)
    refuse_weights(count_weights(config, observations))
    if custom_class(config, "model"):
        raise UsageError(
            f"--encoder_custom={config.encoder_custom} is a whole model, an actor-critic: a network of values of"
            " actions, or a critic of its own, has room for an encoder or a core; name a class of these"
        )
    encoder: nn.Module
    if make := custom_class(config, "encoder"):
        encoder = custom_encoder(make, config, observations)
    else:
        names = encoder_names(config, observations)
        encoder = DictEncoder(
            {key: build_encoder(names[key], spec.shape, config) for key, spec in observations.items()}
        )
        initialize_layers(config, encoder)
    return Tower(encoder, _core(config, size_of(encoder, "output_size")))


def _core(config: ModelConfig, input_size: int) -> Core:
    if make := custom_class(config, "core"):
        return custom_core(make, config, input_size)
    if not config.use_rnn:
        return IdentityCore(input_size)
    core = RecurrentCore(config.rnn_type, input_size, config.hidden_size, config.rnn_num_layers)
    if config.policy_initialization == AS_DRAWN:
        return core
    for name, parameter in core.rnn.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            continue
        # A recurrent layer stacks the matrices of its gates; each is drawn by itself.
        for gate in torch.split(parameter.detach(), config.hidden_size):
            _draw(config, gate, config.policy_init_gain)
    return core


def initialize_layers(config: ModelConfig, encoder: nn.Module) -> None:
    """Draw the weights of linear and convolution layers by `--policy_initialization`; biases become 0."""
    if config.policy_initialization == AS_DRAWN:
        return
    for module in encoder.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            _draw(config, module.weight, config.policy_init_gain)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def policy_head_of(config: ModelConfig, env_spec: EnvSpec, input_size: int) -> PolicyHead:
    """Make the layer from features to logits, with the weights that torch draws."""
    return PolicyHead(
        input_size,
        env_spec.action.parts,
        adaptive_stddev=config.adaptive_stddev,
        initial_log_stddev=math.log(config.initial_stddev),
    )


def initialize_policy_head(config: ModelConfig, head: PolicyHead) -> None:
    """Draw the first weights of the layer of the logits as the flags ask."""
    if config.policy_initialization == AS_DRAWN:
        head.initialize_stddev()
        return
    # A small last layer makes all actions about equally likely (gaussian: means near 0) whatever the features are, so
    # that exploration starts unbiased and the first updates do not undo chance (https://arxiv.org/abs/2006.05990, 3.2).
    _draw(config, head.linear.weight, OUTPUT_GAIN)
    head.initialize_biases()


def _draw(config: ModelConfig, weight: Tensor, gain: float) -> None:
    draw = nn.init.orthogonal_ if config.policy_initialization == "orthogonal" else nn.init.xavier_uniform_
    draw(weight, gain=gain)


def _normalize_spectrally(config: ModelConfig, model: TowerActorCritic) -> None:
    """Bound the largest singular value of every linear layer and kernel, as a matrix [out,in*k*k], by 1.

    Every forward pass in training mode advances the estimate; acting models are in eval mode.

    Raises:
        UsageError: a custom encoder has no such layer, or a layer that cannot be normalized.

    Source: Miyato et al. 2018, arXiv:1802.05957, eq. 8 and algorithm 1.
    """
    for tower in (tower for tower in (model.actor, model.critic) if tower is not None):
        if not any(isinstance(module, NORMALIZED) for module in tower.encoder.modules()):
            raise UsageError(f"--use_spectral_norm: {type(tower.encoder).__name__} has no linear or convolution layer")
    for name, module in list(model.named_modules()):
        if not isinstance(module, NORMALIZED) or parametrize.is_parametrized(module, "weight"):
            continue  # the user's own layer may be normalized already
        try:
            spectral_norm(module)
        except (ValueError, KeyError, RuntimeError) as error:
            raise UsageError(f"--use_spectral_norm: {name} of {config.encoder_custom}: {text_of(error)}") from error
    # Normalized, a weight cannot take up the units of returns: they would cancel.
    parametrize.register_parametrization(model.value_head, "weight", UnitScale())


def new_model(config: ModelConfig, spec: EnvSpec, device: str) -> FlatModule:
    """Make a model on a device, all weights in one vector."""
    return FlatModule(build_model(config, spec).to(device))


def let_act(flat: FlatModule, config: ModelConfig, precision: str, device: str) -> None:
    """Prepare a model for acting: evaluation mode, and weights in bf16 where the model computes in bf16."""
    flat.module.eval()
    if computes_in_bf16(config, precision, flat.module, device):
        assert isinstance(flat.module, ActingNetwork)
        flat.compute_with_copies(flat.module.compute_in_bf16(), torch.bfloat16)


def let_learn(flat: FlatModule, config: ModelConfig, precision: str, device: str) -> None:
    """Prepare a model for training: weights stay float32 where the model computes in bf16; threads share images."""
    if computes_in_bf16(config, precision, flat.module, device):
        assert isinstance(flat.module, ActingNetwork)
        flat.module.compute_in_bf16()
    share_images(flat.module)


def computes_in_bf16(config: ModelConfig, precision: str, model: nn.Module, device: str) -> bool:
    """Return whether `--precision` means bf16 for a model: `auto` does for images on hardware with bf16 products.

    Networks of a few vectors gain nothing, and custom parts may not tolerate bf16.
    """
    if precision == "fp32" or config.encoder_custom:
        return False
    has_images = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if precision == "bf16" or not has_images:
        return precision == "bf16"
    if device == "cpu":
        return machine.multiplies_bf16()
    return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
