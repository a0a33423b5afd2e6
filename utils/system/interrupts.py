"""Ctrl-C, SIGTERM and SIGHUP while a command does not watch for signals.

During an import, Python may lose a KeyboardInterrupt or turn the exception into another one.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from appo.utils.errors import Interrupted

SAME_PRESS_SECONDS = 0.2
"""A second signal within this time counts as the first: a parent may pass on a signal that the terminal also sent."""

_came: list[float] = []  # monotonic times; without a lock, for which a second signal would wait


@contextmanager
def kept() -> Iterator[None]:
    """While entered, Ctrl-C raises KeyboardInterrupt, and `came` reports the press even if Python loses the error."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored in the background
        yield
        return
    before, report = signal.signal(signal.SIGINT, _interrupt), sys.unraisablehook

    def report_others(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):  # `came` reports these
            report(lost)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, before)
        _came.clear()


def came() -> bool:
    """Return whether Ctrl-C was pressed since the command began, until another handler is installed."""
    return bool(_came)


def is_behind(error: Exception) -> bool:
    """Return whether a KeyboardInterrupt has caused this error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None and not isinstance(error, Interrupted)


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _came or now - _came[-1] >= SAME_PRESS_SECONDS:
        _came.append(now)
        raise KeyboardInterrupt


_unwinding: list[signal.Signals] = []


@contextmanager
def unwound() -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP raise KeyboardInterrupt, so that cleanups end children and remove folders.

    On leaving, the process ends by that signal, as without a handler. A second signal ends the process at once, unless
    the second arrives with the first: a shell passes on signals of the terminal.
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
        _unwinding.extend(n for n in (signal.SIGTERM, signal.SIGHUP) if is_free(n))
        for one in _unwinding:
            signal.signal(one, unwind)
    try:
        yield
    finally:
        stop_unwinding()
        if came:
            os.kill(os.getpid(), came[0][0])


def stop_unwinding() -> None:
    """Restore the default of SIGTERM and SIGHUP: a run watches for signals with its own handlers."""
    while _unwinding:
        signal.signal(_unwinding.pop(), signal.SIG_DFL)


def is_free(number: signal.Signals) -> bool:
    """Return whether a signal has its default action."""
    return signal.getsignal(number) is signal.SIG_DFL
