"""Directory operations that a crash cannot tear."""

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk: a renamed or new file is durable only after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable(path: Path) -> None:
    """Make a directory and its parents, and put the new names on disk."""
    if not path.is_dir():
        make_durable(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def replace_directory(new: Path, target: Path) -> None:
    """Give a finished directory its name; one that had the name before is removed.

    Raises:
        OSError: the rename is refused; the target is as it was.
    """
    if not target.exists():
        os.rename(new, target)
        return
    if not _exchange(new, target):
        # The file system has no exchange: a crash between these two renames leaves nothing under this one name.
        aside = new.with_name(new.name + "-old")
        os.rename(target, aside)
        os.rename(new, target)
        new = aside
    shutil.rmtree(new, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (renameat2); False where system or file system cannot."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(second))
    return False
