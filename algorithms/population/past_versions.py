"""Past versions of a policy on disk, beside the checkpoints, for a resumed run."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from appo.algorithms.runtime.disk import DiskThread
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import LearnerState, ModelDescription
from appo.algorithms.runtime.memory.state_files import decode, encode
from appo.utils import checkpoint_files
from appo.utils.errors import AppoError, CheckpointError
from appo.utils.values import is_number

log = logging.getLogger(__name__)

RATING = "rating"
"""Name of the rating in the state of a version."""


class Version(NamedTuple):
    """A past version of a policy."""

    env_steps: int  # that it had learned from; tells versions apart
    rating: float
    weights: Array  # [P] float32


class PastVersions:
    """Keeps versions on disk; a thread writes, so a slow disk stalls nothing."""

    def __init__(self, folder: Path, model: ModelDescription) -> None:
        self.folder, self.model = folder, model
        self._writer = DiskThread("past")
        self._pending: list[Future[None]] = []

    def load(self, newest: int, limit: int) -> list[Version]:
        """Return the newest `limit` versions, oldest first.

        Versions beyond `newest` env steps, the step of the resumed state, were undone by a crash. They are removed, as
        are versions beyond the limit. A damaged version is set aside.
        """
        checkpoint_files.clean_temporaries(self.folder)
        found: list[Version] = []
        for env_steps, path in checkpoint_files.listed_if_readable(self.folder):
            if env_steps > newest or len(found) == limit:
                checkpoint_files.remove(path)
                continue
            try:
                found.append(self._read(path))
            except CheckpointError as error:
                log.warning("damaged past version skipped: %s: %s", path, error)
                checkpoint_files.quarantine(self.folder, (checkpoint_files.Damaged(path, str(error)),))
        return found[::-1]

    def add(self, state: LearnerState, rating: float) -> None:
        """Write a version."""
        kept = replace(state, meta={**state.meta, RATING: rating})
        name = checkpoint_files.checkpoint_name(int(state.meta["env_steps"]))
        self._do(lambda: checkpoint_files.save(self.folder, name, encode(kept, self.model.table)))

    def remove(self, env_steps: int) -> None:
        """Remove a version."""
        self._do(lambda: checkpoint_files.remove(self.folder / checkpoint_files.checkpoint_name(env_steps)))

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._writer.finish("saving past versions")
        self._look()

    def _read(self, path: Path) -> Version:
        state, _ = decode(checkpoint_files.contents(path, self.model.limit), self.model.table)
        rating = state.meta.get(RATING, 0.0)
        if not is_number(rating):
            raise CheckpointError(f"{RATING} in state.json is not what it must be")
        return Version(int(state.meta["env_steps"]), float(rating), state.weights)

    def _do(self, act: Callable[[], object]) -> None:
        self._look()
        self._pending.append(self._writer.submit(partial(_carefully, act)))

    def _look(self) -> None:
        done = [one for one in self._pending if one.done()]
        self._pending = [one for one in self._pending if one not in done]
        for one in done:
            one.result()  # whatever is no `AppoError` is a bug, and must not pass unnoticed in a thread


def _carefully(act: Callable[[], object]) -> None:
    """Log a failure of the disk; training still has the version in memory."""
    try:
        act()
    except AppoError as error:
        log.warning("past version: %s", error)
