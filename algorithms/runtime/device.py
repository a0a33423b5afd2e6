"""What the runtime asks of the device its networks live on, and the answers of the CPU.

What only CUDA needs is in `cuda.py`. Buffers, buckets, uploads and publication use this protocol alone, so that the
same code runs on a CPU: there every copy is done when it returns, and a captured function is the function itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Generator, Tensor

from algorithms.runtime.arena import Arena
from algorithms.runtime.node import Worker


class CaptureError(RuntimeError):
    """A function cannot be captured; it can still be called."""


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether it has been reached."""
        ...

    def synchronize(self) -> None:
        """Wait until it has been reached."""
        ...


class SideStream(Protocol):
    """Copies beside the stream that computes (the current one of the calling worker)."""

    def active(self) -> AbstractContextManager[object]:
        """While entered, work is issued here."""
        ...

    def follow(self) -> None:
        """What is issued here from now on starts after what has been issued to compute so far."""
        ...

    def lead(self) -> None:
        """What is issued to compute from now on starts after what has been issued here so far."""
        ...

    def mark(self) -> Event:
        """Reached when all that has been issued here so far is done."""
        ...


class Device(Protocol):
    """Where a worker's network lives.

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
        """A new one."""
        ...

    def mark(self) -> Event:
        """Reached when all that has been issued to compute so far is done."""
        ...

    def send(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; the caller may overwrite the original at once and waits for nothing."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory whose copies from and to the device run without the host."""
        ...

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        """A cheap way to repeat the function on the memory it uses now; it must have run before and is not run here.

        Args:
            function: always does the same on tensors that stay where they are; enters inference mode itself.
            generator: the one it draws from, besides the default one.

        Raises:
            CaptureError: there is none.
        """
        ...

    def strict(self) -> AbstractContextManager[object]:
        """While entered, what waits for the device, and so cannot be captured, raises RuntimeError."""
        ...

    def nap(self) -> None:
        """The caller has nothing to do until the device gets on."""
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
        """Nothing changes."""
        return nullcontext()

    def follow(self) -> None:
        """It does anyway."""

    def lead(self) -> None:
        """It does anyway."""

    def mark(self) -> Event:
        """Reached."""
        return REACHED


class HostDevice:
    """The CPU."""

    name, is_host = "cpu", True

    def make(self, make: Callable[[], Worker]) -> Worker:
        """Make a worker."""
        return make()

    def register(self, arena: Arena) -> None:
        """Nothing to do."""

    def side_stream(self) -> SideStream:
        """One without delay."""
        return HostStream()

    def mark(self) -> Event:
        """Reached."""
        return REACHED

    def send(self, tensor: Tensor) -> Tensor:
        """The tensor itself: what is sent is used up before it is overwritten."""
        return tensor

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(shape, dtype=dtype)

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        """The function."""
        return function

    def strict(self) -> AbstractContextManager[object]:
        """Nothing waits."""
        return nullcontext()

    def nap(self) -> None:
        """Nothing is ever under way."""


def device_of(name: str, *, urgent: bool = False) -> Device:
    """The device of a torch name; the work of workers that an `urgent` one makes goes before that of others."""
    if name == "cpu":
        return HostDevice()
    from algorithms.runtime.cuda import CudaDevice

    return CudaDevice(urgent)
