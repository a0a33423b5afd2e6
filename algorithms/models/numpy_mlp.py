"""The forward pass of small networks without torch.

At a few rows and layers of 64 units, torch spends nearly all its time on dispatch: 0.5 ms for what numpy computes in
0.1 ms. The weights are views of the torch module's, so there is nothing to keep in step with it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.models.actor_critic import PolicyHead, Tower, TowerActorCritic
from algorithms.models.cores import IdentityCore
from algorithms.models.encoders import CLIP, DictEncoder, Encoder, InputScaling

Array = NDArray[Any]
Activation = Callable[[Array], None]

MAX_WEIGHTS = 1 << 17
"""Larger networks are all arithmetic, and torch's is at least as good. Half a megabyte stays in the cache of a core."""


def _tanh(x: Array) -> None:
    np.tanh(x, out=x)


def _relu(x: Array) -> None:
    np.maximum(x, 0.0, out=x)


def _elu(x: Array) -> None:
    negative = np.minimum(x, 0.0)
    np.exp(negative, out=negative)  # numpy's expm1 is ten times slower, and more exact than float32 needs here
    np.subtract(negative, 1.0, out=negative)
    np.maximum(x, negative, out=x)  # for x > 0 the latter is 0


_ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.Tanh: _tanh, nn.ReLU: _relu, nn.ELU: _elu}


class _Layer(NamedTuple):
    weight: Array  # [in, out]
    bias: Array  # [out]
    activation: Activation
    out: Array  # [R, out]


class NumpyMlp:
    """What a `TowerActorCritic` of plain MLPs says about R rows; make it with `numpy_mlp`.

    Args:
        model: its weights and buffers must stay where they are, as those of a `FlatModule` do.
        rows: R.
    """

    def __init__(self, model: TowerActorCritic, rows: int) -> None:
        self.key = model.keys[0]
        self._scale = _scaling(model.scaling_of(self.key), rows)
        self._actor = _layers(model.actor, rows)
        self._critic = _layers(model.critic, rows) if model.critic else None
        self._policy = _policy(model.policy_head)
        weight, bias = model.value_layer()
        self._value_weight, self._value_bias = _view(weight).T, _view(bias)
        self._value = np.empty((rows, 1), np.float32)
        self._value_row = self._value[:, 0]
        self._return_mean, self._return_std = _view(model.return_mean), _view(model.return_std)

    def act(self, obs: Array, logits: Array, value: Array) -> None:
        """Fill logits [R, L] and value [R], in units of return, from obs [R, *] as the environment gave it."""
        x = self._scale(obs)
        features = _forward(self._actor, x)
        self._policy(features, logits)
        if self._critic is not None:
            features = _forward(self._critic, x)
        np.matmul(features, self._value_weight, out=self._value)
        np.add(self._value_row, self._value_bias, out=value)
        np.multiply(value, self._return_std, out=value)
        np.add(value, self._return_mean, out=value)


def numpy_mlp(model: nn.Module, rows: int) -> NumpyMlp | None:
    """The numpy twin of a model on the CPU, or None where it is not small, or more than MLPs of one observation."""
    if type(model) is not TowerActorCritic or len(model.keys) != 1 or model.return_mean.device.type != "cpu":
        return None
    if sum(parameter.numel() for parameter in model.parameters()) > MAX_WEIGHTS:
        return None
    towers = [tower for tower in (model.actor, model.critic) if tower is not None]
    return NumpyMlp(model, rows) if all(_is_plain(tower) for tower in towers) else None


def _is_plain(tower: Tower) -> bool:
    """Whether a tower is one MLP; a layer with spectral norm is of another class than Linear."""
    encoder = tower.encoder
    if tower.bf16 or type(tower.core) is not IdentityCore or type(encoder) is not DictEncoder:
        return False
    layers = list(_encoder_of(tower))
    if layers and isinstance(layers[0], nn.Flatten | nn.Unflatten):
        layers = layers[1:]
    linear, activations = layers[::2], layers[1::2]
    return all(type(layer) is nn.Linear for layer in linear) and all(type(a) in _ACTIVATIONS for a in activations)


def _encoder_of(tower: Tower) -> Encoder:
    encoder = tower.encoder
    assert isinstance(encoder, DictEncoder)
    (only,) = encoder.encoders
    assert isinstance(only, Encoder)
    return only


def _layers(tower: Tower, rows: int) -> list[_Layer]:
    made = []
    for linear, activation in pairwise(_encoder_of(tower)):
        if isinstance(linear, nn.Linear):
            out = np.empty((rows, linear.out_features), np.float32)
            made.append(_Layer(_view(linear.weight).T, _view(linear.bias), _ACTIVATIONS[type(activation)], out))
    return made


def _forward(layers: list[_Layer], x: Array) -> Array:
    for weight, bias, activation, out in layers:
        np.matmul(x, weight, out=out)
        np.add(out, bias, out=out)
        activation(out)
        x = out
    return x


def _policy(head: PolicyHead) -> Callable[[Array, Array], None]:
    """(features, logits): as `PolicyHead.forward`."""
    weight, bias = _view(head.linear.weight).T, _view(head.linear.bias)
    if head.log_stddev is None:

        def dependent(features: Array, logits: Array) -> None:
            np.matmul(features, weight, out=logits)
            np.add(logits, bias, out=logits)

        return dependent
    log_stddev = _view(head.log_stddev)
    outputs = np.cumsum([0, *head.output_sizes]).tolist()
    free = np.cumsum([0, *head.gaussian_sizes]).tolist()

    def with_free_deviations(features: Array, logits: Array) -> None:
        means, start = np.matmul(features, weight), 0
        np.add(means, bias, out=means)
        for part in range(len(outputs) - 1):
            width = outputs[part + 1] - outputs[part]
            logits[:, start : start + width] = means[:, outputs[part] : outputs[part + 1]]
            start += width
            width = free[part + 1] - free[part]
            logits[:, start : start + width] = log_stddev[free[part] : free[part + 1]]
            start += width

    return with_free_deviations


def _scaling(scaling: InputScaling, rows: int) -> Callable[[Array], Array]:
    """Observation [R, *] to [R, D] float32: as `InputScaling.forward`."""
    if scaling.running:
        mean, inv_std = _view(scaling.mean).reshape(-1), _view(scaling.inv_std).reshape(-1)
        out = np.empty((rows, mean.size), np.float32)

        def standardized(obs: Array) -> Array:
            np.subtract(obs.reshape(rows, -1), mean, out=out)
            np.multiply(out, inv_std, out=out)
            np.maximum(out, -CLIP, out=out)
            return np.minimum(out, CLIP, out=out)

        return standardized
    shift, scale = np.float32(scaling.subtract_mean), np.float32(scaling.scale)

    def scaled(obs: Array) -> Array:
        x: Array = obs.reshape(rows, -1).astype(np.float32)
        if shift:
            x -= shift
        return x / scale if scale != 1.0 else x

    return scaled


@torch.no_grad()
def _view(tensor: Tensor) -> Array:
    """The numbers of a weight where they are."""
    return tensor.detach().numpy()
