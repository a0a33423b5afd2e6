"""Strays of environments, left to themselves: processes in sessions of their own, and names in /dev/shm.

Knows no other module of ours, as the janitor, which is a script, uses it.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MARK = "APPO_STARTED_BY"
"""Environment variable of actors, which what they start inherits: main, by `mark_of`, and the actor's own number."""

SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (where others leave theirs, not we ours)
OF_GAMES = re.compile("ViZDoom")
"""Begin of names that are known to be a game's, whoever has seen it live."""

UNMAPPED_SECONDS = 2.0  # more than a game needs from making a name to mapping it
SWEEP_AGE_SECONDS = 10.0  # of a game's name that nobody has mapped, before it counts as left behind
LONGEST_PAUSE_LOOKS = 256  # between two looks at who has mapped a name
MOST_ROUNDS, ROUND_SECONDS = 20, 0.05  # of killing: what is killed may have started something meanwhile
SPARED = b"resource_tracker"  # multiprocessing's, which ends by itself when it has cleaned up


class Process(NamedTuple):
    """A living process, as /proc/PID/stat has it. The time of its start tells it from later ones of its number."""

    pid: int
    parent: int
    group: int
    session: int
    started: int


def processes() -> dict[int, Process]:
    """Return all living processes by their numbers."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (one := process_of(int(entry.name))):
            found[one.pid] = one
    return found


def process_of(pid: int) -> Process | None:
    """Return a process; None if it has ended, a zombie included."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if words[0] in b"ZX":
        return None
    return Process(pid, int(words[1]), int(words[2]), int(words[3]), int(words[19]))


def mark_of(pid: int) -> str:
    """Return the first part of a `MARK`: a process by its number and the time of its start."""
    one = process_of(pid)
    return f"{pid}-{one.started if one else 0}"


class Strays:
    """Processes that descend from leaders of groups and have left their groups.

    While their parents live they are found by them, and remembered for later. What an actor that dies leaves behind
    goes to the fork server, see `prctl.adopt_orphans`; what no look has seen is known by its `MARK`.

    Args:
        main: process of the run, which may be dead already.
        mark: of it, see `mark_of`.
        owns_main: what main itself has started is to go as well in the end: it is no program of the user's.

    Attributes:
        leaders: processes that lead groups, and that main has not ended yet.
    """

    def __init__(self, main: int, mark: str, *, owns_main: bool = False) -> None:
        self.main, self.mark = main, mark
        self.leaders: set[int] = set()
        self._led: set[int] = set()  # leaders of before too
        self._roots = [main] if owns_main else []
        self._known: dict[int, tuple[int, int]] = {}  # when it was started, and the leader it descends from; 0: of any
        self._server: Process | None = None

    def look(self, table: dict[int, Process]) -> set[int]:
        """Remember the strays now; return the numbers of all processes that environments started, and of actors."""
        self._led |= self.leaders
        self._known = {pid: known for pid, known in self._known.items() if _is_same(table.get(pid), known[0])}
        children: dict[int, list[Process]] = {}
        for one in table.values():
            children.setdefault(one.parent, []).append(one)
        roots = {**dict.fromkeys(self._roots, 0), **dict.fromkeys(self._orphans(table, children), 0)}
        roots |= {pid: leader for pid, (_, leader) in self._known.items()}
        roots |= {leader: leader for leader in self.leaders}
        below: dict[int, int] = {}
        for root, leader in roots.items():
            self._descend(children, root, leader, below)
        below |= dict.fromkeys(roots.keys() - self.leaders - self._known.keys() - set(self._roots), 0)
        for pid, leader in below.items():
            if table[pid].group not in self.leaders and not _is_spared(pid):
                self._known.setdefault(pid, (table[pid].started, leader))
        return {*below, *self._known, *(one.pid for one in table.values() if one.group in self.leaders)}

    def _descend(self, children: dict[int, list[Process]], root: int, leader: int, below: dict[int, int]) -> None:
        waiting = [root]
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child.pid not in below and child.pid not in self.leaders and child.pid != os.getpid():
                    below[child.pid] = leader
                    waiting.append(child.pid)

    def _orphans(self, table: dict[int, Process], children: dict[int, list[Process]]) -> Iterator[int]:
        """Yield children of the fork server in other sessions than its own: orphans of actors, which are ours."""
        server = self._server
        if server is None or not _is_same(table.get(server.pid), server.started):
            server = self._server = next(filter(_is_fork_server, children.get(self.main, ())), None)
        if server is not None and any(table[pid].parent == server.pid for pid in self.leaders & table.keys()):
            self._adopts = True
        for child in children.get(server.pid, ()) if server is not None and self._adopts else ():
            if child.session != table[child.parent].session:
                yield child.pid

    _adopts = False  # whether a leader of ours was started by the fork server, which others may use as well

    def of(self, leaders: set[int] | None) -> set[int]:
        """Return the numbers of known or marked strays of leaders; None: of all leaders there have been."""
        table = processes()
        self.look(table)
        found = {pid for pid, (_, leader) in self._known.items() if leaders is None or leader in leaders}
        marks = {f"{MARK}={self.mark}:{leader}".encode() for leader in (self._led if leaders is None else leaders)}
        return found | {pid for pid in table.keys() - self.leaders if not marks.isdisjoint(_environment_of(pid))}

    def kill(self, leaders: set[int] | None = None) -> None:
        """End all strays of leaders, or of any, and the processes that these start meanwhile."""
        for _ in range(MOST_ROUNDS):
            if not (found := self.of(leaders) - {os.getpid()}):
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody starts others while they are killed one by one
                for pid in found:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            time.sleep(ROUND_SECONDS)


def _is_same(one: Process | None, started: int) -> bool:
    return one is not None and one.started == started


def _environment_of(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # ended, or another user's
        return file.read().split(b"\0")
    return []


def _command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def _is_spared(pid: int) -> bool:
    return SPARED in _command_of(pid)


def _is_fork_server(one: Process) -> bool:
    return b"multiprocessing.forkserver" in _command_of(one.pid)


class SharedMemory:
    """Names in /dev/shm that games have made: noted while they live, removed when nobody has them any more.

    Args:
        since: time (seconds since 1970); older names are not a run's own.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self._owners: dict[str, tuple[int, dict[int, int]]] = {}  # inode; numbers and starts of those who had it
        self._turns: dict[tuple[str, int], tuple[int, int]] = {}  # looks that are left out, and how many after that

    def look(self, table: dict[int, Process], ours: set[int]) -> None:
        """Note the owners of new names, and remove names whose owners have all died.

        Args:
            table: of living processes.
            ours: numbers of those that belong to a run.
        """
        names = dict(_names())
        self._owners = {n: known for n, known in self._owners.items() if n in names and names[n][0] == known[0]}
        self._turns = {key: turn for key, turn in self._turns.items() if key[0] in names and names[key[0]][0] == key[1]}
        new = {name for name, (inode, at) in names.items() if self._is_due(name, inode, at)}
        for pid in ours & table.keys() if new else ():
            for name in new & mapped_by(pid):
                self._owners.setdefault(name, (names[name][0], {}))[1][pid] = table[pid].started
        self.remove(name for name, (_, owners) in list(self._owners.items()) if not _any_lives(owners, table))
        old = time.time() - SWEEP_AGE_SECONDS
        self.remove(n for n in new - self._owners.keys() if OF_GAMES.match(n) and names[n][1] < old)

    def _is_due(self, name: str, inode: int, at: float) -> bool:
        """Return whether to look for the owner of a name: at once, and more and more seldom while it is unknown."""
        if name in self._owners or (at < self.since and not OF_GAMES.match(name)):
            return False
        left, pause = self._turns.get((name, inode), (0, 1))
        self._turns[name, inode] = (left - 1, pause) if left else (pause, min(2 * pause, LONGEST_PAUSE_LOOKS))
        return left == 0

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the names that no process has mapped, and forget the owners of the others."""
        if left := set(names):
            for name in left:
                self._owners.pop(name, None)
            for pid in processes():
                left -= mapped_by(pid)
        for name in left:
            with contextlib.suppress(OSError):
                os.unlink(SHARED_MEMORY + name)

    def remove_orphaned(self) -> None:
        """Remove noted names that no process has any more, and names of this time that games have left unseen."""
        begin, end = self.since, time.time() - UNMAPPED_SECONDS
        self.remove(
            [*self._owners, *(name for name, (_, at) in _names() if OF_GAMES.match(name) and begin <= at < end)]
        )


def _any_lives(owners: dict[int, int], table: dict[int, Process]) -> bool:
    return any(_is_same(table.get(pid), started) for pid, started in owners.items())


def _names() -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield names of files of ours in /dev/shm, with their inodes and the times of their last change."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False) and found.st_uid == os.getuid():
                    yield entry.name, (found.st_ino, found.st_ctime)


def mapped_by(pid: int) -> set[str]:
    """Return names in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:  # it has ended, or is another user's
        return set()
    paths = (line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line and "(deleted)" not in line)
    return {path.removeprefix(SHARED_MEMORY) for path in paths}
