"""Rollbacks: when training goes back to its last good state, when that is of no use, and what is kept of it then."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from appo.algorithms.runtime.learning.batches import Batch
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import LearnerState, Table
from appo.algorithms.runtime.memory.state_files import encode
from appo.utils import checkpoint_files
from appo.utils.errors import NumericsError, ResourceError

MAX_ROLLBACKS = 3
MAX_INCIDENTS = 3
SKIPPED_IN_A_ROW = "skipped_in_a_row"
"""Among the metrics and in the plain state of a learner: updates skipped since the last one that was not."""


class Verdict(Enum):
    """A verdict on skipped updates."""

    GO_ON = auto()
    ROLL_BACK = auto()
    GIVE_UP = auto()


@dataclass
class RollbackRule:
    """The rule that many skipped updates in a row roll back, and `MAX_ROLLBACKS` without a good update give up.

    Attributes:
        max_skipped: in a row, before a rollback.
        rollbacks: so far.
    """

    max_skipped: int
    rollbacks: int = 0
    _in_vain: int = 0
    _updates: int = 0  # at the last rollback

    def judge(self, skipped_in_a_row: int, updates: int) -> Verdict:
        """Return the verdict on the last update; a rollback counts as done.

        Args:
            skipped_in_a_row: updates since the last good one, or since the rollback after it.
            updates: of the learner so far, skipped ones included.
        """
        if skipped_in_a_row < updates - self._updates:  # one since the last rollback was good
            self._in_vain = 0
        if skipped_in_a_row < self.max_skipped:
            return Verdict.GO_ON
        if self._in_vain == MAX_ROLLBACKS:
            return Verdict.GIVE_UP
        self._in_vain += 1
        self.rollbacks += 1
        self._updates = updates
        return Verdict.ROLL_BACK


def giving_up(
    reason: str, folder: Path | None, policy: int, state: LearnerState, table: Table, batch: Batch
) -> NumericsError:
    """Keep a batch on which no update is finite, and the learner it was met with; return the error that ends the run.

    Args:
        reason: in words.
        folder: of all incidents of the run; None: nothing is kept.
        policy: of the learner.
        state: of the learner; stored as in a checkpoint.
        table: name and shape of every weight.
        batch: the one trained last.
    """
    reason = f"{reason}, also after {MAX_ROLLBACKS} rollbacks to the last good state"
    if folder is None:
        return NumericsError(reason)
    words = {"reason": reason, "policy": policy}
    name = f"numerics_p{policy}_v{state.meta['version']:012d}"
    try:
        path = checkpoint_files.save(folder, name, {**encode(state, table), **_encode_batch(batch, words)})
        _remove_oldest(folder)
    except ResourceError as error:  # a full disk must not hide why the run ends
        return NumericsError(f"{reason}; batch and weights are not kept: {error}")
    return NumericsError(f"{reason}; batch and weights are in {path}")


def _encode_batch(batch: Batch, words: Mapping[str, object]) -> dict[str, bytes]:
    """Return the files of an incident that a checkpoint does not have."""
    arrays: dict[str, Array] = {name: np.ascontiguousarray(x.cpu().numpy()) for name, x in batch.named().items()}
    not_finite = sorted(name for name, array in arrays.items() if not np.isfinite(array).all())
    words = {**words, "not_finite": not_finite}
    return {"batch.safetensors": save(arrays), "incident.json": json.dumps(words, indent=1).encode()}


def _remove_oldest(folder: Path) -> None:
    incidents = sorted(folder.glob("numerics_p*"), key=lambda path: path.stat().st_mtime_ns)
    for path in incidents[:-MAX_INCIDENTS]:
        checkpoint_files.remove(path)
