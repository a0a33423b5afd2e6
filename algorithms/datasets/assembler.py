"""Assembles whole episodes from the steps of rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


_Piece = dict[str, Any]
"""Successive steps of a row, [t, *] by the names of `Steps.named`, in memory of their own."""

PIECES = 32
"""Pieces of an open episode after which they are joined: small arrays take as much memory as their numbers."""


class EpisodeAssembler:
    """Assembles whole episodes from the steps of rows; drops and counts steps without a beginning or an end.

    Args:
        rows: R.

    Attributes:
        dropped_episodes, dropped_steps: dropped so far.
        open_steps: steps of open episodes, by row.
    """

    def __init__(self, rows: int) -> None:
        self._pieces: list[list[_Piece]] = [[] for _ in range(rows)]
        self.open_steps = [0] * rows
        self.dropped_episodes = self.dropped_steps = self._step_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes of open episodes."""
        return sum(self.open_steps) * self._step_bytes

    def add(self, steps: Steps) -> Iterator[Episode]:
        """Take in the next steps; yield the episodes that end."""
        ended = (steps.terminated | steps.truncated) & steps.valid
        stops: list[list[int]] = [[] for _ in self._pieces]
        for row, t in np.argwhere((ended | ~steps.valid).T).tolist():
            stops[row].append(t)
        first, length = steps.first, len(ended)
        arrays = {name: array[:length].swapaxes(0, 1) for name, array in steps.named.items()}
        self._step_bytes = sum(array[0, 0].nbytes for array in arrays.values())
        for row, ends in enumerate(stops):
            begin = 0
            for t in ends:
                is_end = bool(ended[t, row])
                self._append(row, arrays, slice(begin, t + is_end), first)
                if is_end:
                    yield from self._finished(row, t, steps)
                else:
                    self.break_off(row)  # nothing is open behind an end: an episode that is open has failed
                begin = t + 1
            self._append(row, arrays, slice(begin, length), first)
            pieces = self._pieces[row]
            if len(pieces) >= PIECES and len(pieces[-PIECES]["reward"]) <= length:  # those that are joined stay
                pieces[-PIECES:] = [_joined(pieces[-PIECES:], pieces[0])]

    def break_off(self, row: int) -> None:
        """Drop the open episode of a row; its further steps have no beginning."""
        self.dropped_episodes += bool(self._pieces[row])
        self.dropped_steps += self.open_steps[row]
        self._pieces[row], self.open_steps[row] = [], 0

    def close(self) -> None:
        """Drop all open episodes."""
        for row in range(len(self._pieces)):
            self.break_off(row)

    def _append(self, row: int, arrays: Mapping[str, Array], part: slice, first: BoolArray) -> None:
        """Append a part of the rows [R, T, *] to the open episode of a row, or open one."""
        steps = part.stop - part.start
        if steps <= 0:
            return
        if not (self._pieces[row] or first[part.start, row]):
            self.dropped_steps += steps
            return
        if steps == len(first) - 1:  # most are whole, and a slice costs a third of a small copy
            piece = {name: array[row].copy() for name, array in arrays.items()}
        else:
            piece = {name: array[row, part].copy() for name, array in arrays.items()}
        self._pieces[row].append(piece)
        self.open_steps[row] += steps

    def _finished(self, row: int, t: int, steps: Steps) -> Iterator[Episode]:
        """Yield the open episode of a row, which ends with step t, if there is one."""
        pieces = self._pieces[row]
        self._pieces[row], self.open_steps[row] = [], 0
        if not pieces:
            return
        last = {f"obs.{key}": array[t + 1 : t + 2, row] for key, array in steps.obs.items()}
        whole = _joined([*pieces, last], pieces[0])
        obs = {key: whole[f"obs.{key}"] for key in steps.obs}
        infos = {key: whole[f"info.{key}"] for key in steps.infos}
        yield Episode(obs, whole["action"], whole["reward"], bool(steps.terminated[t, row]), infos)


def _joined(pieces: Sequence[_Piece], names: Iterable[str]) -> _Piece:
    """Return all steps as one piece; a piece without a name adds nothing to it."""
    return {name: np.concatenate([one[name] for one in pieces if name in one]) for name in names}
