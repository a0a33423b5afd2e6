"""Devices on which networks live: the runtime's protocol of them, the CPU and CUDA.

What only CUDA needs is in `cuda.py`. Buffers, buckets, uploads and publication use this protocol alone, so that the
same code runs on a CPU: there every copy is done when it returns, and a captured function is the function itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Generator, Tensor

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.messages import Worker


class CaptureError(RuntimeError):
    """An error: a function cannot be captured; it can still be called."""


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return whether the point has been reached."""
        ...

    def synchronize(self) -> None:
        """Wait until the point has been reached."""
        ...


class SideStream(Protocol):
    """A stream of copies beside the stream that computes (the current one of the calling worker)."""

    def active(self) -> AbstractContextManager[object]:
        """Issue work here while entered."""
        ...

    def follow(self) -> None:
        """Let work that is issued here from now on start after all that has been issued to compute so far."""
        ...

    def lead(self) -> None:
        """Let work that is issued to compute from now on start after all that has been issued here so far."""
        ...

    def mark(self) -> Event:
        """Return an event that is reached when all that has been issued here so far is done."""
        ...


class Device(Protocol):
    """The device on which a worker's network lives.

    Attributes:
        name: as torch knows it.
        is_host: whether its memory is that of the host, so that nothing needs to be copied to it.
    """

    name: str
    is_host: bool

    def make(self, make: Callable[[], Worker]) -> Worker:
        """Make a worker whose work is issued to a stream of its own."""
        ...

    def register(self, arena: Arena) -> None:
        """Let copies from and to the arena run without the host."""
        ...

    def side_stream(self) -> SideStream:
        """Make a new side stream."""
        ...

    def mark(self) -> Event:
        """Return an event that is reached when all that has been issued to compute so far is done."""
        ...

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device; the caller may overwrite the original at once and waits for nothing."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate host memory whose copies from and to the device run without the host."""
        ...

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        """Return a cheap way to repeat the function on the memory it uses now; it must have run before, and is not run.

        Args:
            function: always does the same on tensors that stay where they are; enters inference mode itself.
            generator: the one it draws from, besides the default one.

        Raises:
            CaptureError: there is none.
        """
        ...

    def strict(self) -> AbstractContextManager[object]:
        """Raise RuntimeError, while entered, where the host waits for the device, which cannot be captured."""
        ...

    def nap(self) -> None:
        """Sleep a little: the caller has nothing to do until the device gets on."""
        ...


class _Reached:
    """An event of a device that never lags behind."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


REACHED: Event = _Reached()


class HostStream:
    """A side stream where every copy is done when it returns."""

    def active(self) -> AbstractContextManager[object]:
        """Change nothing."""
        return nullcontext()

    def follow(self) -> None:
        """Do nothing: copies here start in order anyway."""

    def lead(self) -> None:
        """Do nothing: all that was issued here is done."""

    def mark(self) -> Event:
        """Return an event that has been reached."""
        return REACHED


class HostDevice:
    """The CPU."""

    name, is_host = "cpu", True

    def make(self, make: Callable[[], Worker]) -> Worker:
        """Make a worker."""
        return make()

    def register(self, arena: Arena) -> None:
        """Do nothing: the arena is in its memory."""

    def side_stream(self) -> SideStream:
        """Make a stream without delay."""
        return HostStream()

    def mark(self) -> Event:
        """Return an event that has been reached."""
        return REACHED

    def send(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself: it is used up before it is overwritten."""
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
        """Do nothing: no work is ever under way."""
