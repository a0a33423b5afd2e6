"""A process and all its descendants: who they are, how much CPU time they have used, and the memory that they hold.

Memory is the proportional set size (PSS): a page that several processes share counts once in their sum.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


class Stat(NamedTuple):
    """Fields of `/proc/PID/stat`."""

    name: str
    parent: int
    cpu_seconds: float


class Process(NamedTuple):
    """One process at one time."""

    pid: int
    role: str
    cpu_seconds: float


def parse_stat(text: str) -> Stat:
    """The name may hold spaces and brackets; all else follows its last bracket."""
    name = text[text.index("(") + 1 : text.rindex(")")]
    words = text[text.rindex(")") + 2 :].split()
    return Stat(name, int(words[1]), (int(words[11]) + int(words[12])) / TICKS_PER_SECOND)


def parse_pss(text: str) -> int:
    """Bytes, of `/proc/PID/smaps_rollup`; 0 where there are none."""
    found = re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def parse_anonymous(text: str) -> int:
    """Bytes of pages in no file, of `/proc/PID/status`; 0 where there are none."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def role_of(name: str, output: str) -> str:
    """Return the role of a process: a worker of ours has a log file of its own, a game of VizDoom its name."""
    if name.lower().startswith("vizdoom"):
        return "game"
    worker = re.fullmatch(r"(actor|policy_worker|learner)_[\d.]+\.log", Path(output).name)
    return worker[1] if worker else "other"


def processes(root: int) -> list[Process]:
    """The process and its descendants, parents first."""
    stats = dict(_stats())
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop(0)
        if pid in stats:
            found.append(Process(pid, role_of(stats[pid].name, _output_of(pid)), stats[pid].cpu_seconds))
            waiting += children.get(pid, [])
    return found


def pss_bytes(members: list[Process]) -> int:
    """The memory of them together."""
    return sum(parse_pss(_read(PROC / str(member.pid) / "smaps_rollup")) for member in members)


def anonymous_bytes(pid: int) -> int:
    """Memory of its own."""
    return parse_anonymous(_read(PROC / str(pid) / "status"))


def command_of(pid: int) -> list[str]:
    """The words with which it was started."""
    return _read(PROC / str(pid) / "cmdline").split("\0")[:-1]


def _stats() -> Iterator[tuple[int, Stat]]:
    for directory in PROC.glob("[0-9]*"):
        if text := _read(directory / "stat"):
            yield int(directory.name), parse_stat(text)


def _output_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(PROC / str(pid) / "fd" / "1")
    return ""


def _read(path: Path) -> str:
    """The text; nothing once the process has ended."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
