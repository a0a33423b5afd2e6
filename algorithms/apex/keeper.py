"""A replay on disk, so that a later start of the run goes on with it (`--save_replay`).

The file is an image of the shared memory, with room for all of it and holes where nothing has been inserted. Only what
is new since the last time is written. The words of columns come last, and those of columns in whose place something is
written are struck out first: whenever writing is cut off, what the file still calls whole is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from algorithms.apex.frame_stores import LARGEST
from algorithms.apex.storage import ReplayStorage
from algorithms.runtime.disk import DiskThread
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.messages import Message, Stop
from utils.run_folder import open_own, remove_own, update_own

log = logging.getLogger(__name__)

HEADER_BYTES = PAGE = 4096
WORD, DRAWN = "word", "drawn"
WHOLE = ("note", "leaf", "largest", "pace")
"""Arrays that are written as a whole every time, as priorities change everywhere."""


class ReplayFile:
    """The file of a replay.

    Args:
        path: of the file.
        storage: the replay.
    """

    def __init__(self, path: Path, storage: ReplayStorage) -> None:
        self.path, self.storage = path, storage
        self._saved: Array | None = None  # words of the columns that are whole in the file; None: not looked at
        self._arrays = storage.shared()
        frames = [f"obs.{key}.{name}" for key, ring in storage.rings.items() for name in ring.store.NAMES]
        self._of_columns = [name for name in self._arrays if name not in (WORD, *WHOLE, *frames)]
        self._place, self._nbytes = {}, HEADER_BYTES
        for name, array in self._arrays.items():
            self._place[name] = self._nbytes
            self._nbytes += -(-array.nbytes // PAGE) * PAGE
        shapes = {name: (array.shape, array.dtype.name) for name, array in self._arrays.items()}
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
        self._header = f"replay 1 {digest}\n".encode()
        self._numbers = f"{storage.columns} {storage.rollout}\n".encode()

    # ---- out

    def save(self) -> int:
        """Write what is new, while columns may be inserted; return how many steps can be drawn of what the file has.

        Raises:
            OSError: the disk is full, or refuses; what was whole in the file still is.
        """
        storage = self.storage
        descriptor = update_own(self.path)
        try:
            word = storage.word.copy()
            saved = self._begin(descriptor)
            is_whole = (word > 0) & (word % 2 == 0)
            kept = is_whole & (saved == word)
            self._saved = np.where(kept, word, 0)
            self._write(descriptor, WORD, self._saved)
            os.fdatasync(descriptor)
            for begin, end in runs(is_whole & ~kept):
                self._write_columns(descriptor, begin, end)
            for name in WHOLE:
                self._write(descriptor, name, self._arrays[name])
            used = int(np.flatnonzero(is_whole).max(initial=-1)) + 1
            self._write(descriptor, DRAWN, storage.arrays[DRAWN][:used])
            os.fdatasync(descriptor)
            # A column whose place has been taken meanwhile may have been copied in the middle of that.
            is_whole &= storage.word == word
            self._write(descriptor, WORD, np.where(is_whole, word, 0))
            os.fdatasync(descriptor)
            self._saved = np.where(is_whole, word, 0)
            return int(np.count_nonzero(storage.arrays["valid"][is_whole]))
        finally:
            os.close(descriptor)

    def _begin(self, descriptor: int) -> Array:
        """Return the words of the columns that are whole in the file, which is made anew if it is of another shape."""
        words = np.zeros_like(self.storage.word)
        if not self._is_of_this_shape(descriptor):
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, self._nbytes)
            os.pwrite(descriptor, self._header + self._numbers, 0)
        elif self._saved is not None:
            return self._saved
        else:  # a learner that takes the place of one that died goes on with its file
            self._read(descriptor, WORD, words)
        return words

    def _write_columns(self, descriptor: int, begin: int, end: int) -> None:
        for name in self._of_columns:
            self._write(descriptor, name, self._arrays[name][begin:end], begin)
        for key, ring in self.storage.rings.items():
            for column in range(begin, end):
                for array, places in ring.places(column).items():
                    name = f"obs.{key}.{array}"
                    for first, after in places:
                        self._write(descriptor, name, self._arrays[name][first:after], first)

    def _is_of_this_shape(self, descriptor: int) -> bool:
        is_whole = os.fstat(descriptor).st_size == self._nbytes
        return is_whole and os.pread(descriptor, len(self._header), 0) == self._header

    def _write(self, descriptor: int, name: str, array: Array, begin: int = 0) -> None:
        """Write elements of an array from index `begin` on."""
        left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        place = self._place[name] + begin * (array.nbytes // max(1, len(array)))
        while left:
            written = os.pwrite(descriptor, left[: 1 << 30], place)
            left, place = left[written:], place + written

    # ---- in

    def load(self) -> None:
        """Fill the replay, which must be empty, with what the file holds, if there is such a file.

        A file that is damaged, or of a replay of another shape, is left out with a warning.
        """
        storage = self.storage
        try:
            with open_own(self.path) as file:
                self._read_all(file.fileno())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s is removed, the replay fills again: %s", self.path, error)
            with contextlib.suppress(OSError):  # writing says so too
                remove_own(self.path)
            for name in (WORD, *WHOLE):  # nothing of what has been read counts
                self._arrays[name][:] = 0
            storage.recover()
            return
        storage.recover()
        self._saved = storage.word.copy()
        log.info("the replay goes on with %d steps of %s", storage.size, self.path)

    def _read_all(self, descriptor: int) -> None:
        storage, arrays = self.storage, self._arrays
        if not self._is_of_this_shape(descriptor):
            raise ValueError("it is of a replay of another shape, or cut off")
        word = np.zeros_like(storage.word)
        self._read(descriptor, WORD, word)
        whole = np.flatnonzero(word)
        if not len(whole):  # the first writing was cut off
            return
        number = word[whole] // 2
        are_numbers = not (word % 2).any() and (number >= 1).all() and (number < LARGEST).all()
        if not are_numbers or ((number - 1) % storage.columns != whole).any():
            raise ValueError("it is damaged: its columns have other places")
        used = int(whole.max(initial=-1)) + 1
        storage.reserve_columns(used)
        for name in WHOLE:
            self._read(descriptor, name, arrays[name])
        for name in self._of_columns:
            self._read(descriptor, name, arrays[name][:used])
        self._check_columns(whole)
        for key, ring in storage.rings.items():
            for array, into in ring.reserve(whole[np.argsort(number)]):
                self._read(descriptor, f"obs.{key}.{array}", into)
        leaf = arrays["leaf"][: storage.columns * storage.leaves].reshape(storage.columns, storage.leaves)
        if not all(np.isfinite(one).all() and (one >= 0).all() for one in (leaf, arrays["largest"])):
            raise ValueError("it is damaged: a priority is negative or no number")
        leaf[word == 0] = 0.0
        arrays["note"][:, 0] = -1  # they came from no slot of this start
        storage.word[:] = word

    def _check_columns(self, whole: Array) -> None:
        """Refuse what would be read beside arrays later: flags that are no flags, and actions that there are not."""
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

    def _read(self, descriptor: int, name: str, into: Array) -> None:
        left, place = into.reshape(-1).view(np.uint8).data, self._place[name]
        while left:
            count = os.preadv(descriptor, [left[: 1 << 30]], place)
            if not count:
                raise ValueError("it is cut off")
            left, place = left[count:], place + count


def kept_shape(path: Path) -> tuple[int, int] | None:
    """Return columns and steps of each that the file of a replay has; None: it does not say so."""
    with contextlib.suppress(OSError, ValueError):
        with open_own(path) as file:
            columns, rollout = file.read(HEADER_BYTES).partition(b"\n")[2].partition(b"\n")[0].split()
        return int(columns), int(rollout)
    return None


def runs(chosen: Array) -> list[tuple[int, int]]:
    """Return where runs of True [N] begin and end.

    >>> runs(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class ReplayKeeper:
    """Writes what is new of the replay that its process has, in a thread of its own and when the run stops.

    It is beside the learner, or beside a shard.

    Args:
        file: of the replay; None: it is not kept.
        seconds: from one time to the next.
        clock: monotonic seconds.
    """

    def __init__(self, file: ReplayFile | None, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.seconds, self.clock = file, seconds, clock
        self.thread = DiskThread("replay")
        self._writing: Future[None] | None = None
        self._due = clock() + seconds

    def handle(self, message: Message) -> Iterator[Message]:
        """Write the rest when the run stops."""
        if isinstance(message, Stop) and self.file is not None:
            self.thread.finish("saving the replay")
            self._save(self.file)
        yield from ()

    def pending(self) -> bool:
        """Whether it is time to write."""
        return self.file is not None and self.clock() >= self._due

    def work(self) -> Iterator[Message]:
        """Let the thread write, unless it still does."""
        file = self.file
        assert file is not None
        self._due = self.clock() + self.seconds
        if self._writing is None or self._writing.done():
            self._writing = self.thread.submit(lambda: self._save(file))
        yield from ()

    @staticmethod
    def _save(file: ReplayFile) -> None:
        """A failure, of a full disk for example, costs nothing but that time."""
        began = time.monotonic()
        try:
            steps = file.save()
        except OSError as error:
            log.warning("the replay is not saved, it will be tried again: %s", error)
        else:
            log.info("saved %d steps of the replay in %.1f s: %s", steps, time.monotonic() - began, file.path)
