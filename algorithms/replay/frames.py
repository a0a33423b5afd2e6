"""Observations that stack the last k frames, stored as single frames, each once.

The overlap of successive observations is read off the observations and not assumed. Reading returns the inserted bits
exactly, for every environment; an observation that is no stack only takes more frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from appo.algorithms.models.config import is_picture
from appo.algorithms.replay.frame_stores import LARGEST, Packed, PackedFrames, PlainFrames
from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.envs.spec import ObservationSpec, is_channels_first

WORDS = ("uint64", "uint32", "uint16", "uint8")


class Stack(NamedTuple):
    """Layout of an observation as frames: elements are [outer, frames, inner].

    Attributes:
        frames: k, frames of an observation.
        outer: separate parts of a frame; 1 where channels come first.
        inner: elements of a part.
    """

    frames: int
    outer: int
    inner: int

    @property
    def size(self) -> int:
        """Elements of a frame."""
        return self.outer * self.inner


def stack_of(observation: ObservationSpec, *, single: bool = False) -> Stack | None:
    """Return the stack in an observation by shape; None: not a stack.

    Images of bytes with the channels of several pictures are stacks: each frame has three channels, or one, unless a
    flag has stacked a known number of frames. Boards of one-hot channels are none. With `single` every other image
    counts as a stack of one frame.
    """
    shape = observation.shape
    if observation.dtype != "uint8" or len(shape) != 3:
        return None
    first = is_channels_first(shape)
    channels = shape[0] if first else shape[2]
    pixels = shape[1] * (shape[2] if first else shape[0])
    stacked = observation.frames if observation.frames > 1 and channels % observation.frames == 0 else 0
    of_frame = channels // stacked if stacked else 1 if channels % 3 else 3
    if channels <= of_frame or not (stacked or is_picture(observation)):
        return Stack(1, 1, prod(shape)) if single else None
    count = channels // of_frame
    return Stack(count, 1, of_frame * pixels) if first else Stack(count, pixels, of_frame)


class FrameRing:
    """The frames of an observation key of all columns in a ring; columns with many episodes take more frames.

    Attributes:
        store: store of the frames.
        size: F, capacity in frames.
    """

    def __init__(self, arena: Arena, prefix: str, stack: Stack) -> None:
        self.stack, self._index, self._span = stack, arena[f"{prefix}.index"], arena[f"{prefix}.span"]
        packed = f"{prefix}.{PackedFrames.NAMES[0]}" in arena
        self.store = PackedFrames(arena, prefix, stack.size) if packed else PlainFrames(arena, prefix)
        self.size = self.store.size

    @staticmethod
    def declare(prefix: str, stack: Stack, columns: int, rollout: int, share: float | None = None) -> list[Field]:
        """Return the fields for N columns of T+1 observations; None as `share` means plain frames.

        The ring has half a frame per column more than columns without a beginning episode need. Compressed frames get
        `share` of the bytes of plain frames.
        """
        needed = columns * (rollout + stack.frames) + columns // 2
        newest = (rollout + 1) * stack.frames
        frames = max(needed, 2 * newest)  # the newest column, and any other
        return [
            *(
                PlainFrames.declare(prefix, frames, stack.size)
                if share is None
                else PackedFrames.declare(prefix, frames, stack.size, max(share * frames, 2 * newest + 2))
            ),
            Field(f"{prefix}.index", (columns, rollout + 1, stack.frames), "uint16", fills=True),
            Field(f"{prefix}.span", (columns, 2), "int64"),  # first frame of a column and end; they only grow
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arrays, those of the frames first."""
        return (*self.store.NAMES, "index", "span")

    def frames_of(self, column: Sequence[int] | int) -> Array:
        """Return first frame and end of columns, counted through the whole run, [*, 2]."""
        span: Array = self._span[column]
        return span

    def places(self, column: int) -> dict[str, list[tuple[int, int]]]:
        """Return the ranges of a column's frames in the store's arrays; empty while another thread writes there."""
        first, after = self._span[column].tolist()
        return self.store.places(first, after) if 0 < after - first <= self.size else {}

    def reserve(self, columns: Array) -> Iterator[tuple[str, Array]]:
        """Reserve the memory of the frames of columns with known spans; yield the arrays to be filled.

        Raises:
            ValueError: an array contains impossible values.
        """
        spans = self._span[columns]
        first, after = spans.T
        grow = (first >= 0).all() and (first < after).all() and (after[:-1] <= first[1:]).all()
        begin, end = (int(first[0]), int(after[-1])) if len(spans) else (0, 0)
        if not grow or end - begin > self.size or end >= LARGEST:
            raise ValueError("it is damaged: frames cannot lie where it says")
        if (self._index[columns].max(axis=(1, 2), initial=0) >= after - first).any():
            raise ValueError("it is damaged: observations consist of frames that are not theirs")
        yield from self.store.reserve(spans)

    def pack(self, obs: Array, stored: Array) -> Packed:
        """Return the frames of observations [T+1, *] in stored form; `stored` comes from `plan`."""
        steps, stack = len(obs), self.stack
        at, of = stored.nonzero()
        frames = obs.reshape(steps, stack.outer, stack.frames, stack.inner)[at, :, of]
        return self.store.pack(frames.reshape(len(at), stack.size))

    def plan(self, obs: Array) -> Array:
        """Return the frames [T+1, k] of observations [T+1, *] that must be stored; the rest is stored already."""
        steps, stack = len(obs), self.stack
        frames = obs.reshape(steps, stack.outer, stack.frames, stack.inner)
        words = frames.view(next(word for word in WORDS if stack.inner % np.dtype(word).itemsize == 0))
        goes_on = (words[1:, :, :-1] == words[:-1, :, 1:]).reshape(steps - 1, -1).all(axis=1)
        stored = np.zeros((steps, stack.frames), np.bool_)
        stored[:, -1] = True
        for step in (0, *(np.flatnonzero(~goes_on) + 1).tolist()):
            stored[step, 0] = True  # a whole stack, in which frames that follow each other can be equal
            stored[step, 1:] = (words[step, :, 1:] != words[step, :, :-1]).any(axis=(0, 2))
        # What follows looks at column 0 for where stacks begin anew; a stack that goes on stores its last frame only.
        return stored

    def write(self, column: int, start: int, stored: Array, packed: Packed) -> None:
        """Store the observations of a column from frame `start` on, counted through the whole run; requires room.

        `stored` [T+1, k] comes from `plan`, `packed` from `pack`.
        """
        place = (np.cumsum(stored) - 1).reshape(stored.shape)
        index = self._index[column]
        for step in range(len(stored)):
            if stored[step, 0]:
                index[step] = place[step]
            else:
                index[step, :-1], index[step, -1] = index[step - 1, 1:], place[step, -1]
        self.store.write(start, packed)
        self._span[column] = start, start + len(packed)

    def read(self, column: Array, step: Array, out: Array) -> None:
        """Copy observations at columns [B] and steps [B], from 0 to T, to contiguous memory [B, *]."""
        stack, count = self.stack, len(column)
        number = (self._span[column, 0][:, None] + self._index[column, step]).ravel() % self.size
        if stack.outer == 1:
            self.store.take(number, out.reshape(count * stack.frames, stack.size))
        else:
            taken = np.empty((count * stack.frames, stack.size), np.uint8)
            self.store.take(number, taken)
            frames = taken.reshape(count, stack.frames, stack.outer, stack.inner)
            out.reshape(count, stack.outer, stack.frames, stack.inner)[:] = frames.transpose(0, 2, 1, 3)
