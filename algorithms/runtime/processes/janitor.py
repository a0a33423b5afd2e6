"""The janitor kills processes that environments started (games, renderers) after main was killed.

Workers die with main, but processes started by environments would survive. Every process with environments therefore
leads a process group, and main sends the groups to the janitor, a small process without torch in a session of its own
(this file, run as a script). The janitor reads lines until main has ended, then kills the groups and removes the
directories that main did not take back. Meanwhile the janitor records processes that left their group, and names in
/dev/shm (`strays`).
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

if __name__ == "__main__":  # a script without packages
    sys.path.insert(0, os.path.dirname(__file__))
    import strays  # type: ignore[import-not-found]
else:
    from appo.algorithms.runtime.processes import strays

JOIN_SECONDS = 3.0
LOOK_SECONDS = 0.25
STARTED = float(sys.argv[1]) if __name__ == "__main__" else time.time()  # start of main, in seconds since 1970


def kill_group(group: int) -> None:
    """Kill all processes of a group, if any, and unlink their shared memory."""
    kill_groups([group])


def kill_groups(groups: Iterable[int]) -> None:
    """Kill all processes of several groups; the files that the machine's processes map are read once."""
    living = {
        group for group in groups if group and _has_taken(group, signal.SIGSTOP)
    }  # keeps the mapped files unchanged
    if not living:
        return
    ours, others = set[str](), set[str]()
    for pid, process in strays.processes().items():
        (ours if process.group in living else others).update(strays.mapped_by(pid))
    abandoned = set[str]()
    for path in (strays.SHARED_MEMORY + name for name in ours - others):
        with contextlib.suppress(OSError):
            if os.stat(path).st_ctime >= STARTED:
                abandoned.add(path)
    for group in living:
        _has_taken(group, signal.SIGKILL)
    for path in abandoned:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _has_taken(group: int, number: int) -> bool:
    """Send a signal to a group; return whether a process has got it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class Janitor:
    """Main's end of the janitor, started before any worker.

    Attributes:
        owns_main: whether all children of main belong to the run; False in a user's program.
        detached: whether the janitor is no child of main, for a main whose children are killed with it (by Ray), the
            janitor included; main then neither waits for the janitor nor revives it.
    """

    owns_main = detached = False

    def __init__(self) -> None:
        self._things: dict[int | Path, None] = {}  # watched groups and directories

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        whose = str(int(self.owns_main)), str(int(self.detached))
        arguments = (str(STARTED), str(os.getpid()), strays.mark_of(os.getpid()), *whose)
        command = [sys.executable, "-I", "-S", __file__, *arguments]  # -I -S: no import of user code, a quick start
        devnull = subprocess.DEVNULL
        self._process = subprocess.Popen(  # noqa: S603 (our own file)
            command, stdin=subprocess.PIPE, stdout=devnull, stderr=devnull, bufsize=0, start_new_session=True
        )
        if self.detached:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(JOIN_SECONDS)  # until the process has forked the janitor
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)  # the process may be stopped
        for thing in self._things:
            self._send("+", thing)

    def revive(self) -> None:
        """Restart the process if it was killed."""
        if self._process.poll() is not None and not self.detached:
            before = self._pipe
            with contextlib.suppress(OSError):  # memory or pids are short: tried again at the next call
                self._start()
                before.close()

    def __exit__(self, *exception: object) -> None:
        for thing in self._things:
            if isinstance(thing, Path):  # main removes directories itself
                self._send("-", thing)
        self._pipe.close()
        try:
            self._process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # blocked in the kernel by a dead disk
                self._process.wait(JOIN_SECONDS)

    def watch(self, thing: int | Path) -> None:
        """Add a process group, or a directory of temporary files."""
        self._things[thing] = None
        self._send("+", thing)

    def forget(self, group: int) -> None:
        """Remove a group that main has ended."""
        self._things.pop(group, None)
        self._send("-", group)

    def _send(self, sign: str, thing: int | Path) -> None:
        try:
            os.write(self._pipe.fileno(), f"{sign}{thing}\n".encode())  # a short line is written whole or not at all
        except BrokenPipeError:  # killed: `revive` sends all lines again
            return
        except BlockingIOError:  # stopped for a thousand lines
            self._process.kill()


class _Watch:
    """The state of the janitor, and the cleaning after the end of main."""

    def __init__(self, main: int, mark: str, *, owns_main: bool) -> None:
        self.strays, self.memory = strays.Strays(main, mark, owns_main=owns_main), strays.SharedMemory(STARTED)
        self.directories: set[Path] = set()

    def hear(self, lines: Iterable[str]) -> None:
        """Read main's lines about groups and directories, and kill the rest of groups that main has ended."""
        ended: set[int] = set()
        for line in lines:
            is_there, thing = line[0] == "+", line[1:]
            if not thing.isdecimal():
                (self.directories.add if is_there else self.directories.discard)(Path(thing))
            elif is_there:
                self.strays.leaders.add(int(thing))
            else:
                ended.add(int(thing))
        if ended:
            self.strays.kill(ended)
            self.strays.leaders -= ended

    def look(self) -> float:
        """Record processes that left their group and names in /dev/shm; return the seconds until the next look."""
        began = time.process_time()  # not wall time: on a busy machine looks must not become rare
        table = strays.processes()
        self.memory.look(table, self.strays.look(table))
        return max(LOOK_SECONDS, 200 * (time.process_time() - began))

    def clean_up(self) -> None:
        """Kill the remaining processes and remove the remaining files."""
        kill_groups(self.strays.leaders)
        self.strays.kill()
        self.memory.remove_orphaned()
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)  # does not follow links


def _main() -> None:
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU"):  # for main alone
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    if sys.argv[5] == "1" and os.fork():
        return
    watch = _Watch(int(sys.argv[2]), sys.argv[3], owns_main=sys.argv[4] == "1")
    rest, due = b"", 0.0
    while True:
        if time.monotonic() >= due:
            due = time.monotonic() + watch.look()
        if not select.select([0], [], [], max(0.0, due - time.monotonic()))[0]:
            continue
        if not (heard := os.read(0, 1 << 16)):
            break
        *lines, rest = (rest + heard).split(b"\n")
        watch.hear(map(os.fsdecode, lines))
    watch.clean_up()


if __name__ == "__main__":
    _main()
