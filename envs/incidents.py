"""Incidents: the actions of an environment until a failure, kept during play, written then, read again."""

import contextlib
import logging
import os
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, get_type_hints

import numpy as np

from appo.envs.journal import Story
from appo.utils.errors import EnvironmentFailure, UsageError
from appo.utils.run_folder import own_folder, read_own_mapping, write_json_atomic
from appo.utils.values import shown

log = logging.getLogger(__name__)
HANG = "hang"
MAX_INCIDENTS = 100  # in a run
INTERVAL_SECONDS = 1.0  # between two of a worker


def random_state(env: Any) -> dict[str, Any] | None:
    """Return the state of an environment's random numbers, if gymnasium made the generator."""
    try:
        state: dict[str, Any] = env.unwrapped.np_random.bit_generator.state
    except Exception:  # an environment of any kind: it may have no such thing, or one of its own
        return None
    return state


def restore_random_state(env: Any, state: Mapping[str, Any]) -> None:
    """Set the random numbers of an environment back to a `random_state` (UsageError: they are of another kind)."""
    try:
        env.unwrapped.np_random.bit_generator.state = state
    except Exception as error:
        raise UsageError(f"the environment has other random numbers than the incident tells of: {error}") from error


def error_name(failure: EnvironmentFailure) -> str:
    """Return the type of an environment's error, or of another kind of failure."""
    return type(failure.__cause__ or failure).__name__


class Ending(NamedTuple):
    """How the last call of an environment ended; see `Incident`."""

    error: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Incident:
    """A failure as written.

    Attributes:
        flags: flags of the environment, which make the environment again.
        index: index of the environment in the group; -1: a vector.
        error: type of the error, or the end of the process: the name of a signal, an exit code or `HANG`.
        message: message in one line.
        place, seed, random_state, actions, num_steps, seeds: see `Story`.
        traceback: traceback of the error, or the stacks of the process.
        ended_process: whether the failure ended the process.
    """

    flags: dict[str, Any]
    index: int
    error: str
    message: str
    place: str
    seed: int
    random_state: dict[str, Any] | None
    actions: list[Any]
    num_steps: int
    seeds: list[Any]
    traceback: str
    ended_process: bool

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read an incident from a file (UsageError: the file is missing or damaged)."""
        content, hints = read_own_mapping(path), get_type_hints(cls)
        kinds = {name: getattr(hint, "__origin__", hint) for name, hint in hints.items()}
        for name, kind in (kinds | {"random_state": (dict, type(None))}).items():
            if not isinstance(content.get(name), kind):
                raise UsageError(f"{shown(str(path))} is no incident of an environment: no {name}")
        return cls(**{name: content[name] for name in kinds})  # type: ignore[arg-type]


class IncidentFolder:
    """Where a worker writes incidents: `env_<worker>_<number>.json`, the newest `MAX_INCIDENTS` of all workers."""

    def __init__(self, path: Path, worker: str, flags: Mapping[str, object]) -> None:
        self.path, self.worker, self.flags = path, worker, flags
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether the last incident was written a while ago."""
        return time.monotonic() >= self._due

    def write(self, index: int, failure: EnvironmentFailure, story: Story) -> None:
        """Write what led an environment to fail."""
        self._due = time.monotonic() + INTERVAL_SECONDS
        trace = "".join(traceback.format_exception(failure.__cause__ or failure))
        self.store(index, Ending(error_name(failure), str(failure), trace), story, ended_process=False)

    def store(self, index: int, ending: Ending, story: Story, *, ended_process: bool) -> Path | None:
        """Write an incident, with long texts shortened in the middle; a disk that is full costs only the incident."""
        how: dict[str, Any] = {
            k: t if len(t) <= most else f"{t[: most // 2]} [...] {t[-most // 2 :]}"
            for (k, t), most in zip(ending._asdict().items(), (200, 10_000, 100_000), strict=True)
        }
        told = _plain(story._asdict())
        incident = Incident(flags=dict(self.flags), index=index, ended_process=ended_process, **how, **told)
        try:
            with own_folder(self.path, make=True) as folder:
                stem = f"env_{self.worker}_"
                used = (re.fullmatch(rf"{re.escape(stem)}([0-9]+)\.json", name) for name in os.listdir(folder))
                path = self.path / f"{stem}{max((int(one[1]) for one in used if one), default=-1) + 1}.json"
                write_json_atomic(path, asdict(incident), durable=False, indent=None)
                self._remove_oldest(folder)
        except (OSError, ValueError) as error:
            log.warning("what led to a failure of env %d is not kept: %s", index, error)
            return None
        return path

    def _remove_oldest(self, folder: int) -> None:
        files = [name for name in os.listdir(folder) if name.startswith("env_") and name.endswith(".json")]
        files.sort(key=lambda name: (os.lstat(name, dir_fd=folder).st_mtime_ns, name))
        for name in files[:-MAX_INCIDENTS]:
            with contextlib.suppress(FileNotFoundError):  # another worker may have done it
                os.unlink(name, dir_fd=folder)


def _plain(value: Any) -> Any:
    """Convert numpy's numbers and arrays, which states of random numbers contain, for JSON."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
