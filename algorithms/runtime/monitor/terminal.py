"""A frame in the lowest lines of a terminal, drawn over and over, with all else that is printed above it.

The cursor stays visible and no mode of the terminal is changed, so there is nothing to restore: however the process
ends, its last frame stands there and what comes next goes below. Frames are written by the thread that shows them,
through a description of the terminal of their own that never waits: one that does not take them (Ctrl-S, a dead
connection) costs frames and no time.
"""

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TextIO, cast

CLOSING_SECONDS = 1.0


class Screen:
    """Shows frames at the bottom of a terminal; while it is open, stdout, stderr and logs print above them.

    Args:
        descriptor: of the terminal.

    Raises:
        OSError: it cannot be opened for writing.
    """

    def __init__(self, descriptor: int) -> None:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)  # the shell's own must go on waiting
        self._lock = threading.RLock()
        self._frame: list[str] = []
        self._columns = 0  # of the terminal when the frame was written
        self._unsent = b""
        self._is_open = True
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (self._above(stream) for stream in self._streams)

    def size(self) -> os.terminal_size:
        """Return columns and rows now.

        Raises:
            OSError: the terminal is gone.
        """
        return os.get_terminal_size(self._descriptor)

    def show(self, frame: Sequence[str]) -> None:
        """Put these lines in the place of those shown before, unless the terminal is busy or another job's.

        Args:
            frame: lines that are narrower than the terminal; [] takes the last ones away.

        Raises:
            OSError: the terminal is gone.
        """
        if not self._lock.acquire(timeout=0):  # somebody prints a line, and may wait for the terminal
            return
        try:
            if not self._in_foreground():
                self._frame = []  # the shell writes where it was
            elif not self._unsent or self._send(b""):
                self._draw(frame)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Leave the last frame where it is; from here on all streams print below it."""
        if not self._is_open:
            return
        locked = self._lock.acquire(timeout=CLOSING_SECONDS)  # a thread may be printing, if the terminal lets it
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
        """Take the frame away while entered, so that the stream can print where it was."""
        with self._lock:
            frame = self._frame
            if frame:
                stream.write(self._unsent.decode(errors="replace") + self._erase())
                self._unsent, self._frame = b"", []
            yield
            stream.flush()
            if frame and self._is_open:
                with contextlib.suppress(OSError):  # the next frame finds out
                    self._draw(frame)

    def _draw(self, frame: Sequence[str]) -> None:
        before = self._erase()
        self._frame, self._columns = list(frame), self.size().columns
        self._send((before + "".join(f"{line}\r\n" for line in frame)).encode(errors="replace"))

    def _erase(self) -> str:
        """Return the text that moves the cursor to where the frame begins and clears the terminal from there.

        A terminal that has become narrower since has wrapped its lines.
        """
        if not self._frame:
            return ""
        rows_per_line = -(-(self._columns - 1) // max(1, self.size().columns))
        return f"\r\x1b[{len(self._frame) * max(1, rows_per_line)}A\x1b[J"

    def _send(self, text: bytes) -> bool:
        """Write the rest of earlier texts and this one; return whether nothing is left."""
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
        except OSError:  # not the terminal of this session: nobody can send it to the background
            return True

    def _above(self, stream: TextIO) -> TextIO:
        """Return a stream that prints above the frame, if it goes to the same terminal."""
        try:
            same = stream.isatty() and os.fstat(stream.fileno()).st_rdev == os.fstat(self._descriptor).st_rdev
        except (OSError, ValueError):  # a stream without a descriptor
            same = False
        if not same:
            return stream
        above = cast(TextIO, AboveFrame(self, stream))
        _redirect_logs(stream, above)
        return above


class AboveFrame(io.TextIOBase):
    """A stream whose lines appear above the frame of a screen, each as soon as it is complete.

    Args:
        screen: that has the frame.
        stream: what is written to.
    """

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen, self._stream = screen, stream
        self._begun = ""

    def write(self, text: str) -> int:
        """Print the lines that this completes."""
        lines, newline, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if newline:
            with self._screen.aside(self._stream):
                self._stream.write(lines + newline)
        return len(text)

    def finish(self) -> None:
        """Print the line that was begun, for lack of a better moment."""
        with contextlib.suppress(OSError):
            self._stream.write(self._begun)
        self._begun = ""

    def writable(self) -> bool:
        """Return True."""
        return True

    def flush(self) -> None:
        """Let the stream print the text that it has kept."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return True: on no terminal nothing would have to be above the frame."""
        return True

    def __getattr__(self, name: str) -> object:
        """Return any other attribute of the stream, such as its buffer."""
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of the base class it can be written
        """Return the encoding of the stream."""
        return self._stream.encoding


def _redirect_logs(before: TextIO | AboveFrame, after: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.stream = after  # nothing is kept in between that would have to be flushed
