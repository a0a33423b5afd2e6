"""How a person or a scheduler ends a run."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from utils.errors import Interrupted, Terminated


class StopNow(BaseException):
    """A second Ctrl-C: end at once, without saving."""


class SignalWatch:
    """While entered: notes the first SIGINT or SIGTERM, raises `StopNow` at the second SIGINT, outlives SIGHUP.

    Attributes:
        request: what the run shall end with, once a signal has come.
    """

    def __init__(self) -> None:
        self.request: Interrupted | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalWatch":
        handlers: dict[signal.Signals, Any] = {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._terminate,
            signal.SIGHUP: signal.SIG_IGN,
        }
        self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise what a signal asked for.

        Raises:
            Interrupted: a signal has come.
        """
        if self.request is not None:
            raise self.request

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.request is not None:
            raise StopNow
        self.request = Interrupted("interrupted by Ctrl-C")
        # Handlers must not use buffered streams: the signal may have come in the middle of a write to one.
        os.write(2, b"\nstopping: saving what was learned; Ctrl-C again ends at once without saving\n")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.request is None:
            self.request = Terminated("ended by SIGTERM")
