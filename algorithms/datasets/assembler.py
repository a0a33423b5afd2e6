"""Assembles whole episodes from the steps of rows."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from appo.algorithms.datasets.episodes import Episode
from appo.envs.spec import Array, BoolArray, FloatArray


@dataclass(frozen=True)
class Steps:
    """T steps of R rows, time-major, as in a slot; a step that only resets follows each end (NEXT_STEP).

    Attributes:
        obs: [T+1, R, *] by key.
        first: [T+1, R], whether the observation starts an episode.
        valid: [T, R], whether the step was taken.
        reward, terminated, truncated: [T, R].
        action: [T, R, A].
        infos: [T, R, *] by name.
    """

    obs: Mapping[str, Array]
    first: BoolArray
    valid: BoolArray
    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    action: Array
    infos: Mapping[str, Array]

    @property
    def named(self) -> dict[str, Array]:
        """Return what a step contains, [T, R, *] by name, and observations [T+1, R, *]."""
        seen = {f"obs.{key}": array for key, array in self.obs.items()}
        return seen | {"action": self.action, "reward": self.reward} | {f"info.{k}": v for k, v in self.infos.items()}


class _Piece(NamedTuple):
    """Successive steps of a row in arrays [R, T, *] that many pieces share."""

    arrays: Mapping[str, Array]
    row: int
    begin: int
    end: int
    is_own: bool = False

    def of(self, name: str, more: int = 0) -> Array:
        array: Array = self.arrays[name][self.row, self.begin : self.end + more]
        return array


def _together(pieces: Sequence[_Piece]) -> _Piece:
    own = {name: np.concatenate([one.of(name) for one in pieces])[None] for name in pieces[0].arrays}
    return _Piece(own, 0, 0, own["reward"].shape[1], is_own=True)


PIECES = 8
"""Pieces of an open episode after which they are copied together: a shared array lives as long as any piece."""


class EpisodeAssembler:
    """Assembles whole episodes from the steps of rows; drops and counts steps without a beginning or an end.

    Args:
        rows: R.

    Attributes:
        dropped_episodes, dropped_steps: dropped so far.
        open_steps: steps of open episodes, by row.
        step_bytes: bytes of a step, after the first one.
        shared_bytes: bytes of shared arrays that open episodes may hold beside their own steps; see `compact`.
    """

    def __init__(self, rows: int) -> None:
        self._pieces: list[list[_Piece]] = [[] for _ in range(rows)]
        self.open_steps = [0] * rows
        self.dropped_episodes = self.dropped_steps = self.step_bytes = 0
        self._shared: deque[int] = deque(maxlen=PIECES)  # those of before are held by no piece that is not its own

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of shared arrays."""
        return sum(self._shared)

    def compact(self) -> None:
        """Copy the steps of open episodes, which releases shared arrays at the cost of time."""
        if not self._shared:
            return
        self._shared.clear()
        for pieces in self._pieces:
            own = sum(one.is_own for one in pieces)
            if own < len(pieces):
                pieces[own:] = [_together(pieces[own:])]

    def add(self, steps: Steps) -> Iterator[Episode]:
        """Take in the next steps; yield the episodes that end."""
        ended = (steps.terminated | steps.truncated) & steps.valid
        stops: list[list[int]] = [[] for _ in self._pieces]
        for row, t in np.argwhere((ended | ~steps.valid).T).tolist():
            stops[row].append(t)
        arrays = {name: array.swapaxes(0, 1).copy() for name, array in steps.named.items()}
        self.step_bytes = sum(array[0, 0].nbytes for array in arrays.values())
        self._shared.append(sum(array.nbytes for array in arrays.values()))
        first, length = steps.first, len(ended)
        for row, ends in enumerate(stops):
            begin = 0
            for t in ends:
                is_end = bool(ended[t, row])
                self._append(_Piece(arrays, row, begin, t + is_end), first)
                if is_end:
                    yield from self._finished(row, bool(steps.terminated[t, row]))
                else:
                    self.break_off(row)  # nothing is open behind an end: an episode that is open has failed
                begin = t + 1
            self._append(_Piece(arrays, row, begin, length), first)
            newest = self._pieces[row][-PIECES:]
            if len(newest) == PIECES and not any(one.is_own for one in newest):
                self._pieces[row][-PIECES:] = [_together(newest)]

    def break_off(self, row: int) -> None:
        """Drop the open episode of a row; its further steps have no beginning."""
        self.dropped_episodes += bool(self._pieces[row])
        self.dropped_steps += self.open_steps[row]
        self._pieces[row], self.open_steps[row] = [], 0

    def close(self) -> None:
        """Drop all open episodes."""
        for row in range(len(self._pieces)):
            self.break_off(row)

    def _append(self, piece: _Piece, first: BoolArray) -> None:
        steps = piece.end - piece.begin
        if steps <= 0:
            return
        row = piece.row
        if self._pieces[row] or first[piece.begin, row]:
            self._pieces[row].append(piece)
            self.open_steps[row] += steps
        else:
            self.dropped_steps += steps

    def _finished(self, row: int, terminated: bool) -> Iterator[Episode]:
        pieces = self._pieces[row]
        self._pieces[row], self.open_steps[row] = [], 0
        if not pieces:
            return
        whole: dict[str, dict[str, Any]] = {"obs": {}, "info": {}, "": {}}
        for name in pieces[0].arrays:
            kind, dot, key = name.partition(".")
            more = kind == "obs"
            parts = [*(one.of(name) for one in pieces[:-1]), pieces[-1].of(name, more)]
            whole[kind if dot else ""][key if dot else name] = np.concatenate(parts)
        of_steps = whole[""]
        yield Episode(whole["obs"], of_steps["action"], of_steps["reward"], terminated, whole["info"])
