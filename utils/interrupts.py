"""Ctrl-C before anyone watches for signals: during an import, Python may lose a KeyboardInterrupt, or hide it."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from appo.utils.errors import Interrupted, StopNow, Terminated

SAME_PRESS_SECONDS = 0.2
"""Within them a second signal is the first one: who starts us may pass on what the terminal has sent to us as well."""

_came: list[float] = []  # monotonic times; without a lock, which a second signal would wait for


@contextmanager
def kept() -> Iterator[None]:
    """While entered, a Ctrl-C raises KeyboardInterrupt, and `came` knows of it, should Python lose that."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, in the background
        yield
        return
    before, tell = signal.signal(signal.SIGINT, _interrupt), sys.unraisablehook

    def tell_others(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):  # of that we know
            tell(lost)

    sys.unraisablehook = tell_others
    try:
        yield
    finally:
        sys.unraisablehook = tell
        signal.signal(signal.SIGINT, before)
        _came.clear()


def came() -> bool:
    """Whether a Ctrl-C has come since the command began, and before another handler took its place."""
    return bool(_came)


def is_behind(error: Exception) -> bool:
    """Whether a KeyboardInterrupt has become this error on its way."""
    return not isinstance(error, Interrupted) and any(isinstance(e, KeyboardInterrupt) for e in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those it was raised from or while handling."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _came or now - _came[-1] >= SAME_PRESS_SECONDS:
        _came.append(now)
        raise KeyboardInterrupt


# How a person or a scheduler ends a command that does not watch for signals.


_unwinding: list[signal.Signals] = []


@contextmanager
def unwound() -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP raise KeyboardInterrupt, so that children and folders are ended and removed.

    On leaving the process ends by that signal, as it would have without. A second signal ends it on the spot, but for
    one that comes with the first: a shell passes on what the terminal has sent.
    """
    came: list[tuple[int, float]] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not came:
            came.append((number, now))
            raise KeyboardInterrupt
        if now - came[0][1] >= SAME_PRESS_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        _unwinding.extend(n for n in (signal.SIGTERM, signal.SIGHUP) if _is_free(n))
        for one in _unwinding:
            signal.signal(one, unwind)
    try:
        yield
    finally:
        stop_unwinding()
        if came:
            os.kill(os.getpid(), came[0][0])


def stop_unwinding() -> None:
    """Let SIGTERM and SIGHUP end this process at once again: a run watches for them when it has begun."""
    while _unwinding:
        signal.signal(_unwinding.pop(), signal.SIG_DFL)


# How a person or a scheduler ends a run.


LIKE_SIGTERM = (signal.SIGQUIT, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
"""Signals that end a run as SIGTERM does: those of a terminal, of a scheduler that warns, of a timer, of a limit.

SIGUSR1 is not among them: every process writes its stacks then, see `utils/logging.py`.
"""

ENDING = (signal.SIGINT, signal.SIGTERM, *LIKE_SIGTERM)
"""Signals that main ends with."""

QUIET = (*ENDING, signal.SIGHUP, signal.SIGUSR1)
"""Signals that do not end the processes of main: they are meant for main alone, or for stacks (SIGUSR1)."""


class SignalWatch:
    """While entered: notes the first SIGINT or SIGTERM, raises `StopNow` at the second SIGINT, outlives SIGHUP.

    SIGQUIT, SIGUSR2, SIGALRM and SIGXCPU do as SIGTERM, unless the program has a use of its own for them: a handler
    that is there stays, and a SIGALRM that an environment in this process takes stays taken.

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
            **dict.fromkeys(LIKE_SIGTERM, self._terminate),
        }
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():
            ours = {n: h for n, h in self._handlers.items() if n not in LIKE_SIGTERM or _is_free(n)}
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
        """Raise what a signal asked for, and take back signals that an environment in this process has taken.

        Raises:
            Interrupted: a signal has come.
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
        if self.request is not None:
            self._stopping_now = True
            raise StopNow
        self._ask(Interrupted("interrupted by Ctrl-C"))
        # Handlers must not use buffered streams: the signal may have come in the middle of a write to one.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping: saving what was learned; Ctrl-C again ends at once without saving\n")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.request is None:
            self._ask(Terminated(f"ended by {signal.Signals(number).name}"))

    def _ask(self, request: Interrupted) -> None:
        self.request = request
        if self._raising:
            raise request


def _is_free(number: signal.Signals) -> bool:
    """Whether nobody has a use for a signal."""
    return signal.getsignal(number) is signal.SIG_DFL
