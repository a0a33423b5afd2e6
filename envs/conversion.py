"""Conversion between environments and storage: actions out, observations and statistics in."""

import re
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NoReturn

import numpy as np
from gymnasium import spaces

from appo.envs.precision import Precision
from appo.envs.spaces import (
    MaskForm,
    Space,
    allowed_by,
    children,
    choices_of,
    flat_observation_spaces,
    is_mask,
    observation_specs,
    shown_mask,
)
from appo.envs.spec import MASK_KEY, SINGLE_KEY, ActionSpec, Array, ObservationSpec
from appo.utils.errors import AppoError, EnvironmentFailure, SpaceMismatch, StopNow, text_of
from appo.utils.tracebacks import format_error

Path = tuple[str, ...]
Copy = Callable[[Array, Array], None]
BatchConverter = Callable[[Array], Any]
LACKING = re.compile(r"reset\(\) got an unexpected keyword argument '(seed|options)'")
"""Python's error about a `reset` in the style of old gym."""


def reraise(name: str, error: BaseException) -> NoReturn:
    """Raise an error from an environment's code as an `EnvironmentFailure` of one line.

    Errors that already are one line for the user pass, and so does a Ctrl-C.
    """
    raise failure_of(name, error) or error


def failure_of(name: str, error: BaseException) -> EnvironmentFailure | None:
    """The failure of an environment, in one line; None if the error is not the environment's.

    An environment's own KeyboardInterrupt cannot be told from a Ctrl-C where Python's default handler is installed; all
    training processes install another.
    """
    if isinstance(error, EnvironmentFailure):
        return error
    if isinstance(error, AppoError | StopNow):
        return None
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return None
    failure = EnvironmentFailure(f"{name} raised {type(error).__name__}: {one_line(error)}")
    if isinstance(error, TypeError) and (lacking := LACKING.search(str(error))):
        failure = SpaceMismatch(
            f"{name}: reset takes no {lacking[1]}: it must read `def reset(self, *, seed=None, options=None)` and begin"
            " with `super().reset(seed=seed)`, as gymnasium's environments do"
        )
    failure.__cause__ = error
    return failure


def close_env(env: Any, name: str, stacklevel: int) -> None:
    """Close an environment; a failure to close is reported as a warning."""
    try:
        env.close()
    except (Exception, SystemExit) as error:  # what was learned must not be lost to an environment's clean-up
        text = f"{name} raised {type(error).__name__} in close: {one_line(error)}\n{format_error(error)}"
        warnings.warn(text, stacklevel=stacklevel)


def one_line(error: BaseException) -> str:
    """The text of an exception without line breaks, at most 300 characters."""
    text = text_of(error)
    return text if len(text) <= 300 else text[:297] + "..."


def require_info(name: str, where: str, info: object) -> None:
    """Refuse an info of `reset` or `step` that is no dict (SpaceMismatch)."""
    if not isinstance(info, Mapping):
        returned = f"({'observation' if where == 'reset' else 'observation, reward, terminated, truncated'}, info)"
        raise SpaceMismatch(
            f"{name}: {where} must return {returned} with a dict as info, as gymnasium's environments do"
        )


class ActionUnits:
    """Turns stored numbers and bins [R, A] into numbers of the environment; choices and bits pass unchanged."""

    def __init__(self, action: ActionSpec):
        size, bounded = action.num_values, np.array(action.is_bounded, np.bool_)
        self._squashed = np.flatnonzero(action.is_squashed)
        self._low, self._high = np.full(size, -np.inf), np.full(size, np.inf)
        self._scale, self._shift = np.ones(size), np.zeros(size)
        if action.scale is not None:
            self._low[bounded], self._high[bounded] = action.low, action.high
            self._scale[bounded], self._shift[bounded] = action.scale, action.shift
        # Where [-1, 1] stands for itself, the bounds of the space are all there is to do.
        self.differ = bool(self._squashed.size or (self._scale != 1.0).any() or self._shift.any())

    def __call__(self, action: Array) -> Array:
        """The values [R, A] for the environment, float64: rounding may pass a bound by a little."""
        values = np.clip(action, self._low, self._high).astype(np.float64, copy=False)
        if self._squashed.size:
            values[:, self._squashed] = np.tanh(values[:, self._squashed])
        return values * self._scale + self._shift


class ActionConverter:
    """Turns stored actions [R, A] into actions of an environment's action space.

    Real numbers are scaled, and clipped to the bounds, for the environment only: the recorded log-probability is of the
    stored action, as the policy drew it.

    Args:
        space: action space of the environment.
        action: spec of the stored actions; None: stored in the units of the environment.
    """

    def __init__(self, space: Space, action: ActionSpec | None = None):
        self._convert, _ = _batch_converter(space, 0)
        self._split = _row_splitter(space)
        units = None if action is None else ActionUnits(action)
        self._units = units if units and units.differ else None

    def batch(self, action: Array) -> Any:
        """One action of the batched space of R environments."""
        return self._convert(action if self._units is None else self._units(action))

    def rows(self, action: Array) -> Sequence[Any]:
        """R actions of the single space: Python ints for Discrete, arrays, tuples or dicts otherwise."""
        return self._split(self.batch(action))


def _batch_converter(space: Space, begin: int) -> tuple[BatchConverter, int]:
    """The converter of the stored values from column `begin` on, and the column after them."""
    parts = children(space)
    if parts is not None:
        converters: dict[str | int, BatchConverter] = {}
        for key, part in parts:
            converters[key], begin = _batch_converter(part, begin)
        if isinstance(space, spaces.Dict):
            return lambda action: {key: convert(action) for key, convert in converters.items()}, begin
        return lambda action: tuple(convert(action) for convert in converters.values()), begin
    shape, dtype = space.shape or (), space.dtype
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda action: action[:, begin].astype(dtype) + start, begin + 1
    end = begin + prod(shape)
    if isinstance(space, spaces.Box):
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        return lambda action: np.clip(action[:, begin:end], low, high).astype(dtype).reshape(-1, *shape), end
    offset = space.start.reshape(-1) if isinstance(space, spaces.MultiDiscrete) else 0
    return lambda action: (action[:, begin:end].astype(dtype) + offset).astype(dtype).reshape(-1, *shape), end


def _row_splitter(space: Space) -> Callable[[Any], Sequence[Any]]:
    if isinstance(space, spaces.Dict):
        splitters = {key: _row_splitter(part) for key, part in space.spaces.items()}
        return lambda batch: [
            dict(zip(splitters, values, strict=True))
            for values in zip(*(split(batch[key]) for key, split in splitters.items()), strict=True)
        ]
    if isinstance(space, spaces.Tuple):
        parts = [_row_splitter(part) for part in space.spaces]
        return lambda batch: list(zip(*(split(part) for split, part in zip(parts, batch, strict=True)), strict=True))
    if isinstance(space, spaces.Discrete):
        return lambda batch: batch.tolist()  # plain ints: environments index lists and tables with them
    return list


class ObservationWriter:
    """Writes observations into slot rows; refuses keys, shapes and types that the observation space does not have.

    numpy would silently cut a float for a uint8 row to 0, and broadcast a wrong shape. Every write therefore checks the
    kind of the type and the shape. Bounds of a Box are not checked.

    Args:
        name: name of the environment in messages.
        space: observation space.
        action_space: action space, for a mask of several parts; needed only if observations contain such a mask.

    Attributes:
        space: observation space.
        precision: observer of all written numbers, or None; with an observer no array may bypass `write_row`.
        plain_shape, plain_types: shape and type characters of arrays that may be assigned to a row of the only key
            directly; MuJoCo's float64 is stored as float32.
    """

    def __init__(self, name: str, space: Space, action_space: Space | None = None):
        self.name = name
        self.specs: dict[str, ObservationSpec] = observation_specs(space)
        self.space, self._mask = space, shown_mask(space)
        of_parts = self._mask is not None and children(self._mask.space) is not None
        self._mask_form = MaskForm(action_space) if of_parts and action_space is not None else None
        self._is_additive = self._mask is not None and self._mask.is_additive
        self._copies = [
            (
                key,
                self.specs[key].shape if key == MASK_KEY else leaf.shape or (),
                _copy_of(key, leaf, self._is_additive),
            )
            for key, leaf in flat_observation_spaces(space)
        ]
        self.plain_shape, self.plain_types = space.shape, ""
        self.precision: Precision | None = None
        if isinstance(space, spaces.Box):
            codes, stored = np.typecodes["AllInteger"] + "efd?", self.specs[SINGLE_KEY].dtype
            self.plain_types = "".join(code for code in codes if np.can_cast(code, stored, _casting_to(stored)))

    def empty(self, num_rows: int) -> dict[str, Array]:
        """Arrays [R, *] of zeros, as in a slot."""
        return {key: np.zeros((num_rows, *spec.shape), spec.dtype) for key, spec in self.specs.items()}

    def write_row(self, out: dict[str, Array], row: int, observation: Any) -> None:
        """Write the observation of one row.

        Raises:
            SpaceMismatch: a key is missing or unknown, or a shape or type does not fit.
        """
        for (key, shape, copy), value in zip(self._copies, self._values(observation), strict=True):
            self._write(key, copy, out[key][row : row + 1], self._array(key, value)[None], (1, *shape))

    def write_batch(self, out: dict[str, Array], observation: Any, rows: Array | None = None) -> None:
        """Write batched observations: all rows, or only those where `rows` [R] is true.

        Raises:
            SpaceMismatch: as for `write_row`.
        """
        for (key, shape, copy), value in zip(self._copies, self._values(observation), strict=True):
            target = out[key]
            if key == MASK_KEY and self._mask_form is not None and not isinstance(value, np.ndarray):
                for row in range(len(target)) if rows is None else np.flatnonzero(rows):
                    own = self._array(key, _row_of_parts(value, row))[None]
                    self._write(key, copy, target[row : row + 1], own, (1, *shape))
                continue
            source = np.asarray(value)
            if rows is None or source.shape != (len(target), *shape):
                self._write(key, copy, target, source, (len(target), *shape))
                continue
            for row in np.flatnonzero(rows):
                self._write(key, copy, target[row : row + 1], source[row : row + 1], (1, *shape))

    def _array(self, key: str, value: Any) -> Array:
        """Return a row's value under a key as an array; a mask of several parts as a single vector."""
        if key != MASK_KEY or self._mask_form is None:
            return np.asarray(value)
        try:
            return self._mask_form.flat(value, additive=self._is_additive)
        except ValueError as error:
            raise SpaceMismatch(f"{self.name}: observation key {self._shown_name(key)}: {error}") from None

    def _values(self, observation: Any) -> list[Any]:
        values: list[Any] = []
        self._collect(self.space, observation, (), values)
        return values

    def _collect(self, space: Space, observation: Any, path: Path, values: list[Any]) -> None:
        if isinstance(space, spaces.Dict):
            self._collect_dict(space, observation, path, values)
        elif isinstance(space, spaces.Tuple):
            self._require(path, observation, list | tuple, "a tuple")
            if len(observation) != len(space.spaces):
                self._fail(".".join(path), f"{len(space.spaces)} entries", len(observation))
            for index, part in enumerate(space.spaces):
                self._collect(part, observation[index], (*path, str(index)), values)
        else:
            values.append(observation)

    def _collect_dict(self, space: spaces.Dict, observation: Any, path: Path, values: list[Any]) -> None:
        self._require(path, observation, Mapping, "a dict")
        for key, part in space.spaces.items():
            if key not in observation:
                self._fail(".".join((*path, str(key))), "a value", "none")
            if is_mask(key):
                values.append(observation[key])
            else:
                self._collect(part, observation[key], (*path, str(key)), values)
        if len(observation) != len(space.spaces):
            unknown = next(key for key in observation if key not in space.spaces)
            self._fail(".".join((*path, str(unknown))), "no such key", "a value")

    def _require(self, path: Path, observation: Any, kind: Any, expected: str) -> None:
        if not isinstance(observation, kind):
            self._fail(".".join(path), expected, type(observation).__name__)

    def _write(self, key: str, copy: Copy, target: Array, source: Array, shape: tuple[int, ...]) -> None:
        if source.shape != shape:  # of one row, unless it is the number of rows that differs
            own = 0 if source.shape[1:] == shape[1:] or not source.shape else 1
            self._fail(key, f"shape {shape[own:]}", f"shape {source.shape[own:]}")
        try:
            copy(target, source)
            if self.precision is not None:
                self.precision.look(key, source, target)
        except (TypeError, ValueError) as error:
            if key == MASK_KEY:
                raise SpaceMismatch(f"{self.name}: observation key {self._shown_name(key)}: {error}") from None
            self._fail(key, f"a value that fits {target.dtype}", f"{source.dtype} ({one_line(error)})")

    def _shown_name(self, key: str) -> str:
        return self._mask.name if key == MASK_KEY and self._mask is not None else key

    def _fail(self, key: str, expected: str, got: object) -> NoReturn:
        where = f"observation key {self._shown_name(key)}" if key else "observation"
        raise SpaceMismatch(f"{self.name}: {where}: expected {expected}, got {got}")


def _row_of_parts(batch: Any, row: Any) -> Any:
    """Return one row of a value that is batched part by part, as in a vector's Dict or Tuple."""
    if isinstance(batch, Mapping):
        return {key: _row_of_parts(part, row) for key, part in batch.items()}
    return tuple(_row_of_parts(part, row) for part in batch) if isinstance(batch, tuple) else batch[row]


def _copy_of(key: str, space: Space, is_additive: bool) -> Copy:
    if key == MASK_KEY:
        # Masks come as bool, int8, int64 or float; bits say what is allowed.
        return lambda target, source: np.copyto(
            target, allowed_by(source, additive=is_additive and source.dtype != np.bool_)
        )
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        size, first = np.array(choices_of(space)).T
        begin = np.cumsum(size) - size
        return lambda target, source: _copy_one_hot(target, source, size, first, begin)
    if isinstance(space, spaces.MultiBinary):
        return _copy_bits
    return lambda target, source: np.copyto(target, source, casting=_casting_to(target.dtype))


def _casting_to(stored: Any) -> Literal["safe", "same_kind"]:
    """Return how numbers are cast: bytes only from types that hold no larger ones, which would wrap."""
    return "safe" if stored == np.uint8 else "same_kind"


def _copy_bits(target: Array, source: Array) -> None:
    """Bits come as bool or any integer; gymnasium's own samples are int8, which is cast to uint8 only when forced."""
    if source.dtype.kind not in "biu":
        raise TypeError("a bit must be an integer")
    if ((source != 0) & (source != 1)).any():
        raise ValueError(f"bits are 0 or 1, got {source.tolist()}")
    np.copyto(target, source, casting="unsafe")


def _copy_one_hot(target: Array, source: Array, size: Any, first: Any, begin: Any) -> None:
    """Write choices [N, *] as one-hot rows, component by component [C]: sizes, first choices, first columns."""
    if source.dtype.kind not in "iu":
        raise TypeError("a choice must be an integer")
    choice = source.reshape(len(source), -1).astype(np.int64) - first
    if ((choice < 0) | (choice >= size)).any():
        expected = ", ".join(f"{f}..{f + s - 1}" for f, s in zip(first.tolist(), size.tolist(), strict=True))
        raise ValueError(f"choices are {expected}, got {source.tolist()}")
    target[...] = 0
    target[np.arange(len(choice))[:, None], choice + begin] = 1


def as_numpy(value: Any) -> Any:
    """Return an array of another package, such as JAX or torch, as an array of numpy, and everything else unchanged."""
    is_known = isinstance(value, np.ndarray | np.generic | Sequence | Mapping)
    return value if is_known or not hasattr(value, "__array__") else np.asarray(value)


def row_of_batched(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return one row of the batched infos of a vector environment, by gymnasium's "_key" masks."""
    picked: dict[str, Any] = {}
    for key, batch in infos.items():
        mask, value = infos.get(f"_{key}"), as_numpy(batch)
        if str(key).startswith("_") or (mask is not None and not mask[row]):
            continue
        if isinstance(value, Mapping):
            picked[key] = row_of_batched(value, row)
        elif isinstance(value, np.ndarray | Sequence) and len(value) > row:
            picked[key] = value[row]
    return picked


@np.errstate(over="ignore")  # a loss that is not finite makes no step
def scale_rewards(reward: Array, factor: float, limit: float) -> None:
    """Multiply rewards in place by `--reward_scale`, then clip to a limit; 0: no limit."""
    if factor != 1.0:
        np.multiply(reward, factor, out=reward)
    if limit:
        np.clip(reward, -limit, limit, out=reward)
