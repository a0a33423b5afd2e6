"""CUDA: registered memory, streams, events and graphs. No other file calls `torch.cuda`.

Every worker issues its work to its own stream and never to the default stream. The default stream cannot be captured,
and inference in the process of the learner must not wait behind training. Written for torch 2.11 to 2.13.
"""

import contextlib
import gc
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Generator, Tensor

from appo.algorithms.runtime.devices import CaptureError, Device, DeviceEvent, SideStream
from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.messages import Message, Worker
from appo.utils.errors import ResourceError

log = logging.getLogger(__name__)

SUCCESS = 0
_registered: set[int] = set()  # addresses of arenas; several workers of a process may share an arena


class CudaStream(SideStream):
    """A side stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def active(self) -> AbstractContextManager[object]:
        """Make the stream the current one while entered."""
        return torch.cuda.stream(self.stream)

    def follow(self) -> None:
        """Wait for all computing work issued so far."""
        self.stream.wait_stream(torch.cuda.current_stream())

    def lead(self) -> None:
        """Make later computing work wait for this stream."""
        torch.cuda.current_stream().wait_stream(self.stream)

    def mark(self) -> DeviceEvent:
        """Return an event behind all work issued here."""
        return _event(self.stream)


class OnStream:
    """A worker with its own stream; the stream is not current between two messages of the worker."""

    def __init__(self, worker: Worker, stream: torch.cuda.Stream) -> None:
        self.worker, self.stream = worker, stream

    def handle(self, message: Message) -> Iterator[Message]:
        """Handle a message on the stream."""
        return self._issue(self.worker.handle(message))

    def pending(self) -> bool:
        """Return whether the worker has work."""
        return self.worker.pending()

    def work(self) -> Iterator[Message]:
        """Do one unit of work on the stream."""
        return self._issue(self.worker.work())

    def _issue(self, messages: Iterator[Message]) -> Iterator[Message]:
        while True:
            with torch.cuda.stream(self.stream):
                message = next(messages, None)
            if message is None:
                return
            yield message


class CudaDevice(Device):
    """The current CUDA device. Graphs captured through one object share memory and must not run at the same time.

    Args:
        urgent: whether work of a worker made here has priority.

    Raises:
        ResourceError: torch cannot use the GPU.
    """

    name, is_host = "cuda", False

    def __init__(self, urgent: bool = False) -> None:
        if not torch.cuda.is_available():
            raise ResourceError("torch cannot use the GPU of this machine with this driver; --device=cpu does without")
        self._priority = -1 if urgent else 0  # the lower, the more urgent
        self._pool = torch.cuda.graph_pool_handle()
        # The weights of a recurrent core are views of the vector of all weights.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")

    def make(self, make: Callable[[], Worker]) -> Worker:
        """Make a worker with its own stream."""
        stream = torch.cuda.Stream(priority=self._priority)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            worker = make()
        return OnStream(worker, stream)

    def register(self, arena: Arena) -> bool:
        """Pin this process's mapping of the arena; after a refusal copies are slower, with equal results."""
        address = arena.address
        if address in _registered:
            return True
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        portable = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process
        code = int(runtime.cudaHostRegister(address, arena.reserved_nbytes, portable))
        if code == SUCCESS:
            _registered.add(address)
            weakref.finalize(arena, _unregister, address).atexit = False  # CUDA may be gone before
            return True
        # CUDA keeps the error until the next call. This call reports it instead of the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.name)
        log.warning("the shared memory cannot be pinned (CUDA error %d); copies to the GPU are slower", code)
        return False

    def shared(self, array: Array) -> Tensor:
        """Return the pinned memory of an array as a tensor of the GPU, which reads and writes through the bus."""
        if not array.size:
            return torch.from_numpy(array).to(self.name)
        return torch.as_tensor(_Pinned(array), device=self.name)

    def side_stream(self) -> SideStream:
        """Make a new stream."""
        return CudaStream()

    def mark(self) -> DeviceEvent:
        """Return an event behind all computing work issued."""
        return _event(torch.cuda.current_stream())

    def send(self, tensor: Tensor) -> Tensor:
        """Copy through new pinned memory, which torch keeps until the copy is done."""
        if tensor.is_cuda or not tensor.numel():
            return tensor.to(self.name)
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(self.name, non_blocking=True)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate pinned memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        """Capture a CUDA graph on the current stream, outside of inference mode.

        Inside, a graph would store the state of generators, the default one included, as tensors of inference mode,
        which no capture outside of the mode could change.

        Raises:
            CaptureError: with the message of CUDA.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.inference_mode(False), _without_collections():
                if generator is not None and hasattr(graph, "register_generator_state"):
                    with warnings.catch_warnings():  # newer versions of torch register it and deprecate this call
                        warnings.simplefilter("ignore")
                        graph.register_generator_state(generator)
                with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                    function()
        except RuntimeError as error:
            # A failed capture leaves its stream current, and memory and generators half captured.
            torch.cuda.set_stream(stream)
            self._pool = torch.cuda.graph_pool_handle()
            for used in (generator, torch.cuda.default_generators[torch.cuda.current_device()]):
                if used is not None:
                    fresh = Generator(self.name).manual_seed((used.initial_seed() + 1) % 2**63)
                    used.graphsafe_set_state(fresh.graphsafe_get_state())
            cause = error.__context__ or error  # ending a failed capture raises again
            raise CaptureError(str(cause).partition("\n")[0]) from error
        return graph.replay

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        """Raise, while entered, where an operation waits for the device."""
        before = torch.cuda.get_sync_debug_mode()
        _set_sync_debug_mode("error")
        try:
            yield
        finally:
            _set_sync_debug_mode(before)

    def nap(self) -> None:
        """Sleep for less than the time of a relevant kernel."""
        time.sleep(1e-4)


class _Pinned:
    """Pinned memory of the host, by the interface with which CUDA libraries exchange arrays.

    With unified addresses the GPU uses the addresses of the host.
    """

    def __init__(self, array: Array) -> None:
        self.__cuda_array_interface__ = array.__array_interface__ | {"stream": None}


def _unregister(address: int) -> None:
    """Unpin memory before other memory is mapped at its address: CUDA would mistake the new pages for the old ones."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    _registered.discard(address)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage while entered: the destruction of a graph ends the capture of another."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _event(stream: torch.cuda.Stream) -> DeviceEvent:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting sleeps
    event.record(stream)
    return event


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():  # "is a prototype feature"
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
