"""Minari datasets on HDF5: one file with a group per episode."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from appo.algorithms.datasets.door import HDF5_FILE, Place, stored_bytes
from appo.algorithms.datasets.episodes import Unfit
from appo.algorithms.datasets.sources import STEP_ARRAYS, Described, naming_damage
from appo.algorithms.datasets.stored import JPEG_BYTES, decoded_images, is_image, require_stored
from appo.envs.spaces import children
from appo.utils.errors import UsageError


class HDF5Source:
    """A dataset of Minari on HDF5; arguments and errors as in `ArrowSource`."""

    def __init__(self, folder: Place, described: Described) -> None:
        try:
            self._h5py: Any = importlib.import_module("h5py")
        except ImportError:
            raise UsageError('--input needs the package h5py: pip install "appo[offline]"') from None
        self.spaces, self.form, self.frames_per_step, episodes = described
        self.name = str(folder.path / HDF5_FILE)
        with naming_damage(self.name):
            with folder.open(HDF5_FILE) as file:  # which is not looked up by its name again
                self.stored_bytes: int | None = stored_bytes(os.fstat(file.fileno()))
                self._file = self._h5py.File(f"/proc/self/fd/{file.fileno()}", "r")
            places: set[int] = set()  # some kB can name an episode any number of times
            for index in range(episodes):
                places.add(self._link(self._file, f"episode_{index}"))
                if len(places) <= index:
                    raise ValueError(f"episode_{index} is another one, once more")
            arrays = (self._array(self._episode(index), "rewards") for index in range(episodes))
            self.lengths: Sequence[int] = [math.prod(array.shape) for array in arrays]

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode, without infos."""
        group, steps = self._episode(index), self.lengths[index]
        values = {name: self._sized(group, name, (steps,))[:] for name in STEP_ARRAYS}
        for name, space, rows in zip(("observations", "actions"), self.spaces, (steps + 1, steps), strict=True):
            values[name] = self._values(space, group, name, rows)
        return values

    def _episode(self, index: int) -> Any:
        return self._inside(self._file, f"episode_{index}")

    def _link(self, group: Any, name: str) -> int:
        """Return the position in the file of a name in a group (ValueError: not in this file)."""
        if not isinstance(group, self._h5py.Group):
            raise ValueError(f"{name} should lie in a group, and that is none")
        try:
            link = group.id.links.get_info(name.encode())
        except (RuntimeError, KeyError):
            raise ValueError(f"there is no {name}") from None
        if link.type != self._h5py.h5l.TYPE_HARD:
            raise ValueError(f"{name} is a link, which may lead anywhere: it is not followed")
        place: int = link.u
        return place

    def _inside(self, group: Any, name: str) -> Any:
        """Return the content of a name in a group, in this file and not behind a link."""
        for part in name.split("/"):
            self._link(group, part)
            group = group[part]
        return group

    def _array(self, group: Any, name: str) -> Any:
        array = self._inside(group, name)
        if not isinstance(array, self._h5py.Dataset) or array.is_virtual or array.external:
            raise ValueError(f"{name} is no array, or lies in another file")
        if self._h5py.check_vlen_dtype(array.dtype) == np.uint8:
            return array
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise ValueError(f"{name} is an array of {array.dtype}")
        if array.chunks:
            require_stored(f"a chunk of {name}", math.prod(array.chunks) * array.dtype.itemsize, array.nbytes)
        return array

    def _sized(self, group: Any, name: str, shape: tuple[int, ...]) -> Any:
        """Return an array with the numbers of a shape, or images as JPEG (ValueError: another size)."""
        array = self._array(group, name)
        if array.dtype.kind == "O" or math.prod(array.shape) != math.prod(shape):
            if array.shape[1:] == shape[1:] and array.shape:
                raise Unfit(
                    f"its arrays have different lengths: {name} has {array.shape[0]}, where its steps need {shape[0]}"
                )
            raise Unfit(f"{name} has the shape {array.shape}, where the steps and the space have {shape}")
        return array

    def _values(self, space: Any, group: Any, name: str, rows: int) -> Any:
        parts = children(space)
        if parts is None:
            if is_image(space) and (images := self._images(group, name, space.shape, rows)) is not None:
                return decoded_images(space.shape, images)
            return self._sized(group, name, (rows, *(space.shape or ())))[:]
        inside = self._inside(group, name)
        if isinstance(parts[0][0], int):
            return tuple(self._values(one, inside, f"_index_{key}", rows) for key, one in parts)
        return {key: self._values(one, inside, str(key), rows) for key, one in parts}

    def _images(self, group: Any, name: str, shape: tuple[int, ...], rows: int) -> Any:
        """Return runs of bytes, each a JPEG; None: plain images."""
        array = self._array(group, name)
        if array.dtype.kind != "O" and len(array.shape) != 2:
            return None
        if array.shape[0] != rows or math.prod(array.shape[1:]) > 2 * math.prod(shape) + JPEG_BYTES:
            raise Unfit(f"{name} has the shape {array.shape}, where the steps and the space have {(rows, *shape)}")
        return array if array.dtype.kind == "O" else array[:]
