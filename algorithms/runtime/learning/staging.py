"""Memory for batches filled from slots, on the host."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from appo.algorithms.runtime.learning.batches import Batch, named_fields
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import TrajectoryReady


class Staging:
    """Memory for the batches of `ColumnBatches`. Columns are copied in; a slot is free after its last copy.

    This class has one batch on the host, where a copy is done on return.

    Attributes:
        trajectories: shared arrays, the source of the copies.
        late: whether copies arrive later, which makes `take` return None for a while.
    """

    late = False

    def __init__(self, trajectories: Trajectories) -> None:
        self.trajectories = trajectories
        self.sources: dict[str, Array] = named_fields(trajectories)
        self._free: deque[TrajectoryReady] = deque()
        self.counts: dict[str, Array] = {}  # fields on the host

    def allocate(self, columns: int) -> None:
        """Allocate memory for batches of this size."""
        self.counts = {name: staging_for(array, columns) for name, array in self.sources.items()}

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Copy columns of a slot to `start`; `mine` [T, columns] masks the steps of the policy in training."""
        end = start + mine.shape[1]
        for name, counts in self.counts.items():
            counts[:, start:end] = self.sources[name][slot][:, index]
        self.counts["valid"][:, start:end] = mine

    def take(self) -> Batch | None:
        """Return the full batch, or None while a copy is in progress; later copies overwrite the memory."""
        return Batch.of({name: torch.from_numpy(array) for name, array in self.counts.items()})

    def counted(self) -> tuple[Array, Array]:
        """Return valid and num_frames, [T, B], of the batch last returned by `take`, on the host."""
        return self.counts["valid"], self.counts["num_frames"]

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot without further copies."""
        self._free.append(message)

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield slots, each once, after their last copy has finished."""
        while self._free:
            yield self._free.popleft()

    @property
    def on_their_way(self) -> int:
        """Return the number of slots given back and still read."""
        return 0


def staging_for(source: Array, columns: int) -> Array:
    """Return [steps, columns, ...] zeros for a field [S, steps, R, ...]."""
    return np.zeros((source.shape[1], columns, *source.shape[3:]), source.dtype)
