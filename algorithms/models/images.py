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
"""Bound of a standardised observation, in standard deviations."""

IMAGES_AT_ONCE = {torch.float32: 32, torch.bfloat16: 64}
"""Of an encoder on a CPU, by what it computes with."""

WORD = 4
"""Bytes that are moved as one."""


class InputScaling(nn.Module):
    """Shifts and scales one observation, as float32; the tensor it is given is never changed.

    With running statistics the constants are only what the statistics start from: the statistics are those of the raw
    observation, and standardising cancels any constant shift and scale. Without them the constants stay.

    Args:
        shape: The observation of one row.
        subtract_mean, scale: The constants of x -> (x - subtract_mean) / scale.
        running: Keep `mean` and `inv_std` [*shape] as buffers and clip the result to +-`CLIP`.
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
        """Scale x [N,*shape], or its blocks, into out, a tensor of floats of the same shape, and return it."""
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
    """Shows images as [N,C,H,W] with the channels last in memory, where convolutions on CPUs are fastest."""

    def __init__(self, channels_first: bool) -> None:
        super().__init__()
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        """Arrange x [N,C,H,W] or [N,H,W,C]; the latter without copying it."""
        x = x if self.channels_first else x.permute(0, 3, 1, 2)
        return x.contiguous(memory_format=torch.channels_last)


class FlattenImages(nn.Flatten):
    """Shows images [N,C,H,W] as rows [N,C*H*W]; their gradient has the channels last in memory, as the images have.

    The backward pass of ELU takes 8 us per image where gradient and output lie in different orders, and makes the next
    convolution rearrange the result (VizDoom, bf16); arranging the gradient takes 2. ReLU does not mind.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Flatten x."""
        if x.requires_grad:
            last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
            x.register_hook(last)  # type: ignore[no-untyped-call]
        return super().forward(x)


class Blocks:
    """Cuts images into blocks of side x side pixels, and puts the numbers of each in a row ("space to depth").

    In which order they stand there is of no interest, as long as it is the same for images, for kernels, and for all
    that is taken from each pixel: it is the one in which bytes can be moved by words.

    Args:
        side: Of a block, in pixels.
        channels: Of an image.
        channels_first: Whether images are [N,C,H,W] or [N,H,W,C].
    """

    def __init__(self, side: int, channels: int, channels_first: bool) -> None:
        self.side, self.channels_first = side, channels_first
        self.depth = side * side * channels
        self._width = side if channels_first else side * channels  # numbers of one block that are side by side
        self._word = WORD if self._width % WORD == 0 else 1

    def of(self, images: Tensor) -> Tensor:
        """Return blocks [N,rows,columns,depth] of images; pixels beyond the last whole block are left out."""
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
        """Return blocks [N,depth,rows,columns] of x [N,C,H,W], images or kernels, whatever the layout of images."""
        return self.of(x if self.channels_first else x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def computed_in(x: Tensor) -> torch.dtype:
    """Return the type in which layers compute with images x now; bf16 on a CPU: the first convolution takes blocks."""
    is_autocast = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return torch.get_autocast_dtype("cpu") if is_autocast else torch.float32


class FirstConv2d(nn.Conv2d):
    """A convolution of few channels by a kernel that is a multiple of its stride.

    In bf16 on a CPU it is computed with a kernel 1/stride as large over blocks of stride x stride pixels: the same
    products and sums, but over so many channels that the matrix units of the processor are full. Its weight is the
    usual one, [O,C,k,k].

    Attributes:
        divisor: What the kernel has to be divided by for blocks as they come, because they were not.
    """

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int, channels_first: bool) -> None:
        super().__init__(channels, out_channels, kernel, stride)
        self.blocks = Blocks(stride, channels, channels_first)
        self.divisor = 1.0
        self._kept: tuple[tuple[int, bool], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images x [N,C,H,W], or their blocks [N,depth,rows,columns]."""
        are_blocks, dtype = x.shape[1] != self.in_channels, computed_in(x)
        if dtype == torch.float32 and not are_blocks:
            return super().forward(x)
        return self.convolve(x, self.kernel(dtype, divided=are_blocks), self.bias)

    def kernel(self, dtype: torch.dtype, *, divided: bool) -> Tensor:
        """Return the kernel for blocks [O,depth,k/stride,k/stride], divided or not."""
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
        """Convolve images x [N,C,H,W], or their blocks [N,depth,rows,columns], with a kernel for blocks."""
        blocks = self.blocks.of_planes(x.to(kernel.dtype)) if x.shape[1] == self.in_channels else x
        return nn.functional.conv2d(blocks, kernel, bias)


class Bytes:
    """Prepares images of bytes for the first convolution on a CPU, and keeps what its gradient needs of them.

    Args:
        scaling: To floats; the module belongs to the model.
        arrange: The channels last.
        first: The first convolution, if it takes blocks in bf16.
    """

    def __init__(self, scaling: InputScaling, arrange: nn.Module, first: FirstConv2d | None) -> None:
        self.scaling, self.arrange = scaling, arrange
        self.blocks = first.blocks if first else None
        self._divides = not scaling.running and scaling.subtract_mean == 0.0
        if first and self._divides:  # bytes are exact in bf16, and a kernel is smaller than images
            first.divisor = scaling.scale
        self._scratch: dict[int, Tensor] = {}  # by thread

    def prepare(self, images: Tensor) -> Tensor:
        """Return images as floats, or in bf16 the blocks for the first convolution, until the thread's next call.

        New memory for each would leave holes between what is kept.
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
        """Keep bytes for a gradient in place of the images prepared of them, and prepare those once more for it.

        The bytes are there anyway; floats take four times as much, of a large minibatch more than all else together.
        """
        memory, dtype = prepared.untyped_storage().data_ptr(), prepared.dtype

        def pack(tensor: Tensor) -> Tensor | None:
            if tensor.untyped_storage().data_ptr() != memory:
                return tensor
            return None if tensor.shape == prepared.shape else tensor.clone()

        def unpack(tensor: Tensor | None) -> Tensor:
            return self._prepare(images, dtype) if tensor is None else tensor

        return saved_tensors_hooks(pack, unpack)
