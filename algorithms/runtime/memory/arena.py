"""One nameless shared memory region per run, and the arrays that live in it.

The region is a memfd: it has no name to leak, no 64 MB container limit, and its pages are reserved before the run
starts (`posix_fallocate`), so that too little memory is an error at start-up and not a bus error hours later.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from utils.errors import ResourceError

Array = NDArray[Any]

# Two cache lines: the adjacent-line prefetcher makes 64 bytes too few to keep writers apart.
ALIGNMENT = 128


class Field(NamedTuple):
    """An array to place: its name in the arena, its shape and its numpy dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def offsets(fields: Sequence[Field]) -> tuple[list[int], int]:
    """Aligned byte offset of every field, and the size of the whole in bytes."""
    places, end = [], 0
    for field in fields:
        places.append(end)
        end += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


class Arena:
    """Named arrays over one memory region, shared with every process the arena is passed to at its start."""

    def __init__(self, fields: Sequence[Field], descriptor: int) -> None:
        self.fields = tuple(fields)
        self.descriptor = descriptor
        places, self.nbytes = offsets(self.fields)
        self._memory = mmap.mmap(descriptor, self.nbytes)
        self._arrays = {f.name: self._view(f, place) for f, place in zip(self.fields, places, strict=True)}

    @classmethod
    def create(cls, fields: Sequence[Field]) -> "Arena":
        """Reserve and map the memory of the fields, zero-filled.

        Raises:
            ResourceError: the memory cannot be had.
        """
        _, nbytes = offsets(fields)
        descriptor = os.memfd_create("appo-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ResourceError(f"the shared memory of this run needs {nbytes / 2**20:.0f} MiB: {error}") from error
            raise
        return cls(fields, descriptor)

    @property
    def address(self) -> int:
        """Where this process has mapped the region."""
        return int(np.frombuffer(self._memory, np.uint8, 1).ctypes.data)

    def clear(self) -> None:
        """Fill all of it with zeros, as it was at first; nobody else may use it."""
        np.frombuffer(self._memory, np.uint8).fill(0)

    def __getitem__(self, name: str) -> Array:
        """The array of that name; writes are seen by every process."""
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


def _attach(fields: tuple[Field, ...], descriptor: Any) -> Arena:
    return Arena(fields, descriptor.detach())
