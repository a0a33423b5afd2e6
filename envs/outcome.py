"""The reward and the ends of a step, checked: each value that is not a number or not a truth is named."""

from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from gymnasium import spaces

from appo.envs.spec import Array, BoolArray, row_name
from appo.utils.errors import EnvironmentFailure, NotFinite, SpaceMismatch
from appo.utils.values import shown

LARGEST = float(np.finfo(np.float32).max)
LEAST = -LARGEST
NUMBERS = frozenset({float, int, np.float64, np.float32})
"""Types of rewards that need only a check of size; the test decides most steps in a few nanoseconds."""

FLAGS = frozenset({bool, np.bool_})
"""Types of ends accepted without a check."""

SEVERAL = "only environments with is_multiagent = True speak in lists, an entry per agent (docs/multi_agent.md)"


def reward_of(name: str, who: str, reward: Any, env: Any = None) -> float:
    """Return the reward of a step as a number; NaN and infinity pass.

    Messages name the row by `who`; the spaces of `env` tell several agents from several objectives.

    Raises:
        SpaceMismatch: the reward is not a number.
        NotFinite: the reward is too large for the memory of rewards.
    """
    number: Any = reward.item() if getattr(reward, "shape", None) == () and hasattr(reward, "item") else reward
    if not isinstance(number, Real | Decimal):  # a long double stays one
        raise SpaceMismatch(f"{name}: {who}: a step comes with a number as reward, not with {_described(reward, env)}")
    size: Any = abs(number)
    if LARGEST < size < np.inf:
        raise NotFinite(_too_large(name, who, number))
    return float(number)


def truth_of(name: str, key: str, flag: Any) -> bool:
    """Return an end of an episode as a truth.

    Raises:
        SpaceMismatch: the end is neither true nor false, such as a list, which Python would take for true.
    """
    said = flag.item() if getattr(flag, "shape", None) == () and hasattr(flag, "item") else flag
    if isinstance(said, bool | int | float) and said in (0, 1):
        return bool(said)
    raise SpaceMismatch(f"{name}: step returned {_spelt(flag)} as {key}: it must be True or False")


def write_rewards(name: str, rewards: Any, out: Array) -> None:
    """Write the rewards of a vector environment, one per row of `out` [R].

    Raises:
        EnvironmentFailure: the rewards are not numbers, not one per row, or too large for `out`.
    """
    is_plain = type(rewards) is np.ndarray and rewards.shape == out.shape and rewards.dtype.char in "fd"
    # Most vectors, most steps. No square in a sum below the limit is of a number above it.
    if is_plain and (rewards.dtype == out.dtype or np.vdot(rewards, rewards) <= LARGEST):
        np.copyto(out, rewards, casting="same_kind")
        return
    array = _of_rows(name, "reward", rewards, len(out), "numbers")
    with np.errstate(over="ignore"):
        np.copyto(out, array, casting="same_kind")
    lost = np.flatnonzero(np.isinf(out) & np.isfinite(array))
    if lost.size:
        raise NotFinite(_too_large(name, row_name(int(lost[0]), 1), array[lost[0]].item()))


def truths_of(name: str, key: str, flags: Any, num_rows: int) -> BoolArray:
    """Return the ends of a vector environment as truths [R].

    Raises:
        EnvironmentFailure: the ends are not truths, or not one per row.
    """
    if type(flags) is np.ndarray and flags.dtype.char == "?" and flags.shape == (num_rows,):
        return flags
    array = _of_rows(name, key, flags, num_rows, "bools")
    odd = np.flatnonzero((array != 0) & (array != 1))
    if odd.size:
        who = row_name(int(odd[0]), 1)
        raise SpaceMismatch(f"{name}: step returned {array[odd[0]]} as {key} of {who}: it must be True or False")
    truths: BoolArray = array != 0
    return truths


def _of_rows(name: str, key: str, values: Any, num_rows: int, expected: str) -> Array:
    try:
        array: Array = np.asarray(values)
    except ValueError:  # lists of unequal lengths
        array = np.asarray(None)
    if array.shape != (num_rows,):
        several = f"; {_objectives(array.shape[1:])}" if key == "reward" and array.shape[:1] == (num_rows,) else ""
        raise EnvironmentFailure(f"{name}: {key}: expected shape ({num_rows},), got {array.shape}{several}")
    if array.dtype.kind not in "biuf":
        raise SpaceMismatch(f"{name}: {key}: expected {expected}, got {array.dtype} ({shown(array.tolist())})")
    return array


def _too_large(name: str, who: str, number: Any) -> str:
    try:
        said = f"{number:.6g}"
    except OverflowError:  # a Python int has no limit
        said = f"of {len(str(abs(number)))} digits"
    return f"{name}: {who}: reward is {said}, and float32, which keeps rewards, ends at {LARGEST:.3g}: make it smaller"


def _described(reward: Any, env: Any) -> str:
    """Describe a reward that is not a number, and the cure."""
    if isinstance(reward, Mapping):
        return f"a dict of {shown(list(reward))}: agents with names are those of a pettingzoo.ParallelEnv"
    shape = getattr(reward, "shape", None)
    size = shape[0] if shape else len(reward) if isinstance(reward, list | tuple) else 0
    if not size:
        return _spelt(reward)
    kind = f"{type(reward).__name__} of {size}"
    if _is_tuple(env, "observation_space", size) and _is_tuple(env, "action_space", size):
        return (
            f"a {kind}, and its spaces are Tuples of {size}: it has several agents, and {SEVERAL}, with both spaces"
            " those of one agent"
        )
    return f"a {kind}: {_objectives((size,))}"


def _spelt(value: Any) -> str:
    return shown(repr(value) if isinstance(value, str) else value)  # 'False' is a text


def _objectives(shape: tuple[int, ...]) -> str:
    if shape == (1,):
        return "its one entry is the number that is expected"
    return f"several objectives must be weighed into one number, by a wrapper of yours; of several agents, {SEVERAL}"


def _is_tuple(env: Any, key: str, size: int) -> bool:
    space = getattr(env, key, None)
    return size > 1 and isinstance(space, spaces.Tuple) and len(space.spaces) == size
