"""Strays of environments: processes that left their process group, and names in /dev/shm.

The module imports no module of appo, because the janitor, a script, imports it.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MARK = "APPO_STARTED_BY"
"""Environment variable of actors, inherited by child processes: main (`mark_of`), then the pid of the actor."""

SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (where others leave theirs, not we ours)
OF_GAMES = re.compile("ViZDoom")
"""Prefix of names in /dev/shm that always belong to a game."""

SWEEP_AGE_SECONDS = 10.0  # age of an unmapped name of a game before removal
MOST_ROUNDS, ROUND_SECONDS = 20, 0.05  # of killing: a process may start children before it is killed


class Process(NamedTuple):
    """A living process, from /proc/PID/stat; the time of the start distinguishes processes with equal pids."""

    pid: int
    parent: int
    group: int
    session: int
    started: int


def processes() -> dict[int, Process]:
    """Return all living processes by pid."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (one := process_of(int(entry.name))):
            found[one.pid] = one
    return found


def process_of(pid: int) -> Process | None:
    """Return a process; None for a zombie or after the end."""
    words = _read(pid, "stat").rpartition(b")")[2].split()
    if not words or words[0] in b"ZX":
        return None
    return Process(pid, int(words[1]), int(words[2]), int(words[3]), int(words[19]))


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:  # ended, or of another user
        return file.read()
    return b""


def mark_of(pid: int) -> str:
    """Return the first part of a `MARK`: pid and start of a process."""
    one = process_of(pid)
    return f"{pid}-{one.started if one else 0}"


class Strays:
    """Processes that descend from leaders of groups and have left their groups.

    Strays are found by their parents while the parents live. The fork server adopts the children of a dead actor
    (`prctl.adopt_orphans`). A stray that no look found has the `MARK`.

    Args:
        main: pid of main, which may be dead already.
        mark: first part of the `MARK` of main's actors.
        owns_main: whether all children of main belong to the run; False in a user's program.

    Attributes:
        leaders: pids of leaders of groups that main has not ended yet.
    """

    def __init__(self, main: int, mark: str, *, owns_main: bool = False) -> None:
        self.main, self.mark = main, mark
        self.leaders: set[int] = set()
        self._led: set[int] = set()  # leaders, with ended ones
        self._roots = [main] if owns_main else []
        self._known: dict[int, tuple[int, int]] = {}  # pid -> start, and leader among the ancestors; 0: unknown
        self._server: Process | None = None
        self._adopts = False  # whether the server started a leader of the run; the user may use the server as well

    def look(self, table: dict[int, Process]) -> set[int]:
        """Record new strays; return the pids of actors and of all processes started by environments."""
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
            waiting = [root]
            while waiting:
                for child in children.get(waiting.pop(), ()):
                    if child.pid not in below and child.pid not in self.leaders and child.pid != os.getpid():
                        below[child.pid] = leader
                        waiting.append(child.pid)
        below |= dict.fromkeys(roots.keys() - self.leaders - self._known.keys() - set(self._roots), 0)
        for pid, leader in below.items():
            # multiprocessing's resource tracker ends by itself after cleaning up.
            if table[pid].group not in self.leaders and b"resource_tracker" not in _read(pid, "cmdline"):
                self._known.setdefault(pid, (table[pid].started, leader))
        return {*below, *self._known, *(one.pid for one in table.values() if one.group in self.leaders)}

    def _orphans(self, table: dict[int, Process], children: dict[int, list[Process]]) -> Iterator[int]:
        """Yield children of the fork server in a foreign session: orphans of actors."""
        server = self._server
        if server is None or not _is_same(table.get(server.pid), server.started):
            of_main = children.get(self.main, ())
            servers = (one for one in of_main if b"multiprocessing.forkserver" in _read(one.pid, "cmdline"))
            server = self._server = next(servers, None)
        if server is not None and any(table[pid].parent == server.pid for pid in self.leaders & table.keys()):
            self._adopts = True
        for child in children.get(server.pid, ()) if server is not None and self._adopts else ():
            if child.session != table[child.parent].session:
                yield child.pid

    def of(self, leaders: set[int] | None) -> set[int]:
        """Return the pids of known or marked strays of leaders; None: of all leaders so far."""
        table = processes()
        self.look(table)
        found = {pid for pid, (_, leader) in self._known.items() if leaders is None or leader in leaders}
        marks = {f"{MARK}={self.mark}:{leader}".encode() for leader in (self._led if leaders is None else leaders)}
        others = table.keys() - self.leaders
        return found | {pid for pid in others if not marks.isdisjoint(_read(pid, "environ").split(b"\0"))}

    def kill(self, leaders: set[int] | None = None) -> None:
        """Kill all strays of leaders (None: of all), until no new stray appears."""
        for _ in range(MOST_ROUNDS):
            if not (found := self.of(leaders) - {os.getpid()}):
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process starts no children
                for pid in found:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            time.sleep(ROUND_SECONDS)


def _is_same(one: Process | None, started: int) -> bool:
    return one is not None and one.started == started


class SharedMemory:
    """Names in /dev/shm created by games: recorded while games live, removed after the death of all owners.

    Args:
        since: start of the run (seconds since 1970); older names belong to no game of the run.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self._owners: dict[str, tuple[int, dict[int, int]]] = {}  # name -> inode; pids and starts of owners
        self._turns: dict[tuple[str, int], tuple[int, int]] = {}  # name, inode -> looks left to skip, and next number

    def look(self, table: dict[int, Process], ours: set[int]) -> None:
        """Record the owners of new names, and remove names whose owners have all died."""
        names = dict(_names())
        self._owners = {n: known for n, known in self._owners.items() if n in names and names[n][0] == known[0]}
        self._turns = {key: turn for key, turn in self._turns.items() if key[0] in names and names[key[0]][0] == key[1]}
        new = {name for name, (inode, at) in names.items() if self._is_due(name, inode, at)}
        for pid in ours & table.keys() if new else ():
            for name in new & mapped_by(pid):
                self._owners.setdefault(name, (names[name][0], {}))[1][pid] = table[pid].started
        self.remove(
            name
            for name, (_, owners) in list(self._owners.items())
            if not any(_is_same(table.get(pid), started) for pid, started in owners.items())
        )
        old = time.time() - SWEEP_AGE_SECONDS
        self.remove(n for n in new - self._owners.keys() if OF_GAMES.match(n) and names[n][1] < old)

    def _is_due(self, name: str, inode: int, at: float) -> bool:
        """Return whether to search for the owner of a name: at once, then at growing intervals while unknown."""
        if name in self._owners or (at < self.since and not OF_GAMES.match(name)):
            return False
        left, pause = self._turns.get((name, inode), (0, 1))
        self._turns[name, inode] = (left - 1, pause) if left else (pause, min(2 * pause, 256))
        return left == 0

    def remove(self, names: Iterable[str]) -> None:
        """Remove the names that no process has mapped, and delete the records of owners."""
        if left := set(names):
            for name in left:
                self._owners.pop(name, None)
            for pid in processes():
                left -= mapped_by(pid)
        for name in left:
            with contextlib.suppress(OSError):
                os.unlink(SHARED_MEMORY + name)

    def remove_orphaned(self) -> None:
        """Remove unmapped names with recorded owners, and unmapped names of games created during the run."""
        begin, end = self.since, time.time() - 2.0  # a game needs less from creating a name to mapping the file
        self.remove(
            [*self._owners, *(name for name, (_, at) in _names() if OF_GAMES.match(name) and begin <= at < end)]
        )


def _names() -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield the names of the user's files in /dev/shm, with inodes and times of the last change."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False) and found.st_uid == os.getuid():
                    yield entry.name, (found.st_ino, found.st_ctime)


def mapped_by(pid: int) -> set[str]:
    """Return the names in /dev/shm that a process has mapped."""
    named = (line for line in _read(pid, "maps").decode(errors="replace").splitlines() if "(deleted)" not in line)
    return {name for _, found, name in (line.partition(SHARED_MEMORY) for line in named) if found}
