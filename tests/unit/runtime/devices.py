"""Devices that lag behind, and that refuse, without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Generator

from appo.algorithms.runtime.devices import CaptureError, Device, SideStream


class LateEvent:
    """Reached when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


class LateStream(SideStream):
    """Copies at once but says so late; notes what it is asked."""

    def __init__(self) -> None:
        self.events: list[LateEvent] = []
        self.asked: list[str] = []

    def follow(self) -> None:
        self.asked.append("follow")

    def lead(self) -> None:
        self.asked.append("lead")

    def mark(self) -> LateEvent:
        self.events.append(LateEvent())
        return self.events[-1]


class LateDevice(Device):
    """A device with memory of its own, which happens to be the host's."""

    is_host = False

    def __init__(self) -> None:
        self.streams: list[LateStream] = []

    def side_stream(self) -> LateStream:
        self.streams.append(LateStream())
        return self.streams[-1]


class RecordingDevice(Device):
    """Notes what is captured; a capture is not run, and replaying it runs it on the memory it knows.

    Args:
        refuses: "strict" or "capture", which then raises.
    """

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.captured: list[Callable[[], None]] = []
        self.replays = 0
        self.strict_runs = 0

    @contextmanager
    def strict(self) -> Iterator[None]:
        self.strict_runs += 1
        if self.refuses == "strict":
            raise RuntimeError("called a synchronizing operation")
        yield

    def capture(self, function: Callable[[], None], generator: Generator | None = None) -> Callable[[], None]:
        if self.refuses == "capture":
            raise CaptureError("not permitted while capturing")
        self.captured.append(function)

        def replay() -> None:
            self.replays += 1
            function()

        return replay
