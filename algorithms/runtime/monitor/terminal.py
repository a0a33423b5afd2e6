"""A frame in the lowest lines of a terminal, redrawn in place, with all printed lines above.

The cursor stays visible and no mode of the terminal changes, so nothing must be restored: after any end of the process
the last frame remains and further output appears below. The calling thread writes frames through a separate,
non-blocking description of the terminal. A terminal that takes no output (Ctrl-S, a dead connection) costs frames and
no time.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, cast

CLOSING_SECONDS = 1.0


class Screen:
    """Shows frames at the bottom of a terminal; while open, stdout, stderr and logs print above the frame.

    Raises:
        OSError: the terminal cannot be opened for writing.
    """

    def __init__(self, descriptor: int) -> None:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)  # the shell's descriptor must stay blocking
        self._lock = threading.RLock()
        self._frame: list[str] = []
        self._columns = 0  # width of the terminal at the last frame
        self._unsent, self._is_open = b"", True
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (self._above(stream) for stream in self._streams)

    def size(self) -> os.terminal_size:
        """Return the current columns and rows (OSError: the terminal is gone)."""
        return os.get_terminal_size(self._descriptor)

    def show(self, frame: Sequence[str]) -> None:
        """Replace the last frame, unless the terminal is busy or belongs to another job.

        Args:
            frame: lines, narrower than the terminal; [] removes the last frame.

        Raises:
            OSError: the terminal is gone.
        """
        if not self._lock.acquire(timeout=0):  # a thread prints a line, and may wait for the terminal
            return
        try:
            if not self._in_foreground():
                self._frame = []  # the shell writes over the frame
            elif not self._unsent or self._send(b""):
                self._draw(frame)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Leave the last frame on the terminal; all streams print below from now on."""
        if not self._is_open:
            return
        locked = self._lock.acquire(timeout=CLOSING_SECONDS)  # a thread may print, or wait for the terminal
        self._is_open, self._frame = False, []
        for stream, before in zip((sys.stdout, sys.stderr), self._streams, strict=True):
            if isinstance(stream, AboveFrame):
                stream.finish()
                _redirect_logs(stream, before)
        sys.stdout, sys.stderr = self._streams
        if locked:
            os.close(self._descriptor)
            self._lock.release()

    @contextlib.contextmanager
    def aside(self, stream: TextIO) -> Iterator[None]:
        """Remove the frame while entered, so the stream can print in the place of the frame."""
        with self._lock:
            frame = self._frame
            if frame:
                stream.write(self._unsent.decode(errors="replace") + self._erase())
                self._unsent, self._frame = b"", []
            yield
            stream.flush()
            if frame and self._is_open:
                with contextlib.suppress(OSError):  # the next frame will raise
                    self._draw(frame)

    def _draw(self, frame: Sequence[str]) -> None:
        before = self._erase()
        self._frame, self._columns = list(frame), self.size().columns
        self._send((before + "".join(f"{line}\r\n" for line in frame)).encode(errors="replace"))

    def _erase(self) -> str:
        """Return the escape sequence that clears the terminal from the first line of the frame.

        A terminal that has become narrower has wrapped the lines.
        """
        if not self._frame:
            return ""
        rows_per_line = -(-(self._columns - 1) // max(1, self.size().columns))
        return f"\r\x1b[{len(self._frame) * max(1, rows_per_line)}A\x1b[J"

    def _send(self, text: bytes) -> bool:
        text = self._unsent + text
        try:
            written = os.write(self._descriptor, text) if text else 0
        except BlockingIOError:
            written = 0
        self._unsent = text[written:]
        return not self._unsent

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # a terminal of another session has no background jobs of ours
            return True

    def _above(self, stream: TextIO) -> TextIO:
        """Return a stream that prints above the frame; a stream to another place is returned unchanged."""
        try:
            same = stream.isatty() and os.fstat(stream.fileno()).st_rdev == os.fstat(self._descriptor).st_rdev
        except (OSError, ValueError):  # a stream without a descriptor
            same = False
        if not same:
            return stream
        above = cast(TextIO, AboveFrame(self, stream))
        _redirect_logs(stream, above)
        return above


class AboveFrame:
    """A stream whose complete lines appear above the frame of a screen; otherwise like the stream."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen, self._stream = screen, stream
        self._begun = ""

    def write(self, text: str) -> int:
        """Print the lines completed by the text."""
        lines, newline, rest = (self._begun + text).rpartition("\n")
        self._begun = rest[rest.rfind("\r", 0, -1) + 1 :]  # a bar that is drawn again and again would grow
        if newline:
            with self._screen.aside(self._stream):
                self._stream.write(lines + newline)
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Print the lines completed by the texts."""
        self.write("".join(texts))

    def finish(self) -> None:
        """Print the incomplete last line."""
        with contextlib.suppress(OSError):
            self._stream.write(self._begun)
        self._begun = ""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _redirect_logs(before: TextIO | AboveFrame, after: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.stream = after  # no flush: a handler buffers nothing
