"""The files of a checkpoint, written and read with their SHA-256."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from appo.utils.directories import closing
from appo.utils.errors import CheckpointError
from appo.utils.failpoints import failpoint
from appo.utils.run_folder import NEW, enter, own_folder

CHUNK_BYTES = 1 << 20


class ManifestEntry(NamedTuple):
    """Size and hash of one file in the manifest."""

    size: int  # bytes
    sha256: str


def write_file(directory: int, name: str, content: bytes) -> ManifestEntry:
    """Write a new file to the disk, in a directory given as a descriptor; return the entry of the file."""
    failpoint("ckpt.open")
    with closing(os.open(name, NEW, 0o666, dir_fd=directory)) as descriptor:
        rest = memoryview(content)
        while rest:
            failpoint("ckpt.write")
            rest = rest[os.write(descriptor, rest[:CHUNK_BYTES]) :]
        failpoint("ckpt.fsync")
        os.fsync(descriptor)
    return ManifestEntry(len(content), hashlib.sha256(content).hexdigest())


def chunks(directory: int, path: Path, name: str, entry: ManifestEntry | None) -> Iterator[bytes]:
    """Yield the bytes of one file of a directory, following no link.

    An entry has the expected size and hash; without an entry the file must be small.

    Raises:
        CheckpointError: the file cannot be read; after the last chunk: the content differs from the entry.
    """
    digest = hashlib.sha256()
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with closing(os.open(name, flags, dir_fd=directory)) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: {name} is not a file")
            if entry is not None and status.st_size != entry.size:
                raise CheckpointError(f"{path}: {name} has {status.st_size} bytes instead of {entry.size}")
            if entry is None and status.st_size > 1 << 20:
                raise CheckpointError(f"{path}: {name} is too large")
            while chunk := os.read(descriptor, CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read {name}: {error.strerror}") from None
    if entry is not None and digest.hexdigest() != entry.sha256:
        raise CheckpointError(f"{path}: the content of {name} has changed (SHA-256)")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a directory as a descriptor: all files are of one checkpoint, even if another one takes the name."""
    try:
        with own_folder(path.parent, to_read=True) as folder:
            descriptor = enter(folder, path.name)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot open the checkpoint: {error.strerror}") from None
    with closing(descriptor):
        yield descriptor
