"""The one door for `info` of environments: every key with a meaning for the runtime is checked here."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from appo.envs.conversion import as_numpy, row_of_batched
from appo.envs.spec import MASK_KEY, Array, BoolArray, EpisodeStats
from appo.utils.errors import NotFinite, SpaceMismatch

log = logging.getLogger(__name__)
FRAMES_KEY, STATS_KEY = "num_frames", "episode_extra_stats"
LIVES_KEY = "lives"
ACTIVE_KEY = "is_active"
"""The key of an agent's info that is false while the agent takes no part."""

OBJECTIVE_KEY, OBJECTIVE_SYNONYM = "true_reward", "true_objective"
"""The objective of an episode; the second word is Sample Factory 2's."""

OF_EPISODE = (STATS_KEY, OBJECTIVE_KEY, OBJECTIVE_SYNONYM)
"""Keys read at the end of an episode."""

MOST_STATS = 1000
"""Bound of the statistics of an episode: more are a bug of the environment, and main would have to read every name."""

PLAIN = frozenset({float, int, np.float64, np.float32})
"""Types of numbers accepted without a check."""

NUMBERS = (int, float, np.number, np.bool_, np.ndarray)
MOST_FRAMES = np.iinfo(np.int32).max


def _frames(value: Any) -> int:
    if type(value) is int and 1 <= value <= MOST_FRAMES:
        return value
    is_number = isinstance(value, NUMBERS) and not isinstance(value, bool | np.bool_) and not np.ndim(value)
    if not (is_number and 1 <= value <= MOST_FRAMES and float(value).is_integer()):
        raise ValueError(f"expected the whole number of frames behind a step, from 1 to {MOST_FRAMES}")
    return int(value)


def _number(value: Any) -> float:
    if type(value) in PLAIN:
        return float(value)
    if np.ndim(value) or not isinstance(value, NUMBERS):
        raise ValueError("statistics in info must be numbers")
    return float(value)


def _stats(value: Any) -> dict[str, float]:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise ValueError("expected a dict of numbers")
    stats: dict[str, float] = {}
    for name, number in islice(value.items(), MOST_STATS):
        if not isinstance(name, str):
            raise ValueError(f"expected names as its keys, got {name!r}")
        try:
            stats[name] = number if type(number) is float else _number(number)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"statistics in info must be numbers, got {_shown(number)} for {name}") from None
    return stats


def _flag(value: Any) -> bool:
    if type(value) is bool:
        return value
    if not (isinstance(value, bool | np.bool_) or (isinstance(value, int | np.integer) and value in (0, 1))):
        raise ValueError("expected True or False")
    return bool(value)


READERS: dict[str, Callable[[Any], Any]] = {
    FRAMES_KEY: _frames,
    OBJECTIVE_KEY: _number,
    OBJECTIVE_SYNONYM: _number,
    STATS_KEY: _stats,
    ACTIVE_KEY: _flag,
}


@functools.cache
def _say(key: str) -> None:
    log.info("infos of the environment hold %s", key)  # once in each process


class InfoReader:
    """Reads the keys of infos that have a meaning, and remembers the keys found.

    Args:
        name: name of the environment in messages.
        unmasked: reason for which no mask can be taken; empty if masks are taken.
    """

    def __init__(self, name: str, unmasked: str = "") -> None:
        self.name, self.unmasked = name, unmasked
        self.found: set[str] = set()

    def __call__(self, info: Mapping[str, Any], key: str) -> Any:
        """Return the checked value of a key; None without the key.

        Raises:
            SpaceMismatch: the value has no meaning for the key.
            NotFinite: the value is NaN or infinite.
        """
        if key not in info:
            return None
        if key not in self.found:
            self.found.add(key)
            _say(key)
        try:
            value = READERS[key](info[key])
        except (ValueError, OverflowError) as error:
            got = "" if ", got " in str(error) else f", got {_shown(info[key])}"
            raise SpaceMismatch(f"{self.name}: info key {key}: {error}{got}") from None
        if type(value) is float and not math.isfinite(value):
            raise NotFinite(f"{self.name}: info key {key} is not finite: {value}")
        if type(value) is dict and not math.isfinite(sum(value.values())):  # or it is a sum of huge numbers
            for part, number in value.items():
                if not math.isfinite(number):
                    raise NotFinite(f"{self.name}: info key {key}: {part} is not finite: {number}")
        return value

    def frames(self, info: Mapping[str, Any], default: int) -> int:
        """Return the simulator frames behind a step."""
        said: int | None = self(info, FRAMES_KEY)
        return default if said is None else said

    def is_active(self, info: Mapping[str, Any]) -> bool:
        """Return whether an agent takes part."""
        said: bool | None = self(info, ACTIVE_KEY)
        return said is None or said

    def stats(self, row: int, info: Mapping[str, Any]) -> EpisodeStats | None:
        """Return statistics of an episode, from the info of the last step; None without any.

        Raises:
            SpaceMismatch, NotFinite: as `__call__`; or both names of the objective are present with different values.
        """
        reported: dict[str, float] = self(info, STATS_KEY) or {} if STATS_KEY in info else {}
        if OBJECTIVE_KEY in info or OBJECTIVE_SYNONYM in info:
            own, other = self(info, OBJECTIVE_KEY), self(info, OBJECTIVE_SYNONYM)
            if own is not None and other is not None and own != other:
                both = f"{OBJECTIVE_KEY} {own:g} and {OBJECTIVE_SYNONYM} {other:g}"
                raise SpaceMismatch(f"{self.name}: info keys {both} mean the same and differ: leave one of them out")
            reported[OBJECTIVE_KEY] = other if own is None else own
        return EpisodeStats(row, reported) if reported else None

    def write_lives(self, info: Mapping[str, Any], out: Array, rows: Any = True) -> None:
        """Write the lives of an info, or of the infos of a vector, into `out`, where `rows` are set.

        Raises:
            SpaceMismatch: the info holds no lives.
        """
        if LIVES_KEY not in info:
            if not np.any(rows):  # resets and ends alone
                return
            raise SpaceMismatch(f"{self.name}: --episodic_life needs {LIVES_KEY} in the info of every step")
        np.copyto(out, info[LIVES_KEY], casting="unsafe", where=rows & np.asarray(info.get(f"_{LIVES_KEY}", True)))

    def refuse_masks(self, info: Mapping[str, Any]) -> None:
        """Refuse a mask that was not announced: memory and networks have no place for the mask.

        Raises:
            SpaceMismatch: the info contains a mask.
        """
        if self.unmasked and MASK_KEY in info:
            raise SpaceMismatch(f"{self.name}: info key {MASK_KEY}: {self.unmasked}")

    def batch_of_frames(self, infos: Mapping[str, Any], rows: BoolArray, out: Array) -> None:
        """Write the frames [R] from the infos of a vector, for some rows.

        Raises:
            SpaceMismatch: the values are not numbers of frames, or not one per row.
        """
        said = infos.get(FRAMES_KEY)
        if type(said) is np.ndarray and said.dtype.kind in "iu" and said.shape == rows.shape:
            at = rows & infos.get(f"_{FRAMES_KEY}", True)
            if FRAMES_KEY in self.found and not ((said < 1) | (said > MOST_FRAMES))[at].any():
                np.copyto(out, said, casting="unsafe", where=at)
                return
        own = self._of_rows(infos, len(rows), (FRAMES_KEY,))
        for row in np.flatnonzero(rows):
            out[row] = self.frames(row_of_batched(own, int(row)), int(out[row]))

    def batch_of_stats(self, infos: Mapping[str, Any], rows: BoolArray) -> list[EpisodeStats]:
        """Return the statistics, from the infos of a vector, of episodes that ended in some rows [R].

        Raises:
            SpaceMismatch, NotFinite: as `stats`; or the number of entries is not the number of rows.
        """
        own = self._of_rows(infos, len(rows), OF_EPISODE)
        found = [self.stats(row, row_of_batched(own, row)) for row in np.flatnonzero(rows).tolist()] if own else ()
        return [stats for stats in found if stats is not None]

    def _of_rows(self, infos: Mapping[str, Any], num_rows: int, keys: Sequence[str]) -> dict[str, Any]:
        """Return what the infos of a vector say under some keys, an entry per row."""
        said = {key: as_numpy(infos[key]) for key in (*keys, *(f"_{key}" for key in keys)) if key in infos}
        for key, value in said.items():
            self._require_rows(key, value, num_rows)
        return said

    def _require_rows(self, key: str, value: Any, num_rows: int) -> None:
        if isinstance(value, Mapping):
            for name, part in value.items():
                self._require_rows(f"{key}: {name}", as_numpy(part), num_rows)
        elif (
            not isinstance(value, np.ndarray | list | tuple)
            or (len(value) if np.ndim(value) or isinstance(value, list | tuple) else -1) != num_rows
        ):
            got = f"{len(value)}" if isinstance(value, list | tuple) else _shown(value)
            raise SpaceMismatch(f"{self.name}: info key {key}: expected {num_rows} entries, one per row, got {got}")


def _shown(value: object) -> str:
    text = " ".join(repr(value.item() if isinstance(value, np.generic) else value).split())
    return text if len(text) <= 80 else f"{type(value).__name__}"
