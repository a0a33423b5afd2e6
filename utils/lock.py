"""One training process per run directory."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from appo.utils.errors import DirectoryInUse, ResourceError, UsageError
from appo.utils.run_folder import append_to_own, is_named


class RunLock:
    """The lock file of a run, held by `flock`: the kernel frees the lock however the holder ends, kill -9 included.

    Processes started with exec do not inherit the descriptor; a plain `os.fork()` would share the lock. The file stays
    after a release: otherwise two processes could lock two files with one name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock, or fail at once.

        Raises:
            DirectoryInUse: another process holds the lock; the message names the process.
            UsageError: the file cannot be written.
            ResourceError: the file system has no locks.
        """
        try:
            descriptor = append_to_own(self.path, mode=0o600, make=True)
        except OSError as error:
            raise UsageError(f"cannot write in {self.path.parent}: {error.strerror}") from error
        try:
            _lock(descriptor, self.path)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            with contextlib.suppress(OSError):  # a full disk must not prevent resuming
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def renew(self) -> None:
        """Lock the file at the path again if the locked file was removed or renamed.

        Raises:
            DirectoryInUse, UsageError, ResourceError: see `acquire`.
        """
        held = self._descriptor
        if held is not None and not self.is_in_place():
            self.acquire()
            os.close(held)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the locked file; True without a lock."""
        return self._descriptor is None or is_named(self._descriptor, self.path)

    def release(self) -> None:
        """Release the lock; harmless without a lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock(descriptor: int, path: Path) -> None:
    run = path.absolute().parent.name
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise ResourceError(f"cannot lock {path}: {error.strerror}") from error
        raise DirectoryInUse(f"run {run} is in use by {_describe_holder(descriptor)}") from None
    if not os.fstat(descriptor).st_nlink:  # opened before a refused start removed the folder
        raise DirectoryInUse(f"run {run} has just been removed by its own start: start again")


def _describe_holder(descriptor: int) -> str:
    deadline = time.monotonic() + 0.2
    while True:
        try:
            holder = json.loads(os.pread(descriptor, 4096, 0))
            return f"pid {holder['pid']} on host {holder['host']} since {holder['since']}"
        except (OSError, ValueError, TypeError, KeyError):
            if time.monotonic() > deadline:
                return "another process"
            time.sleep(0.01)  # the holder locks first and writes later
