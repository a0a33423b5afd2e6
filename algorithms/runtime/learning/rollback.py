"""Rollbacks: the return to the last good state, the end after useless rollbacks, and the incident saved then."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
"""Name, in metrics and plain state of a learner, of the number of updates skipped since the last good one."""


@dataclass
class RollbackRule:
    """The rule: many skipped updates in a row roll back; `MAX_ROLLBACKS` without a good update end the run."""

    max_skipped: int
    rollbacks: int = 0
    _in_vain: int = 0
    _updates: int = 0  # at the last rollback

    def judge(self, skipped_in_a_row: int, updates: int) -> Literal["go on", "roll back", "give up"]:
        """Return the verdict on the last update; a rollback counts as done.

        Args:
            skipped_in_a_row: updates since the last good one, or since the rollback after it.
            updates: updates of the learner so far, with skipped ones, but without those that had no valid step.
        """
        if skipped_in_a_row < updates - self._updates:  # one since the last rollback was good
            self._in_vain = 0
        if skipped_in_a_row < self.max_skipped:
            return "go on"
        if self._in_vain == MAX_ROLLBACKS:
            return "give up"
        self._in_vain += 1
        self.rollbacks += 1
        self._updates = updates
        return "roll back"


def giving_up(
    reason: str, folder: Path | None, policy: int, state: LearnerState, table: Table, batch: Batch
) -> NumericsError:
    """Save a batch without finite updates, and its learner; return the error that ends the run.

    Without a folder of incidents, nothing is saved.
    """
    reason = f"{reason}, also after {MAX_ROLLBACKS} rollbacks to the last good state"
    if folder is None:
        return NumericsError(reason)
    arrays: dict[str, Array] = {name: np.ascontiguousarray(x.cpu().numpy()) for name, x in batch.named().items()}
    not_finite = sorted(name for name, array in arrays.items() if not np.isfinite(array).all())
    words = {"reason": reason, "policy": policy, "not_finite": not_finite}
    files = {"batch.safetensors": save(arrays), "incident.json": json.dumps(words, indent=1).encode()}
    name = f"numerics_p{policy}_v{state.meta['version']:012d}"
    try:
        path = checkpoint_files.save(folder, name, {**encode(state, table), **files})
        for oldest in sorted(folder.glob("numerics_p*"), key=lambda path: path.stat().st_mtime_ns)[:-MAX_INCIDENTS]:
            checkpoint_files.remove(oldest)
    except ResourceError as error:  # a full disk must not hide the reason
        return NumericsError(f"{reason}; batch and weights are not kept: {error}")
    return NumericsError(f"{reason}; batch and weights are in {path}")
