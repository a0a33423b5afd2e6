"""Frames in a ring by number: plain, or compressed by lz4 in a ring of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field

LARGEST = 1 << 61
"""Limit of counts in a file that continue through a run: counting goes on in 64 bits."""

Packed = Sequence[bytes] | Array
"""Stored frames, in order."""


class PlainFrames:
    """A ring of the last F frames, uncompressed.

    Attributes:
        NAMES: names of the arrays behind the prefix.
        size: F.
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
        """Return frames [n, P] in stored form."""
        return frames

    def has_room(self, first: int, end: int, packed: Packed) -> bool:
        """Return whether frames fit behind frame `end` while all frames from `first` stay."""
        return end + len(packed) - first <= self.size

    def write(self, start: int, packed: Packed) -> None:
        """Store frames from number `start` on; requires room."""
        assert isinstance(packed, np.ndarray)
        count = len(packed)
        self._reserve(start + count)
        begin = start % self.size
        before_end = min(count, self.size - begin)
        self._frames[begin : begin + before_end] = packed[:before_end]
        self._frames[: count - before_end] = packed[before_end:]

    def take(self, place: Array, out: Array) -> None:
        """Copy the frames in places [n], numbers modulo F, to [n, P]."""
        self._frames.take(place, axis=0, out=out, mode="clip")

    def places(self, first: int, end: int) -> dict[str, list[tuple[int, int]]]:
        """Return the ranges of frames in each array; two ranges where frames wrap around."""
        return {self.NAMES[0]: ranges(first, end, self.size)}

    def reserve(self, spans: Array) -> Iterator[tuple[str, Array]]:
        """Reserve memory for spans [n, 2] of frames; yield arrays to be filled, and check each when asked again."""
        count = min(int(spans[:, 1].max(initial=0)), self.size)
        self._reserve(count)
        yield self.NAMES[0], self._frames[:count]

    def _reserve(self, count: int) -> None:
        self.arena.reserve(self._name, min(count, self.size) * self._frames.shape[1])


class PackedFrames:
    """A ring of bytes with lz4 frames, each in one piece; a frame that would grow is stored plain.

    A frame that would cross the end of the ring begins at the start. Positions count bytes through the whole run,
    skipped bytes at the end included. Methods are described in `PlainFrames`.
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
        """Return the fields for F frames in the bytes of `room` plain frames."""
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
        """Return whether places and bytes suffice."""
        if end + len(packed) - first > self.size:
            return False
        laid_out = self._laid_out(end, packed)
        begin = int(self._at[first % self.size, 0]) if first < end else laid_out[0][0]
        return laid_out[-1][1] - begin <= self.num_bytes

    def write(self, start: int, packed: Packed) -> None:
        """Copy compressed frames."""
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
        """Return the ranges of frames; none while another thread overwrites them."""
        begin, last = int(self._at[first % self.size, 0]), int(self._at[(end - 1) % self.size, 1])
        if not 0 < last - begin <= self.num_bytes:  # another thread writes there
            return {}
        return {"at": ranges(first, end, self.size), "packed": ranges(begin, last, self.num_bytes)}

    def reserve(self, spans: Array) -> Iterator[tuple[str, Array]]:
        """Reserve memory for the places, then for the bytes named by the places.

        Raises:
            ValueError: damaged places, or bytes of no frame.
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
    """Return the ranges from `first` to `end` in a ring of this size.

    >>> ranges(7, 9, 8), ranges(8, 10, 8)
    ([(7, 8), (0, 1)], [(0, 2)])
    """
    begin, count = first % size, end - first
    before_end = min(count, size - begin)
    return [(begin, begin + before_end), (0, count - before_end)][: 1 + (count > before_end)]
