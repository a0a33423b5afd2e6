"""Frames in a ring, by number: as they are, or compressed by lz4 in a ring of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field

LARGEST = 1 << 61
"""Limit of what is counted through a whole run and read from a file: counting goes on from there in 64 bits."""

Packed = Sequence[bytes] | Array
"""Frames as they are stored, one after the other."""


class FrameStore(Protocol):
    """Keeps the last F frames.

    Attributes:
        NAMES: of its arrays, whose fields have a common prefix.
        size: F.
    """

    NAMES: ClassVar[tuple[str, ...]]
    size: int

    def pack(self, frames: Array) -> Packed:
        """Return frames [n, P] as they are stored."""
        ...

    def has_room(self, first: int, end: int, packed: Packed) -> bool:
        """Whether these fit behind frame `end` while frame `first`, and all since, stay."""
        ...

    def write(self, start: int, packed: Packed) -> None:
        """Store frames from number `start` on, for which there must be room."""
        ...

    def take(self, place: Array, out: Array) -> None:
        """Copy the frames in places [n], their numbers modulo F, to [n, P]."""
        ...

    def places(self, first: int, end: int) -> dict[str, list[tuple[int, int]]]:
        """Return where frames lie in each array, from and to; two ranges where they go on at its start."""
        ...

    def reserve(self, spans: Array) -> Iterator[tuple[str, Array]]:
        """Reserve memory for spans [n, 2] of frames; yields what is to be filled, and looks at it when asked again."""
        ...


class PlainFrames:
    """Frames as they are.

    Args:
        arena: the shared memory.
        prefix: of the names of the fields.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("frames",)

    def __init__(self, arena: Arena, prefix: str) -> None:
        self.arena, self._name, self._frames = arena, f"{prefix}.frames", arena[f"{prefix}.frames"]
        self.size = len(self._frames)

    @staticmethod
    def declare(prefix: str, frames: int, nbytes: int) -> list[Field]:
        """Return the field for F frames."""
        return [Field(f"{prefix}.frames", (frames, nbytes), "uint8", fills=True)]

    def pack(self, frames: Array) -> Array:
        """Return the frames."""
        return frames

    def has_room(self, first: int, end: int, packed: Packed) -> bool:
        """Whether there are places enough."""
        return end + len(packed) - first <= self.size

    def write(self, start: int, packed: Packed) -> None:
        """Copy the frames in."""
        assert isinstance(packed, np.ndarray)
        count = len(packed)
        self._reserve(start + count)
        begin = start % self.size
        before_end = min(count, self.size - begin)
        self._frames[begin : begin + before_end] = packed[:before_end]
        self._frames[: count - before_end] = packed[before_end:]

    def take(self, place: Array, out: Array) -> None:
        """Copy frames out."""
        self._frames.take(place, axis=0, out=out, mode="clip")

    def places(self, first: int, end: int) -> dict[str, list[tuple[int, int]]]:
        """Return where frames lie."""
        return {self.NAMES[0]: ranges(first, end, self.size)}

    def reserve(self, spans: Array) -> Iterator[tuple[str, Array]]:
        """Reserve memory up to the last frame."""
        count = min(int(spans[:, 1].max(initial=0)), self.size)
        self._reserve(count)
        yield self.NAMES[0], self._frames[:count]

    def _reserve(self, count: int) -> None:
        self.arena.reserve(self._name, min(count, self.size) * self._frames.shape[1])


class PackedFrames:
    """Frames that lz4 has made smaller, each in one piece of a ring of bytes; one that grows by it is as it was.

    A frame that would go over the end of the ring begins at its start. Where a frame lies is counted in bytes through
    the whole run, those that are left out at the end included.

    Args:
        arena: the shared memory.
        prefix: of the names of the fields.
        nbytes: P, of a frame as it is.

    Attributes:
        num_bytes: of the ring.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("packed", "at")

    def __init__(self, arena: Arena, prefix: str, nbytes: int) -> None:
        lz4: Any = import_module("lz4.block")
        self._compress, self._decompress, self._error = lz4.compress, lz4.decompress, lz4.LZ4BlockError
        self.arena, self._prefix, self.nbytes = arena, prefix, nbytes
        self._bytes, self._at = arena[f"{prefix}.packed"], arena[f"{prefix}.at"]
        self.size, self.num_bytes = len(self._at), len(self._bytes)

    @staticmethod
    def declare(prefix: str, frames: int, nbytes: int, room: float) -> list[Field]:
        """Return the fields for F frames in as many bytes as `room` frames have as they are."""
        return [
            Field(f"{prefix}.packed", (int(room * nbytes),), "uint8", fills=True),
            Field(f"{prefix}.at", (frames, 2), "int64", fills=True),  # first byte and end
        ]

    def pack(self, frames: Array) -> Packed:
        """Compress frames."""
        packed: list[bytes] = []
        for frame in frames:
            smaller = self._compress(frame, store_size=False)
            packed.append(smaller if len(smaller) < self.nbytes else frame.tobytes())
        return packed

    def has_room(self, first: int, end: int, packed: Packed) -> bool:
        """Whether there are places and bytes enough."""
        if end + len(packed) - first > self.size:
            return False
        laid_out = self._laid_out(end, packed)
        begin = int(self._at[first % self.size, 0]) if first < end else laid_out[0][0]
        return laid_out[-1][1] - begin <= self.num_bytes

    def write(self, start: int, packed: Packed) -> None:
        """Copy compressed frames in."""
        laid_out = self._laid_out(start, packed)
        self._reserve(start + len(packed), laid_out[-1][1])
        for number, ((begin, end), frame) in enumerate(zip(laid_out, packed, strict=True), start):
            at = begin % self.num_bytes
            self._bytes[at : at + end - begin] = np.frombuffer(frame, np.uint8)
            self._at[number % self.size] = begin, end

    def _laid_out(self, start: int, packed: Packed) -> list[tuple[int, int]]:
        """Return first byte and end of frames from number `start` on."""
        places = []
        end = int(self._at[(start - 1) % self.size, 1]) if start else 0
        for frame in packed:
            left = self.num_bytes - end % self.num_bytes
            begin = end + left if len(frame) > left else end
            end = begin + len(frame)
            places.append((begin, end))
        return places

    def take(self, place: Array, out: Array) -> None:
        """Decompress frames."""
        for row, (begin, end) in zip(out, self._at[place].tolist(), strict=True):
            row[:] = self._frame(begin, end)

    def _frame(self, begin: int, end: int) -> Array:
        at = begin % self.num_bytes
        frame = self._bytes[at : at + end - begin]
        if len(frame) == self.nbytes:
            return frame
        return np.frombuffer(self._decompress(frame, uncompressed_size=self.nbytes), np.uint8)

    def places(self, first: int, end: int) -> dict[str, list[tuple[int, int]]]:
        """Return where frames lie; bytes may go on at the start of the ring."""
        begin, last = int(self._at[first % self.size, 0]), int(self._at[(end - 1) % self.size, 1])
        if not 0 < last - begin <= self.num_bytes:  # another thread writes there
            return {}
        return {"at": ranges(first, end, self.size), "packed": ranges(begin, last, self.num_bytes)}

    def reserve(self, spans: Array) -> Iterator[tuple[str, Array]]:
        """Reserve memory for the places, then for the bytes that these name.

        Raises:
            ValueError: places are none, or bytes are no frame.
        """
        count = min(int(spans[:, 1].max(initial=0)), self.size)
        self._reserve(count, 0)
        yield "at", self._at[:count]
        numbers = np.concatenate([np.arange(*span) for span in spans.tolist()] or [np.zeros(0, np.int64)]) % self.size
        begin, end = self._at[numbers].T
        length = end - begin
        apart = (begin >= 0).all() and (length > 0).all() and (end[:-1] <= begin[1:]).all()
        beyond = (length > self.nbytes) | (begin % self.num_bytes + length > self.num_bytes)
        first, after = (int(begin[0]), int(end[-1])) if len(end) else (0, 0)
        if not apart or beyond.any() or after - first > self.num_bytes or after >= LARGEST:
            raise ValueError("it is damaged: compressed frames cannot lie where it says")
        last = min(int(end.max(initial=0)), self.num_bytes)
        self._reserve(count, last)
        yield "packed", self._bytes[:last]
        try:
            for place in zip(begin.tolist(), end.tolist(), strict=True):  # one at a time: all are too large
                if len(self._frame(*place)) != self.nbytes:
                    raise ValueError("it is damaged: a frame has another size")
        except self._error as error:
            raise ValueError(f"it is damaged: {error}") from None

    def _reserve(self, frames: int, num_bytes: int) -> None:
        self.arena.reserve(f"{self._prefix}.at", min(frames, self.size) * self._at.strides[0])
        self.arena.reserve(f"{self._prefix}.packed", min(num_bytes, self.num_bytes))


def ranges(first: int, end: int, size: int) -> list[tuple[int, int]]:
    """Return where what is counted from `first` to `end` lies in a ring of this size.

    >>> ranges(7, 9, 8), ranges(8, 10, 8)
    ([(7, 8), (0, 1)], [(0, 2)])
    """
    begin, count = first % size, end - first
    before_end = min(count, size - begin)
    return [(begin, begin + before_end), (0, count - before_end)][: 1 + (count > before_end)]
