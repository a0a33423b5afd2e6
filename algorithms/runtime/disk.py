"""Threads for a disk that may not answer: all access to the disk happens there, and callers wait for a limited time.

A file system on the network, or a frozen one, blocks a writing process for any time, and no signal ends the wait. Main
therefore submits writes to a `DiskThread`. The thread is a daemon, and a blocked thread does not keep the program from
ending.
"""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from appo.utils.failpoints import failpoint

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.5
"""Wait of a caller with other work for the disk."""

LATE_SECONDS = 5.0
"""Silence of the disk after which a warning is logged."""

MOST_WAITING = 1000
_LOOK_SECONDS = 1.0
T = TypeVar("T")


class DiskThread:
    """Executes actions on the disk one after another, in a thread started by the first action.

    Args:
        name: name in the failpoint `disk.<name>` of every action.

    Attributes:
        dropped: number of actions dropped, because the disk did not answer and too many actions waited.
    """

    def __init__(self, name: str) -> None:
        self.name, self.dropped = name, 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._newest: Future[Any] | None = None  # the last one in the queue
        self._thread: threading.Thread | None = None
        self._since = 0.0  # monotonic time at which a caller first stopped waiting
        self._is_said = False

    @property
    def is_late(self) -> bool:
        """Return whether an action outlasted its patience and is still not done."""
        if self._since and (self._newest is None or self._newest.done()):
            if self._is_said:
                log.warning("the disk answers again, after %.0f s", time.monotonic() - self._since)
            self._since, self._is_said = 0.0, False
        return bool(self._since)

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """Queue an action; return a future with its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                failpoint(f"disk.{self.name}")
                future.set_result(action())
            except BaseException as error:  # raised by `Future.result`
                future.set_exception(error)

        self._newest = future
        self._queue.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(self._queue,), name=self.name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)  # the thread ends with this object at the latest
        return future

    def do(self, action: Callable[[], T], patience_seconds: float = PATIENCE_SECONDS, *, keep: bool = True) -> T | None:
        """Queue an action and return its result, or None if late.

        While the disk does not answer, callers do not wait; after a while a warning is logged.

        Args:
            action: action on the disk.
            patience_seconds: longest wait for the result.
            keep: whether the action must be done; otherwise it is dropped while the disk does not answer.
        """
        if self.is_late:
            seconds = time.monotonic() - self._since
            if not self._is_said and seconds >= LATE_SECONDS:
                self._is_said = True
                log.warning(
                    "the disk has not answered for %.0f s: nothing is written meanwhile, and training goes on", seconds
                )
            if not keep or self._queue.qsize() >= MOST_WAITING:
                self.dropped += 1
                return None
            patience_seconds = 0.0
        began = time.monotonic()
        future = self.submit(action)
        futures.wait([future], patience_seconds)
        if future.done():
            return future.result(0.0)
        self._since = self._since or began
        return None

    def finish(self, what: str, patience_seconds: float | None = None) -> bool:
        """Wait until all actions are done, and end the thread; the next action starts another.

        Args:
            what: purpose of the wait, for the log.
            patience_seconds: longest wait; None: only Ctrl-C ends the wait.

        Returns:
            Whether all actions are done; otherwise the thread is abandoned.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._queue.put(None)
        self._queue = queue.SimpleQueue()  # an abandoned thread keeps its own
        begin, is_said = time.monotonic(), False
        while thread.is_alive():
            waited = time.monotonic() - begin
            if patience_seconds is not None and waited >= patience_seconds:
                break
            if waited >= LATE_SECONDS and not is_said:
                is_said = True
                log.warning("%s: the disk has not answered for %.0f s; Ctrl-C ends without it", what, waited)
            thread.join(_LOOK_SECONDS if patience_seconds is None else min(_LOOK_SECONDS, patience_seconds - waited))
        return not thread.is_alive()

    @staticmethod
    def _work(actions: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while (action := actions.get()) is not None:
            action()
            del action  # so that its objects do not stay while the thread waits


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Return the result of an action on the disk; `otherwise` after a timeout.

    The action runs in its own thread, abandoned after the timeout.
    """
    thread = DiskThread("look")
    future = thread.submit(action)
    try:
        futures.wait([future], seconds)
        if future.done():
            return future.result(0.0)
        log.warning("the disk has not answered for %.0f s", seconds)
        return otherwise
    finally:
        thread.finish("a look at the disk", 0.0)
