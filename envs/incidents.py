"""What an environment was asked to do until it failed: remembered while it plays, written when it fails, read again."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self, get_type_hints

import numpy as np

from envs.spec import Array
from utils.errors import EnvironmentFailure, UsageError
from utils.files import read_mapping, write_json_atomic
from utils.values import shown

log = logging.getLogger(__name__)

CHUNK_STEPS = 256
MAX_STEPS = 100_000
MAX_BYTES = 32 << 20  # of the actions of one group
MAX_INCIDENTS = 100  # in a run
INTERVAL_SECONDS = 1.0  # between two of a worker


class Story(NamedTuple):
    """What an environment was asked to do before it failed.

    Attributes:
        place: what failed: "init", its "first reset", a later "reset" or a "step".
        seed: of its first reset.
        random_state: of its random numbers before the reset its episode began with; None where that was the first one,
            or where it has no such numbers.
        actions: as stored, since that reset; of a step that failed, too.
        num_steps: how many there were; more than there are actions, if they were too many to remember.
    """

    place: str
    seed: int
    random_state: dict[str, Any] | None
    actions: list[list[float]]
    num_steps: int


class _Beginning(NamedTuple):
    seed: int
    random_state: dict[str, Any] | None
    step: int  # of the group
    walked: list[list[float]]


class Journal:
    """Remembers the actions of one group, each environment's since its episode began.

    A step costs one copy of its actions. Blocks of steps that no episode needs any more are forgotten, and the oldest
    ones when there are too many.

    Args:
        num_envs: environments of the group.

    Attributes:
        place: what is being done to an environment: see `Story`.
    """

    def __init__(self, num_envs: int) -> None:
        self.place = "step"
        self._begun = [_Beginning(0, None, 0, []) for _ in range(num_envs)]
        self._coming = self._begun[0]
        self._count = self._forgotten = 0  # steps of the group
        self._chunks: deque[Array] = deque()
        self._filled = CHUNK_STEPS  # steps in the last chunk

    def add(self, action: Array) -> None:
        """Remember the actions [R, A] of a step."""
        if self._filled == CHUNK_STEPS:
            self._add_chunk(action)
        self._chunks[-1][self._filled] = action
        self._filled += 1
        self._count += 1

    def walk(self, index: int, action: Array) -> None:
        """Remember an action [A] that only one environment takes, before the first step of the group."""
        self._begun[index].walked.append(action.tolist())

    def begins(self, index: int, seed: int | None, random_state: dict[str, Any] | None) -> None:
        """An environment is about to be reset."""
        before = self._begun[index].seed
        self._coming = _Beginning(before if seed is None else seed, random_state, self._count, [])
        self.place = "reset" if seed is None else "first reset"
        if seed is not None:
            self._begun[index] = self._coming  # whatever was before counts no more

    def began(self, index: int) -> None:
        """It has been reset."""
        self._begun[index] = self._coming
        self.place = "step"

    def story(self, index: int) -> Story:
        """What an environment was asked to do until now, when it failed."""
        begun = _Beginning(0, None, self._count, []) if self.place == "init" else self._begun[index]
        end = self._count - (self.place == "reset")  # in place of its last action it was reset
        num_steps = len(begun.walked) + max(0, end - begun.step)
        actions: list[list[float]] = []
        if begun.step >= self._forgotten:
            steps = range(begun.step - self._forgotten, end - self._forgotten)
            taken = [self._chunks[step // CHUNK_STEPS][step % CHUNK_STEPS, index] for step in steps]
            actions = begun.walked + [action.tolist() for action in taken]
        return Story(self.place, begun.seed, begun.random_state, actions, num_steps)

    def _add_chunk(self, action: Array) -> None:
        needed = min(begun.step for begun in self._begun)
        most = max(1, min(MAX_STEPS, MAX_BYTES // max(1, action.nbytes)) // CHUNK_STEPS)
        while self._chunks and (self._forgotten + CHUNK_STEPS <= needed or len(self._chunks) >= most):
            self._chunks.popleft()
            self._forgotten += CHUNK_STEPS
        self._chunks.append(np.empty((CHUNK_STEPS, *action.shape), action.dtype))
        self._filled = 0


def random_state(env: Any) -> dict[str, Any] | None:
    """The state of an environment's random numbers, if they are those that gymnasium gives it."""
    try:
        state: dict[str, Any] = env.unwrapped.np_random.bit_generator.state
    except Exception:  # an environment of any kind: it may have no such thing, or one of its own
        return None
    return state


def restore_random_state(env: Any, state: Mapping[str, Any]) -> None:
    """Let an environment draw the random numbers that it drew after `random_state`.

    Raises:
        UsageError: its random numbers are of another kind.
    """
    try:
        env.unwrapped.np_random.bit_generator.state = state
    except Exception as error:
        raise UsageError(f"the environment has other random numbers than the incident tells of: {error}") from error


def error_name(failure: EnvironmentFailure) -> str:
    """The type of what an environment raised, or of how it failed otherwise."""
    return type(failure.__cause__ or failure).__name__


@dataclass(frozen=True)
class Incident:
    """A failure as it is written.

    Attributes:
        flags: of the environment, with which it can be made again.
        index: of the environment in its group.
        error: type of what it raised.
        message: in one line.
        place, seed, random_state, actions, num_steps: see `Story`.
        traceback: of what it raised.
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
    traceback: str

    @classmethod
    def of(cls, flags: Mapping[str, object], index: int, failure: EnvironmentFailure, story: Story) -> Self:
        """What is written of a failure."""
        trace = "".join(traceback.format_exception(failure.__cause__ or failure))
        said: dict[str, Any] = {"error": error_name(failure), "message": str(failure), "traceback": trace}
        plain = story._asdict() | {"random_state": _plain(story.random_state)}
        return cls(flags=dict(flags), index=index, **said, **plain)

    @classmethod
    def read(cls, path: Path) -> Self:
        """An incident from its file.

        Raises:
            UsageError: there is none, or it is damaged.
        """
        content = read_mapping(path)
        kinds = get_type_hints(cls)
        for field in fields(cls):
            kind = getattr(kinds[field.name], "__origin__", kinds[field.name])
            if field.name == "random_state":
                kind = (dict, type(None))
            if not isinstance(content.get(field.name), kind):
                raise UsageError(f"{shown(str(path))} is no incident of an environment: no {field.name}")
        return cls(**{field.name: content[field.name] for field in fields(cls)})  # type: ignore[arg-type]


class IncidentFolder:
    """Where a worker writes incidents: `env_<worker>_<number>.json`, the newest `MAX_INCIDENTS` of all workers.

    Args:
        path: of the folder.
        worker: in their names.
        flags: of the environment.
    """

    def __init__(self, path: Path, worker: str, flags: Mapping[str, object]) -> None:
        self.path, self.worker, self.flags = path, worker, flags
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether the last incident was written a while ago."""
        return time.monotonic() >= self._due

    def write(self, index: int, failure: EnvironmentFailure, story: Story) -> None:
        """Write an incident; a disk that is full costs only that."""
        self._due = time.monotonic() + INTERVAL_SECONDS
        incident = Incident.of(self.flags, index, failure, story)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.path / self._new_name(), asdict(incident), durable=False, indent=None)
            self._remove_oldest()
        except (OSError, ValueError) as error:
            log.warning("what led to a failure of env %d is not kept: %s", index, error)

    def _new_name(self) -> str:
        stem = f"env_{self.worker}_"
        used = (path.stem.removeprefix(stem) for path in self.path.glob(f"{stem}*.json"))
        return f"{stem}{max((int(number) for number in used if number.isdecimal()), default=-1) + 1}.json"

    def _remove_oldest(self) -> None:
        incidents = sorted((path.stat().st_mtime_ns, path) for path in self.path.glob("env_*.json"))
        for _, path in incidents[:-MAX_INCIDENTS]:
            path.unlink(missing_ok=True)  # another worker may have done it


def _plain(value: Any) -> Any:
    """Numpy's numbers and arrays, of which states of random numbers are made, as JSON has them."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
