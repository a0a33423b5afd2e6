"""A terminal for tests: the slave of a pty, and what an emulator shows of what is written to it."""

import fcntl
import os
import struct
import sys
import termios
from types import TracebackType
from typing import TextIO

import pyte
import pytest


class Terminal:
    """A pseudo-terminal with an emulator behind it; while entered, stdout and stderr go there."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.master, self.slave = os.openpty()
        os.set_blocking(self.master, False)
        self.resize(columns, rows)
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._emulator = pyte.ByteStream(self.screen)
        self.written = b""
        self._patch = pytest.MonkeyPatch()
        self._streams: list[TextIO] = []

    def __enter__(self) -> "Terminal":
        for name in ("stdout", "stderr"):
            self._streams.append(open(os.dup(self.slave), "w", encoding="utf-8"))
            self._patch.setattr(sys, name, self._streams[-1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._patch.undo()
        for stream in self._streams:
            stream.close()
        for descriptor in {self.master, self.slave} - {-1}:
            os.close(descriptor)

    def resize(self, columns: int, rows: int) -> None:
        """As when a person drags the window."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        """As when the window is closed."""
        os.close(self.master)
        self.master = -1

    def read(self) -> bytes:
        """Take what has been written since the last call, and show it."""
        taken = b""
        while True:
            try:
                taken += os.read(self.master, 1 << 16)
            except BlockingIOError:
                break
        self.written += taken
        self._emulator.feed(taken)
        return taken

    def lines(self) -> list[str]:
        """What has been shown, from the first line on that scrolled away, without what is empty at the end."""
        self.read()
        gone = ["".join(line[column].data for column in range(self.screen.columns)) for line in self.screen.history.top]
        shown = [line.rstrip() for line in [*gone, *self.screen.display]]
        while shown and not shown[-1]:
            shown.pop()
        return shown
