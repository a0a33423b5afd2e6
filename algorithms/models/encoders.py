"""Encoders map the observations of one moment to a feature vector: scaling, a network per observation, their join."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from appo.algorithms.models.config import ModelConfig
from appo.algorithms.models.images import (
    IMAGES_AT_ONCE,
    Bytes,
    ChannelsLast,
    FirstConv2d,
    FlattenImages,
    InputScaling,
    computed_in,
)
from appo.algorithms.models.side_by_side import side_by_side
from appo.envs.spec import is_channels_first
from appo.utils.system import machine

FEW_CHANNELS = 8
"""Limit of channels that leave a vector register partly empty."""

Observations = dict[str, Tensor]
Shape = tuple[int, ...]
ConvLayer = tuple[int, int, int]
Layer = Callable[[Tensor], Tensor]

CONVNET_SIMPLE: tuple[ConvLayer, ...] = ((32, 8, 4), (64, 4, 2), (128, 3, 2))
"""Output channels, kernel size and stride, both in pixels; the net of Sample Factory."""

CONVNET_ATARI: tuple[ConvLayer, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""The net of Mnih et al. 2015 (https://www.nature.com/articles/nature14236)."""

CONVNET_DQN: tuple[ConvLayer, ...] = ((16, 8, 4), (32, 4, 2))
"""The net of Mnih et al. 2013 (https://arxiv.org/abs/1312.5602), a third of the work of `CONVNET_ATARI`."""

IMPALA_CHANNELS = (16, 32, 32)
"""Channels of the three stages of the deep net of Espeholt et al. 2018 (https://arxiv.org/abs/1802.01561, fig. 3)."""

_NONLINEARITIES: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh}


def nonlinearity(name: str, *, inplace: bool = False) -> nn.Module:
    """Make the module of `elu`, `relu` or `tanh`; `inplace` if only this module needs its input."""
    kind = _NONLINEARITIES[name]
    return kind(inplace=True) if inplace and kind is not nn.Tanh else kind()


class Encoder(nn.Sequential):
    """The layers that map an observation [N,*] to features [N,output_size].

    Args:
        layers: layers in order.
        output_size: number of features of the last layer.
        num_image_layers: number of first layers with images; the very first only arranges them. A CPU takes
            `IMAGES_AT_ONCE` at most, and threads take equal shares: tensors between layers stay in the cache, and a
            training step needs half the memory.

    Attributes:
        threads: number of threads that share images on a CPU; 0: the threads of the process.
    """

    def __init__(self, layers: Sequence[nn.Module], output_size: int, num_image_layers: int = 0) -> None:
        super().__init__(*layers)
        self.output_size, self.num_image_layers, self.threads = output_size, num_image_layers, 1
        self._bytes: Bytes | None = None

    def scale_with(self, scaling: InputScaling) -> None:
        """Accept images of bytes too, and scale them here: on a CPU a few at a time, never kept as floats."""
        first = self[1]
        self._bytes = Bytes(scaling, self[0], first if isinstance(first, FirstConv2d) else None)

    def forward(self, x: Tensor) -> Tensor:
        """Encode x [N,*] to [N,output_size]."""
        if not self.num_image_layers:
            return _through(self, x)
        at_once = IMAGES_AT_ONCE[computed_in(x)] if x.device.type == "cpu" else len(x)
        if self.training and any(parametrize.is_parametrized(part) for part in self.modules()):
            # A pass continues the estimates of spectral norms: one estimate for all parts, and a single thread.
            with parametrize.cached():
                return self._forward(self._ready(x)[0], at_once, x)
        layers, trained = self._ready(x)
        forward = partial(self._forward, layers, at_once)
        if self._threads == 1 or len(x) <= at_once:
            return forward(x)
        return side_by_side(forward, torch.split(x, -(-len(x) // self._threads)), trained)

    @property
    def _threads(self) -> int:
        return self.threads or machine.threads()

    def _ready(self, x: Tensor) -> tuple[list[Layer], list[Tensor]]:
        """Return the layers for images x, and the tensors in them that gradients flow to."""
        dtype = computed_in(x)
        if dtype == torch.float32:
            return list(self), list(self.parameters()) if self._threads > 1 else []
        are_bytes = self._bytes is not None and not x.is_floating_point()
        layers, trained = zip(*(_rounded(layer, dtype, are_bytes) for layer in self), strict=True)
        return list(layers), [tensor for tensors in trained for tensor in tensors]

    def _forward(self, layers: Sequence[Layer], at_once: int, x: Tensor) -> Tensor:
        """Encode x in this thread alone."""
        image_layers, others = layers[: self.num_image_layers], layers[self.num_image_layers :]
        chunks = -(-len(x) // at_once) if len(x) else 1
        features = [self._encode(some, image_layers) for some in torch.tensor_split(x, chunks)]
        return _through(others, torch.cat(features) if len(features) > 1 else features[0])

    def _encode(self, images: Tensor, layers: Sequence[Layer]) -> Tensor:
        if self._bytes is None or images.is_floating_point():
            return _through(layers, images)
        if images.device.type != "cpu":
            return _through(layers, self._bytes.scaling(images))
        prepared = self._bytes.prepare(images)
        _, first, *others = layers
        with self._bytes.kept(images, prepared):  # only here: hooks make threads wait for each other at what is saved
            features = first(prepared)
        return _through(others, features)


def share_images(module: nn.Module) -> bool:
    """Share images among the threads of the process, and run operations of torch on one; return whether encoders exist.

    The rest of the work is too small to be divided: with both kinds of threads an image of Pong in batches of 256 took
    two cores 3 % longer, and a third longer where waiting threads spin.
    """
    encoders = [part for part in module.modules() if isinstance(part, Encoder) and part.num_image_layers]
    for encoder in encoders:
        encoder.threads = 0
    if encoders:
        torch.set_num_threads(1)
    return bool(encoders)


def _rounded(layer: nn.Module, dtype: torch.dtype, are_bytes: bool) -> tuple[Layer, list[Tensor]]:
    """Return a layer with rounded and arranged weights for images, and its trained tensors.

    Preparing once, not for every few images of every thread, saves 7 of 280 us per trained image (Pong, batches of 256)
    with one thread, 23 of 231 with two.
    """
    if not isinstance(layer, nn.Conv2d | nn.Linear):
        return layer, list(layer.parameters())
    bias = None if layer.bias is None else layer.bias.to(dtype)
    ready: Layer
    if isinstance(layer, FirstConv2d):
        weight = layer.kernel(dtype, divided=are_bytes)
        ready = partial(layer.convolve, kernel=weight, bias=bias)
    elif isinstance(layer, nn.Conv2d):
        weight = layer.weight.to(dtype, memory_format=torch.channels_last)
        ready = partial(layer._conv_forward, weight=weight, bias=bias)  # which knows its strides, padding and groups
    else:
        weight = layer.weight.to(dtype)
        ready = partial(nn.functional.linear, weight=weight, bias=bias)
    return ready, [weight] if bias is None else [weight, bias]


def _through(layers: Iterable[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


# The builders, which the table `ENCODERS` of `config.py` names. Each makes an encoder of observations of a shape [*] by
# the flags; its weights are as torch draws them.


def build_mlp(shape: Shape, config: ModelConfig) -> Encoder:
    """Build the net for observations that are not images: a Linear layer and a nonlinearity per size."""
    numbers = torch.Size(shape).numel()
    return _of_flat(shape, *_linear_layers(numbers, config.encoder_mlp_layers, config.nonlinearity))


def build_mlp_residual(shape: Shape, config: ModelConfig) -> Encoder:
    """Build the residual net for observations that are not images: a Linear layer, blocks, LayerNorm.

    Source: SimBa (Lee et al. 2024, arXiv:2410.09754), whose running statistics of observations `InputScaling` has.
    """
    width = config.encoder_mlp_layers[0]
    blocks = [ResidualMlpBlock(width) for _ in config.encoder_mlp_layers]
    return _of_flat(shape, [nn.Linear(torch.Size(shape).numel(), width), *blocks, nn.LayerNorm(width)], width)


def _of_flat(shape: Shape, layers: list[nn.Module], size: int) -> Encoder:
    """Make the encoder of layers that take flat observations, with features [N,size]."""
    if len(shape) == 1:
        return Encoder(layers, size)
    # An observation without dimensions is [N]: nn.Flatten would leave it so.
    return Encoder([nn.Flatten() if shape else nn.Unflatten(0, (-1, 1)), *layers], size)


def with_layer_norm(encoder: Encoder) -> Encoder:
    """Return the encoder with normalized outputs of its linear layers and convolutions; images as a whole.

    Source: Gallici et al. 2024, arXiv:2407.04811, section 3.1.
    """
    layers: list[nn.Module] = []
    num_image_layers = 0
    for i, layer in enumerate(encoder):
        layers.append(layer)
        if isinstance(layer, nn.Linear):
            layers.append(nn.LayerNorm(layer.out_features))
        elif isinstance(layer, nn.Conv2d):
            layers.append(nn.GroupNorm(1, layer.out_channels))
        if i + 1 == encoder.num_image_layers:
            num_image_layers = len(layers)
    return Encoder(layers, encoder.output_size, num_image_layers)


def build_convnet(shape: Shape, config: ModelConfig, conv_layers: tuple[ConvLayer, ...]) -> Encoder:
    """Build a stack of convolutions for an image [C,H,W] or [H,W,C], then Linear layers; a nonlinearity after each."""
    layers, channels = _image_layers(shape)
    for i, (out_channels, kernel_size, stride) in enumerate(conv_layers):
        has_blocks = not i and stride > 1 and kernel_size % stride == 0 and channels < FEW_CHANNELS
        convolution = (
            FirstConv2d(channels, out_channels, kernel_size, stride, is_channels_first(shape))
            if has_blocks
            else nn.Conv2d(channels, out_channels, kernel_size, stride)
        )
        layers += [convolution, nonlinearity(config.nonlinearity, inplace=True)]
        channels = out_channels
    return _with_linear_layers(layers, shape, config)


build_convnet_simple = partial(build_convnet, conv_layers=CONVNET_SIMPLE)
build_convnet_atari = partial(build_convnet, conv_layers=CONVNET_ATARI)
build_convnet_dqn = partial(build_convnet, conv_layers=CONVNET_DQN)


def build_impala(shape: Shape, config: ModelConfig) -> Encoder:
    """Build IMPALA's residual net for an image [C,H,W] or [H,W,C] of any size.

    A stage is a convolution, a pooling that halves the image, and two residual blocks.
    """
    layers, channels = _image_layers(shape)
    for out_channels in IMPALA_CHANNELS:
        layers += [
            nn.Conv2d(channels, out_channels, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            ResidualBlock(out_channels, config.nonlinearity),
            ResidualBlock(out_channels, config.nonlinearity),
        ]
        channels = out_channels
    return _with_linear_layers([*layers, nonlinearity(config.nonlinearity)], shape, config)


class ResidualBlock(nn.Module):
    """Computes x + conv(f(conv(f(x)))) with 3x3 kernels and as many channels out as in."""

    def __init__(self, channels: int, activation: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nonlinearity(activation),
            nn.Conv2d(channels, channels, 3, padding=1),
            nonlinearity(activation),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [N,channels,height,width]."""
        change: Tensor = self.layers(x)
        return x + change


class ResidualMlpBlock(nn.Module):
    """Computes x + W2 relu(W1 LayerNorm(x)) with biases and four times as many hidden units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 4 * width
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [N,width]."""
        change: Tensor = self.layers(x)
        return x + change


class DictEncoder(nn.Module):
    """Encodes every observation key by an encoder of its own; the features stand side by side."""

    def __init__(self, encoders: dict[str, Encoder]) -> None:
        super().__init__()
        self.keys = tuple(encoders)
        # A list, because keys may hold "." or the name of a method, which nn.ModuleDict refuses.
        self.encoders = nn.ModuleList(encoders.values())
        self.output_size = sum(encoder.output_size for encoder in encoders.values())

    def items(self) -> Iterator[tuple[str, Encoder]]:
        """Yield every key with its encoder."""
        yield from zip(self.keys, cast(Iterable[Encoder], self.encoders), strict=True)

    def forward(self, obs: Observations) -> Tensor:
        """Encode obs{key} [N,*] to [N,output_size]."""
        features = [encoder(obs[key]) for key, encoder in self.items()]
        return features[0] if len(features) == 1 else torch.cat(features, dim=-1)


def _image_layers(shape: Shape) -> tuple[list[nn.Module], int]:
    first = is_channels_first(shape)
    return [ChannelsLast(first)], shape[0] if first else shape[2]


def _linear_layers(size: int, layer_sizes: Shape, activation: str) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    for layer_size in layer_sizes:
        layers += [nn.Linear(size, layer_size), nonlinearity(activation, inplace=True)]
        size = layer_size
    return layers, size


def _with_linear_layers(layers: list[nn.Module], shape: Shape, config: ModelConfig) -> Encoder:
    image_layers = nn.Sequential(*layers, FlattenImages() if config.nonlinearity == "elu" else nn.Flatten())
    with torch.no_grad():
        num_features = image_layers(torch.zeros(1, *shape)).shape[1]
    sizes = (config.hidden_size,) * config.encoder_extra_fc_layers
    linear_layers, size = _linear_layers(num_features, sizes, config.nonlinearity)
    return Encoder([*image_layers, *linear_layers], size, len(image_layers))
