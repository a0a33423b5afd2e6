"""What a process gives back is only what it can have again."""

import subprocess
import sys
from pathlib import Path

from appo.utils.system.memory import unchanged_files

ROOT = Path(__file__).parents[3]

SMAPS = """\
00001000-00003000 r-xp 00000000 08:01 11                         /lib/clean\x0c\x85.so
Pss:                   8 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd ex mr mw me
00003000-00004000 r--p 00002000 08:01 11                         /lib/relocated.so
Anonymous:             4 kB
Swap:                  0 kB
00004000-00005000 r--p 00002000 08:01 11                         /lib/swapped out.so
Anonymous:             0 kB
Swap:                  4 kB
00005000-00006000 rw-p 00003000 08:01 11                         /lib/written.so
Anonymous:             0 kB
00006000-00007000 r--s 00000000 08:01 12                         /data/shared
Anonymous:             0 kB
00007000-00008000 rw-p 00000000 00:00 0                          [heap]
Anonymous:             0 kB
00008000-00009000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f0000000000-7f0000001000 r--p 00000000 08:01 13                 /lib/last.so
Anonymous:             0 kB
Swap:                  0 kB
"""

RELEASE = """
import ctypes, mmap, sys
from appo.utils.system.memory import release_unused

PAGE, READ_ONLY = mmap.PAGESIZE, 1
with open(sys.argv[1], "rb") as file:
    clean = mmap.mmap(file.fileno(), 4 * PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ)
    changed = mmap.mmap(file.fileno(), 4 * PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
changed[PAGE] = 99
address = ctypes.addressof(ctypes.c_char.from_buffer(changed))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4 * PAGE), READ_ONLY) == 0
before, seen = clean[:], changed[:]  # all pages are read


def resident(name):
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        sizes = (next(line for line in lines if line.startswith("Rss:")) for line in lines if name in line)
        return [int(size.split()[1]) for size in sizes]


assert resident("pages.bin") == [4 * PAGE >> 10] * 2, resident("pages.bin")
assert release_unused() >= 4 * PAGE
assert sorted(resident("pages.bin")) == [0, 4 * PAGE >> 10]
assert clean[:] == before
assert changed[:] == seen
assert seen[PAGE] == 99
"""


def test_only_files_without_pages_of_this_process_may_go() -> None:
    assert list(unchanged_files(SMAPS)) == [(0x1000, 0x3000), (0x7F0000000000, 0x7F0000001000)]
    assert list(unchanged_files("")) == []


def test_what_goes_comes_back_and_what_was_changed_stays(tmp_path: Path) -> None:
    """As the pages of a library that has been relocated and can no longer be written."""
    pages = tmp_path / "pages.bin"
    pages.write_bytes(bytes(range(256)) * 256)
    subprocess.run([sys.executable, "-c", RELEASE, str(pages)], cwd=ROOT, check=True, timeout=60)
