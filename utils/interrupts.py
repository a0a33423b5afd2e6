"""Ctrl-C before anyone watches for signals: during an import, Python may lose a KeyboardInterrupt, or hide it."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from utils.errors import Interrupted

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
