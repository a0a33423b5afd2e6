"""Writes whole episodes as Minari datasets on Arrow, part by part; a part appears when it is whole.

    DATASET/part-00000/data/metadata.json      what Minari reads first: spaces, counts, name
    DATASET/part-00000/data/7/part-0.arrow     episode 7: one record batch of L+1 rows; the last row of all but the
                                               observations is padding
    DATASET/part-00000/data/7/metadata.json    its number of steps

Every part is a dataset of its own to Minari (`minari.MinariDataset("DATASET/part-00000/data")`). The part that is being
written is hidden, so that a process which is killed leaves nothing half written under a name that is read.
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
from appo.algorithms.datasets.episodes import (
    SAMPLED_ACTION,
    Episode,
    Spaces,
    form_of,
    given_actions,
    in_units,
    spaces_of,
)
from appo.algorithms.datasets.space_json import space_to_json
from appo.envs.spec import SINGLE_KEY, Array, EnvSpec
from appo.utils.errors import ResourceError, UsageError
from appo.utils.values import shown

OPEN = ".open-"
FRAMES = "frames_per_step"
"""Name in the metadata of what is no part of Minari's format: simulator frames behind a step."""
FORM = "action_form"
"""Name in the metadata of whether actions are scaled, and squashed, where they are drawn; see `ActionForm`."""
LEAST_COMPRESSED_BYTES = 16 << 10
"""Of an episode. A smaller one takes as many blocks of the disk in any case, and compressing twice as long to write."""
MINARI_VERSION = "0.5.3"
"""Of the format, from which on Minari reads what is written here."""


def require_pyarrow(flag_name: str) -> Any:
    """Import pyarrow, which the extra `[offline]` installs; UsageError where it is missing."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise UsageError(f'--{flag_name} needs the package pyarrow: pip install "appo[offline]"') from None


class DatasetWriter:
    """Writes episodes, each once, and closes parts as they get large enough.

    A folder that holds parts already gets more of them; what a writer of this name has left open there is removed.

    Args:
        config: where, and in what form; `output` names the folder.
        spec: of the environment; its agents are rows of their own.
        about: further entries of the metadata, such as `algorithm_name`.
        name: of the writer, among those that write into the folder at the same time.

    Attributes:
        episodes, steps: in whole parts and in the open one.
        parts: that are whole.

    Raises:
        UsageError: pyarrow is missing, the folder cannot be written, or it holds a dataset of other spaces.
    """

    def __init__(self, config: OutputConfig, spec: EnvSpec, about: Mapping[str, object], name: str = "writer") -> None:
        self._arrow = require_pyarrow("output")
        self.config, self.spec, self.about = config, spec, dict(about)
        self.folder = Path(config.output).absolute()
        self.spaces = spaces_of(spec)
        self._plain_spaces = _plain(self.spaces)
        self.episodes = self.steps = self.parts = 0
        self._open: NewPart | None = None
        self._hidden = open_folder(self.folder, name, spec)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, episode: Episode) -> None:
        """Write an episode, and let the open part appear if that makes it full (ResourceError)."""
        self.add(episode)
        if self.is_full:
            self.close()

    @property
    def is_full(self) -> bool:
        """Whether the open part has as many bytes as a part may have."""
        return self._open is not None and self._open.nbytes >= self.config.output_max_file_size

    def add(self, episode: Episode) -> None:
        """Write an episode into the open part.

        Raises:
            ResourceError: the disk is full, or the folder has gone.
        """
        try:
            if self._open is None:
                self._open = NewPart(self.folder, self._hidden)
            self._open.add(self._encoded(episode), len(episode))
        except OSError as error:
            raise ResourceError(f"cannot write {shown(str(self.folder))}: {error.strerror or error}") from error
        self.episodes, self.steps = self.episodes + 1, self.steps + len(episode)

    def close(self) -> None:
        """Let the open part appear, if it holds anything.

        Raises:
            ResourceError: the disk is full, or the folder has gone.
        """
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
        """Episodes and steps in the part that has not appeared."""
        return (0, 0) if self._open is None else (self._open.episodes, self._open.steps)

    def abandon(self) -> int:
        """Drop the open part, as the disk has failed; return its episodes, which are counted no more."""
        part, dropped = self._open, self.open_counts
        self._open = None
        if part is not None:
            part.close()
        with contextlib.suppress(OSError):  # it has gone
            remove_hidden(self.folder, self._hidden)
        self.episodes, self.steps = self.episodes - dropped[0], self.steps - dropped[1]
        return dropped[0]

    def _encoded(self, episode: Episode) -> bytes:
        """The bytes of an Arrow file of one record batch."""
        pa = self._arrow
        shown_as = episode.obs[SINGLE_KEY] if episode.obs.keys() == {SINGLE_KEY} else episode.obs
        ended = np.zeros(len(episode), np.bool_)
        ended[-1] = True
        infos = {name: episode.infos[name] for name in self.config.output_columns if name in episode.infos}
        if any(self.spec.action.is_real):
            infos[SAMPLED_ACTION] = episode.action
        columns = {
            "observations": _array(pa, shown_as),
            "actions": _array(pa, _padded(given_actions(self.spaces[1], in_units(self.spec.action, episode.action)))),
            "rewards": _array(pa, _padded(episode.reward.astype(np.float64))),
            "terminations": _array(pa, _padded(ended & episode.terminated)),
            "truncations": _array(pa, _padded(ended & (not episode.terminated))),
        }
        if infos:
            columns["infos"] = _infos(pa, _padded(infos))
        batch = pa.RecordBatch.from_pydict(columns)
        sink = pa.BufferOutputStream()
        compression: str | None = self.config.output_compression
        if compression == "none" or batch.nbytes < LEAST_COMPRESSED_BYTES:
            compression = None
        options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)  # waking threads costs more
        with pa.ipc.new_file(sink, batch.schema, options=options) as file:
            file.write_batch(batch)
        encoded: bytes = sink.getvalue().to_pybytes()
        return encoded


def open_folder(folder: Path, name: str, spec: EnvSpec) -> str:
    """Make the folder of a dataset, and return the name in it of what this writer has open, which is removed.

    Raises:
        UsageError: it cannot be written, or holds a dataset of other spaces, or one that is damaged.
    """
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
    """Values with a row of zeros behind the last, as arrays or dicts or tuples of them."""
    if isinstance(values, Mapping):
        return {name: _padded(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(map(_padded, values))
    return np.concatenate([values, np.zeros((1, *values.shape[1:]), values.dtype)])


def _array(pa: Any, values: Any) -> Any:
    """An Arrow array of arrays [N, *], of dicts, or of tuples of them."""
    if isinstance(values, Mapping | tuple):
        pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
        names, arrays = zip(*((str(name), _array(pa, value)) for name, value in pairs), strict=True)
        return pa.StructArray.from_arrays(list(arrays), names=list(names))
    if values.ndim == 1:
        return pa.array(values)
    return _rows(pa, values)


def _rows(pa: Any, values: Array) -> Any:
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    kind = pa.list_(pa.from_numpy_dtype(flat.dtype), flat.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), type=kind)


def _infos(pa: Any, infos: Mapping[str, Array]) -> Any:
    """A struct whose fields say their shapes, as Minari restores them by."""
    arrays = [pa.array(values) if values.ndim == 1 else _rows(pa, values) for values in infos.values()]
    shapes = ({"shape": ",".join(map(str, values.shape[1:]))} if values.ndim > 1 else None for values in infos.values())
    fields = [
        pa.field(name, array.type, metadata=shape) for name, array, shape in zip(infos, arrays, shapes, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields)
