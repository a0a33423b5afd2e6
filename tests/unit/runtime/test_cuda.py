"""The Python of `cuda.py`, with a stand-in for what it calls of `torch.cuda`. It says nothing about GPUs."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from appo.algorithms.runtime import cuda
from appo.algorithms.runtime.algorithm import companion
from appo.algorithms.runtime.cuda import CudaDevice, OnStream
from appo.algorithms.runtime.devices import CaptureError
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.messages import Address, Message, SlotReleased, Stop, Worker
from appo.algorithms.runtime.roles import LEARNER, POLICY_WORKER
from appo.utils.errors import ResourceError


class Driver:
    """What `torch.cuda` would have: a current stream, and a note of every call.

    Attributes:
        refused: error code of registering memory.
        available: whether torch can use it.
        broken: whether what is captured waits for the device, which ends the capture with an error of its own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = "default"
        self.calls: list[Any] = []
        self.refused, self.available, self.broken, self.mode = 0, True, False, 0
        self.kept_error = False  # of the runtime, for whoever launches a kernel next
        driver = self

        class Stream:
            def __init__(self, priority: int = 0) -> None:
                self.priority = priority

            def wait_stream(self, other: object) -> None:
                driver.calls.append(("wait", self, other))

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking

            def record(self, stream: object) -> None:
                self.stream = stream

        class Graph:
            def register_generator_state(self, generator: object) -> None:
                warnings.warn("deprecated", FutureWarning, stacklevel=2)
                driver.calls.append(("generator", generator))

            def replay(self) -> None:
                driver.calls.append("replay")

        def register(*given: int) -> int:
            driver.calls.append(given)
            driver.kept_error = driver.refused != 0
            return driver.refused

        def unregister(address: int) -> int:
            driver.calls.append(("unregister", address))
            return 0

        known: dict[str, Any] = {
            "is_available": lambda: self.available,
            "synchronize": lambda: driver.calls.append("synchronize"),
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "stream": self.stream,
            "graph": self.graph,
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "graph_pool_handle": object,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
            "current_device": lambda: 0,
            "default_generators": (Generator(3),),
        }
        for name, value in known.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda, "Generator", lambda device: Generator(0))
        monkeypatch.setattr(torch, "zeros", self.zeros)

    def zeros(self, *shape: int, device: str) -> None:
        before, self.kept_error = self.kept_error, False
        if before:
            raise RuntimeError("CUDA error: said by the first kernel after it")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: object) -> Iterator[None]:
        self.calls.append(("capture", pool, stream))
        self.current = "capturing"
        try:
            yield
        finally:
            if self.broken:  # as `torch.cuda.graph` leaves: the stream stays current
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nhints")
            self.current = stream


class Generator:
    """A generator whose state is an object that can be exchanged."""

    def __init__(self, seed: int) -> None:
        self.state = {"seed": seed}

    def manual_seed(self, seed: int) -> "Generator":
        self.state["seed"] = seed
        return self

    def initial_seed(self) -> int:
        return self.state["seed"]

    def graphsafe_get_state(self) -> dict[str, int]:
        return self.state

    def graphsafe_set_state(self, state: dict[str, int]) -> None:
        self.state = state


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


class Noting:
    """A worker that notes the current stream whenever it runs."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.seen = driver, [driver.current]

    def handle(self, message: Message) -> Iterator[Message]:
        self.seen.append(self.driver.current)
        yield from ()

    def pending(self) -> bool:
        return True

    def work(self) -> Iterator[Message]:
        for slot in range(2):
            self.seen.append(self.driver.current)
            yield SlotReleased(0, slot, 0)
        self.seen.append(self.driver.current)


def test_a_worker_runs_on_its_stream_and_nobody_else_does(driver: Driver) -> None:
    worker = CudaDevice(urgent=True).make(lambda: Noting(driver))
    assert isinstance(worker, OnStream)
    assert worker.stream.priority < 0
    assert worker.pending()
    for message in worker.work():
        assert isinstance(message, SlotReleased)
        assert driver.current == "default"
    assert list(worker.handle(Stop())) == []
    assert worker.worker.seen == [worker.stream] * 5  # type: ignore[attr-defined]
    assert driver.current == "default"


def test_a_worker_on_a_stream_is_found_by_workers_beside_it(driver: Driver) -> None:
    own = Noting(driver)
    others: dict[Address, Worker] = {Address(LEARNER.name, 1): CudaDevice().make(lambda: own)}
    assert companion(others, Address(POLICY_WORKER.name, 1), LEARNER, Noting) is own


@pytest.mark.parametrize("code", [712, 2])
def test_registering_what_is_refused_is_only_a_warning(
    driver: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(CudaDevice, "name", "cpu")
    driver.refused = code
    arena = Arena.create([Field("x", (1000,), "uint8")])
    CudaDevice().register(arena)
    assert driver.calls == [(arena["x"].ctypes.data, 1024, 1)]
    assert len(caplog.records) == 1
    assert not driver.kept_error
    del arena
    assert len(driver.calls) == 1


def test_memory_is_registered_once_and_until_it_is_unmapped(driver: Driver) -> None:
    for _ in range(2):  # the second arena is likely to have the address of the first
        arena = Arena.create([Field("x", (1000,), "uint8")])
        address = arena["x"].ctypes.data
        for _ in range(2):
            CudaDevice().register(arena)
        assert driver.calls == [(address, 1024, 1)]
        del arena
        assert driver.calls[1:] == ["synchronize", ("unregister", address)]
        driver.calls.clear()


def test_a_gpu_that_torch_cannot_use_is_said(driver: Driver) -> None:
    driver.available = False
    with pytest.raises(ResourceError, match=r"^torch cannot use the GPU of this machine"):
        CudaDevice()


def test_garbage_is_not_collected_during_a_capture(driver: Driver) -> None:
    enabled = []
    CudaDevice().capture(lambda: enabled.append(gc.isenabled()))
    assert enabled == [False]
    assert gc.isenabled()


def test_a_capture_leaves_inference_mode(driver: Driver) -> None:
    """What it keeps of generators could not be changed outside of it by the next capture."""
    modes = []
    with torch.inference_mode():
        CudaDevice().capture(lambda: modes.append(torch.is_inference_mode_enabled()))
    assert modes == [False]


def test_what_is_sent_may_be_overwritten_even_if_it_is_pinned_already(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty_like(tensor: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.full(tensor.shape, -1.0)

    monkeypatch.setattr(CudaDevice, "name", "cpu")
    monkeypatch.setattr(torch, "empty_like", empty_like)
    buffer = torch.arange(3.0)
    sent = CudaDevice().send(buffer)
    buffer += 5
    assert sent.tolist() == [0.0, 1.0, 2.0]


def test_a_graph_is_captured_on_the_stream_of_its_worker(driver: Driver) -> None:
    device, generator = CudaDevice(), Generator(1)
    driver.current = "mine"
    replays = [device.capture(lambda: driver.calls.append("run"), generator) for _ in range(2)]  # type: ignore[arg-type]
    pool = device._pool
    assert driver.calls == [("generator", generator), ("capture", pool, "mine"), "run"] * 2
    driver.calls.clear()
    replays[0]()
    assert driver.calls == ["replay"]
    assert generator.state == {"seed": 1}


def test_a_capture_that_fails_leaves_everything_usable(driver: Driver) -> None:
    device, generator = CudaDevice(), Generator(1)
    pool, states = device._pool, [generator.state, torch.cuda.default_generators[0].state]
    driver.current, driver.broken = "mine", True

    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nhints")

    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        device.capture(waits, generator)  # type: ignore[arg-type]
    assert driver.current == "mine"
    assert device._pool is not pool
    fresh = [generator.state, torch.cuda.default_generators[0].state]
    assert fresh == [{"seed": 2}, {"seed": 4}]
    assert all(new is not old for new, old in zip(fresh, states, strict=True))


def test_strict_is_left_however_it_ends(driver: Driver) -> None:
    device = CudaDevice()

    def wait() -> None:
        with device.strict():
            assert driver.mode == "error"
            raise RuntimeError("waits")

    with pytest.raises(RuntimeError, match="waits"):
        wait()
    assert driver.mode == 0


def test_side_streams_wait_for_the_one_that_computes_and_the_other_way_round(driver: Driver) -> None:
    device = CudaDevice()
    driver.current = computing = torch.cuda.Stream()
    side = device.side_stream()
    side.follow()
    side.lead()
    assert driver.calls == [("wait", side.stream, computing), ("wait", computing, side.stream)]  # type: ignore[attr-defined]
    with side.active():
        assert driver.current is side.stream  # type: ignore[attr-defined]
    assert side.mark().stream is side.stream  # type: ignore[attr-defined]
    assert device.mark().stream is computing  # type: ignore[attr-defined]
