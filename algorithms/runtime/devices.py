"""Devices of networks: the interface for the runtime, whose base classes are the CPU.

Buffers, buckets, uploads and publication use this interface alone, and the same code runs on a CPU: every copy is done
on return, no operation waits, and a captured function is the function itself. `cuda.py` overrides all methods.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Generator, Tensor

from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.messages import Worker


class CaptureError(RuntimeError):
    """A function cannot be captured; it can still be called."""


class DeviceEvent(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return whether the point has been reached."""
        return True

    def synchronize(self) -> None:
        """Wait until the point has been reached."""


class _Reached(DeviceEvent):
    """An event of a device that never lags behind."""

    def synchronize(self) -> None:
        """Do nothing."""


REACHED: DeviceEvent = _Reached()


class SideStream:
    """A stream of copies beside the computing stream (the current stream of the calling worker)."""

    def active(self) -> AbstractContextManager[object]:
        """Issue work here while entered."""
        return nullcontext()

    def follow(self) -> None:
        """Make later work of this stream wait for all computing work issued so far."""

    def lead(self) -> None:
        """Make later computing work wait for all work issued to this stream so far."""

    def mark(self) -> DeviceEvent:
        """Return an event behind all work issued to this stream so far."""
        return REACHED


class Device:
    """The device of a worker's network: the CPU, or a subclass.

    Attributes:
        name: torch name.
        is_host: whether the memory is host memory, which needs no copies.
    """

    name, is_host = "cpu", True

    def make(self, make: Callable[[], Worker]) -> Worker:
        """Make a worker with its own computing stream."""
        return make()

    def register(self, arena: Arena) -> bool:
        """Enable access to the arena without the host; return whether `shared` works."""
        return True

    def shared(self, array: Array) -> Tensor:
        """Return the memory of an array, in a registered arena, as a tensor of this device."""
        return torch.from_numpy(array)

    def side_stream(self) -> SideStream:
        """Make a new side stream."""
        return SideStream()

    def mark(self) -> DeviceEvent:
        """Return an event behind all computing work issued so far."""
        return REACHED

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device, without waiting; the caller may overwrite the original after its use."""
        return tensor

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate host memory for copies without the host."""
        return torch.zeros(shape, dtype=dtype)

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        """Return a cheap repetition of the function on the memory in use now; the function must have run before.

        Args:
            function: function that repeats the same work on permanent tensors, and enters inference mode itself.
            generator: generator used beside the default one.

        Raises:
            CaptureError: the function cannot be captured.
        """
        return function

    def strict(self) -> AbstractContextManager[object]:
        """Raise RuntimeError, while entered, where the host waits for the device, which prevents a capture."""
        return nullcontext()

    def nap(self) -> None:
        """Sleep briefly: the caller waits for the device."""
