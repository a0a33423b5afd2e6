"""Images before and in the first convolution: how they lie in memory, bytes to floats, blocks."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from appo.algorithms.ops.normalization import normalize
from appo.envs.spec import is_channels_first

CLIP = 10.0
"""Bound of a standardized observation, in standard deviations."""

IMAGES_AT_ONCE = {torch.float32: 32, torch.bfloat16: 64}
"""Images that an encoder on a CPU takes at a time, by type of computation."""

WORD = 4
"""Bytes moved together."""


class InputScaling(nn.Module):
    """Shifts and scales an observation to float32, in new memory.

    With running statistics the constants are only initial values: standardization cancels any constant shift and scale.

    Args:
        shape: shape of the observation of one row.
        subtract_mean, scale: constants of x -> (x - subtract_mean) / scale.
        running: keep `mean` and `inv_std` [*shape] as buffers and clip the result to +-`CLIP`.
    """

    mean: Tensor
    inv_std: Tensor

    def __init__(self, shape: tuple[int, ...], *, subtract_mean: float, scale: float, running: bool) -> None:
        super().__init__()
        self.subtract_mean, self.scale, self.running = subtract_mean, scale, running
        if running:
            self.register_buffer("mean", torch.full(shape, subtract_mean, dtype=torch.float32))
            self.register_buffer("inv_std", torch.full(shape, 1.0 / scale, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Scale x [N,*shape]."""
        if self.running:
            return normalize(x, self.mean, self.inv_std, CLIP)
        return self.write(x, torch.empty_like(x, dtype=torch.float32))

    def write(self, x: Tensor, out: Tensor, blocks: Blocks | None = None) -> Tensor:
        """Scale x [N,*shape], or blocks of x, into `out`, floats of the same shape; return `out`."""
        out.copy_(x)  # first: arithmetic on mixed types takes three times as long as both passes over the memory
        if self.running:
            mean, inv_std = self.mean, self.inv_std
            if blocks:
                mean, inv_std = blocks.of(torch.stack((mean, inv_std)))
            return out.sub_(mean).mul_(inv_std).clamp_(-CLIP, CLIP)
        if self.subtract_mean != 0.0:
            out -= self.subtract_mean
        if self.scale != 1.0:
            out /= self.scale
        return out


class ChannelsLast(nn.Module):
    """Arranges images as [N,C,H,W] with channels last in memory, the fastest layout for convolutions on CPUs."""

    def __init__(self, channels_first: bool) -> None:
        super().__init__()
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        """Arrange x [N,C,H,W] or [N,H,W,C]; only the former is copied."""
        x = x if self.channels_first else x.permute(0, 3, 1, 2)
        return x.contiguous(memory_format=torch.channels_last)


class FlattenImages(nn.Flatten):
    """Flattens images [N,C,H,W] to [N,C*H*W]; the gradient has channels last in memory like the images.

    The backward pass of ELU takes 8 us per image if gradient and output have different layouts, and the next
    convolution rearranges the result (VizDoom, bf16); arranging the gradient takes 2. ReLU does not care.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Flatten x."""
        if x.requires_grad:
            last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
            x.register_hook(last)  # type: ignore[no-untyped-call]
        return super().forward(x)


class Blocks:
    """Cuts images into blocks of side x side pixels, the numbers of each block in a row ("space to depth").

    The order within a row does not matter if images, kernels and statistics share the order; this order moves bytes by
    words.

    Args:
        side: side of a block in pixels.
        channels: channels of an image.
        channels_first: whether images are [N,C,H,W] or [N,H,W,C].
    """

    def __init__(self, side: int, channels: int, channels_first: bool) -> None:
        self.side, self.channels_first = side, channels_first
        self.depth = side * side * channels
        self._width = side if channels_first else side * channels  # numbers of one block that are side by side
        self._word = WORD if self._width % WORD == 0 else 1

    def of(self, images: Tensor) -> Tensor:
        """Return blocks [N,rows,columns,depth] of images, without pixels beyond the last whole block."""
        lines = images if self.channels_first else images.flatten(2)[:, None]
        num_images, planes, height, width = lines.shape
        rows, columns = height // self.side, width // self._width
        lines = lines[..., : rows * self.side, : columns * self._width]
        # All lines of a row of blocks next to each other, as many numbers as make a word on top of each other.
        lines = lines.reshape(num_images, planes, rows, self.side, columns * self._width).transpose(1, 2).contiguous()
        words = lines.view(num_images * rows, planes * self.side, columns * self._width // self._word, self._word)
        if images.dtype == torch.uint8 and self._word == WORD:  # as one number a word goes several times faster
            words = words.view(torch.int32).squeeze(3).transpose(1, 2).contiguous().view(torch.uint8)
        else:
            words = words.transpose(1, 2)
        return words.reshape(num_images, rows, columns, self.depth)

    def of_planes(self, x: Tensor) -> Tensor:
        """Return blocks [N,depth,rows,columns] of x [N,C,H,W], images or kernels."""
        return self.of(x if self.channels_first else x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def computed_in(x: Tensor) -> torch.dtype:
    """Return the type of computation for images x; with bf16 on a CPU the first convolution takes blocks."""
    is_autocast = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if is_autocast else torch.float32


class FirstConv2d(nn.Conv2d):
    """A convolution of few channels by a kernel that is a multiple of the stride.

    In bf16 on a CPU, blocks of stride x stride pixels are convolved by a kernel 1/stride as large: the same products
    and sums, over enough channels to fill the matrix units of the processor. The weight is the usual [O,C,k,k].

    Attributes:
        divisor: divisor of the kernel for undivided blocks.
    """

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int, channels_first: bool) -> None:
        super().__init__(channels, out_channels, kernel, stride)
        self.blocks = Blocks(stride, channels, channels_first)
        self.divisor = 1.0
        self._kept: tuple[tuple[int, bool], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images x [N,C,H,W] or blocks [N,depth,rows,columns]."""
        are_blocks, dtype = x.shape[1] != self.in_channels, computed_in(x)
        if dtype == torch.float32 and not are_blocks:
            return super().forward(x)
        return self.convolve(x, self.kernel(dtype, divided=are_blocks), self.bias)

    def kernel(self, dtype: torch.dtype, *, divided: bool) -> Tensor:
        """Return the kernel for blocks [O,depth,k/stride,k/stride]."""
        if self.weight.dtype == torch.float32:
            return self._for_blocks(self.weight.to(dtype), divided)  # rounded first, as weights to act with are
        # A copy to act with, see `FlatModule.compute_with_copies`: it is written in place, and seldom.
        key = (self.weight._version, divided)
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self._for_blocks(self.weight, divided)
        return self._kept[1]

    def _for_blocks(self, weight: Tensor, divided: bool) -> Tensor:
        return self.blocks.of_planes(weight / self.divisor if divided else weight)

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve images x [N,C,H,W] or blocks [N,depth,rows,columns] with a kernel for blocks."""
        blocks = self.blocks.of_planes(x.to(kernel.dtype)) if x.shape[1] == self.in_channels else x
        return nn.functional.conv2d(blocks, kernel, bias)


class Bytes:
    """Prepares images of bytes for the first convolution on a CPU, and keeps bytes for the gradient."""

    def __init__(self, scaling: InputScaling, arrange: nn.Module, first: FirstConv2d | None) -> None:
        self.scaling, self.arrange = scaling, arrange
        self.blocks = first.blocks if first else None
        self._divides = not scaling.running and scaling.subtract_mean == 0.0
        if first and self._divides:  # bytes are exact in bf16, and a kernel is smaller than images
            first.divisor = scaling.scale
        self._scratch: dict[int, Tensor] = {}  # by thread

    def prepare(self, images: Tensor) -> Tensor:
        """Return images as floats, or as bf16 blocks, valid until the thread's next call.

        New memory for each call would leave holes between kept tensors.
        """
        return self._prepare(images, computed_in(images))

    def _prepare(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        if self.blocks and dtype != torch.float32:
            return self._prepare_blocks(images, self.blocks, dtype)
        return self._prepare_images(images)

    def _prepare_images(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if is_channels_first(tuple(images.shape[1:])) else torch.contiguous_format
        scratch = self._room(images.shape, torch.float32, layout)
        with torch.no_grad():
            scaled = self.scaling.write(images, scratch)
        prepared: Tensor = self.arrange(scaled)
        return prepared

    def _prepare_blocks(self, images: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            found = blocks.of(images)
            scratch = self._room(found.shape, dtype, torch.contiguous_format)
            if not self._divides:
                found = self.scaling.write(found, torch.empty_like(found, dtype=torch.float32), blocks)
            scratch.copy_(found)
        return scratch.permute(0, 3, 1, 2)

    def _room(self, shape: torch.Size, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
        thread = threading.get_ident()
        scratch = self._scratch.get(thread)
        if scratch is None or scratch.shape[1:] != shape[1:] or len(scratch) < shape[0] or scratch.dtype != dtype:
            with torch.inference_mode(False):  # or it could not be written to outside of it
                scratch = torch.empty(shape, dtype=dtype, memory_format=layout)
            self._scratch[thread] = scratch
        return scratch[: shape[0]]

    def kept(self, images: Tensor, prepared: Tensor) -> AbstractContextManager[object]:
        """Keep bytes instead of prepared images for a gradient, and prepare the images again for it.

        Bytes are in memory anyway; floats take four times as much, in a large minibatch more than everything else
        together.
        """
        memory, dtype = prepared.untyped_storage().data_ptr(), prepared.dtype

        def pack(tensor: Tensor) -> Tensor | None:
            if tensor.untyped_storage().data_ptr() != memory:
                return tensor
            return None if tensor.shape == prepared.shape else tensor.clone()

        def unpack(tensor: Tensor | None) -> Tensor:
            return self._prepare(images, dtype) if tensor is None else tensor

        return saved_tensors_hooks(pack, unpack)
