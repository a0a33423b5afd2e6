"""Threads for a disk that may not answer: they do all that touches it, and nobody waits longer than they can bear.

A file system on the network, or one that is frozen, keeps whoever writes to it for as long as it likes, and no signal
ends that. Main therefore hands its writing to a `DiskThread`. The thread is a daemon: one that never comes back does
not keep the program from ending.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from appo.utils.failpoints import failpoint

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.5
"""For which somebody who has other things to do waits for the disk."""

LATE_SECONDS = 5.0
"""After which a disk that does not answer is worth a line."""

MOST_WAITING = 1000

_LOOK_SECONDS = 1.0

T = TypeVar("T")


class DiskThread:
    """Does all that touches the disk, one action after another, in a thread that begins with the first of them.

    Args:
        name: for the failpoint `disk.<name>`, which every action passes.

    Attributes:
        dropped: actions that were not done, as the disk did not answer and too many waited already.
    """

    def __init__(self, name: str) -> None:
        self.name, self.dropped = name, 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._newest: Future[Any] | None = None  # the one that is done last
        self._thread: threading.Thread | None = None
        self._since = 0.0  # monotonic time at which somebody first had no patience any more
        self._is_said = False

    @property
    def is_late(self) -> bool:
        """Return whether somebody has waited in vain for an action that is still not done."""
        if self._since and (self._newest is None or self._newest.done()):
            if self._is_said:
                log.warning("the disk answers again, after %.0f s", time.monotonic() - self._since)
            self._since, self._is_said = 0.0, False
        return bool(self._since)

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """Have an action done; return a future with its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                failpoint(f"disk.{self.name}")
                future.set_result(action())
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)

        self._newest = future
        self._queue.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(self._queue,), name=self.name, daemon=True)
            self._thread.start()
        return future

    def do(self, action: Callable[[], T], patience_seconds: float = PATIENCE_SECONDS, *, keep: bool = True) -> T | None:
        """Have an action done and return its result, or None when that is not there in time.

        While the disk does not answer nobody waits for it; once that has lasted for a while it is said.

        Args:
            action: what is done.
            patience_seconds: for it.
            keep: whether it is to be done in any case; without, it is left out while the disk does not answer.
        """
        if self.is_late:
            self._say()
            if not keep or self._queue.qsize() >= MOST_WAITING:
                self.dropped += 1
                return None
            patience_seconds = 0.0
        began = time.monotonic()
        future = self.submit(action)
        try:
            return future.result(patience_seconds)
        except TimeoutError:
            if future.done():  # the action's own
                raise
            self._since = self._since or began
            return None

    def finish(self, what: str, patience_seconds: float | None = None) -> bool:
        """Wait until all is done, and end the thread; another one begins with the next action.

        Args:
            what: is waited for, for the line that is said when it takes long.
            patience_seconds: after which it is given up; None: only Ctrl-C ends it.

        Returns:
            Whether all is done; otherwise the thread is left to itself.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._queue.put(None)
        self._queue = queue.SimpleQueue()  # who is left to itself keeps its own
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

    def _say(self) -> None:
        seconds = time.monotonic() - self._since
        if not self._is_said and seconds >= LATE_SECONDS:
            self._is_said = True
            log.warning(
                "the disk has not answered for %.0f s: nothing is written meanwhile, and training goes on", seconds
            )

    @staticmethod
    def _work(actions: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while (action := actions.get()) is not None:
            action()


def within(seconds: float, action: Callable[[], T], otherwise: T) -> T:
    """Return the result of an action on the disk; `otherwise` if it takes longer, or fails for want of the disk.

    A thread of its own does it, which is left behind if it does not come back.
    """
    thread = DiskThread("look")
    future = thread.submit(action)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        log.warning("the disk has not answered for %.0f s", seconds)
        return otherwise
    finally:
        thread.finish("a look at the disk", 0.0)
