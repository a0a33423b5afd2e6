"""The destination of log lines: plain lines on the terminal for main, a file for each worker."""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from appo.utils.run_folder import append_to_own, is_named
from appo.utils.tracebacks import format_error
from appo.utils.values import printable

_RECENT_WARNINGS = 5

SHOWN = {"shown": True}
"""The `extra` of a worker's warning that main is to print although the warning has no traceback."""


class _DropWhenFull(logging.Handler):
    """Drops lines on a full disk or a closed pipe, without a traceback per line."""

    dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            self.dropped += 1
        else:
            super().handleError(record)


class _LineStream(_DropWhenFull, logging.StreamHandler[IO[str]]):
    """Writes to the terminal; characters that the encoding does not have become question marks, as in `say`."""

    def format(self, record: logging.LogRecord) -> str:
        text, encoding = super().format(record), getattr(self.stream, "encoding", None) or "utf-8"
        if getattr(self.stream, "errors", "strict") != "strict":  # stderr escapes such characters
            return text
        return text.encode(encoding, "replace").decode(encoding)


class _LineFile(_DropWhenFull, logging.StreamHandler[IO[str]]):
    """Appends to a file of a run."""

    def __init__(self, path: Path) -> None:
        super().__init__(_open_log(path, make=True))
        self.path = path

    def close(self) -> None:
        super().close()
        self.stream.close()


def _open_log(path: Path, *, make: bool) -> IO[str]:
    return os.fdopen(append_to_own(path, make=make), "a", encoding="utf-8", errors="backslashreplace")


def follow_log() -> None:
    """Continue in a new log file of this process if the file was removed or renamed.

    Main alone makes a missing folder again, with a warning.
    Lines in a file without a name would fill the disk unseen. stdout and stderr follow if they went to the file.
    """
    for handler in logging.getLogger().handlers:
        if not isinstance(handler, _LineFile) or is_named(old := handler.stream.fileno(), handler.path):
            continue
        with contextlib.suppress(OSError):  # not yet possible
            printed = [number for number in (1, 2) if _is_same_file(number, old)]
            stream = _open_log(handler.path, make=False)
            for number in printed:
                os.dup2(stream.fileno(), number)
            before = handler.setStream(stream)
            _dump_stacks_to(stream)
            if before is not None:
                before.close()


def _is_same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:  # an environment has closed the descriptor
        return False


class _Recent(logging.Handler):
    """Keeps the last warnings of this process, each in one line with the time of day."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=_RECENT_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.lines.append(f"{clock} {' '.join(record.getMessage().split())}")


class _Raised(logging.Handler):
    """Keeps the first warnings of a worker with a traceback or with `extra=SHOWN`, until `take_raised`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if (error or hasattr(record, "shown")) and len(self.texts) < _RECENT_WARNINGS:
            self.texts.append(f"{record.getMessage()}\n{format_error(error) if error else ''}".rstrip())


_recent, _raised = _Recent(), _Raised()


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: a mapping passed as `report` in `extra`, else the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        report = getattr(record, "report", None)
        head: dict[str, object] = {"event": "log" if report is None else "report", "time": record.created}
        said = {"level": record.levelname.lower(), "message": record.getMessage()} if report is None else report
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(head | said | trace)


class _Printable(logging.Formatter):
    """Escapes text of files and environments that could command the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def recent_warnings() -> tuple[str, ...]:
    """Return the last warnings and errors that this process has logged, oldest first."""
    return tuple(_recent.lines)


class _LastResort(logging.Handler):
    """Prints warnings where no handler is set up, as Python does where it finds none."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [one for one in (*logging.root.handlers, *logging.getLogger("appo").handlers) if one not in _KEEPING]
        if not others and logging.lastResort:
            logging.lastResort.handle(record)


_KEEPING = (_recent, _LastResort(logging.WARNING))


@contextlib.contextmanager
def kept_warnings() -> Iterator[None]:
    """Keep what `recent_warnings` returns in a program of others, whose logging stays as it is."""
    ours = logging.getLogger("appo")
    if _recent in ours.handlers:  # of a run that encloses this one
        yield
        return
    _recent.lines.clear()
    for handler in _KEEPING:
        ours.addHandler(handler)
    try:
        yield
    finally:
        for handler in _KEEPING:
            ours.removeHandler(handler)


def take_raised() -> tuple[str, ...]:
    """Return and forget the warnings that this worker has logged for main to print."""
    taken, _raised.texts = tuple(_raised.texts), []
    return taken


def configure(role: str, path: Path | None, level: int | str = logging.INFO, *, as_json: bool = False) -> None:
    """Set up the root logger and the stack dump of this process; called once, at entry, in every process.

    SIGUSR1 and crashes (SIGSEGV and the like) then write the Python stacks of all threads to the log (main: stderr).
    The dump takes no lock, so works while the interpreter is stuck in C code.

    Args:
        role: name of the worker, in every line of the file.
        path: log file to append to; None: messages below WARNING go to stdout, others to stderr, as plain lines.
        level: lowest level of messages.
        as_json: without a file, write a JSON object per message, all to stdout.
    """
    dump: IO[str] = sys.stderr
    if path is None:
        out, err = _LineStream(sys.stdout), _LineStream(sys.stderr)
        out.setFormatter(JsonLines() if as_json else _Printable())
        handlers: list[logging.Handler] = [out, _recent] if as_json else [out, err, _recent]
        if not as_json:
            err.setFormatter(_Printable())
            err.setLevel(logging.WARNING)
            out.addFilter(lambda record: record.levelno < logging.WARNING)
    else:
        file = _LineFile(path)
        file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role.replace('%', '%%')}: %(message)s"))
        handlers, dump = [file, _raised], file.stream
    logging.basicConfig(handlers=handlers, level=level, force=True)
    _dump_stacks_to(dump)


def _dump_stacks_to(stream: IO[str]) -> None:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return  # a stream without a descriptor, as under a test runner that captures output
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=False)
