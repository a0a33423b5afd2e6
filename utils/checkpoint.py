"""The atomic checkpoint directory: it is there whole and verified, or it is not there.

A checkpoint is a directory `ckpt_<12 digits>` of plain files and a `MANIFEST.json` with their sizes and SHA-256. It is
written under a temporary name and renamed when all of it is on disk, so that a crash at any moment leaves the newest or
the one before. This module knows files only; what they mean is the caller's business.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from utils.directories import make_durable, replace_directory, sync_directory
from utils.errors import CheckpointError, ResourceError
from utils.failpoints import failpoint

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 1
TEMPORARY = ".tmp-"
CORRUPT = "corrupt"

_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"ckpt_(\d{12,})")
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_READ_ATTEMPTS = 100

T = TypeVar("T")

Content = bytes | Callable[[BinaryIO], None]


class Entry(NamedTuple):
    """What the manifest says of one file."""

    size: int  # bytes
    sha256: str


class Damaged(NamedTuple):
    """A checkpoint that does not verify."""

    path: Path
    reason: str


class Found(NamedTuple):
    """The newest checkpoint that verifies."""

    path: Path
    step: int
    damaged: tuple[Damaged, ...]  # newer ones that had to be skipped, newest first


class Loaded(NamedTuple):
    """The newest checkpoint that verifies, with what its files hold."""

    found: Found
    files: dict[str, bytes]


def checkpoint_name(step: int) -> str:
    """The directory name of the checkpoint at that step."""
    return f"ckpt_{step:012d}"


def save(parent: Path, name: str, files: Mapping[str, Content]) -> Path:
    """Write a checkpoint so that it survives a crash at any moment; on return it is on disk.

    A checkpoint of the same name is replaced. Whatever fails, older checkpoints are untouched.

    Args:
        parent: directory of the checkpoints; made if missing.
        name: `checkpoint_name(step)`, or any other plain name.
        files: bytes, or a function that writes them, for every file name.

    Returns:
        The directory of the checkpoint.

    Raises:
        ResourceError: the disk is full or refuses; what was written is removed again.
    """
    for component in (name, *files):
        if not _COMPONENT.fullmatch(component) or component == MANIFEST:
            raise ValueError(f"{component!r} cannot name a checkpoint or a file in one")
    temporary = parent / f"{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        make_durable(parent)
        temporary.mkdir()
        _fill(temporary, files)
        failpoint("ckpt.rename")
        replace_directory(temporary, parent / name)
        failpoint("ckpt.parentsync")
        sync_directory(parent)
    except OSError as error:
        raise ResourceError(_describe(error, parent / name)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after success there is nothing of that name
    return parent / name


def verify(path: Path) -> None:
    """Compare a checkpoint with its manifest: every file, every byte.

    Raises:
        CheckpointError: says which file is missing, is too many, has the wrong size or the wrong content.
    """
    with _opened(path) as directory:
        for name, entry in _checked_manifest(directory, path).items():
            for _ in _chunks(directory, path, name, entry):
                pass  # the last chunk is followed by the comparison of the hash


def read(path: Path, name: str) -> bytes:
    """The content of one file of a checkpoint, compared with the manifest.

    Raises:
        CheckpointError: the file is not part of the checkpoint or does not verify.
    """
    with _opened(path) as directory:
        manifest = _manifest(directory, path)
        if name not in manifest:
            raise CheckpointError(f"{path}: the checkpoint has no {name}")
        return b"".join(_chunks(directory, path, name, manifest[name]))


def newest(parent: Path) -> Found | None:
    """The checkpoint with the highest step that verifies; None when there is none at all.

    Safe beside a process that saves and prunes: a checkpoint that goes away while it is being read is no damage.

    Raises:
        CheckpointError: there are checkpoints and all of them are damaged.
    """
    result = _examine_newest(parent, verify)
    return None if result is None else result[0]


def load(parent: Path, worth: Callable[[Path], float] = lambda path: 0.0) -> Loaded | None:
    """As `newest` (of those worth most), with its files; goes on to the next when one is pruned before it was read.

    Raises:
        CheckpointError: there are checkpoints and none can be read.
    """
    result = _examine_newest(parent, _contents, worth)
    return None if result is None else Loaded(*result)


def prune(parent: Path, keep: int) -> list[Path]:
    """Remove the oldest checkpoints beyond the newest `keep`; those visibly damaged do not count as kept.

    Counting them would delete every good checkpoint after a fall-back to an older one. Damage inside a file shows only
    in `verify`; who loads past such a checkpoint moves it away with `quarantine`.

    Returns what was removed; raises as `remove`, and ValueError when `keep` is not positive.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    removed, kept = [], 0
    for _, path in _checkpoints(parent):
        if kept < keep:
            kept += _looks_whole(path)
            continue
        remove(path)
        removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Remove a checkpoint; readers see all of it or nothing. ResourceError: the directory cannot be changed."""
    temporary = path.with_name(f"{TEMPORARY}pruned-{path.name}-{secrets.token_hex(4)}")
    failpoint("ckpt.prune")
    try:
        os.rename(path, temporary)
    except OSError as error:
        raise ResourceError(f"cannot remove the old checkpoint {path}: {error.strerror}") from error
    failpoint("ckpt.prune")
    shutil.rmtree(temporary, ignore_errors=True)


def quarantine(parent: Path, damaged: tuple[Damaged, ...]) -> list[Path]:
    """Move damaged checkpoints into `corrupt/`, where they neither count nor hide a good one; returns the new paths."""
    moved = []
    for path, _ in damaged:
        target = parent / CORRUPT / path.name
        if target.exists():
            target = target.with_name(f"{path.name}-{secrets.token_hex(4)}")
        try:
            target.parent.mkdir(exist_ok=True)
            os.rename(path, target)
        except OSError as error:
            raise ResourceError(f"cannot move the damaged checkpoint {path}: {error.strerror}") from error
        moved.append(target)
    return moved


def clean_temporaries(parent: Path) -> list[Path]:
    """Remove what an interrupted save or prune left. Only for the process that holds the lock of the run."""
    leftovers = sorted(parent.glob(TEMPORARY + "*"))
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return leftovers


class _HashingFile(io.RawIOBase):
    """A file being written: counts and hashes what passes, in chunks, so that a fault can come between two of them."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: object, /) -> int:
        view = memoryview(cast("bytes", content)).cast("B")
        done = 0
        while done < len(view):
            failpoint("ckpt.write")
            written = os.write(self._descriptor, view[done : done + _CHUNK_BYTES])
            self._hash.update(view[done : done + written])
            done += written
        self._size += done
        return done

    def entry(self) -> Entry:
        return Entry(self._size, self._hash.hexdigest())


def _fill(directory: Path, files: Mapping[str, Content]) -> None:
    entries = {name: _write_file(directory / name, content) for name, content in files.items()}
    _sync(directory)
    failpoint("ckpt.manifest")
    _write_file(directory / MANIFEST, _encode(entries))
    _sync(directory)


def _write_file(path: Path, content: Content) -> Entry:
    failpoint("ckpt.open")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        file = _HashingFile(descriptor)
        if callable(content):
            content(cast("BinaryIO", file))
        else:
            file.write(content)
        failpoint("ckpt.fsync")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return file.entry()


def _sync(directory: Path) -> None:
    failpoint("ckpt.dirsync")
    sync_directory(directory)


def _describe(error: OSError, path: Path) -> str:
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(path.parent).free >> 20} MB free)"
    return f"cannot save {path}: {error.strerror or error}{free}"


def _encode(entries: Mapping[str, Entry]) -> bytes:
    files = {name: {"sha256": entry.sha256, "size": entry.size} for name, entry in entries.items()}
    text = json.dumps({"files": files, "format_version": FORMAT_VERSION}, indent=1, sort_keys=True)
    return text.encode() + b"\n"


def _manifest(directory: int, path: Path) -> dict[str, Entry]:
    """The entries of a manifest that is byte for byte what `save` would write: any change in it is damage."""
    raw = b"".join(_chunks(directory, path, MANIFEST, None))
    try:
        document = json.loads(raw)
        version = document["format_version"]
        entries = {name: Entry(int(e["size"]), str(e["sha256"])) for name, e in document["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise CheckpointError(f"{path}: {MANIFEST} is damaged") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format {version!r} is not {FORMAT_VERSION}, the one this version reads")
    if raw != _encode(entries):
        raise CheckpointError(f"{path}: {MANIFEST} is damaged")
    return entries


def _checked_manifest(directory: int, path: Path) -> dict[str, Entry]:
    """The manifest, when exactly its files are there; hidden files, as network file systems leave them, may be."""
    manifest = _manifest(directory, path)
    present = {name for name in os.listdir(directory) if not name.startswith(".")}
    if missing := sorted(manifest.keys() - present):
        raise CheckpointError(f"{path}: missing {', '.join(missing)}")
    if extra := sorted(present - manifest.keys() - {MANIFEST}):
        raise CheckpointError(f"{path}: {', '.join(extra)} not in {MANIFEST}")
    return manifest


def _chunks(directory: int, path: Path, name: str, entry: Entry | None) -> Iterator[bytes]:
    """The bytes of one file; raises CheckpointError after the last one if they are not what the entry says."""
    digest = hashlib.sha256()
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: {name} is not a file")
            if entry is not None and status.st_size != entry.size:
                raise CheckpointError(f"{path}: {name} has {status.st_size} bytes instead of {entry.size}")
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read {name}: {error.strerror}") from error
    if entry is not None and digest.hexdigest() != entry.sha256:
        raise CheckpointError(f"{path}: the content of {name} has changed (SHA-256)")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The directory as a descriptor: all files are of one checkpoint, even when another takes its name meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot open the checkpoint: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _contents(path: Path) -> dict[str, bytes]:
    with _opened(path) as directory:
        manifest = _checked_manifest(directory, path)
        return {name: b"".join(_chunks(directory, path, name, entry)) for name, entry in manifest.items()}


def _examine_newest(
    parent: Path, examine: Callable[[Path], T], worth: Callable[[Path], float] = lambda path: 0.0
) -> tuple[Found, T] | None:
    """Apply a function to checkpoints, best and newest first, until one does not raise CheckpointError."""
    for _ in range(_READ_ATTEMPTS):
        damaged: list[Damaged] = []
        candidates = sorted(_checkpoints(parent), key=lambda candidate: worth(candidate[1]), reverse=True)
        for step, path in candidates:
            inode = _inode(path)
            try:
                return Found(path, step, tuple(damaged)), examine(path)
            except CheckpointError as error:
                if inode is not None and _inode(path) == inode:
                    damaged.append(Damaged(path, str(error)))
        if not candidates:
            return None
        if len(damaged) == len(candidates):
            reasons = "; ".join(reason for _, reason in damaged)
            raise CheckpointError(f"none of {len(damaged)} checkpoints can be used: {reasons}")
        # Some were pruned or replaced while they were read: so there are newer ones now.
    raise CheckpointError(f"{parent}: checkpoints come and go faster than they can be read")


def _looks_whole(path: Path) -> bool:
    """Whether names and sizes agree with the manifest: what a full disk or a broken copy leaves does not."""
    try:
        with _opened(path) as directory:
            manifest = _checked_manifest(directory, path)
            return all(os.stat(name, dir_fd=directory).st_size == entry.size for name, entry in manifest.items())
    except (CheckpointError, OSError):
        return False


def _checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Step and path of everything that is named as a checkpoint, highest step first."""
    try:
        matches = [(match, entry) for entry in os.listdir(parent) if (match := _NAME.fullmatch(entry))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{parent}: cannot list checkpoints: {error.strerror}") from error
    return sorted(((int(match[1]), parent / entry) for match, entry in matches), reverse=True)


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None
