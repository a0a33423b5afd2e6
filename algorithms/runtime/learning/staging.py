"""Memory of the batches that are filled from slots."""

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
    """Memory of the batches of `ColumnBatches`: columns are copied into it, slots go back when nothing reads them.

    Attributes:
        trajectories: the shared arrays that are copied from.
        late: whether copies arrive later, so that `take` has to be tried again.
    """

    trajectories: Trajectories
    late: bool

    def allocate(self, columns: int) -> None:
        """Make memory for batches of so many columns."""
        ...

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Copy columns of a slot to `start` and behind; `mine` [T, columns] are the steps of the policy that trains."""
        ...

    def take(self) -> Batch | None:
        """Return the batch that is full, or None while a copy is on its way."""
        ...

    def counted(self) -> tuple[Array, Array]:
        """Return the tensors that are counted of the batch that `take` returned last: valid and num_frames, [T, B]."""
        ...

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot of which nothing more is copied."""
        ...

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield slots, each once, that no copy reads any more."""
        ...

    @property
    def on_their_way(self) -> int:
        """Return how many slots were given back and are still read."""
        ...


class HostStaging:
    """Memory on the host for one batch: a slot is free as soon as it is copied.

    Args:
        trajectories: the shared arrays.
    """

    late = False

    def __init__(self, trajectories: Trajectories) -> None:
        self.trajectories = trajectories
        self.sources: dict[str, Array] = named_fields(trajectories)
        self._free: deque[TrajectoryReady] = deque()
        self.batch: dict[str, Array] = {}

    def allocate(self, columns: int) -> None:
        """Make memory for batches of so many columns."""
        self.batch = {name: staging_for(array, columns) for name, array in self.sources.items()}

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Copy columns of a slot to `start` and behind."""
        end = start + mine.shape[1]
        for name, staging in self.batch.items():
            staging[:, start:end] = self.sources[name][slot][:, index]
        self.batch["valid"][:, start:end] = mine

    def take(self) -> Batch:
        """Return the batch; it is overwritten by the next copies."""
        return Batch.of({name: torch.from_numpy(array) for name, array in self.batch.items()})

    def counted(self) -> tuple[Array, Array]:
        """Return valid and num_frames [T, B] of the batch."""
        return self.batch["valid"], self.batch["num_frames"]

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot of which nothing more is copied."""
        self._free.append(message)

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield the slots that were given back: nothing reads them."""
        while self._free:
            yield self._free.popleft()

    @property
    def on_their_way(self) -> int:
        """Return 0: copies have arrived."""
        return 0


def staging_for(source: Array, columns: int) -> Array:
    """Return [steps, columns, ...] zeros for a field [S, steps, R, ...]."""
    return np.zeros((source.shape[1], columns, *source.shape[3:]), source.dtype)
