"""The state of a learner, which must not be lost: double-buffered in the arena.

The learner writes it about once a second and on request; a restarted learner and the checkpoint writer read it, so
saving never stalls training and the death of a learner costs about a second.
"""

import base64
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.weights import barrier
from appo.algorithms.runtime.messages import KEY, PolicyTraits
from appo.utils.checkpoint_files import Limit
from appo.utils.errors import CheckpointError, UsageError
from appo.utils.run_folder import parse_mapping
from appo.utils.values import is_number, is_plain, nearest, shown

META_BYTES = 1 << 16

READ_ATTEMPTS = 50


class Vector(NamedTuple):
    """A vector of a learner's state. A checkpoint stores one of float32 with a value for every weight by their names.

    Attributes:
        size: number of values.
        dtype: a numpy name.
        inherited: `--init_from` takes it over; all others begin with zeros.
    """

    size: int
    dtype: str = "float32"
    inherited: bool = False


WEIGHTS = "weights"
"""The vector that acts: every layout has it."""


@dataclass(frozen=True)
class StateLayout:
    """The layout of a learner's state beside its counters; memory is reserved and checkpoints are checked by it.

    Attributes:
        vectors: by name, `WEIGHTS` first.
        numbers: plain values with which a new learner begins.
    """

    vectors: Mapping[str, Vector]
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class LearnerState:
    """A learner's state as arrays and plain values.

    Attributes:
        vectors: by name, as the algorithm's `StateLayout` has them; "weights" [P] is always there.
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
        """Return whether training can go on from it: a single NaN in a vector would spread for ever."""
        with np.errstate(invalid="ignore"):  # a sum is not finite if one of its terms is not, and takes no memory
            return all(bool(np.isfinite(a.sum(dtype=np.float64))) for a in self.vectors.values() if a.dtype.kind == "f")


def empty_vectors(vectors: Mapping[str, Vector]) -> dict[str, Array]:
    """Return memory for the vectors of a state, not filled."""
    return {name: np.empty(one.size, one.dtype) for name, one in vectors.items()}


class StateBlock:
    """The state of one policy's learner. One writer; readers never wait for it."""

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
        """Return the arena fields of one policy whose state has these vectors."""
        return [
            *(Field(f"state.{policy}.vectors.{name}", (2, one.size), one.dtype) for name, one in vectors.items()),
            Field(f"state.{policy}.meta", (2, META_BYTES), "uint8"),
            Field(f"state.{policy}.sequence", (2,), "int64"),
            Field(f"state.{policy}.latest", (1,), "int64"),
        ]

    def of_policy(self, policy: int) -> "StateBlock":
        """Return the block of another policy of the run."""
        return StateBlock(self._arena, policy)

    @property
    def writes(self) -> int:
        """Return how many writes were completed so far."""
        return int(self._latest[0])

    def write(self, state: LearnerState) -> None:
        """Replace the older of the two copies and make it the latest.

        Raises:
            ValueError: the plain values do not fit.
        """
        for name, vector in self.begin().items():
            vector[:] = state.vectors[name]
        self.commit(state.meta)

    def begin(self) -> dict[str, Array]:
        """Return the vectors of the older copy, which is lost; values written there are the latest after `commit`."""
        number = self.writes + 1
        self._sequence[number % 2] = 2 * number - 1
        barrier()
        return {name: vector[number % 2] for name, vector in self._vectors.items()}

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Make the vectors that have been written since `begin` the latest, with these plain values.

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
            RuntimeError: the writer overtook every attempt, which two writes a second cannot do.
        """
        for _ in range(READ_ATTEMPTS):
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
        rnn_state_size: H.
        layout: of the learner's state.
    """

    table: Table
    rnn_state_size: int
    layout: StateLayout

    @property
    def num_weights(self) -> int:
        """Return P."""
        return sum(int(np.prod(shape, dtype=np.int64)) for _, shape in self.table)

    @property
    def limit(self) -> Limit:
        """Return the largest size of a checkpoint whose state fits here, headers of files and plain values included."""
        vectors = sum(vector.size * np.dtype(vector.dtype).itemsize for vector in self.layout.vectors.values())
        return Limit(2 * vectors + LARGEST_PLAIN, "it belongs to another model")


FORMAT = 1


def encode(state: LearnerState, table: Table) -> dict[str, bytes]:
    """Return the files of a checkpoint: the weights in one, every other vector in the other.

    A vector with a value for every weight is stored under its name and the names of the weights, others as they are.
    """
    others: dict[str, Array] = {}
    for name, vector in state.vectors.items():
        if name == WEIGHTS:
            continue
        if _is_like_weights(len(vector), str(vector.dtype), table):
            others |= {f"{name}.{weight}": value for weight, value in named(vector, table).items()}
        else:
            others[name] = vector
    return {
        "model.safetensors": save(named(state.weights, table)),
        "optimizer.safetensors": save(others),
        "state.json": json.dumps({"format": FORMAT, **state.meta}, indent=1).encode(),
    }


def decode(
    files: dict[str, bytes], table: Table | None = None, layout: StateLayout | None = None
) -> tuple[LearnerState, Table]:
    """Read a state from the files of a checkpoint, as `encode` makes them, and the table of its weights.

    Args:
        files: of a checkpoint that verified. That says nothing of who wrote them.
        table: what the model expects; None accepts any, in alphabetical order.
        layout: what the learner expects; None: only the weights are read.

    Raises:
        UsageError: the weights are those of another model, or the other vectors those of another algorithm.
        CheckpointError: the files are not what `encode` makes of a state that training can go on from.
    """
    weights = _arrays(files, "model.safetensors", lambda found: _check_weights(found, table))
    if table is None:
        table = [(name, tuple(value.shape)) for name, value in sorted(weights.items())]
    vectors = {WEIGHTS: _joined(weights, "", table)}
    named_so = table
    others = _arrays(files, "optimizer.safetensors", lambda found: _check_others(found, named_so, layout))
    if layout is not None:
        for name, (size, dtype, _) in layout.vectors.items():
            if name != WEIGHTS:
                like_weights = _is_like_weights(size, dtype, table)
                vectors[name] = _joined(others, f"{name}.", table) if like_weights else others[name]
    state = LearnerState(vectors, read_plain(_file(files, "state.json"), layout.numbers if layout else ()))
    if not state.is_finite or not all(np.isfinite(a).all() for a in others.values() if a.dtype.kind == "f"):
        raise CheckpointError("weights, moments or statistics are not finite")
    return state, table


def _is_like_weights(size: int, dtype: str, table: Table) -> bool:
    """Return whether a vector has a value for every weight."""
    return dtype == "float32" and size == sum(int(np.prod(shape, dtype=np.int64)) for _, shape in table)


Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type, as numpy calls it, and shape of arrays by their names."""


def _check_weights(described: Described, table: Table | None) -> None:
    """Refuse weights that are not those of a table, by names and shapes (UsageError); None accepts any."""
    found, expected = {name: shape for name, (_, shape) in sorted(described.items())}, dict(table or ())
    if table is not None and found != expected:
        names = [n for n in {**expected, **found} if found.get(n) != expected.get(n)]
        first = f"{names[0]}: saved {found.get(names[0], 'none')}, expected {expected.get(names[0], 'none')}"
        raise UsageError(f"the checkpoint belongs to another model; {len(names)} weights differ, first {first}")


def _check_others(described: Described, table: Table, layout: StateLayout | None) -> None:
    """Refuse vectors beside the weights that are not those of a layout, or that it does not name; None accepts any."""
    if layout is None:
        return
    known: set[str] = set()
    for name, declared in layout.vectors.items():
        if name == WEIGHTS:
            continue
        if _is_like_weights(declared.size, declared.dtype, table):
            known |= {f"{name}.{key}" for key, _ in table}
            for key, shape in table:
                if described.get(f"{name}.{key}") != ("float32", shape):
                    raise _no_array(f"{name}.{key}", shape)
            continue
        known.add(name)
        dtype, shape = described.get(name, ("", ()))
        if dtype != declared.dtype or len(shape) != 1:
            raise CheckpointError(f"optimizer.safetensors holds no {name}")
        if shape != (declared.size,):
            raise UsageError(
                f"the checkpoint belongs to another model; it has {shape[0]} {name}, expected {declared.size}"
            )
    if unknown := sorted(described.keys() - known):
        raise UsageError(f"the checkpoint belongs to another algorithm; it has {shown(unknown[0])}")


def _file(files: dict[str, bytes], name: str) -> bytes:
    if name not in files:
        raise CheckpointError(f"the checkpoint has no {name}")
    return files[name]


def _arrays(files: dict[str, bytes], name: str, check: Callable[[Described], None]) -> dict[str, Array]:
    """Return the arrays of a safetensors file; its header is checked before there is memory for any."""
    content = _file(files, name)
    if (said := _described(content)) is not None:
        check(said)
    try:
        arrays: dict[str, Array] = load(content)
    except Exception as error:  # of the parser's own kinds, and KeyError or TypeError for types that numpy has not
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}") from None
    check({key: (array.dtype.name, array.shape) for key, array in arrays.items()})
    return arrays


def _described(content: bytes) -> Described | None:
    """Return the header of a safetensors file as `encode` writes it; None: its parser has to judge it.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    begin = 8 + int.from_bytes(content[:8], "little")
    if not 8 < begin <= min(len(content), LARGEST_PLAIN):
        return None
    try:
        entries = json.loads(content[8:begin])
        end, described = 0, dict[str, tuple[str, tuple[int, ...]]]()
        for key, entry in sorted(entries.items(), key=lambda one: one[1]["data_offsets"]):
            dtype, shape = np.dtype(NUMPY_NAMES[entry["dtype"]]), tuple(map(operator.index, entry["shape"]))
            start, end = end, end + math.prod(shape) * dtype.itemsize
            if entry["data_offsets"] != [start, end] or min(shape, default=0) < 0 or len(shape) > MOST_DIMENSIONS:
                return None
            described[key] = (dtype.name, shape)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return described if end == len(content) - begin else None


MOST_DIMENSIONS = 32
"""Of an array; numpy has few more."""

NUMPY_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool"} | {
    f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
"""Types as safetensors calls them, and as numpy does."""


def named(vector: Array, table: Table) -> dict[str, Array]:
    """Return the views of a flat vector [P] that a table describes."""
    views, start = {}, 0
    for name, shape in table:
        size = int(np.prod(shape, dtype=np.int64))
        views[name] = vector[start : start + size].reshape(shape)
        start += size
    return views


def vector_of(weights: Mapping[str, Any], table: Table) -> Array:
    """Return the flat vector [P] of all weights of a model by name, as somebody has given them.

    Raises:
        UsageError: a name or a shape is not the model's, or one is missing.
    """
    expected = dict(table)
    for name in [*weights, *expected]:
        if name not in expected:
            raise UsageError(f"the model has no weights {shown(name)}{nearest(name, expected)}")
        if name not in weights or np.shape(weights[name]) != expected[name]:
            given = np.shape(weights[name]) if name in weights else "none"
            raise UsageError(f"weights {name} must have shape {expected[name]}, got {given}")
    return np.concatenate([np.asarray(weights[name], np.float32).reshape(-1) for name in expected])


def _joined(named: dict[str, Array], prefix: str, table: Table) -> Array:
    for name, shape in table:
        array = named.get(prefix + name)
        if array is None or array.shape != shape or array.dtype != np.float32:
            raise _no_array(prefix + name, shape)
    return np.concatenate([np.zeros(0, np.float32), *(named[prefix + name].reshape(-1) for name, _ in table)])


def _no_array(name: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{name} is missing, or no float32 array of shape {shape}")


# The plain values of a saved state, checked when they are read: whoever goes on from them takes them as they are.


COUNTERS = ("version", "updates", "env_steps", "samples", "discarded")

LARGEST_COUNT = 2**53

LARGEST_PLAIN, MOST_CONTAINERS = 32 << 20, 100_000
"""Bytes of a state.json and lists and mappings in it: windows of statistics may hold many episodes."""

MAX_BYTES = (1 << 16) - 8
"""Of a learner's own, as JSON."""

OF_MAIN = ("progress", "best")
"""What main keeps beside the learner's values: how the policy played, and what makes a checkpoint the best."""


def read_plain(text: bytes, numbers: Iterable[str] = ()) -> dict[str, Any]:
    """Return the values in a state.json.

    Args:
        text: of the file.
        numbers: values of the learner that must be there.

    Raises:
        CheckpointError: it is no JSON, or something in it is not what it must be.
    """
    if text.count(b"[") + text.count(b"{") > MOST_CONTAINERS:  # 25 times as much memory
        raise CheckpointError("state.json holds more than any state does")
    try:
        plain = parse_mapping(text, "state.json", LARGEST_PLAIN)
    except UsageError as error:
        raise CheckpointError(str(error)) from None
    _check_learner(plain, numbers)
    _check_progress(plain.get("progress", {}))
    best = plain.get("best", {"metric": "", "value": 0})
    if not isinstance(best, dict) or not isinstance(best.get("metric"), str) or not is_number(best.get("value")):
        raise _wrong("best")
    return plain


def _check_learner(plain: dict[str, Any], numbers: Iterable[str]) -> None:
    for name in COUNTERS:
        if not _is_count(plain.get(name)):
            raise _wrong(name)
    for name in numbers:
        if not is_number(plain.get(name)):
            raise _wrong(name)
    if not _is_base64(plain.get("generator", "")):
        raise _wrong("generator")
    _check_traits(plain.get(KEY, {}))
    own = {name: value for name, value in plain.items() if name not in OF_MAIN}
    if len(json.dumps(own)) > MAX_BYTES:
        raise CheckpointError(f"state.json holds more than {MAX_BYTES} bytes of a learner's values")


def _check_traits(traits: object) -> None:
    """Check names, kinds and sizes; whether this run can learn with the values is for others to say."""
    if not isinstance(traits, dict) or not traits.keys() <= {one.name for one in fields(PolicyTraits)}:
        raise _wrong(KEY)
    mappings = [traits.get(name, {}) for name in ("hyperparameters", "reward_shaping")]
    counts = [traits.get(name, 0) for name in ("changes", "adoptions", "decided_env_steps")]
    if not all(isinstance(one, dict) and is_plain(one) for one in mappings) or not all(map(_is_count, counts)):
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
