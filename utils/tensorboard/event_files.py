"""Files of TensorBoard's events: records as TensorFlow frames them, and what long training leaves out of old files."""

import contextlib
import importlib
import importlib.util
import itertools
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from appo.utils.run_folder import is_named, names_in_own, new_own, open_own, own_folder, remove_own, replace_own
from appo.utils.thinning import Thinning

EVENTS = "events.out.tfevents."
HPARAMS = "_hparams_/"
"""Begin of the tags of the table of hyperparameters."""

_HEAD = struct.Struct("<QI")  # length and its checksum
_LONGEST_RECORD = 64 << 20


class Records(NamedTuple):
    """Parts of tensorboardX: messages, the module that makes summaries, and the masked CRC-32C of bytes."""

    Event: Any
    SessionLog: Any
    HParamsPluginData: Any
    summary: Any
    checksum: Callable[[bytes], int]
    DecodeError: type[Exception]

    def framed(self, content: bytes) -> bytes:
        """Return a record as a file contains it: length, its checksum, content, its checksum."""
        length = struct.pack("<Q", len(content))
        return b"".join(part + struct.pack("<I", self.checksum(part)) for part in (length, content))


def load_records() -> Records:
    """Import parts of tensorboardX without running the module of the package.

    That module imports torch: 1.7 seconds and 200 MB in main, which does not need torch otherwise. So the package is
    found but not executed while its submodules are imported. A later `import tensorboardX` is ordinary.
    """
    present = sys.modules.get("tensorboardX")
    spec = importlib.util.find_spec("tensorboardX")
    if spec is None:
        raise ModuleNotFoundError("tensorboardX is not installed")
    try:
        if present is None:
            sys.modules["tensorboardX"] = importlib.util.module_from_spec(spec)
        from tensorboardX import summary
        from tensorboardX.proto import api_pb2  # noqa: F401 - `summary.hparams` finds the module here
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
        from tensorboardX.record_writer import masked_crc32c
    finally:
        if present is None:
            del sys.modules["tensorboardX"]
    damaged = importlib.import_module("google.protobuf.message").DecodeError
    return Records(Event, SessionLog, HParamsPluginData, summary, masked_crc32c, damaged)


class EventFile:
    """A new file to which records are appended."""

    def __init__(self, path: Path, records: Records) -> None:
        self._path, self._records = path, records
        self._file = os.fdopen(new_own(path), "wb")

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the file."""
        return is_named(self._file.fileno(), self._path)

    def write(self, event: Any) -> None:
        """Append a message."""
        self._file.write(self._records.framed(event.SerializeToString()))

    @property
    def size(self) -> int:
        """Return the number of bytes so far."""
        return self._file.tell()

    def flush(self) -> None:
        """Write everything to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close the file; bytes that the disk does not take are lost."""
        with contextlib.suppress(OSError):
            self._file.close()


def contents(file: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of all whole records of a file."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, _ = _HEAD.unpack(head)
        if length > _LONGEST_RECORD or len(content := file.read(length)) < length or len(file.read(4)) < 4:
            return
        yield content


class EventFolder:
    """The event files of a folder; all but the newest lose events when the files become too large."""

    def __init__(self, directory: Path, records: Records) -> None:
        self._directory, self._records = directory, records

    def thin(self, most_bytes: int) -> None:
        """Halve the events of all files but the newest until all files have at most three quarters of the bytes."""
        with contextlib.suppress(OSError):  # a full disk: the files stay
            for name in names_in_own(self._directory):
                if name.startswith(f".{EVENTS}"):  # of a process that was killed while it rewrote a file
                    remove_own(self._directory / name)
            before = math.inf
            while 0.75 * most_bytes < (now := sum(self._sizes().values())) < 0.9 * before:
                before = now
                self._thin_once()

    def _thin_once(self) -> None:
        old = [path for name in list(self._sizes())[:-1] if self._is_sound(path := self._directory / name)]
        thinning = Thinning()
        for curve, event, _ in self._events_of(old):
            if curve:
                thinning.see(curve, event.step)
        before = sum(path.lstat().st_size for path in old)
        left = sum([self._rewrite(path, lambda curve, event: thinning.keeps(curve, event.step)) for path in old])
        if left > 0.75 * before:  # curves of a single point
            turn = itertools.count()
            for path in old:
                if os.path.lexists(path):  # a file without events is removed
                    self._rewrite(path, lambda curve, event: next(turn) % 2 == 0)

    def _is_sound(self, path: Path) -> bool:
        """Return whether a file has at most a torn record at its end; a file that is damaged earlier stays."""
        size = 0
        try:
            with open_own(path) as file:
                for content in contents(file):
                    self._records.Event.FromString(content)
                    size += _HEAD.size + len(content) + 4
                file.seek(size)
                head = file.read(_HEAD.size)
        except self._records.DecodeError:
            return False
        length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, None)
        return checksum is None or bool(length <= _LONGEST_RECORD and checksum == self._records.checksum(head[:8]))

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of every file by name, oldest first."""
        with own_folder(self._directory) as folder:
            names = sorted(name for name in os.listdir(folder) if name.startswith(EVENTS))
            return {name: os.lstat(name, dir_fd=folder).st_size for name in names}

    def _events_of(self, paths: Iterable[Path]) -> Iterator[tuple[str, Any, bytes]]:
        """Yield the curve of every event, the event and its bytes; the curve of versions, purges and flags is empty."""
        for path in paths:
            with open_own(path) as file:
                for content in contents(file):
                    event = self._records.Event.FromString(content)
                    tags = [value.tag for value in event.summary.value]
                    yield ("" if not tags or any(tag.startswith(HPARAMS) for tag in tags) else tags[0]), event, content

    def _rewrite(self, path: Path, keeps: Callable[[str, Any], bool]) -> int:
        """Drop events of a file and return its new size; a file without events is removed."""
        size = 0

        def kept() -> Iterator[bytes]:
            nonlocal size
            for curve, event, content in self._events_of([path]):
                if not curve or keeps(curve, event):
                    record = self._records.framed(content)
                    size += len(record)
                    yield record

        replace_own(path, kept())
        if size <= 64:  # only the version
            remove_own(path)
        return size
