import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from appo.algorithms.models.build import build_encoder
from appo.algorithms.models.config import ENCODERS, MLP, ModelConfig, image_sides
from appo.algorithms.models.encoders import (
    CONVNET_ATARI,
    CONVNET_DQN,
    CONVNET_SIMPLE,
    ConvLayer,
    DictEncoder,
    Encoder,
    build_convnet,
    build_impala,
    build_mlp,
    is_channels_first,
    share_images,
)
from appo.algorithms.models.flat_module import FlatModule
from appo.algorithms.models.images import CLIP, IMAGES_AT_ONCE, Blocks, FirstConv2d, FlattenImages, InputScaling
from tests.patience import HANG_SECONDS
from tests.unit.models.cases import config_of

AT_ONCE = IMAGES_AT_ONCE[torch.float32]


def mlp_encoder(shape: tuple[int, ...], sizes: tuple[int, ...], activation: str) -> Encoder:
    return build_mlp(shape, config_of(encoder_mlp_layers=sizes, nonlinearity=activation))


def with_extra(sizes: tuple[int, ...], activation: str) -> ModelConfig:
    (size,) = {*sizes} or {1}
    return config_of(hidden_size=size, encoder_extra_fc_layers=len(sizes), nonlinearity=activation)


def conv_encoder(
    shape: tuple[int, ...], layers: tuple[ConvLayer, ...], sizes: tuple[int, ...], activation: str
) -> Encoder:
    return build_convnet(shape, with_extra(sizes, activation), layers)


def impala_encoder(shape: tuple[int, ...], sizes: tuple[int, ...], activation: str) -> Encoder:
    return build_impala(shape, with_extra(sizes, activation))


def conv_encoder_of_simple(shape: tuple[int, ...] = (3, 36, 36)) -> Encoder:
    return conv_encoder(shape, CONVNET_SIMPLE, (16,), "elu")


def impala_encoder_of_one(shape: tuple[int, ...] = (3, 36, 36)) -> Encoder:
    return impala_encoder(shape, (16,), "relu")


@pytest.mark.parametrize("name", [row.subtype for row in ENCODERS if row.type != MLP])
@pytest.mark.parametrize("shape", [(4, 84, 84), (72, 128, 3), (1, 36, 36)])
def test_every_image_encoder_reads_both_layouts(name: str, shape: tuple[int, ...]) -> None:
    encoder = build_encoder(name, shape, config_of())
    assert encoder.output_size == 8
    assert encoder(torch.rand(3, *shape)).shape == (3, 8)


@pytest.mark.parametrize("shape", [(5,), (2, 3), ()])
@pytest.mark.parametrize("blocks", [1, 3])
def test_residual_blocks_are_those_of_the_paper(shape: tuple[int, ...], blocks: int) -> None:
    encoder = build_encoder("mlp_residual", shape, config_of(encoder_mlp_layers=(6,) * blocks, nonlinearity="tanh"))
    for parameter in encoder.parameters():
        nn.init.normal_(parameter)
    weights = [parameter.detach().double().numpy() for parameter in encoder.parameters()]
    assert [w.shape for w in weights[2:8]] == [(6,), (6,), (24, 6), (24,), (6, 24), (6,)]
    assert len(weights) == 2 + 6 * blocks + 2

    def layer_norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
        normalized: np.ndarray = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        return normalized * scale + shift

    observations = torch.randn(7, *shape)
    x = observations.double().numpy().reshape(7, -1) @ weights[0].T + weights[1]
    for i in range(2, 2 + 6 * blocks, 6):
        scale, shift, w1, b1, w2, b2 = weights[i : i + 6]
        x = x + np.maximum(layer_norm(x, scale, shift) @ w1.T + b1, 0.0) @ w2.T + b2
    features = encoder(observations).detach().numpy()
    assert encoder.output_size == 6
    np.testing.assert_allclose(features, layer_norm(x, *weights[-2:]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 84, 84), (3, 37, 41), (72, 128, 3), (50, 45, 1)])
@pytest.mark.parametrize(("kernel", "stride"), [(8, 4), (6, 3)])
def test_a_first_convolution_of_blocks_is_the_same_convolution(
    shape: tuple[int, ...], kernel: int, stride: int
) -> None:
    channels_first = is_channels_first(shape)
    convolution = FirstConv2d(min(shape), 32, kernel, stride, channels_first)
    images = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    planes = (images if channels_first else images.permute(0, 3, 1, 2)).float()
    blocks = convolution.blocks.of(images)
    torch.testing.assert_close(blocks.float().permute(0, 3, 1, 2), convolution.blocks.of_planes(planes), rtol=0, atol=0)
    found = []
    for x in (blocks.float().permute(0, 3, 1, 2), planes):
        convolved = convolution(x)
        found.append((convolved, *torch.autograd.grad(convolved.square().mean(), list(convolution.parameters()))))
    for by_blocks, plain in zip(*found, strict=True):
        torch.testing.assert_close(by_blocks, plain, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84, 3)])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("subtracted", [0.0, 3.0])
@pytest.mark.parametrize("scale", [255.0, 256.0])
def test_a_first_convolution_takes_blocks_of_bytes_in_bf16(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], running: bool, subtracted: float, scale: float
) -> None:
    torch.manual_seed(5)  # a nonlinearity near zero can multiply errors
    cut: list[torch.dtype] = []
    encoder, images = conv_encoder(shape, CONVNET_ATARI, (8,), "relu"), torch.randint(0, 256, (3, *shape)).byte()
    scaling = InputScaling(shape, subtract_mean=subtracted, scale=scale, running=running)
    if running:
        scaling.mean.copy_(torch.rand(shape) * 100)
        scaling.inv_std.copy_(torch.rand(shape) / 100)
    encoder.scale_with(scaling)
    blocks_of = Blocks.of
    monkeypatch.setattr(Blocks, "of", lambda blocks, x: cut.append(x.dtype) or blocks_of(blocks, x))
    found = []
    for x, bf16 in ((images, True), (scaling(images), True), (images, False)):
        cut.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            features = encoder(x)
        found.append((features.float(), *torch.autograd.grad(features.float().mean(), list(encoder.parameters()))))
        assert (torch.uint8 in cut, bool(cut)) == (bf16 and x is images, bf16)
    in_bf16, of_floats, in_float32 = found
    for one, other, exact in zip(in_bf16, of_floats, in_float32, strict=True):
        if running or subtracted or scale == 256.0:
            assert torch.equal(one, other)  # the same bf16 numbers, whichever way they came
        else:  # kernels are divided instead of images, and rounded then; a power of two changes no rounding
            assert (one - exact).norm() < 0.1 * exact.norm()
    torch.testing.assert_close(in_bf16[0], in_float32[0], rtol=0.1, atol=0.02)
    assert encoder[1].weight.shape == (32, min(shape), 8, 8)


@pytest.mark.parametrize("make", [conv_encoder_of_simple, impala_encoder_of_one])
def test_images_taken_by_parts_have_the_features_and_gradients_of_the_whole(make: Callable[[], Encoder]) -> None:
    encoder, images = make(), torch.rand(AT_ONCE + 3, 3, 36, 36)
    layer_by_layer = nn.Sequential(*encoder)
    found = []
    for network in (encoder, layer_by_layer):
        features = network(images)
        gradients = torch.autograd.grad(features.square().sum(), list(network.parameters()))
        found.append((features, *gradients))
    for by_parts, whole in zip(*found, strict=True):
        torch.testing.assert_close(by_parts, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("shape", [(3, 36, 36), (36, 36, 3)])
@pytest.mark.parametrize("make", [conv_encoder_of_simple, impala_encoder_of_one])
def test_images_that_come_as_bytes_are_scaled_in_the_encoder_and_kept_as_bytes(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Encoder], shape: tuple[int, ...], running: bool
) -> None:
    encoder, images = make(shape), torch.randint(0, 256, (AT_ONCE + 3, *shape), dtype=torch.uint8)
    scaling = InputScaling(shape, subtract_mean=3.0, scale=200.0, running=running)
    encoder.scale_with(scaling)
    written: list[int] = []
    write = InputScaling.write
    monkeypatch.setattr(InputScaling, "write", lambda self, x, *out: written.append(len(x)) or write(self, x, *out))
    found = []
    for x in (images, scaling(images)):
        written.clear()
        with torch.no_grad():
            acting = encoder(x)
        features = encoder(x)
        assert torch.equal(acting, features)
        found.append((features, *torch.autograd.grad(features.square().sum(), list(encoder.parameters()))))
        # to act and to learn from, and the last ones first for the gradient of the first convolution
        assert written == ([18, 17] * 2 + [17, 18] if x is images else [])
    for of_bytes, of_floats in zip(*found, strict=True):
        assert torch.equal(of_bytes, of_floats)


@pytest.mark.parametrize(
    ("make", "bf16"),
    [(make, bf16) for make in (conv_encoder_of_simple, impala_encoder_of_one) for bf16 in (False, True)],
)
def test_threads_take_their_share_of_the_images(make: Callable[[], Encoder], bf16: bool) -> None:
    encoder, images = make(), torch.randint(0, 256, (3 * AT_ONCE, 3, 36, 36), dtype=torch.uint8)
    encoder.scale_with(InputScaling((3, 36, 36), subtract_mean=0.0, scale=255.0, running=False))
    encoder[1].bias.requires_grad_(False)
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    found = []
    for threads in (1, 2, 2):
        encoder.threads, together = threads, threading.Barrier(threads)

        def meet(*layer: object, together: threading.Barrier = together) -> None:
            together.wait(HANG_SECONDS)  # no thread comes through alone

        hook = encoder[2].register_forward_pre_hook(meet)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            with torch.inference_mode():
                acting = encoder(images)
            features = encoder(images)
        hook.remove()
        assert torch.equal(acting, features)
        assert features.dtype == (torch.bfloat16 if bf16 else torch.float32)
        found.append((features, *torch.autograd.grad(features.float().square().mean(), trained)))
    alone, together, again = found
    for one, two, repeated in zip(alone, together, again, strict=True):
        assert torch.equal(two, repeated)
        torch.testing.assert_close(two, one, rtol=0.05 if bf16 else 1e-4, atol=0.02 if bf16 else 1e-5)


def test_a_convolution_in_bf16_keeps_its_padding_dilation_and_groups() -> None:
    convolution = nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2, groups=2, padding_mode="reflect")
    encoder, images = Encoder([nn.Identity(), convolution, nn.Flatten()], 8 * 5 * 5, 3), torch.rand(6, 4, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(images)
    assert features.dtype == torch.bfloat16
    torch.testing.assert_close(features.float(), convolution(images).flatten(1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_is_made_of_weights_once_for_all_images_and_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    encoder, images = conv_encoder_of_simple(), torch.rand(5 * AT_ONCE, 3, 36, 36)
    encoder.threads, made, kernel = threads, 0, FirstConv2d.kernel

    def counted(layer: FirstConv2d, dtype: torch.dtype, *, divided: bool) -> torch.Tensor:
        nonlocal made
        made += 1
        return kernel(layer, dtype, divided=divided)

    monkeypatch.setattr(FirstConv2d, "kernel", counted)
    with torch.autocast("cpu", torch.bfloat16):
        features = encoder(images)
    gradients = torch.autograd.grad(features.float().square().mean(), list(encoder.parameters()))
    assert made == 1
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 8


def test_a_kernel_to_act_with_is_made_once_for_all_passes_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, made, arranged = torch.rand(2, 3, 36, 36), 0, FirstConv2d._for_blocks

    def counted(layer: FirstConv2d, weight: torch.Tensor, divided: bool) -> torch.Tensor:
        nonlocal made
        made += 1
        return arranged(layer, weight, divided)

    monkeypatch.setattr(FirstConv2d, "_for_blocks", counted)
    encoder, others = conv_encoder_of_simple(), [FlatModule(conv_encoder_of_simple()) for _ in range(2)]
    flat = FlatModule(encoder)
    flat.compute_with_copies(encoder.parameters(), torch.bfloat16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for other in others:
            flat.load(other.flat.numpy())
            before = made
            found = [encoder(images) for _ in range(3)]
            assert made == before + 1
            assert all(torch.equal(features, other.module(images)) for features in found)


def test_estimates_of_spectral_norms_advance_once_however_many_threads_there_are() -> None:
    images, found = torch.rand(2 * AT_ONCE, 3, 36, 36), []
    for threads in (1, 2):
        torch.manual_seed(0)
        encoder = conv_encoder_of_simple()
        spectral_norm(encoder[-2])
        encoder.threads = threads
        encoder(images)
        found.append(dict(encoder.named_buffers()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_all_images_of_a_pass_see_one_estimate_of_the_spectral_norm(threads: int) -> None:
    """A pass in parts computes the kernel once: the same image has the same features wherever it stands."""
    torch.manual_seed(0)
    encoder = conv_encoder_of_simple()
    encoder.threads = threads
    for layer in [layer for layer in encoder if isinstance(layer, nn.Conv2d)]:
        spectral_norm(layer, n_power_iterations=1)
    image = torch.rand(1, 3, 36, 36)
    features = encoder(image.repeat(3 * AT_ONCE, 1, 1, 1))
    torch.testing.assert_close(features, features[:1].expand_as(features), rtol=1e-5, atol=1e-6)
    before = features[:1].detach()
    assert not torch.equal(encoder(image), before)  # the next pass has a better one


def test_what_fails_on_a_thread_fails_here() -> None:
    encoder = conv_encoder_of_simple()
    encoder.threads = 2
    with pytest.raises(RuntimeError, match="expected input"):
        encoder(torch.rand(2 * AT_ONCE, 4, 36, 36))


def test_encoders_of_images_take_the_threads_of_operations() -> None:
    images, others = conv_encoder_of_simple(), mlp_encoder((4,), (8,), "relu")
    try:
        torch.set_num_threads(3)
        assert not share_images(others)
        assert (others.threads, torch.get_num_threads()) == (1, 3)
        assert share_images(nn.ModuleList([images, others]))
        assert (images.threads, others.threads, torch.get_num_threads()) == (0, 1, 1)  # 0: those of the process
    finally:
        torch.set_num_threads(1)


def test_what_else_keeps_the_scaled_images_gets_a_copy() -> None:
    """The next images overwrite them."""
    shape = (3, 4, 4)
    squares = Encoder([nn.Identity(), Squares(), nn.Flatten()], 48, num_image_layers=3)
    squares.scale_with(InputScaling(shape, subtract_mean=0.0, scale=1.0, running=False))
    images = torch.randint(0, 16, (2 * AT_ONCE, *shape), dtype=torch.uint8)
    factor = squares[1].factor
    (gradient,) = torch.autograd.grad(squares(images).sum(), [factor])
    assert gradient.item() == images.double().square().sum().item()


class Squares(nn.Module):
    """A layer whose gradient needs its input in another shape than it came."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.flatten() * self.factor * x.flatten()).reshape(x.shape)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 7, 7)])
def test_mlp_flattens_any_shape(shape: tuple[int, ...]) -> None:
    encoder = mlp_encoder(shape, (16, 6), "tanh")
    assert encoder(torch.rand(4, *shape)).shape == (4, 6)
    assert [type(layer) for layer in encoder][-4:] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh]


def test_mlp_without_layers_passes_the_observation() -> None:
    encoder, x = mlp_encoder((2, 3), (), "elu"), torch.rand(4, 2, 3)
    assert encoder.output_size == 6
    assert torch.equal(encoder(x), x.reshape(4, 6))


def test_no_extra_layers_leave_the_convolution_features() -> None:
    assert conv_encoder((4, 84, 84), CONVNET_ATARI, (), "relu").output_size == 64 * 7 * 7
    assert conv_encoder((3, 72, 128), CONVNET_SIMPLE, (), "relu").output_size == 128 * 3 * 6
    assert impala_encoder((4, 84, 84), (), "relu").output_size == 32 * 11 * 11


def test_the_gradient_of_images_has_their_channels_last_as_they_have() -> None:
    images = torch.rand(2, 5, 4, 3).permute(0, 3, 1, 2).requires_grad_()
    flatten, weights = FlattenImages(), torch.rand(2, 60)
    seen: list[torch.Tensor] = []
    shown = images.clone(memory_format=torch.channels_last)
    rows = flatten(shown)
    shown.register_hook(seen.append)
    (rows * weights).sum().backward()
    assert torch.equal(rows, images.flatten(1))
    assert torch.equal(seen[0], weights.view(2, 3, 5, 4))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not weights.view(2, 3, 5, 4).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["mlp", "convnet_atari"])
def test_layers_are_normalized_before_their_activation(name: str) -> None:
    """Linear layers over their units, convolutions over an image; in pieces, threads, bytes and bf16 as without."""
    shape = (5,) if name == "mlp" else (1, 36, 36)
    torch.manual_seed(0)
    plain = build_encoder(name, shape, config_of())
    torch.manual_seed(0)
    encoder = build_encoder(name, shape, config_of(layer_norm=True))
    x = torch.rand(AT_ONCE + 3, *shape)
    expected = x
    for layer in plain:
        expected = layer(expected)
        if isinstance(layer, nn.Linear | nn.Conv2d):
            over = tuple(range(1, expected.dim()))
            variance = expected.var(over, keepdim=True, unbiased=False)
            expected = (expected - expected.mean(over, keepdim=True)) / (variance + 1e-5).sqrt()
    torch.testing.assert_close(encoder(x), expected, rtol=1e-3, atol=1e-4)
    encoder.threads = 2
    torch.testing.assert_close(encoder(x), expected, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        encoder(x).float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in encoder.parameters())


def test_impala_has_fifteen_convolutions() -> None:
    layers = [module for module in impala_encoder((4, 84, 84), (), "relu").modules() if isinstance(module, nn.Conv2d)]
    assert [layer.out_channels for layer in layers] == [16] * 5 + [32] * 10


def test_impala_reads_a_tiny_image() -> None:
    assert impala_encoder((7, 7, 3), (8,), "relu")(torch.rand(2, 7, 7, 3)).shape == (2, 8)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("convnet_simple", CONVNET_SIMPLE), ("convnet_atari", CONVNET_ATARI), ("convnet_dqn", CONVNET_DQN)],
)
def test_min_side_is_the_smallest_image_of_the_stacks(name: str, layers: tuple[tuple[int, int, int], ...]) -> None:
    side = next(row.min_side for row in ENCODERS if row.subtype == name)
    assert conv_encoder((1, side, side), layers, (), "elu").output_size == layers[-1][0]
    with pytest.raises(RuntimeError):
        conv_encoder((1, side, side - 1), layers, (), "elu")


def test_both_layouts_of_one_image_give_the_same_features() -> None:
    torch.manual_seed(0)
    channels_first = conv_encoder((3, 40, 44), CONVNET_SIMPLE, (8,), "elu")
    channels_last = conv_encoder((40, 44, 3), CONVNET_SIMPLE, (8,), "elu")
    for ours, theirs in zip(channels_last.parameters(), channels_first.parameters(), strict=True):
        ours.data.copy_(theirs)
    x = torch.rand(2, 3, 40, 44)
    torch.testing.assert_close(channels_last(x.permute(0, 2, 3, 1).contiguous()), channels_first(x))


def test_the_smaller_outer_dimension_holds_the_channels() -> None:
    assert is_channels_first((4, 84, 84))
    assert is_channels_first((84, 84, 84))
    assert not is_channels_first((72, 128, 3))
    assert not is_channels_first((7, 7, 20))  # a small board of many channels
    assert is_channels_first((16, 10, 10))
    assert is_channels_first((3, 36, 40))
    assert image_sides((4, 84, 80)) == (84, 80)
    assert image_sides((72, 128, 3)) == (72, 128)


def test_dict_encoder_joins_features_in_the_order_of_its_keys() -> None:
    encoders = {"a.b": mlp_encoder((2,), (3,), "elu"), "keys": mlp_encoder((4,), (5,), "elu")}
    encoder = DictEncoder(encoders)
    obs = {"keys": torch.rand(6, 4), "unread": torch.rand(6, 9), "a.b": torch.rand(6, 2)}
    expected = torch.cat((encoders["a.b"](obs["a.b"]), encoders["keys"](obs["keys"])), dim=-1)
    assert encoder.output_size == 8
    assert torch.equal(encoder(obs), expected)


def test_scaling_by_constants_casts_and_keeps_the_image() -> None:
    scaling = InputScaling((3,), subtract_mean=10.0, scale=4.0, running=False)
    x = torch.tensor([[2, 10, 250]], dtype=torch.uint8)
    assert torch.equal(scaling(x), torch.tensor([[-2.0, 0.0, 60.0]]))
    assert torch.equal(x, torch.tensor([[2, 10, 250]], dtype=torch.uint8))
    assert scaling(x).dtype == torch.float32
    assert not list(scaling.buffers())


def test_scaling_without_constants_only_casts() -> None:
    scaling = InputScaling((2,), subtract_mean=0.0, scale=1.0, running=False)
    assert torch.equal(scaling(torch.tensor([[0, 255]], dtype=torch.uint8)), torch.tensor([[0.0, 255.0]]))


@pytest.mark.parametrize("running", [True, False])
def test_scaling_twice_gives_the_same_twice(running: bool) -> None:
    """A batch scaled in place would be divided by scale^2 in the second epoch."""
    scaling = InputScaling((4,), subtract_mean=1.0, scale=255.0, running=running)
    x = torch.rand(8, 4) * 255
    before = x.clone()
    assert torch.equal(scaling(x), scaling(x))
    assert torch.equal(x, before)


def test_running_statistics_start_from_the_constants() -> None:
    scaling = InputScaling((2,), subtract_mean=3.0, scale=2.0, running=True)
    assert torch.equal(scaling(torch.tensor([[5.0, 3.0]])), torch.tensor([[1.0, 0.0]]))


def test_running_statistics_are_clipped() -> None:
    scaling = InputScaling((2,), subtract_mean=0.0, scale=1.0, running=True)
    assert torch.equal(scaling(torch.tensor([[1e6, -1e6]])), torch.tensor([[CLIP, -CLIP]]))
