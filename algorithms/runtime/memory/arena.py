"""A nameless shared memory region per run, and the arrays in the region.

The region is a memfd. No name can be left behind, and the 64 MB limit of containers does not apply. Pages are reserved
before the run starts (`posix_fallocate`): too little memory is an error at the start and not a bus error hours later.
Fields that fill during the run are at the end, and the filling process reserves their pages.
"""

import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from appo.utils.errors import ResourceError

Array = NDArray[Any]
# Two cache lines: the adjacent-line prefetcher makes 64 bytes too few to keep writers apart.
ALIGNMENT = 128
RESERVED_BYTES = 16 << 20  # reserved at a time, for a field that fills


class Field(NamedTuple):
    """An array to place in the arena.

    Attributes:
        shape: shape of the array.
        dtype: a numpy name.
        fills: whether memory is reserved later: `Arena.reserve` must be called before a write.
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
    """Return the aligned byte offset of every field from `start` on, and the total size in bytes."""
    places, end = [], start
    for field in fields:
        places.append(end)
        end += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


def _divided(fields: Sequence[Field]) -> tuple[list[Field], list[Field], int]:
    """Return fields reserved at the start, fields that fill, and the begin of the latter, on a page boundary."""
    at_start, filling = ([f for f in fields if f.fills is fills] for fills in (False, True))
    _, end = offsets(at_start)
    return at_start, filling, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE if filling else end


class Arena:
    """Named arrays in one memory region, shared with every process that receives the arena at its start.

    The memory lives as long as the arena or one of its arrays.

    Args:
        fields: arrays in the region.
        descriptor: memfd of the region, which the arena closes at its own end.
    """

    def __init__(self, fields: Sequence[Field], descriptor: int) -> None:
        self.fields = tuple(fields)
        self.descriptor = descriptor
        # The mapping has a duplicate of its own. At the end of the process the kernel closes both.
        weakref.finalize(self, os.close, descriptor).atexit = False
        at_start, filling, self.reserved_nbytes = _divided(self.fields)
        places = offsets(at_start)[0]
        more, self.nbytes = offsets(filling, self.reserved_nbytes)
        self._memory = mmap.mmap(descriptor, self.nbytes)
        placed = list(zip([*at_start, *filling], [*places, *more], strict=True))
        self._arrays = {field.name: self._view(field, place) for field, place in placed}
        self._reserved = {field.name: (place, place) for field, place in placed if field.fills}

    @classmethod
    def create(cls, fields: Sequence[Field]) -> "Arena":
        """Map zero-filled memory for the fields, and reserve all but the fields that fill.

        Raises:
            ResourceError: too little memory.
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
        """Return the address of the region in this process."""
        return int(np.frombuffer(self._memory, np.uint8, 1).ctypes.data)

    def reserve(self, name: str, nbytes: int) -> None:
        """Reserve the first bytes of a field that fills, and a few more, before a write.

        Raises:
            ResourceError: too little memory.
        """
        start, reserved = self._reserved[name]
        if start + nbytes > reserved:
            end = start + min(-(-nbytes // RESERVED_BYTES) * RESERVED_BYTES, self._arrays[name].nbytes)
            _reserve(self.descriptor, reserved, end - reserved, self.nbytes)
            self._reserved[name] = start, end

    def clear(self) -> None:
        """Fill the arena with zeros; no other process may use the arena meanwhile."""
        np.frombuffer(self._memory, np.uint8, self.reserved_nbytes).fill(0)
        if self.reserved_nbytes < self.nbytes:  # fields that fill give their memory back
            os.ftruncate(self.descriptor, self.reserved_nbytes)
            os.ftruncate(self.descriptor, self.nbytes)
            self._reserved = {name: (start, start) for name, (start, _) in self._reserved.items()}

    def __getitem__(self, name: str) -> Array:
        """Return the array of that name; every process sees writes."""
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
    """Reserve part of the region; the message of a ResourceError contains the size of the whole."""
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ResourceError(f"the shared memory of this run needs {whole / 2**20:.0f} MiB: {error}") from error
        raise


def _attach(fields: tuple[Field, ...], descriptor: Any) -> Arena:
    return Arena(fields, descriptor.detach())
