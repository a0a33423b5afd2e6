"""The atomic checkpoint directory: a checkpoint exists whole and verified, or not at all.

A checkpoint is a directory `ckpt_<12 digits>` of plain files and a `MANIFEST.json` with the sizes and SHA-256 of the
files. The directory is written under a temporary name and renamed when all files are on disk: a crash at any moment
leaves the newest checkpoint or the previous one. Callers give the files their meaning.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from appo.utils.directories import closing, remove_tree, replace_directory
from appo.utils.errors import CheckpointError, ResourceError, UsageError
from appo.utils.failpoints import failpoint
from appo.utils.hashed_files import ManifestEntry, chunks, opened, write_file
from appo.utils.run_folder import CORRUPT, enter, names_in_own, own_folder
from appo.utils.system import machine

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 1
TEMPORARY = ".tmp-"
_NAME = re.compile(r"ckpt_([0-9]{12,})")
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Limit(NamedTuple):
    """Largest size of a checkpoint that is read into memory, and the reason in words."""

    num_bytes: int
    reason: str


class Damaged(NamedTuple):
    """A checkpoint that does not verify."""

    path: Path
    reason: str


class FoundCheckpoint(NamedTuple):
    """The newest checkpoint that verifies."""

    path: Path
    step: int
    damaged: tuple[Damaged, ...]  # newer checkpoints that were skipped, newest first


class Loaded(NamedTuple):
    """The newest checkpoint that verifies, with the contents of its files."""

    found: FoundCheckpoint
    files: dict[str, bytes]


def checkpoint_name(step: int) -> str:
    """Return the name of the directory of a checkpoint; readers find no step below 0."""
    if step < 0:
        raise ValueError(f"a checkpoint cannot be of step {step}")
    return f"ckpt_{step:012d}"


def save(parent: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write a checkpoint that survives a crash at any moment; return its directory once everything is on disk.

    A checkpoint with the same name is replaced. A failure leaves older checkpoints untouched.

    Args:
        parent: directory of the checkpoints; made if missing.
        name: `checkpoint_name(step)`, or any other plain name.
        files: file name -> content.

    Raises:
        ResourceError: the disk is full or refuses; the new files are removed.
    """
    for component in (name, *files):
        if not _COMPONENT.fullmatch(component) or component == MANIFEST:
            raise ValueError(f"{component!r} cannot name a checkpoint or a file in one")
    temporary = f"{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with own_folder(parent, make=True) as folder:
            try:
                os.mkdir(temporary, dir_fd=folder)
                with closing(enter(folder, temporary)) as directory:
                    entries = {file: write_file(directory, file, content) for file, content in files.items()}
                    _sync(directory)
                    failpoint("ckpt.manifest")
                    write_file(directory, MANIFEST, _encode(entries))
                    _sync(directory)
                failpoint("ckpt.rename")
                replace_directory(temporary, name, dir_fd=folder)
                failpoint("ckpt.parentsync")
                os.fsync(folder)
            finally:
                remove_tree(temporary, dir_fd=folder)  # after success no file has the name
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(parent).free >> 20} MB free)"
        raise ResourceError(f"cannot save {parent / name}: {error.strerror or error}{free}") from None
    return parent / name


def verify(path: Path) -> None:
    """Compare every byte of a checkpoint with its manifest.

    Raises:
        CheckpointError: a file is missing, not in the manifest, or has the wrong size or content.
    """
    with opened(path) as directory:
        for name, entry in _checked_manifest(directory, path).items():
            for _ in chunks(directory, path, name, entry):
                pass  # after the last chunk, the hashes are compared


def read(path: Path, name: str, most_bytes: int) -> bytes:
    """Return the content of one file of a checkpoint, compared with the manifest.

    Raises:
        CheckpointError: the file is not part of the checkpoint, has more bytes, or does not verify.
    """
    with opened(path) as directory:
        manifest = _manifest(directory, path)
        if name not in manifest:
            raise CheckpointError(f"{path}: the checkpoint has no {name}")
        if manifest[name].size > most_bytes:
            raise CheckpointError(f"{path}: {name} has more than {most_bytes} bytes")
        return b"".join(chunks(directory, path, name, manifest[name]))


def load(
    parent: Path,
    worth: Callable[[Path], float] = lambda path: 0.0,
    check: Callable[[dict[str, bytes]], object] = lambda files: None,
    at_most: int | None = None,
    limit: Limit | None = None,
) -> Loaded | None:
    """Load the newest usable checkpoint of those with the highest worth; None without checkpoints.

    Safe beside a process that saves and prunes: a checkpoint removed while being read does not count as damaged.

    Args:
        parent: directory of the checkpoints.
        worth: function that rates a checkpoint, before the step counts.
        check: function that raises CheckpointError for files that verify and still cannot be used; the next older
            checkpoint follows.
        at_most: largest step; None: any.
        limit: largest size, see `contents`.

    Raises:
        CheckpointError: no checkpoint can be used.
    """
    for _ in range(100):
        damaged: list[Damaged] = []
        near = (one for one in listed(parent) if at_most is None or one[0] <= at_most)
        candidates = sorted(near, key=lambda candidate: worth(candidate[1]), reverse=True)
        for step, path in candidates:
            inode, prefix = _inode(path), ""
            try:
                files, prefix = contents(path, limit), f"{path}: "
                check(files)
                return Loaded(FoundCheckpoint(path, step, tuple(damaged)), files)
            except CheckpointError as error:
                if inode is not None and _inode(path) == inode:
                    damaged.append(Damaged(path, f"{prefix}{error}"))
        if not candidates:
            return None
        if len(damaged) == len(candidates):
            reasons = "; ".join(reason for _, reason in damaged)
            raise CheckpointError(f"none of {len(damaged)} checkpoints can be used: {reasons}")
        # Checkpoints were pruned or replaced while being read, so newer ones exist now.
    raise CheckpointError(f"{parent}: checkpoints come and go faster than they can be read")


def prune(parent: Path, keep: int) -> None:
    """Remove the oldest checkpoints beyond the newest `keep`.

    Visibly damaged checkpoints do not count as kept: after a fall-back to an older checkpoint, all good ones would be
    deleted. Only `verify` finds damage inside a file; a caller that loads past such a checkpoint moves the checkpoint
    away with `quarantine`.

    Raises:
        ResourceError: see `remove`.
        ValueError: `keep` is not positive.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    kept = 0
    for _, path in listed(parent):
        if kept < keep:
            kept += _looks_whole(path)
        else:
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint; readers see the whole checkpoint or nothing (ResourceError: the directory is read-only)."""
    temporary = f"{TEMPORARY}pruned-{path.name}-{secrets.token_hex(4)}"
    failpoint("ckpt.prune")
    try:
        with own_folder(path.parent) as folder:
            os.rename(path.name, temporary, src_dir_fd=folder, dst_dir_fd=folder)
            failpoint("ckpt.prune")
            remove_tree(temporary, dir_fd=folder)
    except OSError as error:
        raise ResourceError(f"cannot remove the old checkpoint {path}: {error.strerror}") from error


def quarantine(parent: Path, damaged: tuple[Damaged, ...]) -> None:
    """Move damaged checkpoints into `corrupt/`, so that good ones come first."""
    for path, _ in damaged:
        try:
            with own_folder(parent) as folder, own_folder(parent / CORRUPT, make=True) as corrupt:
                name = path.name if path.name not in os.listdir(corrupt) else f"{path.name}-{secrets.token_hex(4)}"
                os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=corrupt)
        except OSError as error:
            raise ResourceError(f"cannot move the damaged checkpoint {path}: {error.strerror}") from error


def clean_temporaries(parent: Path) -> None:
    """Remove leftovers of an interrupted save or prune. Only the process with the run's lock may call."""
    for name in [name for name in names_in_own(parent) if name.startswith(TEMPORARY)]:
        with own_folder(parent) as folder:
            remove_tree(name, dir_fd=folder)


def _sync(directory: int) -> None:
    failpoint("ckpt.dirsync")
    os.fsync(directory)


def _encode(entries: Mapping[str, ManifestEntry]) -> bytes:
    files = {name: {"sha256": entry.sha256, "size": entry.size} for name, entry in entries.items()}
    return json.dumps({"files": files, "format_version": FORMAT_VERSION}, indent=1, sort_keys=True).encode() + b"\n"


def _manifest(directory: int, path: Path) -> dict[str, ManifestEntry]:
    """Return the entries of a manifest; every byte that `save` would write differently is damage."""
    raw = b"".join(chunks(directory, path, MANIFEST, None))
    try:
        document = json.loads(raw)
        version = document["format_version"]
        entries = {name: ManifestEntry(int(e["size"]), str(e["sha256"])) for name, e in document["files"].items()}
        if not all(_COMPONENT.fullmatch(name) for name in entries):
            raise ValueError("a name that leads out of the directory")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise CheckpointError(f"{path}: {MANIFEST} is damaged") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format {version!r} is not {FORMAT_VERSION}, the one this version reads")
    if raw != _encode(entries):
        raise CheckpointError(f"{path}: {MANIFEST} is damaged")
    return entries


def _checked_manifest(directory: int, path: Path) -> dict[str, ManifestEntry]:
    """Return the manifest if exactly its files exist, beside hidden files, which network file systems leave."""
    manifest = _manifest(directory, path)
    present = {name for name in os.listdir(directory) if not name.startswith(".")}
    if missing := sorted(manifest.keys() - present):
        raise CheckpointError(f"{path}: missing {', '.join(missing)}")
    if extra := sorted(present - manifest.keys() - {MANIFEST}):
        raise CheckpointError(f"{path}: {', '.join(extra)} not in {MANIFEST}")
    return manifest


def contents(path: Path, limit: Limit | None = None) -> dict[str, bytes]:
    """Return the contents of all files of a checkpoint by name.

    Args:
        path: directory of the checkpoint.
        limit: largest sum of the sizes, compared before the first byte is read.

    Raises:
        CheckpointError: the checkpoint does not verify.
        ResourceError: the checkpoint is larger than the free memory, and not damaged.
        UsageError: the checkpoint is larger than the limit.
    """
    with opened(path) as directory:
        manifest = _checked_manifest(directory, path)
        size = sum(entry.size for entry in manifest.values())
        if limit is not None and size > limit.num_bytes:
            raise UsageError(f"{path} has {size >> 20:,} MiB, more than {limit.num_bytes >> 20:,} MiB: {limit.reason}")
        # There is always memory for 64 MiB.
        if size > 64 << 20 and size > (free := machine.available_memory_bytes()):
            raise ResourceError(f"{path} has {size >> 20} MiB, of memory {free >> 20} MiB are free")
        return {name: b"".join(chunks(directory, path, name, entry)) for name, entry in manifest.items()}


def _looks_whole(path: Path) -> bool:
    """Return whether names and sizes agree with the manifest; leftovers of a full disk or a broken copy do not."""
    try:
        with opened(path) as directory:
            manifest = _checked_manifest(directory, path)
            return all(os.stat(name, dir_fd=directory).st_size == entry.size for name, entry in manifest.items())
    except (CheckpointError, OSError):
        return False


def listed(parent: Path) -> list[tuple[int, Path]]:
    """Return step and path of everything with the name of a checkpoint, highest step first."""
    try:
        with own_folder(parent, to_read=True) as folder:
            entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{parent}: cannot list checkpoints: {error.strerror}") from None
    matches = filter(None, map(_NAME.fullmatch, entries))
    return sorted(((int(match[1]), parent / match[0]) for match in matches), reverse=True)


def listed_if_readable(parent: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints as `listed`; [] for a folder that cannot be read, which saving reports."""
    try:
        return listed(parent)
    except CheckpointError:
        return []


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None
