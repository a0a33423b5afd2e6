"""One nameless shared memory region per run, and the arrays that live in it.

The region is a memfd: it has no name to leak, no 64 MB container limit, and its pages are reserved before the run
starts (`posix_fallocate`), so that too little memory is an error at start-up and not a bus error hours later. Fields
that fill during the run lie at the end and are reserved by who fills them.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from appo.utils.errors import ResourceError

Array = NDArray[Any]

# Two cache lines: the adjacent-line prefetcher makes 64 bytes too few to keep writers apart.
ALIGNMENT = 128

RESERVED_BYTES = 16 << 20  # that are reserved at a time of a field that fills


class Field(NamedTuple):
    """An array to place in the arena.

    Attributes:
        name: in the arena.
        shape: of the array.
        dtype: a numpy name.
        fills: its memory is not reserved at the start: `Arena.reserve` must have been called before it is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fills: bool = False

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def offsets(fields: Sequence[Field], start: int = 0) -> tuple[list[int], int]:
    """Return the aligned byte offset of every field from `start` on, and the size of the whole in bytes."""
    places, end = [], start
    for field in fields:
        places.append(end)
        end += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


def _divided(fields: Sequence[Field]) -> tuple[list[Field], list[Field], int]:
    """Return fields reserved at the start, those that fill, and where the latter begin, on a page of their own."""
    at_start, filling = ([f for f in fields if f.fills is fills] for fills in (False, True))
    _, end = offsets(at_start)
    return at_start, filling, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE if filling else end


class Arena:
    """Named arrays over one memory region, shared with every process the arena is passed to at its start."""

    def __init__(self, fields: Sequence[Field], descriptor: int) -> None:
        self.fields = tuple(fields)
        self.descriptor = descriptor
        at_start, filling, self.reserved_nbytes = _divided(self.fields)
        places = offsets(at_start)[0]
        more, self.nbytes = offsets(filling, self.reserved_nbytes)
        self._memory = mmap.mmap(descriptor, self.nbytes)
        placed = list(zip([*at_start, *filling], [*places, *more], strict=True))
        self._arrays = {field.name: self._view(field, place) for field, place in placed}
        self._reserved = {field.name: (place, place) for field, place in placed if field.fills}

    @classmethod
    def create(cls, fields: Sequence[Field]) -> "Arena":
        """Map the memory of the fields, zero-filled, and reserve all but the fields that fill later.

        Raises:
            ResourceError: the memory cannot be had.
        """
        _, filling, reserved = _divided(fields)
        nbytes = offsets(filling, reserved)[1]
        descriptor = os.memfd_create("appo-arena", os.MFD_CLOEXEC)
        try:
            _reserve(descriptor, 0, reserved, nbytes)
            os.ftruncate(descriptor, nbytes)
        except (OSError, ResourceError):
            os.close(descriptor)
            raise
        return cls(fields, descriptor)

    @property
    def address(self) -> int:
        """Return where this process has mapped the region."""
        return int(np.frombuffer(self._memory, np.uint8, 1).ctypes.data)

    def reserve(self, name: str, nbytes: int) -> None:
        """Reserve the first bytes of a field that fills, before they are written; those after them a little early.

        Raises:
            ResourceError: the memory cannot be had.
        """
        start, reserved = self._reserved[name]
        if start + nbytes > reserved:
            end = start + min(-(-nbytes // RESERVED_BYTES) * RESERVED_BYTES, self._arrays[name].nbytes)
            _reserve(self.descriptor, reserved, end - reserved, self.nbytes)
            self._reserved[name] = start, end

    def clear(self) -> None:
        """Fill all of it with zeros, as it was at first; nobody else may use it."""
        np.frombuffer(self._memory, np.uint8, self.reserved_nbytes).fill(0)
        if self.reserved_nbytes < self.nbytes:  # what fills is given back
            os.ftruncate(self.descriptor, self.reserved_nbytes)
            os.ftruncate(self.descriptor, self.nbytes)
            self._reserved = {name: (start, start) for name, (start, _) in self._reserved.items()}

    def __getitem__(self, name: str) -> Array:
        """Return the array of that name; writes are seen by every process."""
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.fields, DupFd(self.descriptor))

    def _view(self, field: Field, place: int) -> Array:
        if not field.nbytes:  # a field of zero elements needs no place, and frombuffer refuses it
            return np.empty(field.shape, field.dtype)
        count = int(np.prod(field.shape, dtype=np.int64))
        return np.frombuffer(self._memory, field.dtype, count, place).reshape(field.shape)


def _reserve(descriptor: int, start: int, nbytes: int, whole: int) -> None:
    """Take memory for a part of the region, of which messages say how large the whole is (ResourceError)."""
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ResourceError(f"the shared memory of this run needs {whole / 2**20:.0f} MiB: {error}") from error
        raise


def _attach(fields: tuple[Field, ...], descriptor: Any) -> Arena:
    return Arena(fields, descriptor.detach())
