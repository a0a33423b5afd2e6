"""Devices of networks: the interface for the runtime, and the CPU.

Buffers, buckets, uploads and publication use this interface alone, and the same code runs on a CPU: every copy is done
on return, and a captured function is the function itself. `cuda.py` implements the interface for CUDA.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Generator, Tensor

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.messages import Worker


class CaptureError(RuntimeError):
    """A function cannot be captured; it can still be called."""


class DeviceEvent(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return whether the point has been reached."""

    def synchronize(self) -> None:
        """Wait until the point has been reached."""


class SideStream(Protocol):
    """A stream of copies beside the computing stream (the current stream of the calling worker)."""

    def active(self) -> AbstractContextManager[object]:
        """Issue work here while entered."""

    def follow(self) -> None:
        """Make later work of this stream wait for all computing work issued so far."""

    def lead(self) -> None:
        """Make later computing work wait for all work issued to this stream so far."""

    def mark(self) -> DeviceEvent:
        """Return an event behind all work issued to this stream so far."""


class Device(Protocol):
    """The device of a worker's network.

    Attributes:
        name: torch name.
        is_host: whether the memory is host memory, which needs no copies.
    """

    name: str
    is_host: bool

    def make(self, make: Callable[[], Worker]) -> Worker:
        """Make a worker with its own computing stream."""

    def register(self, arena: Arena) -> None:
        """Enable copies from and to the arena without the host."""

    def side_stream(self) -> SideStream:
        """Make a new side stream."""

    def mark(self) -> DeviceEvent:
        """Return an event behind all computing work issued so far."""

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device, without waiting; the caller may overwrite the original at once."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate host memory for copies without the host."""

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        """Return a cheap repetition of the function on the memory in use now; the function must have run before.

        Args:
            function: function that repeats the same work on permanent tensors, and enters inference mode itself.
            generator: generator used beside the default one.

        Raises:
            CaptureError: the function cannot be captured.
        """

    def strict(self) -> AbstractContextManager[object]:
        """Raise RuntimeError, while entered, where the host waits for the device, which prevents a capture."""

    def nap(self) -> None:
        """Sleep briefly: the caller waits for the device."""


class _Reached:
    """An event of a device that never lags behind."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


REACHED: DeviceEvent = _Reached()


class HostStream:
    """A side stream whose copies are done on return."""

    def active(self) -> AbstractContextManager[object]:
        """Change nothing."""
        return nullcontext()

    def follow(self) -> None:
        """Do nothing: copies start in order."""

    def lead(self) -> None:
        """Do nothing: all copies are done."""

    def mark(self) -> DeviceEvent:
        """Return a reached event."""
        return REACHED


class HostDevice:
    """The CPU."""

    name, is_host = "cpu", True

    def make(self, make: Callable[[], Worker]) -> Worker:
        """Make a worker."""
        return make()

    def register(self, arena: Arena) -> None:
        """Do nothing: the arena is host memory."""

    def side_stream(self) -> SideStream:
        """Make a stream without delay."""
        return HostStream()

    def mark(self) -> DeviceEvent:
        """Return a reached event."""
        return REACHED

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, which is used before the next write."""
        return tensor

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate plain memory."""
        return torch.zeros(shape, dtype=dtype)

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        """Return the function."""
        return function

    def strict(self) -> AbstractContextManager[object]:
        """Change nothing: no operation waits."""
        return nullcontext()

    def nap(self) -> None:
        """Do nothing: no work is in progress."""
