"""All that a learner must not lose, double-buffered in the arena.

The learner writes it about once a second and on request; a restarted learner and the checkpoint writer read it, so
saving never stalls training and the death of a learner costs about a second.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from algorithms.runtime.arena import Arena, Array, Field
from algorithms.runtime.weights import barrier

META_BYTES = 1 << 16
READ_ATTEMPTS = 50


@dataclass(frozen=True)
class LearnerState:
    """A learner's state as arrays and plain values.

    Attributes:
        vectors: [3, P] float32: weights with buffers, first and second Adam moments (zero for buffers).
        moments: [K] float64: running statistics of observations and returns, concatenated.
        meta: counters, schedules and random state, as JSON values.
    """

    vectors: Array
    moments: Array
    meta: dict[str, Any]

    @property
    def is_finite(self) -> bool:
        """Whether training can go on from it: a single NaN in weights or moments would spread for ever."""
        with np.errstate(invalid="ignore"):  # a sum is not finite if one of its terms is not, and takes no memory
            return all(bool(np.isfinite(a.sum(dtype=np.float64))) for a in (self.vectors, self.moments))


class StateBlock:
    """The state of one policy's learner. One writer; readers never wait for it."""

    def __init__(self, arena: Arena, policy: int) -> None:
        self._arena = arena
        self._vectors = arena[f"state.{policy}.vectors"]
        self._moments = arena[f"state.{policy}.moments"]
        self._meta = arena[f"state.{policy}.meta"]
        self._sequence = arena[f"state.{policy}.sequence"]
        self._latest = arena[f"state.{policy}.latest"]

    @staticmethod
    def declare(policy: int, size: int, moments: int) -> list[Field]:
        """The arena fields of one policy with `size` weights and `moments` statistics."""
        return [
            Field(f"state.{policy}.vectors", (2, 3, size), "float32"),
            Field(f"state.{policy}.moments", (2, moments), "float64"),
            Field(f"state.{policy}.meta", (2, META_BYTES), "uint8"),
            Field(f"state.{policy}.sequence", (2,), "int64"),
            Field(f"state.{policy}.latest", (1,), "int64"),
        ]

    def of_policy(self, policy: int) -> "StateBlock":
        """That of another policy of the run."""
        return StateBlock(self._arena, policy)

    @property
    def num_moments(self) -> int:
        """How many running statistics it holds."""
        return int(self._moments.shape[1])

    @property
    def writes(self) -> int:
        """Writes completed so far."""
        return int(self._latest[0])

    def write(self, state: LearnerState) -> None:
        """Replace the older of the two copies and make it the latest.

        Raises:
            ValueError: the plain values do not fit.
        """
        self.begin()[:] = state.vectors
        self.commit(state)

    def begin(self) -> Array:
        """The vectors [3, P] of the older copy, which is lost; what is written there is the latest after `commit`."""
        number = self.writes + 1
        self._sequence[number % 2] = 2 * number - 1
        barrier()
        vectors: Array = self._vectors[number % 2]
        return vectors

    def commit(self, state: LearnerState) -> None:
        """Make a state the latest, the vectors of which have been written since `begin`.

        Raises:
            ValueError: the plain values do not fit.
        """
        text = json.dumps(state.meta).encode()
        if len(text) + 8 > META_BYTES:
            raise ValueError(f"a learner's plain state takes {len(text)} bytes; {META_BYTES - 8} are reserved")
        number = self.writes + 1
        place = number % 2
        self._moments[place] = state.moments
        self._meta[place, :8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
        self._meta[place, 8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        barrier()
        self._sequence[place] = 2 * number
        barrier()
        self._latest[0] = number

    def read(self) -> LearnerState | None:
        """A consistent copy of the latest state; None before the first write.

        Raises:
            RuntimeError: the writer overtook every attempt, which two writes a second cannot do.
        """
        for _ in range(READ_ATTEMPTS):
            number = self.writes
            if not number:
                return None
            place = number % 2
            before = int(self._sequence[place])
            barrier()
            vectors, moments = self._vectors[place].copy(), self._moments[place].copy()
            meta = self._meta[place].copy()
            barrier()
            if before == int(self._sequence[place]) == 2 * number:
                size = int.from_bytes(meta[:8].tobytes(), "little")
                return LearnerState(vectors, moments, json.loads(meta[8 : 8 + size].tobytes()))
        raise RuntimeError("a learner's state block changed during every attempt to read it")
