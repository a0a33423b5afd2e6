"""Writes whole episodes as Minari datasets on Arrow, in parts that appear when complete.

    DATASET/part-00000/data/metadata.json      read first by Minari: spaces, counts, name
    DATASET/part-00000/data/7/part-0.arrow     episode 7: one record batch of L+1 rows; except for observations, the
                                               last row is padding
    DATASET/part-00000/data/7/metadata.json    number of steps

Minari reads every part as a dataset (`minari.MinariDataset("DATASET/part-00000/data")`). The open part is hidden, so a
killed process leaves no incomplete part under a readable name.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from appo.algorithms.datasets.config import OutputConfig
from appo.algorithms.datasets.door import DATA, METADATA, NewPart, Place, make_folder, remove_hidden
from appo.algorithms.datasets.episodes import SAMPLED_ACTION, Episode, Spaces, form_of, spaces_of
from appo.algorithms.datasets.space_json import space_to_json
from appo.envs.conversion import ActionConverter
from appo.envs.spec import SINGLE_KEY, Array, EnvSpec
from appo.utils.errors import ResourceError, UsageError
from appo.utils.values import shown

OPEN = ".open-"
FRAMES = "frames_per_step"
"""Our entry of the metadata: simulator frames behind a step."""
FORM = "action_form"
"""Our entry of the metadata: whether drawn actions are scaled, and squashed; see `ActionForm`."""
LEAST_COMPRESSED_BYTES = 16 << 10
"""Size of the smallest compressed episode: below, compression saves no block of the disk and doubles the time."""
MINARI_VERSION = "0.5.3"
"""First version of Minari that reads the written format."""


def require_pyarrow(flag_name: str) -> Any:
    """Import pyarrow, part of the extra `[offline]`; UsageError if it is missing."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise UsageError(f'--{flag_name} needs the package pyarrow: pip install "appo[offline]"') from None


class DatasetWriter:
    """Writes episodes, each once, and closes parts that are large enough.

    Existing parts in the folder stay; an open part left by a writer of this name is removed.

    Args:
        config: form and folder (`output`) of the dataset.
        spec: spaces of the environment; agents are rows of their own.
        about: further entries of the metadata, such as `algorithm_name`.
        name: name of the writer, unique among concurrent writers into the folder.

    Attributes:
        episodes, steps: in complete parts and in the open one.
        parts: complete parts.

    Raises:
        UsageError: pyarrow is missing, the folder cannot be written, or it contains a dataset of other spaces.
    """

    def __init__(self, config: OutputConfig, spec: EnvSpec, about: Mapping[str, object], name: str = "writer") -> None:
        self._arrow = require_pyarrow("output")
        self.config, self.spec, self.about = config, spec, dict(about)
        self.folder = Path(config.output).absolute()
        spaces = spaces_of(spec)
        self._plain_spaces, self._actions = _plain(spaces), ActionConverter(spaces[1], spec.action)
        self.episodes = self.steps = self.parts = 0
        self._open: NewPart | None = None
        self._hidden = open_folder(self.folder, name, spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except ResourceError:
            self.abandon()  # the first error is raised

    def write(self, episode: Episode) -> None:
        """Write an episode, and publish the open part if full (ResourceError)."""
        self.add(episode)
        if self.is_full:
            self.close()

    @property
    def is_full(self) -> bool:
        """Whether the open part has reached the largest size."""
        return self._open is not None and self._open.nbytes >= self.config.output_max_file_size

    def add(self, episode: Episode) -> None:
        """Write an episode into the open part (ResourceError: the disk is full, or the folder is gone)."""
        try:
            if self._open is None:
                self._open = NewPart(self.folder, self._hidden)
            self._open.add(self._encoded(episode), len(episode))
        except OSError as error:
            raise ResourceError(f"cannot write {shown(str(self.folder))}: {error.strerror or error}") from error
        self.episodes, self.steps = self.episodes + 1, self.steps + len(episode)

    def close(self) -> None:
        """Publish the open part, if any (ResourceError: the disk is full, or the folder is gone)."""
        part = self._open
        if part is None:
            return
        about = {
            **self._plain_spaces,
            "data_format": "arrow",
            "minari_version": MINARI_VERSION,
            "jpeg_encoding": False,  # which Minari takes for true where it is missing
            "dataset_id": f"{re.sub(r'[^A-Za-z0-9_]', '_', self.folder.name) or 'dataset'}-part-v{self.parts}",
            FRAMES: self.spec.frames_per_step,
            FORM: list(form_of(self.spec.action)[:2]),
            **self.about,
        }
        try:
            part.finish(about)
        except OSError as error:
            raise ResourceError(f"cannot write {shown(str(self.folder))}: {error.strerror or error}") from error
        self._open, self.parts = None, self.parts + 1

    @property
    def open_counts(self) -> tuple[int, int]:
        """Episodes and steps in the open part."""
        return (0, 0) if self._open is None else (self._open.episodes, self._open.steps)

    def abandon(self) -> int:
        """Drop the open part after a failure of the disk; return the number of its episodes, which no longer count."""
        part, dropped = self._open, self.open_counts
        self._open = None
        if part is not None:
            part.close()
        with contextlib.suppress(OSError):  # it has gone
            remove_hidden(self.folder, self._hidden)
        self.episodes, self.steps = self.episodes - dropped[0], self.steps - dropped[1]
        return dropped[0]

    def _encoded(self, episode: Episode) -> bytes:
        """Return an Arrow file of one record batch."""
        pa = self._arrow
        shown_as = episode.obs[SINGLE_KEY] if episode.obs.keys() == {SINGLE_KEY} else episode.obs
        ended = np.zeros(len(episode), np.bool_)
        ended[-1] = True
        infos = {name: episode.infos[name] for name in self.config.output_columns if name in episode.infos}
        if any(self.spec.action.is_real):
            infos[SAMPLED_ACTION] = episode.action
        columns = {
            "observations": _array(pa, shown_as),
            "actions": _array(pa, _padded(self._actions.batch(episode.action))),
            "rewards": _array(pa, _padded(episode.reward.astype(np.float64))),
            "terminations": _array(pa, _padded(ended & episode.terminated)),
            "truncations": _array(pa, _padded(ended & (not episode.terminated))),
        }
        if infos:
            columns["infos"] = _infos(pa, _padded(infos))
        batch = pa.RecordBatch.from_pydict(columns)
        sink = pa.BufferOutputStream()
        is_plain = self.config.output_compression == "none" or batch.nbytes < LEAST_COMPRESSED_BYTES
        compression = None if is_plain else self.config.output_compression
        options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)  # waking threads costs more
        with pa.ipc.new_file(sink, batch.schema, options=options) as file:
            file.write_batch(batch)
        encoded: bytes = sink.getvalue().to_pybytes()
        return encoded


def open_folder(folder: Path, name: str, spec: EnvSpec) -> str:
    """Make the folder of a dataset; remove the writer's open part and return its name.

    Raises:
        UsageError: the folder cannot be written, or contains a damaged dataset or one of other spaces; or an
            observation has no numbers.
    """
    if empty := next((key for key, one in spec.observations.items() if 0 in one.shape), None):
        raise UsageError(f"--output: observation key {shown(empty)} has no numbers, which Minari cannot read")
    hidden = f"{OPEN}{name}"
    try:
        make_folder(folder, hidden)  # so that one without room or permission is found now
    except OSError as error:
        raise UsageError(f"--output: cannot write {shown(str(folder))}: {error.strerror}") from None
    spaces, place = _plain(spaces_of(spec)), Place(folder)
    try:
        if any(whole.holds(METADATA) for whole in (place, place.inside(DATA))):  # which would be read instead
            raise UsageError(f"{shown(str(folder))} is a dataset by itself, to which no part is added: name another")
        found = [part.mapping(METADATA) for part in place.parts()]
    except UsageError as error:
        raise UsageError(f"--output: {error}") from None
    if any(there.get(name) != text for there in found for name, text in spaces.items()):
        raise UsageError(f"--output: {shown(str(folder))} holds a dataset of other spaces")
    return hidden


def _plain(spaces: Spaces) -> dict[str, str]:
    return dict(zip(("observation_space", "action_space"), map(space_to_json, spaces), strict=True))


def _padded(values: Any) -> Any:
    """Append a row of zeros to arrays, or to dicts or tuples of arrays."""
    if isinstance(values, Mapping):
        return {name: _padded(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(map(_padded, values))
    return np.concatenate([values, np.zeros((1, *values.shape[1:]), values.dtype)])


def _array(pa: Any, values: Any) -> Any:
    """Return an Arrow array of arrays [N, *], or of dicts or tuples of arrays."""
    if isinstance(values, Mapping | tuple):
        pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
        names, arrays = zip(*((str(name), _array(pa, value)) for name, value in pairs), strict=True)
        return pa.StructArray.from_arrays(list(arrays), names=list(names))
    if values.ndim == 1:
        return pa.array(values)
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    kind = pa.list_(pa.from_numpy_dtype(flat.dtype), flat.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), type=kind)


def _infos(pa: Any, infos: Mapping[str, Array]) -> Any:
    """Return a struct whose fields contain their shapes, which Minari restores."""
    arrays = [_array(pa, values) for values in infos.values()]
    shapes = ({"shape": ",".join(map(str, values.shape[1:]))} if values.ndim > 1 else None for values in infos.values())
    fields = [
        pa.field(name, array.type, metadata=shape) for name, array, shape in zip(infos, arrays, shapes, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields)
