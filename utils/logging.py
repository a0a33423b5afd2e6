"""Where log lines go: plain lines on the terminal for main, a file for each worker."""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO

from appo.utils.errors import format_error
from appo.utils.run_folder import append_to_own, is_named, open_own, update_own
from appo.utils.values import printable

_TAIL_BLOCK_BYTES = 1 << 16
_RECENT_WARNINGS = 5


class _DropWhenFull(logging.Handler):
    """A full disk or a closed pipe costs log lines, never the run, and is not answered with a traceback per line."""

    dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            self.dropped += 1
        else:
            super().handleError(record)


class _LineStream(_DropWhenFull, logging.StreamHandler[IO[str]]):
    """Writes to the terminal; characters that its encoding does not know become question marks, as `say` has it."""

    def format(self, record: logging.LogRecord) -> str:
        text, encoding = super().format(record), getattr(self.stream, "encoding", None) or "utf-8"
        if getattr(self.stream, "errors", "strict") != "strict":  # stderr writes them as Python spells them
            return text
        return text.encode(encoding, "replace").decode(encoding)


class _LineFile(_DropWhenFull, logging.StreamHandler[IO[str]]):
    """Appends to a file of a run."""

    def __init__(self, path: Path) -> None:
        super().__init__(_open_log(path))
        self.path = path

    def close(self) -> None:
        super().close()
        self.stream.close()


def _open_log(path: Path) -> IO[str]:
    return os.fdopen(append_to_own(path, make=True), "a", encoding="utf-8", errors="backslashreplace")


def follow_log() -> None:
    """Go on in the log file of this process where it should be, if somebody has removed or renamed it with its folder.

    What goes into a file without a name fills the disk unseen. What is printed follows, as far as it went there too.
    """
    for handler in logging.getLogger().handlers:
        if not isinstance(handler, _LineFile) or is_named(old := handler.stream.fileno(), handler.path):
            continue
        with contextlib.suppress(OSError):  # not yet
            printed = [number for number in (1, 2) if _is_same_file(number, old)]
            stream = _open_log(handler.path)
            for number in printed:
                os.dup2(stream.fileno(), number)
            before = handler.setStream(stream)
            _dump_stacks_to(stream)
            if before is not None:
                before.close()


def _is_same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:  # an environment has closed it
        return False


class _Recent(logging.Handler):
    """Keeps the last warnings of this process, each with the time of day, in one line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=_RECENT_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.lines.append(f"{clock} {' '.join(record.getMessage().split())}")


SHOWN = {"shown": True}
"""The `extra` of a warning without a traceback that main is to show, where a worker of that process takes it there."""


class _Raised(logging.Handler):
    """Keeps the first warnings of this process that people are to see, until somebody takes them.

    These come with a traceback, or with `extra=SHOWN`.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if (error or hasattr(record, "shown")) and len(self.texts) < _RECENT_WARNINGS:
            self.texts.append(f"{record.getMessage()}\n{format_error(error) if error else ''}".rstrip())


_recent, _raised = _Recent(), _Raised()


class JsonLines(logging.Formatter):
    """A JSON object per record: its `report`, a mapping handed over as `extra`, or else its message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        report = getattr(record, "report", None)
        head: dict[str, object] = {"event": "log" if report is None else "report", "time": record.created}
        said = {"level": record.levelname.lower(), "message": record.getMessage()} if report is None else report
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(head | said | trace)


class _Printable(logging.Formatter):
    """Writes what files and environments say so that it cannot command the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def recent_warnings() -> tuple[str, ...]:
    """The last warnings and errors that this process has logged, oldest first."""
    return tuple(_recent.lines)


def take_raised() -> tuple[str, ...]:
    """The warnings that this process, a worker, has logged for main to show since they were taken last."""
    taken, _raised.texts = tuple(_raised.texts), []
    return taken


def configure(role: str, path: Path | None, level: int | str = logging.INFO, *, as_json: bool = False) -> None:
    """Set up the root logger and the stack dump of this process; called once, at entry, in every process.

    SIGUSR1 then writes the Python stacks of all threads to the log (main: stderr), and so does a crash (SIGSEGV and
    its like). It works while the interpreter is stuck in C code, as it takes no lock.

    Args:
        role: name of the worker, in every line of its file.
        path: log file, appended to; None: messages below WARNING go to stdout, others to stderr, as plain lines.
        level: messages below it are dropped.
        as_json: without a file, write a JSON object per message, all of them to stdout.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    if path is None:
        handlers: list[logging.Handler] = [*_on_terminal(as_json), _recent]
        dump: IO[str] = sys.stderr
    else:
        file = _LineFile(path)
        file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role.replace('%', '%%')}: %(message)s"))
        handlers = [file, _raised]
        dump = file.stream
    for handler in handlers:
        root.addHandler(handler)
    _dump_stacks_to(dump)


def _on_terminal(as_json: bool) -> list[logging.Handler]:
    out = _LineStream(sys.stdout)
    if as_json:
        out.setFormatter(JsonLines())
        return [out]
    err = _LineStream(sys.stderr)
    for stream in (out, err):
        stream.setFormatter(_Printable())
    out.addFilter(lambda record: record.levelno < logging.WARNING)
    err.setLevel(logging.WARNING)
    return [out, err]


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, without their line ends; [] when it cannot be read. Reads no more than it must."""
    if lines <= 0:
        return []
    try:
        with open_own(path) as file:
            start = file.seek(0, os.SEEK_END)
            content = b""
            while start > 0 and content.count(b"\n") <= lines:
                block = min(_TAIL_BLOCK_BYTES, start)
                start -= block
                file.seek(start)
                content = file.read(block) + content
    except OSError:
        return []
    text = content.decode("utf-8", errors="replace").removesuffix("\n")
    return text.split("\n")[-lines:] if text else []


# A log that has grown too long, as an environment prints without end.


_COPY_BYTES = 1 << 20

FULL = 0.75
"""Share of what a log may have at which it is shortened: so much room is left for what comes before the next look."""


def shorten(path: Path, most_bytes: int) -> bool:
    """Shorten a log that is nearly as long as it may be; whether it was.

    An eighth of what it may have is kept of the beginning, and three eighths of the end. Whoever appends to it
    meanwhile, as every process does, goes on at the new end; what is written in the instant of the cut is lost with the
    middle. The end is copied before anything is cut off, so that a crash costs nothing of it.

    Args:
        path: of the log.
        most_bytes: that it may have, at least a few thousand.

    Raises:
        OSError: it cannot be opened.
    """
    head, tail_bytes = most_bytes // 8, most_bytes * 3 // 8
    descriptor = update_own(path)
    try:
        size = os.fstat(descriptor).st_size
        if size <= FULL * most_bytes:
            return False
        source, target = _line_after(descriptor, size - tail_bytes), head
        chunk = f"\n[left out: the log had become longer than {FULL:.0%} of {most_bytes} bytes]\n".encode()
        try:
            # What has come since is copied too, but for a flood that comes faster than that.
            while chunk and target < most_bytes:
                target += os.pwrite(descriptor, chunk, target)
                chunk = os.pread(descriptor, _COPY_BYTES, source)
                source += len(chunk)
        finally:
            os.ftruncate(descriptor, target)
    finally:
        os.close(descriptor)
    return True


def _line_after(descriptor: int, place: int) -> int:
    """Where the first line begins after a place, if that is near."""
    return place + os.pread(descriptor, _TAIL_BLOCK_BYTES, place).find(b"\n") + 1


def _dump_stacks_to(stream: IO[str]) -> None:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return  # a stream without a descriptor, as under a test runner that captures output
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=False)
