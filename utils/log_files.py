"""Log files of a run: the last lines, and shortening a log that has grown too long."""

import os
from pathlib import Path

from appo.utils.directories import closing
from appo.utils.run_folder import open_own, update_own

_BLOCK_BYTES = 1 << 16
FULL = 0.75
"""Share of the largest size at which a log is shortened: the rest is room until the next look."""


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file without line ends, reading from the end; [] if the file cannot be read."""
    if lines <= 0:
        return []
    try:
        with open_own(path) as file:
            start, content = file.seek(0, os.SEEK_END), b""
            while start > 0 and content.count(b"\n") <= lines:
                block = min(_BLOCK_BYTES, start)
                start -= block
                file.seek(start)
                content = file.read(block) + content
    except OSError:
        return []
    text = content.decode("utf-8", errors="replace").removesuffix("\n")
    return text.split("\n")[-lines:] if text else []


def shorten(path: Path, most_bytes: int) -> bool:
    """Shorten a log that is nearly full; return whether the log was shortened.

    An eighth of the largest size is kept of the beginning and three eighths of the end. Processes append meanwhile, and
    continue at the new end; text written in the instant of the cut is lost with the middle. The end is copied before
    the cut, so a crash loses nothing of the end.

    Raises:
        OSError: the file cannot be opened.
    """
    with closing(update_own(path)) as descriptor:
        size = os.fstat(descriptor).st_size
        if size <= FULL * most_bytes:
            return False
        source, target = size - most_bytes * 3 // 8, most_bytes // 8
        source += os.pread(descriptor, _BLOCK_BYTES, source).find(b"\n") + 1  # the next line begins here, if near
        chunk = f"\n[left out: the log had become longer than {FULL:.0%} of {most_bytes} bytes]\n".encode()
        try:
            # Lines appended meanwhile are copied too, except those of a flood faster than the copy.
            while chunk and target < most_bytes:
                target += os.pwrite(descriptor, chunk, target)
                chunk = os.pread(descriptor, 1 << 20, source)
                source += len(chunk)
        finally:
            os.ftruncate(descriptor, target)
    return True
