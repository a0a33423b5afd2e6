"""The door of datasets: opens all folders and files in a dataset, each by its name in the folder above.

A dataset may come from a stranger, and other processes may write into its folder. Nothing in a dataset is opened behind
a link for reading or writing, and new files never replace old ones. Only the folder that the user names may be a link
or lie behind one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from appo.utils.directories import closing, remove_tree
from appo.utils.errors import UsageError
from appo.utils.run_folder import NEW, OWN_BYTES, enter, inner_folder, open_in, read_own_mapping

PART, DATA = "part-", "data"
METADATA, EPISODE_FILE, HDF5_FILE = "metadata.json", "part-0.arrow", "main_data.hdf5"
_PART_NAME = re.compile(rf"{PART}([0-9]{{5}}|[1-9][0-9]{{5,17}})")


class Place:
    """A folder in a dataset; only methods access the disk."""

    def __init__(self, root: Path, *inner: str) -> None:
        self.root, self.inner, self.path = root, inner, root.joinpath(*inner)

    def inside(self, *names: str) -> Place:
        """Return a folder in this folder."""
        return Place(self.root, *self.inner, *names)

    def entered(self) -> contextlib.AbstractContextManager[int]:
        """Return a context with an open descriptor of the folder (OSError), for `dir_fd` of functions of `os`."""
        return inner_folder(self.root, self.inner)

    def open(self, name: str) -> BinaryIO:
        """Open a plain file in the folder for reading, without waiting on a pipe.

        Raises:
            OSError: the file cannot be read, is not plain, or is or lies behind a link.
        """
        with self.entered() as folder:
            return open_in(folder, name)

    def mapping(self, name: str, most_bytes: int = OWN_BYTES) -> dict[str, object]:
        """Return the mapping in a JSON file of the folder (UsageError: see `read_own_mapping`)."""
        return read_own_mapping(self.path / name, most_bytes, opened=lambda path: self.open(path.name))

    def holds(self, name: str) -> bool:
        """Return whether the folder contains the name.

        Raises:
            UsageError: the folder cannot be entered, for example because it is a link.
        """
        try:
            with self.entered() as folder:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror}") from None
        return True

    def mark(self, name: str) -> tuple[int, int, int]:
        """Return numbers of a file that change when it is written or replaced (OSError)."""
        with self.entered() as folder:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return found.st_ino, found.st_mtime_ns, found.st_size

    def disk_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of files on the disk; missing files take none (OSError)."""
        total = 0
        with self.entered() as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # of which reading says so
                    total += stored_bytes(os.stat(name, dir_fd=folder, follow_symlinks=False))
        return total

    def parts(self) -> list[Place]:
        """Return the data folders of the parts with metadata, in order.

        Raises:
            UsageError: a data folder is a link or cannot be read.
        """
        try:
            with self.entered() as folder:
                names = sorted((name for name in os.listdir(folder) if part_number(name) >= 0), key=part_number)
        except OSError:
            return []
        return [data for name in names if (data := self.inside(name, DATA)).holds(METADATA)]


def stored_bytes(found: os.stat_result) -> int:
    """Return the bytes of a file on the disk: a file with holes can have any size."""
    return min(found.st_size, 512 * found.st_blocks) or min(found.st_size, 4096)  # small ones may stand in the folder


def part_number(name: str) -> int:
    """Return the number in the name of a part; -1: another name, for example of a user's copy."""
    match = _PART_NAME.fullmatch(name)
    return int(match[1]) if match else -1


class NewPart:
    """A part that is being written, in a hidden folder until `finish` (OSError: the folder cannot be made)."""

    def __init__(self, folder: Path, name: str) -> None:
        self._place, self._name = Place(folder), name
        self.episodes = self.steps = self.nbytes = 0
        with self._place.entered() as above:
            os.mkdir(name, dir_fd=above)
            self._folder = enter(above, name)
        os.mkdir(DATA, dir_fd=self._folder)
        self._data = enter(self._folder, DATA)

    def add(self, encoded: bytes, steps: int) -> None:
        """Write an episode (OSError)."""
        name = str(self.episodes)
        os.mkdir(name, dir_fd=self._data)
        try:
            with closing(enter(self._data, name)) as episode:
                _write(episode, EPISODE_FILE, encoded)
                _write(episode, METADATA, b'{"id": %d, "total_steps": %d}' % (self.episodes, steps))
        except OSError:
            with contextlib.suppress(OSError):  # the first error is raised
                remove_tree(name, dir_fd=self._data)  # which leaves a full disk room for the metadata of the others
            raise
        self.episodes, self.steps, self.nbytes = self.episodes + 1, self.steps + steps, self.nbytes + len(encoded)

    def finish(self, about: Mapping[str, object]) -> None:
        """Write the metadata with the counts, and rename the folder to the next part.

        Raises:
            OSError: writing fails, or another process has replaced the folder.
        """
        counts = {"total_episodes": self.episodes, "total_steps": self.steps}
        metadata = {**about, **counts, "dataset_size": round(self.nbytes / 1e6, 1)}
        _write(self._data, METADATA, json.dumps(metadata).encode())  # with Infinity, as Minari has it
        with self._place.entered() as above:
            if not os.path.samestat(os.stat(self._name, dir_fd=above, follow_symlinks=False), os.fstat(self._folder)):
                raise OSError(errno.ESTALE, f"somebody has replaced {self._name}")
            number = max(map(part_number, os.listdir(above)), default=-1) + 1
            while not self._is_named(f"{PART}{number:05}", above):
                number += 1
        self.close()

    def _is_named(self, name: str, above: int) -> bool:
        """Rename the folder; return False if another writer has just taken the name."""
        try:
            os.rename(self._name, name, src_dir_fd=above, dst_dir_fd=above)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            return False
        return True

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._data)
        os.close(self._folder)


def _write(folder: int, name: str, content: bytes) -> None:
    with closing(os.open(name, NEW, 0o666, dir_fd=folder)) as descriptor:
        while content:
            content = content[os.write(descriptor, content) :]


def remove_hidden(folder: Path, name: str) -> None:
    """Remove the hidden folder of a writer, or a link of that name, as far as possible.

    Raises:
        OSError: the dataset cannot be opened.
    """
    with Place(folder).entered() as above:
        remove_tree(name, dir_fd=above)


def make_folder(folder: Path, name: str) -> None:
    """Make the folder of a dataset, and test whether a hidden folder can be made inside.

    Raises:
        OSError: making a folder fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_hidden(folder, name)
    with Place(folder).entered() as above:
        os.mkdir(name, dir_fd=above)
        os.rmdir(name, dir_fd=above)
