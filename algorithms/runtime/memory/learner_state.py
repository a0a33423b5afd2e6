"""The state of a learner, which must not be lost: double-buffered in the arena.

The learner writes the state about once a second and on request. A replacement learner and the checkpoint writer read
the state: saving never stalls training, and the death of a learner costs about a second.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.plain_state import LARGEST_PLAIN
from appo.algorithms.runtime.memory.weights import barrier
from appo.utils.checkpoint_files import Limit
from appo.utils.errors import UsageError
from appo.utils.values import nearest, shown

META_BYTES = 1 << 16


class Vector(NamedTuple):
    """An array of a learner's state. Checkpoints store float32 vectors as long as the weights by the names of weights.

    Attributes:
        size: number of values, or the shape of an array that is no vector.
        dtype: a numpy name.
        inherited: whether `--init_from` copies the array; all others begin with zeros.
    """

    size: int | tuple[int, ...]
    dtype: str = "float32"
    inherited: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array."""
        return (self.size,) if isinstance(self.size, int) else self.size


WEIGHTS = "weights"
"""Name of the vector used for acting, which every layout has."""

NETWORKS = "networks."
"""Prefix of the names of the weights of networks beside the acting network."""


@dataclass(frozen=True)
class StateLayout:
    """The layout of a learner's state, by which memory is reserved and checkpoints are checked.

    Attributes:
        vectors: vectors by name, `WEIGHTS` first.
        numbers: plain values of a new learner.
    """

    vectors: Mapping[str, Vector]
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class LearnerState:
    """A learner's state as arrays and plain values.

    Attributes:
        vectors: arrays by name, as in the algorithm's `StateLayout`; "weights" [P] is always present.
        meta: counters, schedules and random state, as JSON values.
    """

    vectors: dict[str, Array]
    meta: dict[str, Any]

    @property
    def weights(self) -> Array:
        """Return the weights with buffers [P]."""
        return self.vectors[WEIGHTS]

    @property
    def is_finite(self) -> bool:
        """Return whether training can continue: a single NaN in a vector would spread to all weights."""
        with np.errstate(invalid="ignore"):  # a sum is not finite if one of its terms is not, and takes no memory
            return all(bool(np.isfinite(a.sum(dtype=np.float64))) for a in self.vectors.values() if a.dtype.kind == "f")


def empty_vectors(vectors: Mapping[str, Vector]) -> dict[str, Array]:
    """Return uninitialized memory for the vectors of a state."""
    return {name: np.empty(one.shape, one.dtype) for name, one in vectors.items()}


class StateBlock:
    """The state of one policy's learner in the arena. One writer; readers never block the writer."""

    def __init__(self, arena: Arena, policy: int) -> None:
        self._arena = arena
        prefix = f"state.{policy}.vectors."
        names = [field.name for field in arena.fields if field.name.startswith(prefix)]
        self._vectors = {name.removeprefix(prefix): arena[name] for name in names}
        self._meta = arena[f"state.{policy}.meta"]
        self._sequence = arena[f"state.{policy}.sequence"]
        self._latest = arena[f"state.{policy}.latest"]

    @staticmethod
    def declare(policy: int, vectors: Mapping[str, Vector]) -> list[Field]:
        """Return the arena fields of one policy with these vectors."""
        return [
            *(Field(f"state.{policy}.vectors.{name}", (2, *one.shape), one.dtype) for name, one in vectors.items()),
            Field(f"state.{policy}.meta", (2, META_BYTES), "uint8"),
            Field(f"state.{policy}.sequence", (2,), "int64"),
            Field(f"state.{policy}.latest", (1,), "int64"),
        ]

    def of_policy(self, policy: int) -> "StateBlock":
        """Return the block of another policy of the run."""
        return StateBlock(self._arena, policy)

    @property
    def writes(self) -> int:
        """Return the number of completed writes."""
        return int(self._latest[0])

    def write(self, state: LearnerState) -> None:
        """Replace the older copy and make it the latest (ValueError: the plain values do not fit)."""
        for name, vector in self.begin().items():
            vector[...] = state.vectors[name]
        self.commit(state.meta)

    def begin(self) -> dict[str, Array]:
        """Return the vectors of the older copy, to be overwritten; `commit` makes the new values the latest."""
        number = self.writes + 1
        self._sequence[number % 2] = 2 * number - 1
        barrier()
        return {name: vector[number % 2] for name, vector in self._vectors.items()}

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Make the vectors written since `begin` the latest, with these plain values.

        Raises:
            ValueError: the plain values do not fit.
        """
        text = json.dumps(meta).encode()
        if len(text) + 8 > META_BYTES:
            raise ValueError(f"a learner's plain state takes {len(text)} bytes; {META_BYTES - 8} are reserved")
        number = self.writes + 1
        copy = number % 2
        self._meta[copy, :8] = np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
        self._meta[copy, 8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        barrier()
        self._sequence[copy] = 2 * number
        barrier()
        self._latest[0] = number

    def read(self) -> LearnerState | None:
        """Return a consistent copy of the latest state; None before the first write.

        Raises:
            RuntimeError: the writer overtook every attempt, impossible at two writes a second.
        """
        for _ in range(50):
            number = self.writes
            if not number:
                return None
            copy = number % 2
            before = int(self._sequence[copy])
            barrier()
            vectors = {name: vector[copy].copy() for name, vector in self._vectors.items()}
            meta = self._meta[copy].copy()
            barrier()
            if before == int(self._sequence[copy]) == 2 * number:
                size = int.from_bytes(meta[:8].tobytes(), "little")
                return LearnerState(vectors, json.loads(meta[8 : 8 + size].tobytes()))
        raise RuntimeError("a learner's state block changed during every attempt to read it")


Table = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class ModelDescription:
    """The sizes of a policy's model and learner state, by which memory is reserved.

    Attributes:
        table: name and shape of every weight, in the order of the flat vector.
        rnn_state_size: number of recurrent values, H.
        layout: layout of the learner's state.
    """

    table: Table
    rnn_state_size: int
    layout: StateLayout

    @property
    def num_weights(self) -> int:
        """Return P."""
        return sum(int(np.prod(shape, dtype=np.int64)) for _, shape in self.table)

    @property
    def num_gradients(self) -> int:
        """Return the number of gradients of all networks, which several learners add up in every optimizer step."""
        return sum(math.prod(one.shape) for name, one in self.layout.vectors.items() if "exp_avg" in name.split("."))

    @property
    def limit(self) -> Limit:
        """Return the size limit of checkpoints of this model, headers and plain values included."""
        vectors = sum(math.prod(one.shape) * np.dtype(one.dtype).itemsize for one in self.layout.vectors.values())
        return Limit(2 * vectors + LARGEST_PLAIN, "it belongs to another model")


def named(vector: Array, table: Table) -> dict[str, Array]:
    """Return views of a flat vector [P] by name, as the table describes."""
    views, start = {}, 0
    for name, shape in table:
        size = int(np.prod(shape, dtype=np.int64))
        views[name] = vector[start : start + size].reshape(shape)
        start += size
    return views


def all_weights(state: LearnerState, table: Table) -> dict[str, Array]:
    """Return views of the weights of a state by name: the acting network's, then those of `NETWORKS`."""
    networks = {name: array for name, array in state.vectors.items() if name.startswith(NETWORKS)}
    return named(state.weights, table) | networks


def replace_weights(state: LearnerState, vector: Array) -> None:
    """Copy a vector with all acting weights into a state; weights of `NETWORKS` may follow, as in `all_weights`."""
    networks = (array for name, array in state.vectors.items() if name.startswith(NETWORKS))
    start = 0
    for array in (state.weights, *networks):
        if start < len(vector):
            array[...] = vector[start : start + array.size].reshape(array.shape)
        start += array.size


def vector_of(weights: Mapping[str, Any], table: Table) -> Array:
    """Return the flat vector [P] of all weights of a model, given by name.

    Raises:
        UsageError: a name or a shape is not in the model, one is missing, or a number is not finite.
    """
    expected = dict(table)
    for name in [*weights, *expected]:
        if name not in expected:
            raise UsageError(f"the model has no weights {shown(name)}{nearest(name, expected)}")
        if name not in weights or np.shape(weights[name]) != expected[name]:
            given = np.shape(weights[name]) if name in weights else "none"
            raise UsageError(f"weights {name} must have shape {expected[name]}, got {given}")
        if not np.isfinite(weights[name]).all():
            raise UsageError(f"weights {name} are not finite")
    return np.concatenate([np.asarray(weights[name], np.float32).reshape(-1) for name in expected])
