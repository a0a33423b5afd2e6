"""Memory of this process: the size with its children, and the return of unused memory to the kernel."""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4  # mman.h of Linux

_SMAPS = Path("/proc/self/smaps")

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.?)")  # range, permissions, start of the path


def held_bytes() -> int:
    """Return the unshared memory of this process and its children: a game may be a process of its own."""
    total = 0
    for pid in ("self", *_children()):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    return total


def _children() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            yield from (thread / "children").read_text().split()


def release_unused() -> int:
    """Return freed memory, and pages of libraries that can be read again, to the kernel.

    Importing torch maps 40 MiB of code that runs once, and a process that only waits would keep the pages. The page
    cache brings back code that is needed after all. Call while no other thread runs.

    Returns:
        Bytes of the emptied mappings; 0 if the kernel does not list mappings.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # musl has none
        libc.malloc_trim(0)
    text = ""
    with contextlib.suppress(OSError):  # a kernel without the file
        text = _SMAPS.read_text(errors="replace")
    emptied = 0
    for start, end in unchanged_files(text):
        length = ctypes.c_size_t(end - start)
        if libc.madvise(ctypes.c_void_p(start), length, _MADV_DONTNEED) == 0:
            emptied += end - start
    return emptied


def unchanged_files(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges of mapped files without a page changed by this process, from a `/proc/<pid>/smaps`.

    Only these mappings lose nothing without their pages. A relocated library has pages of its own, in memory or swapped
    out, in a mapping that is no longer writable.
    """
    mapping: tuple[int, int] | None = None
    own = 0
    for line in smaps.split("\n"):
        if found := _MAPPING.match(line):
            if mapping and not own:
                yield mapping
            is_file = found[3] in ("r-xp", "r--p") and found[4] == "/"
            mapping, own = (int(found[1], 16), int(found[2], 16)) if is_file else None, 0
        elif line.startswith(("Anonymous:", "Swap:")):
            own += int(line.split()[1])
    if mapping and not own:
        yield mapping
