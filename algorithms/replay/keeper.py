"""A replay on disk for later starts of the run (`--save_replay`).

The file is an image of the shared memory with holes for empty places. Only new content is written. Words of columns
come last, and words of columns about to be overwritten are erased first: after any interruption, every column with a
word is complete.

Each column has a checksum. Priorities and words, which change with every batch, have a common checksum that does not
count during writing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from appo.algorithms.replay.frame_stores import LARGEST
from appo.algorithms.replay.storage import Pace, ReplayStorage
from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import Begin, Message, Stop, WorkerReport
from appo.utils.directories import closing
from appo.utils.logging import SHOWN, take_raised
from appo.utils.run_folder import open_own, put_aside_own, update_own

log = logging.getLogger(__name__)

HEADER_BYTES = PAGE = 4096
WORD, DRAWN, CHECK = "word", "drawn", "check"
WHOLE = ("note", "leaf", "largest", "pace")
"""Arrays written as a whole every time, because priorities change everywhere."""
REST = 512
"""Place of the checksum of words, `drawn` and `WHOLE` without notes; a disk writes a sector completely."""
NOT_WRITTEN = b"%08x" % 0
CHECKED_BYTES = 16 << 20
"""Bytes of columns that are copied to be checked together."""


class ReplayFile:
    """The file of a replay."""

    def __init__(self, path: Path, storage: ReplayStorage) -> None:
        self.path, self.storage = path, storage
        self._saved: Array | None = None  # words of the columns that are whole in the file; None: not looked at
        self._arrays = storage.shared()
        self._check = np.zeros(storage.columns, np.uint32)  # of columns that are whole in the file
        frames = [f"obs.{key}.{name}" for key, ring in storage.rings.items() for name in ring.store.NAMES]
        self._of_columns = [name for name in self._arrays if name not in (WORD, *WHOLE, *frames)]
        self._place, self._nbytes = {}, HEADER_BYTES
        for name, array in (*self._arrays.items(), (CHECK, self._check)):
            self._place[name] = self._nbytes
            self._nbytes += -(-array.nbytes // PAGE) * PAGE
        shapes = {name: (array.shape, array.dtype.name) for name, array in self._arrays.items()}
        if storage.spec.same_step:  # ends of episodes have another meaning, see `Outcomes`
            shapes["same_step"] = ((), "bool")
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
        numbers = f"{storage.columns} {storage.rollout}"
        self._header = f"replay 2 {digest}\n{numbers} {zlib.crc32(numbers.encode()):08x}\n".encode()

    def save(self) -> int:
        """Write new content while columns may be inserted; return the number of drawable steps in the file.

        Raises:
            OSError: the disk is full or refuses; complete columns in the file stay complete.
        """
        storage = self.storage
        with closing(self._open()) as descriptor:
            word = storage.word.copy()
            rest = {"note": self._arrays["note"].copy()}  # now: those of columns that are kept have their checksums
            saved = self._begin(descriptor)
            os.pwrite(descriptor, NOT_WRITTEN, REST)
            os.fdatasync(descriptor)
            is_whole = (word > 0) & (word % 2 == 0) & (storage.word == word)
            kept = is_whole & (saved == word)
            self._saved = np.where(kept, word, 0)
            self._write(descriptor, WORD, self._saved)
            os.fdatasync(descriptor)
            for begin, end in runs(is_whole & ~kept):
                self._write_columns(descriptor, begin, end)
                for columns in self._split(np.arange(begin, end)):
                    self._check[columns] = self._checksums(columns, word)
            self._write(descriptor, CHECK, self._check)
            rest |= {name: self._arrays[name].copy() for name in WHOLE[1:]}
            rest[DRAWN] = storage.arrays[DRAWN][: _used(word)].copy()
            for name, array in rest.items():
                self._write(descriptor, name, array)
            os.fdatasync(descriptor)
            # A column whose place has been taken meanwhile may have been copied in the middle of that.
            is_whole &= storage.word == word
            self._saved = np.where(is_whole, word, 0)
            self._write(descriptor, WORD, self._saved)
            os.fdatasync(descriptor)
            os.pwrite(descriptor, _checksum_of_rest(self._saved, rest), REST)
            os.fdatasync(descriptor)
            return int(np.count_nonzero(storage.arrays["valid"][is_whole]))

    def _open(self) -> int:
        """Open the file for writing; a file of another shape is put aside."""
        descriptor = update_own(self.path)
        if os.fstat(descriptor).st_size and not self._has_shape(descriptor):
            os.close(descriptor)
            log.warning("%s is put aside as %s, it is of another shape", self.path, put_aside_own(self.path))
            descriptor = update_own(self.path)
        return descriptor

    def _begin(self, descriptor: int) -> Array:
        """Return the words of complete columns in the file, each with a checksum; the file may be new."""
        words = np.zeros_like(self.storage.word)
        if not self._has_shape(descriptor):
            os.ftruncate(descriptor, self._nbytes)
            os.pwrite(descriptor, self._header, 0)
        elif self._saved is not None:
            words = self._saved
        else:  # a learner that takes the place of one that died goes on with its file
            self._read(descriptor, WORD, words)
            self._read(descriptor, CHECK, self._check)
        return words

    def _split(self, columns: Array) -> list[Array]:
        """Return columns [B] in pieces of about `CHECKED_BYTES`."""
        nbytes = sum(self._arrays[name].nbytes for name in self._of_columns) // self.storage.columns
        size = max(1, CHECKED_BYTES // nbytes)
        return [columns[begin : begin + size] for begin in range(0, len(columns), size)]

    def _checksums(self, columns: Array, word: Array) -> Array:
        """Return the checksums [B] of the constant parts of columns [B] in memory, with the words [N] of all columns.

        One call for all bytes of a column: calls for every array took most of the time of loading.
        """
        noted = np.column_stack([word[columns], self._arrays["note"][columns, 1:]])
        constant = [self._arrays[name][columns] for name in self._of_columns if name != DRAWN]
        content = np.concatenate([x.reshape(len(columns), -1).view(np.uint8) for x in (noted, *constant)], axis=1)
        found = np.array([zlib.crc32(row.data) for row in content], np.uint32)
        for place, column in enumerate(columns.tolist() if self.storage.rings else ()):
            for name, begin, end in self._frames_of(column):
                found[place] = zlib.crc32(_bytes_of(self._arrays[name][begin:end]), int(found[place]))
        return found

    def _frames_of(self, column: int) -> Iterator[tuple[str, int, int]]:
        for key, ring in self.storage.rings.items():
            for array, places in ring.places(column).items():
                yield from ((f"obs.{key}.{array}", *place) for place in places)

    def _write_columns(self, descriptor: int, begin: int, end: int) -> None:
        for name in self._of_columns:
            self._write(descriptor, name, self._arrays[name][begin:end], begin)
        for column in range(begin, end):
            for name, first, after in self._frames_of(column):
                self._write(descriptor, name, self._arrays[name][first:after], first)

    def _has_shape(self, descriptor: int) -> bool:
        """Return whether a file has this header and size."""
        same_size = os.fstat(descriptor).st_size == self._nbytes
        return same_size and os.pread(descriptor, len(self._header), 0) == self._header

    def _write(self, descriptor: int, name: str, array: Array, begin: int = 0) -> None:
        left = _bytes_of(array)
        place = self._place[name] + begin * (array.nbytes // max(1, len(array)))
        while left:
            written = os.pwrite(descriptor, left[: 1 << 30], place)
            left, place = left[written:], place + written

    def load(self) -> None:
        """Fill the empty replay from the file, if the file exists.

        A file that is damaged or has another shape is put aside with a warning.
        """
        storage = self.storage
        try:
            with open_own(self.path) as file:
                self._read_all(file.fileno())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            try:
                where = f"put aside as {put_aside_own(self.path)}"
            except OSError as refused:
                where = f"left as it is ({refused.strerror})"
            log.warning("%s is %s, the replay fills again: %s", self.path, where, error, extra=SHOWN)
        if not storage.word.any():  # nothing of what has been read counts
            for name in WHOLE:
                self._arrays[name][:] = 0
        if not storage.plan.prioritized:  # the file may have priorities, which no batch would correct or update
            leaf = self._arrays["leaf"]
            leaf[leaf > 0] = 1.0
        storage.recover()
        self._saved = storage.word.copy()
        if storage.size:
            log.info("the replay goes on with %d steps of %s", storage.size, self.path)

    def _read_all(self, descriptor: int) -> None:
        storage, arrays = self.storage, self._arrays
        if not os.fstat(descriptor).st_size:
            return  # the first writing was cut off before its first byte
        if not self._has_shape(descriptor):
            raise ValueError("it is of a replay of another shape, or cut off")
        word = np.zeros_like(storage.word)
        whole, used = self._read_words(descriptor, word), _used(word)
        storage.reserve_columns(used)
        # Its mark `known` in shared memory would keep a successor of this process from loading the rest.
        pace = np.zeros_like(storage.pace)
        for name in WHOLE:
            self._read(descriptor, name, pace if name == "pace" else arrays[name])
        for name in self._of_columns:
            self._read(descriptor, name, arrays[name][:used])
        self._read(descriptor, CHECK, self._check)
        if os.pread(descriptor, len(NOT_WRITTEN), REST) not in (
            NOT_WRITTEN,
            _checksum_of_rest(word, arrays | {"pace": pace}),
        ):
            raise ValueError("it is damaged: words or priorities are not as they were written")
        if not len(whole):
            return  # the first writing was cut off
        self._check_columns(whole)
        for key, ring in storage.rings.items():
            for array, into in ring.reserve(whole[np.argsort(word[whole])]):
                self._read(descriptor, f"obs.{key}.{array}", into)
        self._check_content(whole, word)
        leaf = arrays["leaf"][: storage.columns * storage.leaves].reshape(storage.columns, storage.leaves)
        leaf[word == 0] = 0.0
        arrays["note"][:, 0] = -1  # they came from no slot of this start
        storage.pace[:] = Pace(*pace.tolist())._replace(known=0)
        storage.word[:] = word

    def _read_words(self, descriptor: int, word: Array) -> Array:
        """Read the words of columns; return the complete columns."""
        self._read(descriptor, WORD, word)
        whole = np.flatnonzero(word)
        number = word[whole] // 2
        are_numbers = not (word % 2).any() and (number >= 1).all() and (number < LARGEST).all()
        if not are_numbers or ((number - 1) % self.storage.columns != whole).any():
            raise ValueError("it is damaged: its columns have other places")
        return whole

    def _check_columns(self, whole: Array) -> None:
        """Refuse flags that are not boolean and actions out of range, which later code would use as indices."""
        arrays, parts = self.storage.arrays, self.storage.spec.action.parts
        flags = [array for array in arrays.values() if array.dtype == np.bool_]
        if any((flag.view(np.uint8)[whole] > 1).any() for flag in flags):
            raise ValueError("it is damaged: a flag is neither true nor false")
        sizes = [2 if part.kind == "bernoulli" else part.size for part in parts for _ in range(part.num_values)]
        action, counts = arrays["action"][whole], self._arrays["note"][whole, 1:]
        if ((counts < 0) | (counts >= LARGEST)).any():
            raise ValueError("it is damaged: steps are counted wrongly")
        if action.dtype.kind == "i" and ((action < 0) | (action >= sizes)).any():
            raise ValueError("it is damaged: an action is no choice")
        if not all(
            np.isfinite(one).all() and (one >= 0).all() for one in (self._arrays["leaf"], self._arrays["largest"])
        ):
            raise ValueError("it is damaged: a priority is negative or no number")

    def _check_content(self, whole: Array, word: Array) -> None:
        """Refuse columns that differ from their checksum, and values that are not finite."""
        names = ["reward", *(f"obs.{key}" for key, array in self.storage.obs.items() if array.dtype.kind == "f")]
        for columns in self._split(whole):
            differs = self._checksums(columns, word) != self._check[columns]
            for column in columns[differs][:1]:
                raise ValueError(f"it is damaged: trajectory {word[column] // 2} is not as it was written")
            valid = self._arrays["valid"][columns]
            for name in names:
                values = self._arrays[name][columns, : valid.shape[1]]
                finite = np.isfinite(values).reshape(*valid.shape, -1).all(axis=2)
                for column in columns[(valid & ~finite).any(axis=1)][:1]:
                    raise ValueError(f"it is damaged: {name} of trajectory {word[column] // 2} is no number")

    def _read(self, descriptor: int, name: str, into: Array) -> None:
        left, place = into.reshape(-1).view(np.uint8).data, self._place[name]
        while left:
            count = os.preadv(descriptor, [left[: 1 << 30]], place)
            if not count:
                raise ValueError("it is cut off")
            left, place = left[count:], place + count


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _used(word: Array) -> int:
    return int(np.flatnonzero(word).max(initial=-1)) + 1


def _checksum_of_rest(word: Array, rest: Mapping[str, Array]) -> bytes:
    """Return the checksum of all content that changes with every batch; checksums of columns include notes."""
    found = zlib.crc32(_bytes_of(word))
    for array in (*(rest[name] for name in WHOLE[1:]), rest[DRAWN][: _used(word)]):
        found = zlib.crc32(_bytes_of(array), found)
    return b"%08x" % (found or 1)


def kept_shape(path: Path) -> tuple[int, int] | None:
    """Return columns and steps per column of a replay file; None: not readable."""
    with contextlib.suppress(OSError, ValueError):
        with open_own(path) as file:
            columns, rollout, check = file.read(HEADER_BYTES).partition(b"\n")[2].partition(b"\n")[0].split()
        if int(check, 16) == zlib.crc32(columns + b" " + rollout):
            return int(columns), int(rollout)
    return None


def runs(chosen: Array) -> list[tuple[int, int]]:
    """Return start and end of the runs of True in [N].

    >>> runs(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class ReplayKeeper:
    """Writes the new content of the replay in its process, the learner's or a shard's, by a thread and at the stop."""

    def __init__(
        self, file: ReplayFile | None, seconds: float, clock: Callable[[], float] = time.monotonic, name: str = "replay"
    ) -> None:
        self.file, self.seconds, self.clock, self.name = file, seconds, clock, name
        self.thread = DiskThread("replay")
        self._writing: Future[None] | None = None
        self._due = clock() + seconds

    def handle(self, message: Message) -> Iterator[Message]:
        """Report warnings of the file to main at the start; write the rest when the run stops."""
        if isinstance(message, Begin) and (raised := take_raised()):
            yield WorkerReport(self.name, {}, raised)
        if isinstance(message, Stop) and self.file is not None:
            self.thread.finish("saving the replay")
            self._save(self.file)

    def pending(self) -> bool:
        """Return whether writing is due."""
        return self.file is not None and self.clock() >= self._due

    def work(self) -> Iterator[Message]:
        """Start writing in the thread, unless the last writing is unfinished."""
        file = self.file
        assert file is not None
        self._due = self.clock() + self.seconds
        if self._writing is None or self._writing.done():
            if self._writing is not None:
                self._writing.result(0.0)  # raises anything but a refusal of the disk
            self._writing = self.thread.submit(lambda: self._save(file))
        yield from ()

    @staticmethod
    def _save(file: ReplayFile) -> None:
        """Save; a failure, for example of a full disk, is logged and tried again later."""
        began = time.monotonic()
        try:
            steps = file.save()
        except OSError as error:
            log.warning("the replay is not saved, it will be tried again: %s", error)
        else:
            log.info("saved %d steps of the replay in %.1f s: %s", steps, time.monotonic() - began, file.path)
