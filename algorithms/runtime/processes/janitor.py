"""The janitor ends all that environments have started (game processes, renderers) when main can no longer do it.

Workers die with main by themselves, but what their environments started would live on. So every process that runs an
environment leads a process group, and main names the groups to a small process that outlives it. Run as a script, this
file is that process: torch-free, in a session of its own, it reads until main has gone and then kills and removes what
main has not taken back. Meanwhile it notes what has left its group, and which names are in /dev/shm, see `strays`.
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
from types import TracebackType
from typing import Self

if __name__ == "__main__":  # a script without packages
    sys.path.insert(0, os.path.dirname(__file__))
    from strays import (  # type: ignore[import-not-found]
        SHARED_MEMORY,
        SharedMemory,
        Strays,
        mapped_by,
        mark_of,
        processes,
    )
else:
    from appo.algorithms.runtime.processes.strays import (
        SHARED_MEMORY,
        SharedMemory,
        Strays,
        mapped_by,
        mark_of,
        processes,
    )

JOIN_SECONDS = 3.0
LOOK_SECONDS = 0.25
LOOK_COST = 200  # a look that takes a millisecond is repeated after so many at the earliest
STARTED = float(sys.argv[1]) if __name__ == "__main__" else time.time()  # of main


def kill_group(group: int) -> None:
    """Kill all processes of a group, which may have none any more, and unlink the shared memory they leave behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGSTOP)  # so that what they have mapped stays what it is
        names = abandoned_by(group)
        os.killpg(group, signal.SIGKILL)
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name)


def abandoned_by(group: int) -> set[str]:
    """Return files in /dev/shm that only processes of the group have mapped, not older than this process.

    What was there before the run, or is in use elsewhere, is not the environments' own.
    """
    ours: set[str] = set()
    others: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            (ours if os.getpgid(int(process.name)) == group else others).update(mapped_by(int(process.name)))
    paths = {SHARED_MEMORY + name for name in ours - others}
    return {path for path in paths if os.path.exists(path) and os.stat(path).st_ctime >= STARTED}


class Janitor:
    """Main's end of the janitor: started before any worker, told what to clean up should main be killed.

    Attributes:
        owns_main: whether all that main has started belongs to the run: it is no program of the user's.
    """

    owns_main = False

    def __init__(self) -> None:
        self._things: dict[int | Path, None] = {}  # what it knows

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        # -I and -S: nothing of the user's is imported, so it runs within milliseconds.
        told = (str(STARTED), str(os.getpid()), mark_of(os.getpid()), str(int(self.owns_main)))
        command = [sys.executable, "-I", "-S", __file__, *told]
        devnull = subprocess.DEVNULL
        self._process = subprocess.Popen(  # noqa: S603 (our own file)
            command, stdin=subprocess.PIPE, stdout=devnull, stderr=devnull, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # it may stand stopped
        for thing in self._things:
            self._tell("+", thing)

    def revive(self) -> None:
        """Start the process again if it has been killed."""
        if self._process.poll() is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        for thing in self._things:
            if isinstance(thing, Path):  # main lives, and removes them itself
                self._tell("-", thing)
        self._process.stdin.close()
        try:
            self._process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel does not let it go: a dead disk
                self._process.wait(JOIN_SECONDS)

    def watch(self, group: int) -> None:
        """Remember a process group."""
        self._things[group] = None
        self._tell("+", group)

    def forget(self, group: int) -> None:
        """Forget a group that main has ended."""
        self._things.pop(group, None)
        self._tell("-", group)

    def watch_directory(self, directory: Path) -> None:
        """Remember a directory of temporary files; main removes it where it can."""
        self._things[directory] = None
        self._tell("+", directory)

    def _tell(self, sign: str, thing: int | Path) -> None:
        assert self._process.stdin is not None
        line = f"{sign}{thing}\n".encode()
        try:
            os.write(self._process.stdin.fileno(), line)  # so short a line goes as a whole or not at all
        except BrokenPipeError:  # killed: it will be told again when it has been revived
            return
        except BlockingIOError:  # it has stood stopped for a thousand lines
            self._process.kill()


class _Watch:
    """The knowledge of the janitor, and its work when main has gone."""

    def __init__(self, main: int, mark: str, *, owns_main: bool) -> None:
        self.strays, self.memory = Strays(main, mark, owns_main=owns_main), SharedMemory(STARTED)
        self.directories: set[Path] = set()

    def hear(self, lines: Iterable[str]) -> None:
        """Take in main's lines about groups and directories, and end the rest of groups that main has ended."""
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
        """Note who has left its group and which names there are; return the seconds until the next look."""
        began = time.process_time()  # not what others take from it: then it is needed most
        table = processes()
        self.memory.look(table, self.strays.look(table))
        return max(LOOK_SECONDS, LOOK_COST * (time.process_time() - began))

    def clean_up(self) -> None:
        """End and remove everything that is left."""
        for group in self.strays.leaders:
            kill_group(group)
        self.strays.kill()
        self.memory.remove_orphaned()
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)  # follows no link


def _main() -> None:
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU"):  # those are main's
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
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
