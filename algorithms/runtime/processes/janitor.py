"""Ends what environments have started (game processes, renderers) when main can no longer do it.

Workers die with main by themselves, but what their environments started would live on. So every process that runs an
environment leads a process group, and main names the groups to a small process that outlives it. Run as a script, this
file is that process: torch-free, in a session of its own, it reads until main has gone and then kills and removes what
main has not taken back.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

JOIN_SECONDS = 1.0
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (where others leave theirs, not we ours)
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
    """Files in /dev/shm that only processes of the group have mapped, and that are not older than this process.

    What was there before the run, or is in use elsewhere, is not the environments' own.
    """
    ours: set[str] = set()
    others: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            (ours if os.getpgid(int(process.name)) == group else others).update(_shared_memory_of(process))
    return {name for name in ours - others if os.path.exists(name) and os.stat(name).st_ctime >= STARTED}


def _shared_memory_of(process: Path) -> set[str]:
    lines = (process / "maps").read_text(errors="replace").splitlines()
    return {line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line and "(deleted)" not in line}


class Janitor:
    """Main's end of it: started before any worker, told what to clean up should main be killed."""

    def __init__(self) -> None:
        self._things: dict[int | Path, None] = {}  # what it knows

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> None:
        # -I and -S: nothing of the user's is imported, so it runs within milliseconds.
        command = [sys.executable, "-I", "-S", __file__, str(STARTED)]
        devnull = subprocess.DEVNULL
        self._process = subprocess.Popen(  # noqa: S603 (our own file)
            command, stdin=subprocess.PIPE, stdout=devnull, stderr=devnull, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # it may stand stopped
        for thing in self._things:
            self._tell("+", thing)

    def revive(self) -> None:
        """Start it again if it has been killed."""
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
        """Main has ended the group."""
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


def _main() -> None:
    for name in ("INT", "TERM", "HUP", "QUIT", "USR2", "ALRM"):  # those are main's
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    things: set[str] = set()
    for line in sys.stdin:
        (things.add if line[0] == "+" else things.discard)(line[1:].rstrip("\n"))
    for thing in things:
        if thing.isdecimal():
            kill_group(int(thing))
        else:
            _remove(Path(thing))


def _remove(directory: Path) -> None:
    """Remove a directory and the files in it, but no directory in it."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


if __name__ == "__main__":
    _main()
