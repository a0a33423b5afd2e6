"""Memory for batches filled from slots, on the host."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from appo.algorithms.runtime.learning.batches import Batch, named_fields
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import TrajectoryReady


class Staging(Protocol):
    """Memory for the batches of `ColumnBatches`. Columns are copied in; a slot is free after its last copy.

    Attributes:
        trajectories: shared arrays, the source of the copies.
        late: whether copies arrive later, which makes `take` return None for a while.
    """

    trajectories: Trajectories
    late: bool

    def allocate(self, columns: int) -> None:
        """Allocate memory for batches of this size."""

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Copy columns of a slot to `start`; `mine` [T, columns] masks the steps of the policy in training."""

    def take(self) -> Batch | None:
        """Return the full batch, or None while a copy is in progress."""

    def counted(self) -> tuple[Array, Array]:
        """Return valid and num_frames, [T, B], of the batch last returned by `take`, on the host."""

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot without further copies."""

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield slots, each once, after their last copy has finished."""

    @property
    def on_their_way(self) -> int:
        """Return the number of slots given back and still read."""


class HostStaging:
    """Memory on the host for one batch: a slot is free as soon as its columns are copied.

    Args:
        trajectories: shared arrays.
    """

    late = False

    def __init__(self, trajectories: Trajectories) -> None:
        self.trajectories = trajectories
        self.sources: dict[str, Array] = named_fields(trajectories)
        self._free: deque[TrajectoryReady] = deque()
        self.batch: dict[str, Array] = {}

    def allocate(self, columns: int) -> None:
        """Allocate memory for batches of this size."""
        self.batch = {name: staging_for(array, columns) for name, array in self.sources.items()}

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Copy columns of a slot to `start`."""
        end = start + mine.shape[1]
        for name, staging in self.batch.items():
            staging[:, start:end] = self.sources[name][slot][:, index]
        self.batch["valid"][:, start:end] = mine

    def take(self) -> Batch:
        """Return the batch; the next copies overwrite the memory."""
        return Batch.of({name: torch.from_numpy(array) for name, array in self.batch.items()})

    def counted(self) -> tuple[Array, Array]:
        """Return valid and num_frames [T, B] of the batch."""
        return self.batch["valid"], self.batch["num_frames"]

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot without further copies."""
        self._free.append(message)

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield the slots given back."""
        while self._free:
            yield self._free.popleft()

    @property
    def on_their_way(self) -> int:
        """Return 0: copies have arrived."""
        return 0


def staging_for(source: Array, columns: int) -> Array:
    """Return [steps, columns, ...] zeros for a field [S, steps, R, ...]."""
    return np.zeros((source.shape[1], columns, *source.shape[3:]), source.dtype)
