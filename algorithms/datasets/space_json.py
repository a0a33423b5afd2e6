"""Spaces as JSON, in the form of Minari's metadata."""

import json
import math
from typing import Any

import numpy as np
from gymnasium import spaces

from appo.algorithms.datasets.episodes import Unfit
from appo.envs.spaces import Space, children, choices_of
from appo.utils.values import refuse_deep, shown


def space_to_json(space: Space) -> str:
    """Return a space of `spaces_of` in the form of Minari's metadata."""
    return json.dumps(_plain_space(space))


def _plain_space(space: Space) -> dict[str, object]:
    match space:
        case spaces.Dict():
            return {"type": "Dict", "subspaces": {key: _plain_space(one) for key, one in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": "Tuple", "subspaces": [_plain_space(one) for one in space.spaces]}
        case spaces.Discrete():
            return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
        case spaces.MultiDiscrete():
            sizes = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": "MultiDiscrete", "dtype": str(space.dtype), **sizes}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n}
        case spaces.Box():
            bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
            return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    raise ValueError(f"a {type(space).__name__} is not stored in datasets")


def space_from_json(text: object) -> Space:
    """Return the space in metadata; nothing is imported or evaluated.

    Raises:
        ValueError, KeyError, TypeError, AssertionError: not a space to learn from.
    """
    plain = json.loads(text) if isinstance(text, str) else text
    _refuse_many(plain)
    space = _space_of(plain)
    _refuse_large(space)
    return space


_NUMBERS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_DTYPES = {name: np.dtype(name) for name in _NUMBERS.split()}
"""Types of numbers by name in metadata; other types, such as text, can have any size."""
MOST_SPACES, MOST_CHOICES, MOST_NUMBERS = 1000, 1 << 16, 1 << 23
"""Limits of spaces in a space, of all choices and bits, and of all numbers."""


def _refuse_large(space: Space) -> None:
    leaves, choices, numbers = [space], 0, 0
    while leaves:
        leaf = leaves.pop()
        leaves += [one for _, one in children(leaf) or ()]
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
            choices += sum(size for size, _ in choices_of(leaf))
        elif isinstance(leaf, spaces.MultiBinary):
            choices += math.prod(leaf.shape)
        elif isinstance(leaf, spaces.Box):
            numbers += math.prod(max(1, size) for size in leaf.shape)
    if choices > MOST_CHOICES or numbers > MOST_NUMBERS:
        most = f"where at most {MOST_CHOICES} and {MOST_NUMBERS} are read"
        raise Unfit(f"a space of {choices} choices and {numbers} numbers, {most}")


def _refuse_many(plain: Any) -> None:
    """Refuse endlessly nested spaces (ValueError) before any is made."""
    refuse_deep(plain)
    level, count = [plain], 0
    while level:
        inner = [one.get("subspaces", ()) for one in level if isinstance(one, dict)]
        level = [one for some in inner for one in (some.values() if isinstance(some, dict) else some)]
        count += len(level)
        if count > MOST_SPACES:
            raise Unfit(f"a space of more than {MOST_SPACES} spaces")


def _space_of(plain: Any, key: str = "") -> Space:
    kind, inner = plain["type"], f"{key}." if key else ""
    if kind == "Dict":
        # Pairs keep their order, which gymnasium takes from a dict by sorting.
        return spaces.Dict([(str(name), _space_of(one, f"{inner}{name}")) for name, one in plain["subspaces"].items()])
    if kind == "Tuple":
        return spaces.Tuple([_space_of(one, f"{inner}{index}") for index, one in enumerate(plain["subspaces"])])
    if kind == "Discrete":
        return spaces.Discrete(int(plain["n"]), start=int(plain.get("start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(plain["nvec"], np.int64), start=plain.get("start"))
    if kind == "MultiBinary":
        return spaces.MultiBinary(plain["n"])
    if kind == "Box":
        shape, dtype = tuple(int(size) for size in plain["shape"]), _DTYPES.get(str(plain["dtype"]))
        if dtype is None:
            raise ValueError(f"a Box of the type {shown(plain['dtype'])}, which is none of {_NUMBERS}")
        low, high = (np.array(plain[end], np.float64).astype(dtype).reshape(shape) for end in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    raise Unfit(
        f"{f'{shown(key)}: ' if key else ''}a space of type {shown(kind)} cannot be learned from: leave it out by"
        " --input=package.module:function, which returns spaces and episodes without it"
    )
