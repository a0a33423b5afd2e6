"""How a person or a scheduler ends a run."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from utils import interrupts
from utils.errors import Interrupted, StopNow, Terminated


class SignalWatch:
    """While entered: notes the first SIGINT or SIGTERM, raises `StopNow` at the second SIGINT, outlives SIGHUP.

    A third SIGINT ends the process on the spot; the kernel then ends its children. In a thread that is not the main one
    Python allows no handlers: signals then stay what they are to the caller.

    Attributes:
        request: what the run shall end with, once a signal has come.
    """

    def __init__(self) -> None:
        self.request: Interrupted | None = None
        self._raising = self._stopping_now = False
        self._pressed = -math.inf  # when Ctrl-C was
        self._handlers: dict[signal.Signals, Any] = {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._terminate,
            signal.SIGHUP: signal.SIG_IGN,
        }
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, handler) for number, handler in self._handlers.items()}
            if interrupts.came():
                self._pressed = time.monotonic()
                self._ask(Interrupted("interrupted by Ctrl-C"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def check(self) -> None:
        """Raise what a signal asked for, and take back signals that an environment in this process has taken.

        Raises:
            Interrupted: a signal has come.
        """
        for number in self._previous:
            if signal.getsignal(number) != self._handlers[number]:
                signal.signal(number, self._handlers[number])
        if self.request is not None:
            raise self.request

    @contextmanager
    def raising(self) -> Iterator[None]:
        """While entered, the first signal raises at once, not at the next `check`: for waits with nothing to save."""
        self.check()
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._pressed
        if now - before < interrupts.SAME_PRESS_SECONDS:
            return
        self._pressed = now
        if self._stopping_now:
            os._exit(Interrupted.exit_code)
        if self.request is not None:
            self._stopping_now = True
            raise StopNow
        self._ask(Interrupted("interrupted by Ctrl-C"))
        # Handlers must not use buffered streams: the signal may have come in the middle of a write to one.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping: saving what was learned; Ctrl-C again ends at once without saving\n")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.request is None:
            self._ask(Terminated("ended by SIGTERM"))

    def _ask(self, request: Interrupted) -> None:
        self.request = request
        if self._raising:
            raise request
