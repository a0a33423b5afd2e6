"""All that a learner must not lose, double-buffered in the arena.

The learner writes it about once a second and on request; a restarted learner and the checkpoint writer read it, so
saving never stalls training and the death of a learner costs about a second.
"""

import base64
import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from algorithms.runtime.memory.arena import Arena, Array, Field
from algorithms.runtime.memory.weights import barrier
from algorithms.runtime.messages import KEY, Traits
from utils.errors import CheckpointError, UsageError
from utils.values import is_number, is_plain

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


Table = list[tuple[str, tuple[int, ...]]]

FORMAT = 1

MOMENTS = ("exp_avg.", "exp_avg_sq.")


def encode(state: LearnerState, table: Table) -> dict[str, bytes]:
    """The files of a checkpoint."""
    weights, first, second = (named(vector, table) for vector in state.vectors)
    moments = zip(MOMENTS, (first, second), strict=True)
    optimizer = {prefix + name: value for prefix, vector in moments for name, value in vector.items()}
    optimizer["statistics"] = state.moments
    meta = {"format": FORMAT, **state.meta}
    return {
        "model.safetensors": save(weights),
        "optimizer.safetensors": save(optimizer),
        "state.json": json.dumps(meta, indent=1).encode(),
    }


def decode(files: dict[str, bytes], table: Table | None = None) -> tuple[LearnerState, Table]:
    """The inverse of `encode`, with the table of the weights.

    Args:
        files: of a checkpoint that verified. That says nothing of who wrote them.
        table: what the model expects; None accepts any, in alphabetical order.

    Raises:
        UsageError: the weights are those of another model.
        CheckpointError: the files are not what `encode` makes of a state that training can go on from.
    """
    weights, optimizer = _arrays(files, "model.safetensors"), _arrays(files, "optimizer.safetensors")
    found = {name: tuple(value.shape) for name, value in sorted(weights.items())}
    if table is None:
        table = list(found.items())
    expected = dict(table)
    if found != expected:
        names = [n for n in {**expected, **found} if found.get(n) != expected.get(n)]
        first = f"{names[0]}: saved {found.get(names[0], 'none')}, expected {expected.get(names[0], 'none')}"
        raise UsageError(f"the checkpoint belongs to another model; {len(names)} weights differ, first {first}")
    vectors = np.stack([_flat(weights, "", table), *(_flat(optimizer, name, table) for name in MOMENTS)])
    statistics = optimizer.get("statistics")
    if statistics is None or statistics.dtype != np.float64 or statistics.ndim != 1:
        raise CheckpointError("optimizer.safetensors holds no running statistics")
    state = LearnerState(vectors, statistics, read_plain(_file(files, "state.json")))
    if not state.is_finite:
        raise CheckpointError("weights, moments or statistics are not finite")
    return state, table


def _file(files: dict[str, bytes], name: str) -> bytes:
    if name not in files:
        raise CheckpointError(f"the checkpoint has no {name}")
    return files[name]


def _arrays(files: dict[str, bytes], name: str) -> dict[str, Array]:
    """The arrays of a safetensors file, whose own parser checks its header against its size."""
    content = _file(files, name)
    try:
        return load(content)
    except Exception as error:  # of the parser's own kinds, and KeyError or TypeError for types that numpy has not
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}") from None


def named(vector: Array, table: Table) -> dict[str, Array]:
    """The views of a flat vector [P] that a table describes."""
    views, start = {}, 0
    for name, shape in table:
        size = int(np.prod(shape, dtype=np.int64))
        views[name] = vector[start : start + size].reshape(shape)
        start += size
    return views


def _flat(named: dict[str, Array], prefix: str, table: Table) -> Array:
    for name, shape in table:
        array = named.get(prefix + name)
        if array is None or array.shape != shape or array.dtype != np.float32:
            raise CheckpointError(f"{prefix}{name} is missing, or no float32 array of shape {shape}")
    return np.concatenate([np.zeros(0, np.float32), *(named[prefix + name].reshape(-1) for name, _ in table)])


# The plain values of a saved state, checked when they are read: whoever goes on from them takes them as they are.


COUNTERS = ("version", "updates", "env_steps", "samples", "discarded")

NUMBERS = ("adam_steps", "learning_rate")

LARGEST_COUNT = 2**53

MAX_BYTES = (1 << 16) - 8
"""Of a learner's own, as JSON."""

OF_MAIN = ("progress", "best")
"""What main keeps beside the learner's values: how the policy played, and what makes a checkpoint the best."""


def read_plain(text: bytes) -> dict[str, Any]:
    """The values in a state.json.

    Raises:
        CheckpointError: it is no JSON, or something in it is not what it must be.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError("state.json is damaged") from None
    if not isinstance(plain, dict):
        raise CheckpointError("state.json holds no values by name")
    _check_learner(plain)
    _check_progress(plain.get("progress", {}))
    best = plain.get("best", {"metric": "", "value": 0})
    if not isinstance(best, dict) or not isinstance(best.get("metric"), str) or not is_number(best.get("value")):
        raise _wrong("best")
    return plain


def _check_learner(plain: dict[str, Any]) -> None:
    for name in COUNTERS:
        if not _is_count(plain.get(name)):
            raise _wrong(name)
    for name in NUMBERS:
        if not is_number(plain.get(name)):
            raise _wrong(name)
    if not _is_base64(plain.get("generator", "")):
        raise _wrong("generator")
    _check_traits(plain.get(KEY, {}))
    own = {name: value for name, value in plain.items() if name not in OF_MAIN}
    if len(json.dumps(own)) > MAX_BYTES:
        raise CheckpointError(f"state.json holds more than {MAX_BYTES} bytes of a learner's values")


def _check_traits(traits: object) -> None:
    """Names, kinds and sizes; whether the values are such that this run can learn with them is for others to say."""
    if not isinstance(traits, dict) or not traits.keys() <= {one.name for one in fields(Traits)}:
        raise _wrong(KEY)
    mappings = [traits.get(name, {}) for name in ("hyperparameters", "reward_shaping")]
    counts = [traits.get(name, 0) for name in ("changes", "adoptions", "decided_env_steps")]
    try:
        plain = all(isinstance(one, dict) and is_plain(one) for one in mappings)
    except RecursionError:  # thousands of brackets
        plain = False
    if not plain or not all(map(_is_count, counts)):
        raise _wrong(KEY)


def _check_progress(progress: object) -> None:
    counts = ("episodes", "adoptions")
    if not isinstance(progress, dict) or not all(_is_count(progress.get(name, 0)) for name in counts):
        raise _wrong("progress")
    seconds, windows = progress.get("elapsed_seconds", 0), progress.get("windows", {})
    if not is_number(seconds) or seconds < 0 or not isinstance(windows, dict):
        raise _wrong("progress")
    for window in windows.values():
        if not isinstance(window, list) or not all(isinstance(x, float) or is_number(x) for x in window):
            raise _wrong("progress")  # a return can be NaN


def _wrong(name: str) -> CheckpointError:
    return CheckpointError(f"{name} in state.json is missing or is not what it must be")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def _is_base64(value: object) -> bool:
    try:
        return isinstance(value, str) and base64.b64decode(value, validate=True) is not None
    except ValueError:
        return False
