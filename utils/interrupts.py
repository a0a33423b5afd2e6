"""Ctrl-C before anyone watches for signals: Python loses a KeyboardInterrupt that a callback of an import raises."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_came: list[int] = []  # without a lock, which a second signal would wait for


@contextmanager
def kept() -> Iterator[None]:
    """While entered, a Ctrl-C raises KeyboardInterrupt as ever, and `came` knows of it should that be lost."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, in the background
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _came.clear()


def came() -> bool:
    """Whether a Ctrl-C has come since the command began, and before another handler took its place."""
    return bool(_came)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    raise KeyboardInterrupt
