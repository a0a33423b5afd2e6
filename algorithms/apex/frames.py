"""Observations that stack the last k frames, stored as single frames: each once, wherever an episode begins.

How an observation overlaps with the one before is read off the two and not assumed. So what comes out equals what went
in, bit by bit, whatever an environment shows; where it is no stack after all it only takes more frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from algorithms.runtime.memory.arena import Arena, Array, Field
from envs.spec import ObservationSpec, is_channels_first

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


def stack_of(observation: ObservationSpec) -> Stack | None:
    """Return how an observation stacks frames, by its shape; None: it does not.

    Images of bytes do whose channels are no three of one picture: then each channel is a frame, or each three are.
    """
    shape = observation.shape
    if observation.dtype != "uint8" or len(shape) != 3:
        return None
    first = is_channels_first(shape)
    channels = shape[0] if first else shape[2]
    pixels = shape[1] * (shape[2] if first else shape[0])
    of_frame = 1 if channels % 3 else 3
    if channels <= of_frame:
        return None
    count = channels // of_frame
    return Stack(count, 1, of_frame * pixels) if first else Stack(count, pixels, of_frame)


class FrameRing:
    """The frames of one observation key of all columns, in a ring: columns that begin many episodes take more of it.

    Args:
        arena: the shared memory.
        prefix: of the names of the fields.
        stack: of the observations.

    Attributes:
        size: F, frames that fit.
    """

    def __init__(self, arena: Arena, prefix: str, stack: Stack) -> None:
        self.arena, self.stack, self._name = arena, stack, f"{prefix}.frames"
        self._frames, self._index, self._span = arena[self._name], arena[f"{prefix}.index"], arena[f"{prefix}.span"]
        self.size = len(self._frames)

    @staticmethod
    def declare(prefix: str, stack: Stack, columns: int, rollout: int) -> list[Field]:
        """Return the fields for so many columns [T+1] of observations.

        There is room for half a frame more per column than a column needs in which no episode begins.
        """
        needed = columns * (rollout + stack.frames) + columns // 2
        frames = max(needed, 2 * (rollout + 1) * stack.frames)  # the newest column, and any other
        return [
            Field(f"{prefix}.frames", (frames, stack.size), "uint8", fills=True),
            Field(f"{prefix}.index", (columns, rollout + 1, stack.frames), "uint16", fills=True),
            Field(f"{prefix}.span", (columns, 2), "int64"),  # first frame of a column and end; they only grow
        ]

    def frames_of(self, column: Sequence[int] | int) -> Array:
        """Return where the frames of columns begin and end, counted through the whole run, [*, 2]."""
        span: Array = self._span[column]
        return span

    def places(self, column: int) -> list[tuple[int, int]]:
        """Return where the frames of a column lie in the ring, from and to; two ranges where they go on at its start.

        There is none while another process, or thread, writes the column.
        """
        first, after = self._span[column].tolist()
        count = after - first
        if not 0 < count <= self.size:
            return []
        begin = first % self.size
        before_end = min(count, self.size - begin)
        return [(begin, begin + before_end), (0, count - before_end)][: 1 + (count > before_end)]

    def reserve(self, columns: Array) -> Array:
        """Reserve the memory of the frames of columns, whose spans are known; return what is reserved, [*, size]."""
        count = min(int(self._span[columns, 1].max(initial=0)), self.size)
        self.arena.reserve(self._name, count * self.stack.size)
        reserved: Array = self._frames[:count]
        return reserved

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

    def write(self, column: int, start: int, obs: Array, stored: Array) -> None:
        """Store the observations [T+1, *] of a column.

        Args:
            column: whose.
            start: its first frame, counted through the whole run; nothing that is needed may lie in its way.
            obs: the observations.
            stored: as `plan` gives it for them.
        """
        steps, stack = len(obs), self.stack
        count = int(np.count_nonzero(stored))
        place = (np.cumsum(stored) - 1).reshape(stored.shape)
        index = self._index[column]
        for step in range(steps):
            if stored[step, 0]:
                index[step] = place[step]
            else:
                index[step, :-1], index[step, -1] = index[step - 1, 1:], place[step, -1]
        self.arena.reserve(self._name, min(start + count, self.size) * stack.size)
        at, of = stored.nonzero()
        frames = obs.reshape(steps, stack.outer, stack.frames, stack.inner)[at, :, of].reshape(count, stack.size)
        begin = start % self.size
        before_end = min(count, self.size - begin)
        self._frames[begin : begin + before_end] = frames[:before_end]
        self._frames[: count - before_end] = frames[before_end:]
        self._span[column] = start, start + count

    def read(self, column: Array, step: Array, out: Array) -> None:
        """Copy observations out.

        Args:
            column: [B] of each.
            step: [B] of each, from 0 to T.
            out: [B, *] for them, contiguous.
        """
        stack, count = self.stack, len(column)
        index = (self._span[column, 0][:, None] + self._index[column, step]) % self.size
        if stack.outer == 1:
            self._frames.take(index.ravel(), axis=0, out=out.reshape(count * stack.frames, stack.size), mode="clip")
        else:
            frames = self._frames[index].reshape(count, stack.frames, stack.outer, stack.inner)
            out.reshape(count, stack.outer, stack.frames, stack.inner)[:] = frames.transpose(0, 2, 1, 3)
