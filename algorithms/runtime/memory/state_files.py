"""Files of a checkpoint: encoding a state of a learner, and decoding files that anybody may have written."""

import json
import math
import operator
from collections.abc import Callable, Mapping

import numpy as np
from safetensors.numpy import load, save

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.learner_state import NETWORKS, WEIGHTS, LearnerState, StateLayout, Table, named
from appo.algorithms.runtime.memory.plain_state import LARGEST_PLAIN, read_plain
from appo.utils.errors import CheckpointError, UsageError
from appo.utils.values import shown


def encode(state: LearnerState, table: Table) -> dict[str, bytes]:
    """Return the files of a checkpoint: weights in the first, other vectors in the second, plain values in the third.

    A vector with a value for every weight is stored under its name and the names of the weights, others unchanged.
    """
    others: dict[str, Array] = {}
    for name, vector in state.vectors.items():
        if name == WEIGHTS:
            continue
        if _is_like_weights(vector.shape, str(vector.dtype), table):
            others |= {f"{name}.{weight}": value for weight, value in named(vector, table).items()}
        else:
            others[name] = vector
    return {
        "model.safetensors": save(named(state.weights, table)),
        "optimizer.safetensors": save(others),
        "state.json": json.dumps({"format": 1, **state.meta}, indent=1).encode(),
    }


def decode(
    files: dict[str, bytes], table: Table | None = None, layout: StateLayout | None = None, *, whole: bool = True
) -> tuple[LearnerState, Table]:
    """Decode the files of a checkpoint, as written by `encode`; return the state and the table of its weights.

    Args:
        files: contents of a verified checkpoint. Verified files may be by any author.
        table: expected table; None accepts any, in alphabetical order.
        layout: expected layout; None: only the weights are read.
        whole: whether vectors outside of the layout, and missing ones other than of networks, are refused.

    Raises:
        UsageError: weights of another model, or vectors of another algorithm.
        CheckpointError: not the output of `encode` for a finite state.
    """
    weights = _arrays(files, "model.safetensors", lambda found: _check_weights(found, table))
    if table is None:
        table = [(name, tuple(value.shape)) for name, value in sorted(weights.items())]
    vectors = {WEIGHTS: _joined(weights, "", table)}
    named_so = table
    others = _arrays(files, "optimizer.safetensors", lambda found: _check_others(found, named_so, layout, whole))
    if layout is not None:
        for name, declared in layout.vectors.items():
            if name != WEIGHTS:
                like_weights = _is_like_weights(declared.shape, declared.dtype, table)
                if like_weights or name in others:
                    vectors[name] = _joined(others, f"{name}.", table) if like_weights else others[name]
    state = LearnerState(vectors, read_plain(_file(files, "state.json"), layout.numbers if layout else ()))
    if not state.is_finite or not all(np.isfinite(a).all() for a in others.values() if a.dtype.kind == "f"):
        raise CheckpointError("weights, moments or statistics are not finite")
    return state, table


def _is_like_weights(shape: tuple[int, ...], dtype: str, table: Table) -> bool:
    """Return whether an array is a vector with a value for every weight."""
    return dtype == "float32" and shape == (sum(int(np.prod(one, dtype=np.int64)) for _, one in table),)


Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type (a numpy name) and shape of arrays by name."""


def _check_weights(described: Described, table: Table | None) -> None:
    """Refuse weights with names or shapes unlike the table (UsageError); None accepts any."""
    found, expected = {name: shape for name, (_, shape) in sorted(described.items())}, dict(table or ())
    if table is not None and found != expected:
        names = [n for n in {**expected, **found} if found.get(n) != expected.get(n)]
        first = f"{names[0]}: saved {found.get(names[0], 'none')}, expected {expected.get(names[0], 'none')}"
        raise UsageError(f"the checkpoint belongs to another model; {len(names)} weights differ, first {first}")


def _check_others(described: Described, table: Table, layout: StateLayout | None, whole: bool) -> None:
    """Refuse vectors unlike the layout and, of a whole state, missing in the layout; None accepts any."""
    if layout is None:
        return
    known: set[str] = set()
    missing: list[str] = []
    for name, declared in layout.vectors.items():
        if name == WEIGHTS:
            continue
        if _is_like_weights(declared.shape, declared.dtype, table):
            known |= {f"{name}.{key}" for key, _ in table}
            for key, shape in table:
                if described.get(f"{name}.{key}") != ("float32", shape):
                    raise _no_array(f"{name}.{key}", shape)
            continue
        known.add(name)
        dtype, shape = described.get(name, ("", ()))
        if not (whole or name in described or name.startswith(NETWORKS)):
            continue  # moments of another algorithm, which begin anew
        if dtype != declared.dtype or len(shape) != len(declared.shape):
            missing.append(name)
        elif shape != declared.shape:
            found, expected = ("x".join(map(str, one)) for one in (shape, declared.shape))
            raise UsageError(f"the checkpoint belongs to another model; it has {found} {name}, expected {expected}")
    _refuse_names(missing, sorted(described.keys() - known) if whole else [])


def _refuse_names(missing: list[str], unknown: list[str]) -> None:
    """Refuse a file that lacks arrays (CheckpointError), or has other ones (UsageError)."""
    if missing and unknown:
        raise UsageError(f"the checkpoint belongs to another model; it has {shown(unknown[0])} and no {missing[0]}")
    if missing:
        raise CheckpointError(f"optimizer.safetensors holds no {missing[0]}")
    if unknown:
        raise UsageError(f"the checkpoint belongs to another algorithm; it has {shown(unknown[0])}")


def _file(files: dict[str, bytes], name: str) -> bytes:
    if name not in files:
        raise CheckpointError(f"the checkpoint has no {name}")
    return files[name]


def _arrays(files: dict[str, bytes], name: str, check: Callable[[Described], None]) -> dict[str, Array]:
    """Return the arrays of a safetensors file, after a check of its header without memory for any array."""
    content = _file(files, name)
    if (said := _described(content)) is not None:
        check(said)
    try:
        arrays: dict[str, Array] = load(content)
    except Exception as error:  # errors of the parser, and KeyError or TypeError for types unknown to numpy
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}") from None
    check({key: (array.dtype.name, array.shape) for key, array in arrays.items()})
    return arrays


def _described(content: bytes) -> Described | None:
    """Return the header of a safetensors file written by `encode`; None: only its parser can judge the file.

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
            # numpy allows a few dimensions more than 32
            if entry["data_offsets"] != [start, end] or min(shape, default=0) < 0 or len(shape) > 32:
                return None
            described[key] = (dtype.name, shape)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return described if end == len(content) - begin else None


NUMPY_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool"} | {
    f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
"""Names of types: safetensors -> numpy."""


def _joined(named: dict[str, Array], prefix: str, table: Table) -> Array:
    for name, shape in table:
        array = named.get(prefix + name)
        if array is None or array.shape != shape or array.dtype != np.float32:
            raise _no_array(prefix + name, shape)
    return np.concatenate([np.zeros(0, np.float32), *(named[prefix + name].reshape(-1) for name, _ in table)])


def _no_array(name: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{name} is missing, or no float32 array of shape {shape}")
