"""Minari datasets on Arrow: one folder per episode."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from appo.algorithms.datasets.arrow_batch import record_batch
from appo.algorithms.datasets.door import EPISODE_FILE, METADATA, Place, stored_bytes
from appo.algorithms.datasets.episodes import Unfit
from appo.algorithms.datasets.sources import MOST, STEP_ARRAYS, Described, naming_damage
from appo.algorithms.datasets.stored import decoded_images, is_image, require_stored, row_bytes
from appo.algorithms.datasets.writer import require_pyarrow
from appo.envs.spaces import children
from appo.envs.spec import Array
from appo.utils.values import is_number

NUMBERS = {"bool", "halffloat", "float", "double"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Types of numbers as Arrow names them."""
EPISODE_BYTES = 1 << 20
"""Limit of the metadata of an episode."""


class ArrowSource:
    """A dataset of Minari on Arrow; see `EpisodeSource` for the attributes.

    Raises:
        UsageError: pyarrow is missing, or the number of steps of an episode is missing.
    """

    def __init__(self, folder: Place, described: Described) -> None:
        self._arrow = require_pyarrow("input")
        self.folder, self.name = folder, str(folder.path)
        self.spaces, self.form, self.frames_per_step, episodes = described
        with naming_damage(self.name):
            places = (folder.inside(str(index)) for index in range(episodes))
            self.lengths: Sequence[int] = [_steps_in(place.mapping(METADATA, EPISODE_BYTES)) for place in places]
            self.stored_bytes: int | None = folder.disk_bytes(f"{index}/{EPISODE_FILE}" for index in range(episodes))

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode without the padding behind actions and rewards."""
        steps = self.lengths[index]
        with self.folder.inside(str(index)).open(EPISODE_FILE) as file:
            size = os.fstat(file.fileno())
            require_stored(EPISODE_FILE, size.st_size, stored_bytes(size))
            content = file.read()
        most = dict(zip(("observations", "actions"), map(row_bytes, self.spaces), strict=True))
        wanted = {name: (steps + 1) * one for name, one in (most | dict.fromkeys(STEP_ARRAYS, 16)).items()}
        batch = record_batch(self._arrow, content, wanted | {"infos": -1})
        if batch.num_rows != steps + 1:
            found = f"it has {batch.num_rows - 1} steps and not {steps}"
            raise Unfit(f"{found}: {steps} steps need {steps + 1} observations, there are {batch.num_rows}")
        columns = {name: batch.column(name) for name in batch.schema.names}
        raw: dict[str, Any] = {
            "observations": self._values(self.spaces[0], columns["observations"]),
            "actions": self._values(self.spaces[1], columns["actions"].slice(0, steps)),
            **{name: _numbers(columns[name].slice(0, steps)) for name in STEP_ARRAYS},
        }
        infos = columns.get("infos")
        if infos is not None and self._arrow.types.is_struct(infos.type):
            raw["infos"] = dict(_infos(infos))
        return raw

    def _values(self, space: Any, column: Any) -> Any:
        parts = children(space)
        if parts is None and is_image(space) and self._arrow.types.is_binary(column.type):
            return decoded_images(space.shape, (one.as_buffer() for one in column))
        if parts is None:
            return _numbers(column).reshape(len(column), *(space.shape or ()))
        found = {key: self._values(one, column.field(str(key))) for key, one in parts}
        return tuple(found.values()) if isinstance(parts[0][0], int) else found


def _steps_in(about: Mapping[str, object]) -> int:
    steps = about.get("total_steps")
    if not is_number(steps) or not 1 <= steps < MOST or steps != int(steps):
        raise ValueError("total_steps must be a positive whole number")
    return int(steps)


def _numbers(column: Any) -> Array:
    """Return a column of numbers, or of lists of numbers, as an array [N*]."""
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        if column.null_count:
            raise ValueError("an array with gaps")
        column = column.flatten()
    if column.null_count:
        raise ValueError("an array with gaps")
    if str(column.type) not in NUMBERS:  # structures without fields, for example, take no room in a file
        raise ValueError(f"an array of {column.type}")
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _infos(column: Any) -> Iterator[tuple[str, Array]]:
    """Yield the infos with numbers; text, structures and columns with gaps are not needed."""
    for index, field in enumerate(column.type):
        shape = (field.metadata or {}).get(b"shape", b"")
        with suppress(ValueError, NotImplementedError):
            array = _numbers(column.field(index))
            yield field.name, array.reshape(len(column), *(int(size) for size in shape.split(b",") if size))
