"""Operations on directories that a crash cannot tear."""

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close an open file or directory on leaving."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk: only then is a renamed or new file durable."""
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def make_durable(path: Path) -> None:
    """Make a directory and its parents, and write the new names to the disk."""
    if not path.is_dir():
        make_durable(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def replace_directory(new: str | Path, target: str | Path, *, dir_fd: int | None = None) -> None:
    """Give a finished directory its final name; remove the former owner of the name, also a link.

    Args:
        new: present name of the directory.
        target: final name.
        dir_fd: descriptor of the directory that contains both names, unless the names are paths.

    Raises:
        OSError: the rename is refused; the target is unchanged.
    """
    try:
        os.stat(target, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(new, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        return
    if not _exchange(new, target, dir_fd):
        # The file system has no exchange: a crash between the two renames leaves the target missing.
        aside = f"{new}-old"
        os.rename(target, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.rename(new, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        new = aside
    remove_tree(new, dir_fd=dir_fd)


def remove_tree(path: str | Path, *, dir_fd: int | None = None) -> None:
    """Remove a directory with its contents, or a file, or a link itself, as far as possible."""
    shutil.rmtree(path, ignore_errors=True, dir_fd=dir_fd)
    with contextlib.suppress(OSError):
        os.unlink(path, dir_fd=dir_fd)


def _exchange(first: str | Path, second: str | Path, dir_fd: int | None) -> bool:
    """Swap two names in one step (renameat2); return False if libc or the file system has no exchange."""
    place = -100 if dir_fd is None else dir_fd  # AT_FDCWD of fcntl.h
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(place, os.fsencode(first), place, os.fsencode(second), 2) == 0:  # RENAME_EXCHANGE of fs.h
            return True
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(second))
    return False
