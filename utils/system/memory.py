"""Memory of this process: the size with its children, and the return of unused memory to the kernel."""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from appo.utils.system.cgroups import kernel_text, number_of

_MADV_DONTNEED = 4  # mman.h of Linux
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.?)")  # range, permissions, start of the path


def held_bytes() -> int:
    """Return the unshared memory of this process and its children: a game may be a process of its own."""
    threads = Path("/proc/self/task").iterdir()
    pids = ["self", *(pid for thread in threads for pid in kernel_text(thread / "children").split())]
    return sum((number_of(kernel_text(Path(f"/proc/{pid}/status")), "RssAnon:") or 0) << 10 for pid in pids)


def release_unused() -> int:
    """Return freed memory, and unchanged pages of libraries, to the kernel.

    Importing torch maps 40 MiB of code that runs once, and a waiting process would keep the pages. The page cache
    restores code that is needed later. Call while no other thread runs.

    Returns:
        Bytes of the emptied mappings; 0 if the kernel does not list mappings.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # musl has none
        libc.malloc_trim(0)
    emptied = 0
    for start, end in unchanged_files(kernel_text(Path("/proc/self/smaps"))):
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED) == 0:
            emptied += end - start
    return emptied


def unchanged_files(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield the ranges of mapped files without a page changed by this process, from a `/proc/<pid>/smaps`.

    Other mappings would lose data: a relocated library has changed pages, in memory or swapped out, in a mapping that
    is no longer writable.
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
