"""The end of a run by a person or a scheduler."""

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

from appo.utils.errors import Interrupted, StopNow, Terminated
from appo.utils.system.interrupts import SAME_PRESS_SECONDS, came, is_free

LIKE_SIGTERM = (signal.SIGQUIT, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
"""Signals that end a run like SIGTERM: of a terminal, of a scheduler that warns, of a timer, of a limit.

SIGUSR1 is not in the list: every process then writes its stacks, see `utils/logging.py`.
"""

QUIET = (signal.SIGINT, signal.SIGTERM, *LIKE_SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that do not end the workers: main handles them, and SIGUSR1 writes stacks."""


class SignalWatch:
    """While entered: records the first SIGINT or SIGTERM, raises `StopNow` at the second SIGINT, outlives SIGHUP.

    SIGQUIT, SIGUSR2, SIGALRM and SIGXCPU act like SIGTERM, unless the program has a handler of its own. An environment
    in this process may take SIGALRM.

    A third SIGINT ends the process at once; the kernel then ends the children. Outside the main thread Python allows no
    handlers, so all signals keep the caller's.

    Attributes:
        request: error to end the run with, after a signal.
    """

    def __init__(self) -> None:
        self.request: Interrupted | None = None
        self._raising = self._stopping_now = False
        self._pressed = -math.inf  # time of the last Ctrl-C
        self._handlers: dict[signal.Signals, Any] = {
            signal.SIGINT: self._interrupt,
            signal.SIGTERM: self._terminate,
            signal.SIGHUP: signal.SIG_IGN,
            **dict.fromkeys(LIKE_SIGTERM, self._terminate),
        }
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
            ours = {n: h for n, h in self._handlers.items() if n not in LIKE_SIGTERM or is_free(n)}
            self._previous = {number: signal.signal(number, handler) for number, handler in ours.items()}
            if came():
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
        """Raise the request of a signal, and take back signals that an environment in this process has taken.

        Raises:
            Interrupted: a signal has arrived.
        """
        for number in self._previous:
            if signal.getsignal(number) != self._handlers[number] and number != signal.SIGALRM:
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
        if now - before < SAME_PRESS_SECONDS:
            return
        self._pressed = now
        if self._stopping_now:
            os._exit(Interrupted.exit_code)
        if before > -math.inf:
            self._stopping_now = True
            raise StopNow
        if self.request is None:
            self._ask(Interrupted("interrupted by Ctrl-C"))
        # Handlers must not use buffered streams: the signal may have interrupted a write to the stream.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping: saving what was learned; Ctrl-C again ends at once without saving\n")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.request is None:
            self._ask(Terminated(f"ended by {signal.Signals(number).name}"))

    def _ask(self, request: Interrupted) -> None:
        self.request = request
        if self._raising:
            raise request
