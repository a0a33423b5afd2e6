"""Reads datasets: Minari's on Arrow and on HDF5, and episodes that a function of the user's returns.

What is read may come from anybody. Nothing of it is unpickled, imported or made: of the metadata only spaces and counts
are used, links out of a dataset are refused, and a file that is damaged is named in one line.
"""

from __future__ import annotations

import glob
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from appo.algorithms.datasets.door import DATA, EPISODE_FILE, HDF5_FILE, METADATA, Place, stored_bytes
from appo.algorithms.datasets.episodes import Episode, Spaces, Unfit, episode_of, space_from_json
from appo.algorithms.datasets.stored import (
    FREE_BYTES,
    JPEG_BYTES,
    decoded_images,
    is_image,
    record_batch,
    require_stored,
    row_bytes,
)
from appo.algorithms.datasets.writer import FORM, FRAMES, require_pyarrow
from appo.envs.spaces import AS_THEY_ARE, ActionForm, children, spec_of
from appo.envs.spec import Array, EnvSpec
from appo.utils.errors import AppoError, UsageError, text_of
from appo.utils.user_modules import find_function
from appo.utils.values import is_number, shown

PICKLES = (".pkl", ".pickle", ".npy", ".npz", ".pt", ".pth")
"""Suffixes of files that are pickles, or may hold some."""
NUMBERS = {"bool", "halffloat", "float", "double"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Types of numbers as Arrow names them."""
STEP_ARRAYS = ("rewards", "terminations", "truncations")
EPISODE_BYTES = 1 << 20
"""More than the metadata of an episode has."""
MOST, MOST_FRAMES = 1 << 40, 1 << 20
"""Of anything that is counted, and of frames behind a step."""


def named(path: Path | str) -> str:
    """Return a path as messages name it: whole, and in one line."""
    text = str(path)
    return text if text.isprintable() else repr(text)


class Source(Protocol):
    """Where episodes lie.

    Attributes:
        name: for messages.
        spaces: of observations and actions.
        form: in which those who acted have stored actions.
        frames_per_step: simulator frames behind a step; 0: it does not say.
        lengths: steps of every episode.
        stored_bytes: that its files take on the disk; None: it is no file.
    """

    name: str
    spaces: Spaces
    form: ActionForm
    frames_per_step: int
    lengths: Sequence[int]
    stored_bytes: int | None

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode under Minari's names."""
        ...


class Dataset:
    """Episodes of several sources that have the same spaces.

    Args:
        sources: at least one.
        postprocess: is given each episode as it is read; None: nothing is done.
        form: in which actions are stored.

    Attributes:
        spec: that follows from the spaces; a step has one simulator frame where none of them says how many.
        says_frames: whether the first source says how many.
        lengths: [E] steps of every episode.

    Raises:
        UsageError: sources differ in what they show or take, or there is no step.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        postprocess: Callable[[Episode], Episode] | None = None,
        form: ActionForm = AS_THEY_ARE,
    ) -> None:
        self.sources, self._postprocess = sources, postprocess
        first, specs = sources[0], [_spec_of(source, form) for source in sources]
        for source, spec in zip(sources, specs, strict=True):
            if spec != specs[0]:
                raise UsageError(f"--input: {source.name} has other spaces, or another frame skip, than {first.name}")
        self.spec, self.says_frames = specs[0], first.frames_per_step > 0
        stored = [source for source in sources if source.stored_bytes is not None]
        rows = sum(sum(source.lengths) + len(source.lengths) for source in stored)
        with _damage(first.name):
            asked, there = rows * _row_bytes(self.spec), sum(source.stored_bytes or 0 for source in stored)
            require_stored(f"its {rows} rows", asked, there, 4 * FREE_BYTES)
        self.lengths = np.array([length for source in sources for length in source.lengths], np.int64)
        self._begins = np.cumsum([0, *(len(source.lengths) for source in sources)])
        if not self.lengths.sum():
            raise UsageError(f"--input: {first.name} holds no step")

    @property
    def steps(self) -> int:
        """Steps of all episodes."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Episode:
        """Read an episode.

        Raises:
            UsageError: it is damaged, or does not fit the spaces.
        """
        number = int(np.searchsorted(self._begins, index, "right")) - 1
        source, within = self.sources[number], index - int(self._begins[number])
        name = f"episode {within} of {source.name}"
        with _damage(name):
            episode = episode_of(name, source.spaces, self.spec, source.read(within), source.form)
            if len(episode) != self.lengths[index]:
                raise ValueError(f"it has {len(episode)} steps and not {self.lengths[index]}")
        if self._postprocess is None:
            return episode
        changed = self._postprocess(episode)
        if not isinstance(changed, Episode) or len(changed) != len(episode):
            raise UsageError("--postprocess_inputs must return an Episode of the same length")
        return changed

    def __iter__(self) -> Iterator[Episode]:
        return (self[index] for index in range(len(self)))


def open_dataset(words: Sequence[str], postprocess: str = "", form: ActionForm = AS_THEY_ARE) -> Dataset:
    """Find the datasets that `--input` names; episodes are read later. The same words give the same object.

    Args:
        words: folders, patterns of folders, or package.module:function.
        postprocess: the function that `--postprocess_inputs` names; empty: none.
        form: in which actions are stored.

    Raises:
        UsageError: there is no such dataset, or it is damaged or nothing that is read.
    """
    return _opened(tuple(words), postprocess, form)


@cache
def _opened(words: tuple[str, ...], postprocess: str, form: ActionForm) -> Dataset:
    sources = [source for word in words for source in _sources(word)]
    return Dataset(sources, find_function("postprocess_inputs", postprocess) if postprocess else None, form)


def _sources(word: str) -> list[Source]:
    if ":" in word and not Path(word).exists():
        return [FunctionSource(word)]
    found = sorted(glob.glob(word)) if glob.has_magic(word) and not os.path.lexists(word) else [word]
    with _damage(word):
        folders = [folder for path in found for folder in _data_folders(Path(path))]
    if not folders:
        raise UsageError(f"--input: there is no dataset {shown(word)}")
    return [_source_in(folder) for folder in folders]


def _data_folders(path: Path) -> list[Place]:
    """The folders of a dataset's data: of one of Minari's, or of every part of one of ours."""
    if path.suffix.lower() in PICKLES:
        raise UsageError(f"{named(path)} may be a pickle, which could run code: it is not read")
    place = Place(path)
    for folder in (place, place.inside(DATA)):
        if folder.holds(METADATA):
            return [folder]
    parts = place.parts()
    if not parts:
        hint = f", no folder with {DATA}/{METADATA} as Minari writes it" if path.exists() else _in_store(path)
        raise UsageError(f"there is no dataset {named(path)}{hint}")
    return parts


def _in_store(name: Path) -> str:
    """Return where Minari's own store has a dataset of this name, for a message; empty: nowhere."""
    store = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets") / name
    there = Place(store).holds(DATA) and not name.is_absolute()
    return f"; Minari's store has one of this name: --input={store}" if there else ""


def _source_in(folder: Place) -> Source:
    name = named(folder.path)
    with _damage(str(folder.path / METADATA)):
        metadata = folder.mapping(METADATA)
        if missing := [
            name for name in ("observation_space", "action_space", "total_episodes") if name not in metadata
        ]:
            raise Unfit(f"it lacks {', '.join(missing)}")
        spaces = space_from_json(metadata["observation_space"]), space_from_json(metadata["action_space"])
        episodes: Any = metadata["total_episodes"]
        frames: Any = metadata.get(FRAMES, 0)
        for key, value, most in (("total_episodes", episodes, MOST), (FRAMES, frames, MOST_FRAMES)):
            if not is_number(value) or not 0 <= value < most or value != int(value):
                raise ValueError(f"{key} must be a whole number, at least 0 and below {most}")
        described = Described(spaces, _form_in(metadata), int(frames), int(episodes))
    kinds: Mapping[object, Callable[..., Source]] = {"arrow": ArrowSource, "hdf5": HDF5Source}
    stored = metadata.get("data_format")
    kind = kinds.get(stored)
    if kind is None:
        raise UsageError(f"--input: {name} has the format {shown(stored)}: arrow and hdf5 are read")
    return kind(folder, described)


def _row_bytes(spec: EnvSpec) -> int:
    """Return how many bytes a step takes in memory."""
    of_obs = sum(math.prod(one.shape) * np.dtype(one.dtype).itemsize for one in spec.observations.values())
    return of_obs + 4 * spec.action.num_values + 16


def _form_in(metadata: Mapping[str, Any]) -> ActionForm:
    given: Any = metadata.get(FORM, AS_THEY_ARE[:2])
    if len(given) != 2 or not all(isinstance(one, bool) for one in given):
        raise ValueError(f"{FORM} must be two times true or false")
    return ActionForm(*given)


def _spec_of(source: Source, form: ActionForm) -> EnvSpec:
    with _damage(source.name):
        try:
            return spec_of(*source.spaces, frames_per_step=source.frames_per_step or 1, form=form)
        except UsageError as error:
            raise Unfit(str(error)) from None


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Name in one line what cannot be read, whatever reading it raises."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--input: {error}") from None
    except (AppoError, Unfit) as error:
        raise UsageError(f"--input: {named(name)}: {str(error).removeprefix(f'{name}: ')}") from None
    except Exception as error:  # Arrow, HDF5, Pillow, numpy and gymnasium each have errors of their own
        raise UsageError(f"--input: {named(name)} is damaged: {type(error).__name__}: {text_of(error)[:200]}") from None


class Described(NamedTuple):
    """Description of one of Minari's datasets by its metadata; see `Source`.

    Attributes:
        episodes: how many there are.
    """

    spaces: Spaces
    form: ActionForm
    frames_per_step: int
    episodes: int


# Minari's datasets on Arrow: a folder per episode.


class ArrowSource:
    """One of Minari's datasets on Arrow; see `Source` for the attributes.

    Args:
        folder: of the data.
        described: by its metadata.

    Raises:
        UsageError: pyarrow is missing, or the number of steps of an episode is not there.
    """

    def __init__(self, folder: Place, described: Described) -> None:
        self._arrow = require_pyarrow("input")
        self.folder, self.name = folder, str(folder.path)
        self.spaces, self.form, self.frames_per_step, episodes = described
        with _damage(self.name):
            about = (self._place(index).mapping(METADATA, EPISODE_BYTES) for index in range(episodes))
            self.lengths: Sequence[int] = [_steps_in(one) for one in about]
            files = (f"{index}/{EPISODE_FILE}" for index in range(episodes))
            self.stored_bytes: int | None = folder.disk_bytes(files)

    def _place(self, index: int) -> Place:
        return self.folder.inside(str(index))

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode, the padding behind actions and rewards taken off."""
        steps = self.lengths[index]
        with self._place(index).open(EPISODE_FILE) as file:
            size = os.fstat(file.fileno())
            require_stored(EPISODE_FILE, size.st_size, stored_bytes(size))
            content = file.read()
        most = dict(zip(("observations", "actions"), (row_bytes(space) for space in self.spaces), strict=True))
        most |= dict.fromkeys(STEP_ARRAYS, 16)
        wanted = {name: (steps + 1) * one for name, one in most.items()} | {"infos": -1}
        batch = record_batch(self._arrow, content, wanted)
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
    """A column of numbers, or of lists of them, as an array [N*]."""
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
    """Yield the infos that are numbers; text, structures and columns with gaps nobody needs."""
    for index, field in enumerate(column.type):
        shape = (field.metadata or {}).get(b"shape", b"")
        with suppress(ValueError, NotImplementedError):
            array = _numbers(column.field(index))
            yield field.name, array.reshape(len(column), *(int(size) for size in shape.split(b",") if size))


# Minari's datasets on HDF5: a group per episode in one file.


class HDF5Source:
    """One of Minari's datasets on HDF5; arguments and errors are those of `ArrowSource`."""

    def __init__(self, folder: Place, described: Described) -> None:
        try:
            self._h5py: Any = importlib.import_module("h5py")
        except ImportError:
            raise UsageError('--input needs the package h5py: pip install "appo[offline]"') from None
        self.spaces, self.form, self.frames_per_step, episodes = described
        self.name = str(folder.path / HDF5_FILE)
        with _damage(self.name):
            with folder.open(HDF5_FILE) as file:  # which is not looked up by its name again
                self.stored_bytes: int | None = stored_bytes(os.fstat(file.fileno()))
                self._file = self._h5py.File(f"/proc/self/fd/{file.fileno()}", "r")
            self._refuse_repeated(episodes)
            arrays = (self._array(self._episode(index), "rewards") for index in range(episodes))
            self.lengths: Sequence[int] = [math.prod(array.shape) for array in arrays]

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode; infos of others are left out."""
        group, steps = self._episode(index), self.lengths[index]
        values = {name: self._sized(group, name, (steps,))[:] for name in STEP_ARRAYS}
        for name, space, rows in zip(("observations", "actions"), self.spaces, (steps + 1, steps), strict=True):
            values[name] = self._values(space, group, name, rows)
        return values

    def _refuse_repeated(self, episodes: int) -> None:
        """Refuse episodes that are one and the same (ValueError): some kB can name it any number of times."""
        places: set[int] = set()
        for index in range(episodes):
            places.add(self._link(self._file, f"episode_{index}"))
            if len(places) <= index:
                raise ValueError(f"episode_{index} is another one, once more")

    def _episode(self, index: int) -> Any:
        return self._inside(self._file, f"episode_{index}")

    def _link(self, group: Any, name: str) -> int:
        """Return where in this file lies what a group has under a name (ValueError: nowhere)."""
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
        """Return what lies in a group under a name, in this file and not behind a link to another."""
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
        """Return an array that has as many numbers as a shape, or images as JPEG (ValueError: it has others)."""
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
        """Return runs of bytes, each an image as JPEG; None: images are stored as they are."""
        array = self._array(group, name)
        if array.dtype.kind != "O" and len(array.shape) != 2:
            return None
        if array.shape[0] != rows or math.prod(array.shape[1:]) > 2 * math.prod(shape) + JPEG_BYTES:
            raise Unfit(f"{name} has the shape {array.shape}, where the steps and the space have {(rows, *shape)}")
        return array if array.dtype.kind == "O" else array[:]


# Episodes of a function of the user's.


class Given(NamedTuple):
    """Result of a function that `--input` names.

    Attributes:
        observation_space, action_space: of gymnasium.
        episodes: mappings of arrays under Minari's names: observations [L+1, *], actions, rewards, terminations,
            truncations [L, *], and infos if there are some; read when they are needed.
    """

    observation_space: Any
    action_space: Any
    episodes: Sequence[Mapping[str, Any]]


class FunctionSource:
    """The episodes that a function returns; see `Source` for the attributes.

    Args:
        name: package.module:function.

    Raises:
        UsageError: there is no such function, or it raises or returns something else.
    """

    form, frames_per_step = AS_THEY_ARE, 0
    stored_bytes: int | None = None

    def __init__(self, name: str) -> None:
        function = find_function("input", name)
        self.name = name
        with _damage(name):
            given = Given(*function())
            self.spaces, self._episodes = (given.observation_space, given.action_space), given.episodes
            self.lengths: Sequence[int] = [len(episode["rewards"]) for episode in self._episodes]

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode."""
        return self._episodes[index]
