"""A process and its descendants: roles, CPU time and memory.

Memory is the proportional set size (PSS): the sum over processes counts a shared page once.
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
    """Parse `/proc/PID/stat`. The name may contain spaces and brackets; all other fields follow the last bracket."""
    name = text[text.index("(") + 1 : text.rindex(")")]
    words = text[text.rindex(")") + 2 :].split()
    return Stat(name, int(words[1]), (int(words[11]) + int(words[12])) / TICKS_PER_SECOND)


def parse_pss(text: str) -> int:
    """Return the bytes of PSS in `/proc/PID/smaps_rollup`; 0 for empty text."""
    found = re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def parse_anonymous(text: str) -> int:
    """Return the bytes of anonymous pages in `/proc/PID/status`; 0 for empty text."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def role_of(name: str, output: str) -> str:
    """Return the role of a process: from the log file of a worker, or from the process name of a VizDoom game."""
    if name.lower().startswith("vizdoom"):
        return "game"
    worker = re.fullmatch(r"(actor|policy_worker|learner)_[\d.]+\.log", Path(output).name)
    return worker[1] if worker else "other"


def processes(root: int) -> list[Process]:
    """Return the process and all descendants, parents first."""
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
    return sum(parse_pss(_read(PROC / str(member.pid) / "smaps_rollup")) for member in members)


def anonymous_bytes(pid: int) -> int:
    return parse_anonymous(_read(PROC / str(pid) / "status"))


def command_of(pid: int) -> list[str]:
    """Return the command line of a process."""
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
    """Return the text; empty after the end of the process."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
