"""Sources of episodes: the protocol, their errors, and episodes that a function of the user returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from appo.algorithms.datasets.episodes import Spaces, Unfit
from appo.envs.spaces import AS_THEY_ARE, ActionForm
from appo.utils.errors import AppoError, UsageError, text_of
from appo.utils.user_modules import find_function

STEP_ARRAYS = ("rewards", "terminations", "truncations")
MOST, MOST_FRAMES = 1 << 40, 1 << 20
"""Limits of counts, and of frames behind a step."""


def named(path: Path | str) -> str:
    """Return a path for messages: complete, in a single line."""
    text = str(path)
    return text if text.isprintable() else repr(text)


class EpisodeSource(Protocol):
    """A source of episodes.

    Attributes:
        name: name for messages.
        spaces: spaces of observations and actions.
        form: form of actions in the acting process.
        frames_per_step: simulator frames behind a step; 0: unknown.
        lengths: steps of every episode.
        stored_bytes: bytes of the files on the disk; None: no file.
    """

    name: str
    spaces: Spaces
    form: ActionForm
    frames_per_step: int
    lengths: Sequence[int]
    stored_bytes: int | None

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode with Minari's names."""


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Report any error of reading in a single line with the name."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--input: {error}") from None
    except (AppoError, Unfit) as error:
        raise UsageError(f"--input: {named(name)}: {str(error).removeprefix(f'{name}: ')}") from None
    except Exception as error:  # Arrow, HDF5, Pillow, numpy and gymnasium each have errors of their own
        raise UsageError(f"--input: {named(name)} is damaged: {type(error).__name__}: {text_of(error)[:200]}") from None


class Described(NamedTuple):
    """Description of a dataset of Minari by its metadata; see `EpisodeSource`."""

    spaces: Spaces
    form: ActionForm
    frames_per_step: int
    episodes: int


class Given(NamedTuple):
    """Result of a function in `--input`.

    Attributes:
        observation_space, action_space: spaces of gymnasium.
        episodes: mappings of arrays with Minari's names: observations [L+1, *]; actions, rewards, terminations,
            truncations [L, *]; optional infos. Episodes are read when needed.
    """

    observation_space: Any
    action_space: Any
    episodes: Sequence[Mapping[str, Any]]


class FunctionSource:
    """Episodes that a function returns; see `EpisodeSource` for the attributes.

    Raises:
        UsageError: the function is missing, raises, or returns something else.
    """

    form, frames_per_step = AS_THEY_ARE, 0
    stored_bytes: int | None = None

    def __init__(self, name: str) -> None:
        function = find_function("input", name)
        self.name = name
        with naming_damage(name):
            given = Given(*function())
            self.spaces, self._episodes = (given.observation_space, given.action_space), given.episodes
            self.lengths: Sequence[int] = [len(episode["rewards"]) for episode in self._episodes]

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of an episode."""
        return self._episodes[index]
