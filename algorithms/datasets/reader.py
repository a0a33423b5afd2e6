"""Opens datasets: Minari's on Arrow and on HDF5, and episodes that a function of the user returns.

Datasets may come from strangers. Nothing is unpickled, imported or made: only spaces and counts of the metadata are
used, links out of a dataset are refused, and a damaged file is reported in a single line.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from appo.algorithms.datasets.arrow_source import ArrowSource
from appo.algorithms.datasets.config import InputConfig
from appo.algorithms.datasets.door import DATA, METADATA, Place
from appo.algorithms.datasets.episodes import Episode, Unfit, checked, episode_of
from appo.algorithms.datasets.hdf5_source import HDF5Source
from appo.algorithms.datasets.sources import (
    MOST,
    MOST_FRAMES,
    Described,
    EpisodeSource,
    FunctionSource,
    named,
    naming_damage,
)
from appo.algorithms.datasets.space_json import space_from_json
from appo.algorithms.datasets.stored import FREE_BYTES, require_stored
from appo.algorithms.datasets.writer import FORM, FRAMES
from appo.envs.config import EnvConfig
from appo.envs.conversion import one_line
from appo.envs.spaces import AS_THEY_ARE, ActionForm, spec_of
from appo.envs.spec import EnvSpec
from appo.envs.wrappers.flags import unbounded
from appo.utils.errors import UsageError
from appo.utils.user_modules import find_function
from appo.utils.values import is_number, shown

PICKLES = (".pkl", ".pickle", ".npy", ".npz", ".pt", ".pth")
"""Suffixes of files that are, or may contain, pickles."""


class Dataset:
    """Episodes of several sources with equal spaces.

    Attributes:
        spec: spec of the spaces; one simulator frame per step unless a source states the number.
        says_frames: whether the first source states the number.
        lengths: [E] steps of every episode.

    Raises:
        UsageError: sources differ in their spaces, or contain no step.
    """

    def __init__(
        self,
        sources: Sequence[EpisodeSource],
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
        with naming_damage(first.name):
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
        """Read an episode (UsageError: the episode is damaged, or does not fit the spaces)."""
        number = int(np.searchsorted(self._begins, index, "right")) - 1
        source, within = self.sources[number], index - int(self._begins[number])
        name = f"episode {within} of {source.name}"
        with naming_damage(name):
            episode = episode_of(name, source.spaces, self.spec, source.read(within), source.form)
            if len(episode) != self.lengths[index]:
                raise ValueError(f"it has {len(episode)} steps and not {self.lengths[index]}")
        if self._postprocess is None:
            return episode
        try:
            changed = self._postprocess(episode)
        except Exception as error:
            text = f"raised {type(error).__name__} at {name}: {one_line(error)}"
            raise UsageError(f"--postprocess_inputs {text}") from error
        if not isinstance(changed, Episode) or len(changed) != len(episode):
            raise UsageError("--postprocess_inputs must return an Episode of the same length")
        with naming_damage(f"{name}, as --postprocess_inputs returns it"):
            return checked(changed, self.spec)

    def __iter__(self) -> Iterator[Episode]:
        return (self[index] for index in range(len(self)))


def open_dataset(words: Sequence[str], postprocess: str = "", form: ActionForm = AS_THEY_ARE) -> Dataset:
    """Find the datasets of `--input`; episodes are read later.

    A word is a folder, a pattern of folders, or package.module:function. Equal words return the same object until a
    folder has another part, or other metadata; a function is called once per process.

    Raises:
        UsageError: a dataset is missing, damaged, or of an unknown kind.
    """
    places = [place for word in words for place in _places(word)]
    asked, marks = (tuple(words), postprocess, form), [_mark(place) for place in places]
    if asked not in _opened or _opened[asked][0] != marks:
        _opened.pop(asked, None)  # which closes files, unless a learner still reads
        function = find_function("postprocess_inputs", postprocess) if postprocess else None
        _opened[asked] = marks, Dataset([_source(place) for place in places], function, form)
    return _opened[asked][1]


def dataset_for(env: EnvConfig, words: Sequence[str], postprocess: str = "") -> Dataset:
    """Find datasets whose actions mean the same as those of an environment with these flags.

    Raises:
        UsageError: flags give actions another meaning; or see `open_dataset`.
    """
    dataset = open_dataset(words, postprocess, ActionForm.of(env))
    real = any(dataset.spec.action.is_bounded)  # bins too
    if real and env.continuous_as_bins:
        raise UsageError(f"--continuous_as_bins={env.continuous_as_bins}: datasets have numbers in place of choices")
    bounded = [source.name for source in dataset.sources if unbounded(source.spaces[1]) != source.spaces[1]]
    if real and bounded and not env.clip_actions:
        raise UsageError(f"--clip_actions=False: actions have no bounds, but those of {bounded[0]} have")
    return dataset


def spec_of_input(flags: InputConfig, env: EnvConfig) -> EnvSpec:
    """Return the spec of the datasets of `--input`, with 0 frames per step if the first one does not state them.

    Raises:
        UsageError: see `open_dataset`.
    """
    dataset = dataset_for(env, flags.mix.words, flags.postprocess_inputs)
    return dataset.spec if dataset.says_frames else replace(dataset.spec, frames_per_step=0)


_opened: dict[tuple[tuple[str, ...], str, ActionForm], tuple[list[object], Dataset]] = {}
"""Datasets of this process, with the marks of their places when they were opened."""


def _places(word: str) -> Sequence[Place | str]:
    """Return the data folders of a word, or the name of a function."""
    if ":" in word and not os.path.exists(word):  # `Path` raises where a folder may not be entered
        return [word]
    found = sorted(glob.glob(word)) if glob.has_magic(word) and not os.path.lexists(word) else [word]
    with naming_damage(word):
        folders = [folder for path in found for folder in _data_folders(Path(path))]
    if not folders:
        raise UsageError(f"--input: there is no dataset {shown(word)}")
    return folders


def _mark(place: Place | str) -> object:
    """Return a mark that another part, or other metadata in the same place, does not have."""
    if isinstance(place, str):
        return place
    with naming_damage(str(place.path / METADATA)):
        return place.mark(METADATA)


def _source(place: Place | str) -> EpisodeSource:
    return FunctionSource(place) if isinstance(place, str) else _source_in(place)


def _data_folders(path: Path) -> list[Place]:
    """Return the data folders: one for a dataset of Minari, one per part for a dataset of ours."""
    if path.suffix.lower() in PICKLES:
        raise UsageError(f"{named(path)} may be a pickle, which could run code: it is not read")
    place = Place(path)
    for folder in (place, place.inside(DATA)):
        if folder.holds(METADATA):
            return [folder]
    if parts := place.parts():
        return parts
    store, hint = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets") / path, ""
    if path.exists():
        hint = f", no folder with {DATA}/{METADATA} as Minari writes it"
    elif Place(store).holds(DATA) and not path.is_absolute():
        hint = f"; Minari's store has one of this name: --input={store}"
    raise UsageError(f"there is no dataset {named(path)}{hint}")


def _source_in(folder: Place) -> EpisodeSource:
    name = named(folder.path)
    with naming_damage(str(folder.path / METADATA)):
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
    if (stored := metadata.get("data_format")) not in ("arrow", "hdf5"):
        raise UsageError(f"--input: {name} has the format {shown(stored)}: arrow and hdf5 are read")
    return ArrowSource(folder, described) if stored == "arrow" else HDF5Source(folder, described)


def _row_bytes(spec: EnvSpec) -> int:
    of_obs = sum(math.prod(one.shape) * np.dtype(one.dtype).itemsize for one in spec.observations.values())
    return of_obs + 4 * spec.action.num_values + 16


def _form_in(metadata: Mapping[str, Any]) -> ActionForm:
    given: Any = metadata.get(FORM, AS_THEY_ARE[:2])
    if len(given) != 2 or not all(isinstance(one, bool) for one in given):
        raise ValueError(f"{FORM} must be two times true or false")
    return ActionForm(*given)


def _spec_of(source: EpisodeSource, form: ActionForm) -> EnvSpec:
    with naming_damage(source.name):
        try:
            return spec_of(*source.spaces, frames_per_step=source.frames_per_step or 1, form=form)
        except UsageError as error:
            raise Unfit(str(error)) from None
