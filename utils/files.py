"""Files that the user names, and operations on directories that a crash cannot tear.

Settings are read without evaluating anything. The files of a run are opened by `utils.run_folder`.
"""

import contextlib
import ctypes
import errno
import importlib
import json
import os
import secrets
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from appo.utils.errors import UsageError
from appo.utils.values import refuse_deep, shown

SETTINGS_BYTES = 1 << 18
"""More than any file of settings has; YAML is read at some hundred kB a second."""


@contextlib.contextmanager
def replaced_when_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside a file that the user has named; what is written there takes its place at the end.

    Raises:
        UsageError: no file can be written there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Hidden, of a length that every file system takes, and of a name under which nobody can have put a link.
        temporary = path.with_name(f".{path.stem[:40]}-{secrets.token_hex(8)}{path.suffix}")
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # what was raised before says why
                temporary.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {shown(str(path))}: {error.strerror or error}") from None


def read_mapping(path: Path) -> dict[str, object]:
    """Return the mapping that a JSON, TOML or YAML file of the user's holds (by its suffix; JSON without a known one).

    Raises:
        UsageError: the file is missing, unreadable, no plain one, too large, damaged or no mapping of names.
    """
    readers: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".yaml": _load_yaml, ".yml": _load_yaml}
    reader = readers.get(path.suffix.lower(), _load_json)
    try:
        value = reader(_read_named(path).decode())
        refuse_deep(value)
    except UsageError as error:
        raise UsageError(f"cannot use {path}: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"{path} must hold a mapping of flags to values")
    return value


def _read_named(path: Path) -> bytes:
    """Return all of a file; a pipe is not waited on, and a device not read to its end (UsageError)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError("it is no plain file (a folder, pipe or device)")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(SETTINGS_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > SETTINGS_BYTES:
        raise UsageError(f"it is larger than {SETTINGS_BYTES >> 10} KiB, no settings are")
    return content


def _load_json(text: str) -> object:
    value: object = json.loads(text)
    return value


def _load_yaml(text: str) -> object:
    yaml = importlib.import_module("yaml")
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):  # few bytes of aliases of aliases are values without end
                line = event.start_mark.line + 1
                raise UsageError(f"line {line} has the alias *{shown(event.anchor)}: write out what it stands for")
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


def replace_directory(new: str | Path, target: str | Path, *, dir_fd: int | None = None) -> None:
    """Give a finished directory its name; what had the name before, a link itself too, is removed.

    Args:
        new: the directory.
        target: its name from now on.
        dir_fd: open directory in which both names are, if they are no paths.

    Raises:
        OSError: the rename is refused; the target is as it was.
    """
    try:
        os.stat(target, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(new, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        return
    if not _exchange(new, target, dir_fd):
        # The file system has no exchange: a crash between these two renames leaves nothing under this one name.
        aside = f"{new}-old"
        os.rename(target, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.rename(new, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        new = aside
    remove_tree(new, dir_fd=dir_fd)


def remove_tree(path: str | Path, *, dir_fd: int | None = None) -> None:
    """Remove a directory with all that is in it, or a file or a link itself; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True, dir_fd=dir_fd)
    with contextlib.suppress(OSError):
        os.unlink(path, dir_fd=dir_fd)


def _exchange(first: str | Path, second: str | Path, dir_fd: int | None) -> bool:
    """Swap two names in one step (renameat2); False where system or file system cannot."""
    place = _AT_FDCWD if dir_fd is None else dir_fd
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(place, os.fsencode(first), place, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(second))
    return False
