"""Small files of settings: read without evaluating anything, written so that a crash leaves the old or the new one."""

import contextlib
import ctypes
import errno
import importlib
import json
import os
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from utils.errors import UsageError
from utils.values import shown

OWN_BYTES = 16 << 20
"""More than any file of settings or of a run's status has."""


def write_json_atomic(path: Path, value: object, *, durable: bool = True, indent: int | None = 2) -> None:
    """Replace a JSON file in one step; a crash at any point leaves the previous content or the new one.

    Args:
        path: of the file.
        value: of JSON.
        durable: wait until it is on disk; without, a power failure (no other crash) may leave an empty file.
        indent: spaces per level; None: all in one line.

    Raises:
        OSError: the directory is missing, not writable or full.
        TypeError, ValueError: the value is not JSON.
    """
    text = json.dumps(value, indent=indent, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_directory(path.parent)


@contextlib.contextmanager
def replaced_when_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside a file that the user has named; what is written there takes its place at the end.

    Raises:
        UsageError: no file can be written there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Hidden, and of a length that every file system takes.
        temporary = path.with_name(f".{path.stem[:40]}-{os.getpid()}{path.suffix}")
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # what was raised before says why
                temporary.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {shown(str(path))}: {error.strerror or error}") from None


def _sync_directory(path: Path) -> None:
    """Make a rename durable: without this a power failure may bring the old directory entry back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_json_line(path: Path, value: object) -> None:
    """Append one line of JSON by a single write, so that no other writer's line is split by it.

    Raises:
        OSError: the file cannot be opened or the disk is full.
        TypeError, ValueError: the value is not JSON.
    """
    line = json.dumps(value, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def open_own(path: Path) -> BinaryIO:
    """Open a file that a run has written, for reading.

    A run directory may come from elsewhere: links in it may lead anywhere, and a pipe would be waited on for ever.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return os.fdopen(descriptor, "rb")


def _read_own(path: Path) -> str:
    with open_own(path) as file:
        content = file.read(OWN_BYTES + 1)
    if len(content) > OWN_BYTES:
        raise ValueError(f"it is larger than {OWN_BYTES >> 20} MiB")
    return content.decode()


def read_mapping(path: Path, *, own: bool = False) -> dict[str, object]:
    """Return the mapping a JSON, TOML or YAML file holds (by its suffix; JSON without a known one).

    Args:
        path: of the file.
        own: it is one that a run has written, see `open_own`; otherwise the user has named it.

    Raises:
        UsageError: the file is missing, unreadable, damaged or no mapping of names.
    """
    readers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".yaml": _load_yaml, ".yml": _load_yaml}
    reader = readers.get(path.suffix.lower(), _load_json)
    try:
        value = reader(_read_own(path) if own else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"{path} must hold a mapping of flags to values")
    return value


def _load_json(text: str) -> object:
    value: object = json.loads(text)
    return value


def _load_yaml(text: str) -> object:
    yaml = importlib.import_module("yaml")
    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return value


# Directory operations that a crash cannot tear.


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
