"""Memory that a process holds: how much with what it has started, and giving back what it does not need."""

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4  # mman.h of Linux

_SMAPS = Path("/proc/self/smaps")

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.?)")  # range, permissions, start of the path


def held_bytes() -> int:
    """Memory of this process and its children that nothing else holds: a game may be a process of its own."""
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
    """Give memory that was freed, and pages of libraries that can be read again, back to the kernel.

    Importing torch maps 40 MiB of code that runs once. A process that only waits from then on would keep them; code
    that is needed after all comes back from the page cache. To be called while no other thread runs.

    Returns:
        The bytes of the mappings that were emptied; 0 where the kernel does not list them.
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
    """Where in the text of a `/proc/<pid>/smaps` files are mapped of which this process has changed no page.

    Only of these nothing is lost when their pages go: a library that was relocated has pages of its own, in memory or
    swapped out, in a mapping that can no longer be written.
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


# How many files and sockets this process may have open.


MANY = 1 << 16


def raise_limit() -> None:
    """Take more of the hard limit than shells give, for this process and those it starts from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = raised_limit()
    if wanted is not None and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def raised_limit() -> int | None:
    """How many may be open once `raise_limit` was called; None without a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(soft, MANY if hard == resource.RLIM_INFINITY else min(MANY, hard))


def limit() -> int | None:
    """How many may be open; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """Return how many are open."""
    return len(os.listdir("/proc/self/fd"))
