"""Observations that stack the last k frames, stored as single frames: each once, wherever an episode begins.

How an observation overlaps with the one before is read off the two and not assumed. So what comes out equals what went
in, bit by bit, whatever an environment shows; where it is no stack after all it only takes more frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from appo.algorithms.replay.frame_stores import LARGEST, FrameStore, Packed, PackedFrames, PlainFrames
from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.envs.spec import ObservationSpec, is_channels_first

WORDS = ("uint64", "uint32", "uint16", "uint8")


class Stack(NamedTuple):
    """How an observation consists of frames: its elements are [outer, frames, inner].

    Attributes:
        frames: k, of an observation.
        outer: parts of a frame that lie apart; 1 where channels come first.
        inner: elements of such a part.
    """

    frames: int
    outer: int
    inner: int

    @property
    def size(self) -> int:
        """Elements of a frame."""
        return self.outer * self.inner


def stack_of(observation: ObservationSpec, *, single: bool = False) -> Stack | None:
    """Return how an observation stacks frames, by its shape; None: it does not.

    Images of bytes do whose channels are no three of one picture: then each channel is a frame, or each three are.

    Args:
        observation: as it is stored.
        single: whether an image that is no stack counts as one of a single frame.
    """
    shape = observation.shape
    if observation.dtype != "uint8" or len(shape) != 3:
        return None
    first = is_channels_first(shape)
    channels = shape[0] if first else shape[2]
    pixels = shape[1] * (shape[2] if first else shape[0])
    of_frame = 1 if channels % 3 else 3
    if channels <= of_frame:
        return Stack(1, 1, prod(shape)) if single else None
    count = channels // of_frame
    return Stack(count, 1, of_frame * pixels) if first else Stack(count, pixels, of_frame)


class FrameRing:
    """The frames of one observation key of all columns, in a ring: columns that begin many episodes take more of it.

    Args:
        arena: the shared memory.
        prefix: of the names of the fields.
        stack: of the observations.

    Attributes:
        store: of the frames themselves.
        size: F, frames that fit.
    """

    def __init__(self, arena: Arena, prefix: str, stack: Stack) -> None:
        self.stack, self._index, self._span = stack, arena[f"{prefix}.index"], arena[f"{prefix}.span"]
        packed = f"{prefix}.{PackedFrames.NAMES[0]}" in arena
        self.store: FrameStore = PackedFrames(arena, prefix, stack.size) if packed else PlainFrames(arena, prefix)
        self.size = self.store.size

    @staticmethod
    def declare(prefix: str, stack: Stack, columns: int, rollout: int, share: float | None = None) -> list[Field]:
        """Return the fields for so many columns [T+1] of observations.

        There is room for half a frame more per column than a column needs in which no episode begins.

        Args:
            prefix: of the names of the fields.
            stack: of the observations.
            columns: N.
            rollout: T.
            share: of the bytes of all these frames, that compressed ones have; None: they are stored as they are.
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
        """The names of all its arrays, those of the frames first."""
        return (*self.store.NAMES, "index", "span")

    def frames_of(self, column: Sequence[int] | int) -> Array:
        """Return where the frames of columns begin and end, counted through the whole run, [*, 2]."""
        span: Array = self._span[column]
        return span

    def places(self, column: int) -> dict[str, list[tuple[int, int]]]:
        """Return where the frames of a column lie in the arrays of the store, from and to; two where they go on at 0.

        There is none while another process, or thread, writes the column.
        """
        first, after = self._span[column].tolist()
        return self.store.places(first, after) if 0 < after - first <= self.size else {}

    def reserve(self, columns: Array) -> Iterator[tuple[str, Array]]:
        """Reserve the memory of the frames of columns, whose spans are known; yields what is to be filled with them.

        Args:
            columns: of which there are spans and indices, in the order in which they were inserted.

        Raises:
            ValueError: what an array has been filled with cannot be.
        """
        spans = self._span[columns]
        first, after = spans.T
        grow = (first >= 0).all() and (first < after).all() and (after[:-1] <= first[1:]).all()
        if not grow or (len(spans) and not self._fits(int(first[0]), int(after[-1]))):
            raise ValueError("it is damaged: frames cannot lie where it says")
        if (self._index[columns].max(axis=(1, 2), initial=0) >= after - first).any():
            raise ValueError("it is damaged: observations consist of frames that are not theirs")
        yield from self.store.reserve(spans)

    def _fits(self, first: int, after: int) -> bool:
        return after - first <= self.size and after < LARGEST

    def pack(self, obs: Array, stored: Array) -> Packed:
        """Return the frames of observations [T+1, *] as they are stored; `stored` as `plan` gives it."""
        steps, stack = len(obs), self.stack
        at, of = stored.nonzero()
        frames = obs.reshape(steps, stack.outer, stack.frames, stack.inner)[at, :, of]
        return self.store.pack(frames.reshape(len(at), stack.size))

    def has_room(self, first: int, end: int, packed: Packed) -> bool:
        """Whether these frames fit behind frame `end` while frame `first`, and all since, stay."""
        return self.store.has_room(first, end, packed)

    def plan(self, obs: Array) -> Array:
        """Return which frames [T+1, k] of observations [T+1, *] must be stored: the others lie beside them already."""
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
        """Store the observations of a column.

        Args:
            column: whose.
            start: its first frame, counted through the whole run; nothing that is needed may lie in its way.
            stored: [T+1, k] as `plan` gives it for them.
            packed: as `pack` gives it.
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
        """Copy observations out.

        Args:
            column: [B] of each.
            step: [B] of each, from 0 to T.
            out: [B, *] for them, contiguous.
        """
        stack, count = self.stack, len(column)
        number = (self._span[column, 0][:, None] + self._index[column, step]).ravel() % self.size
        if stack.outer == 1:
            self.store.take(number, out.reshape(count * stack.frames, stack.size))
        else:
            taken = np.empty((count * stack.frames, stack.size), np.uint8)
            self.store.take(number, taken)
            frames = taken.reshape(count, stack.frames, stack.outer, stack.inner)
            out.reshape(count, stack.outer, stack.frames, stack.inner)[:] = frames.transpose(0, 2, 1, 3)
