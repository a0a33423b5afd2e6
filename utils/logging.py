"""Where log lines go: plain lines on the terminal for main, a file for each worker."""

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import IO

_TAIL_BLOCK_BYTES = 1 << 16


class _DropWhenFull(logging.Handler):
    """A full disk or a closed pipe costs log lines, never the run, and is not answered with a traceback per line."""

    dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            self.dropped += 1
        else:
            super().handleError(record)


class _LineStream(_DropWhenFull, logging.StreamHandler[IO[str]]):
    pass


class _LineFile(_DropWhenFull, logging.FileHandler):
    pass


def configure(role: str, path: Path | None, level: int | str = logging.INFO) -> None:
    """Set up the root logger and the stack dump of this process; called once, at entry, in every process.

    SIGUSR1 then writes the Python stacks of all threads to the log (main: stderr), and so does a crash (SIGSEGV and
    its like). It works while the interpreter is stuck in C code, as it takes no lock.

    Args:
        role: name of the worker, in every line of its file.
        path: log file, appended to; None: messages below WARNING go to stdout, others to stderr, as plain lines.
        level: messages below it are dropped.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    if path is None:
        out, err = _LineStream(sys.stdout), _LineStream(sys.stderr)
        out.addFilter(lambda record: record.levelno < logging.WARNING)
        err.setLevel(logging.WARNING)
        handlers: list[logging.Handler] = [out, err]
        dump: IO[str] = sys.stderr
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _LineFile(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role.replace('%', '%%')}: %(message)s"))
        handlers = [file]
        dump = file.stream or sys.stderr
    for handler in handlers:
        root.addHandler(handler)
    _dump_stacks_to(dump)


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file, without their line ends; [] when it cannot be read. Reads no more than it must."""
    if lines <= 0:
        return []
    try:
        with path.open("rb") as file:
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


def _dump_stacks_to(stream: IO[str]) -> None:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return  # a stream without a descriptor, as under a test runner that captures output
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=False)
