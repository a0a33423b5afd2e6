"""Whole episodes: what a dataset holds of one, the spaces it is described by, and how steps of rows become episodes."""

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from appo.envs.conversion import ActionUnits, ObservationWriter
from appo.envs.spaces import AS_THEY_ARE, ActionForm, Space, children, choices_of
from appo.envs.spec import SINGLE_KEY, ActionSpec, Array, BoolArray, EnvSpec, FloatArray
from appo.utils.errors import UsageError
from appo.utils.values import refuse_deep, shown

Spaces = tuple[Space, Space]
"""Of observations and of actions, as a dataset describes them."""

SAMPLED_ACTION = "sampled_action"
"""Name among the infos of continuous actions as they were drawn: a dataset's own actions are within their bounds."""
SQUASHED_BOUND = 4.0
"""The stored number that stands for a bound, where actions are squashed by tanh: 0.07 % of the range is left out."""
OF_BEHAVIOUR = ("logits", "log_prob", SAMPLED_ACTION)
"""Names among the infos of what means something only where actions are stored in the same form."""
POLICY_VERSION = "policy_version"
"""Name among the infos of the version of the weights that acted."""


class Unfit(ValueError):
    """Content of a dataset that is whole, but cannot be learned from as it is."""


@dataclass(frozen=True)
class Episode:
    """One whole episode of L steps, as learners see it.

    Attributes:
        obs: [L+1, *] by key; the last is the true final observation.
        action: [L, A] as stored in slots.
        reward: [L].
        terminated: its last state has no future; otherwise the episode was cut there.
        infos: [L, *] by name: what is known of the policy that acted.
    """

    obs: dict[str, Array]
    action: Array
    reward: FloatArray
    terminated: bool
    infos: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.reward)

    def returns(self, gamma: float) -> float:
        """Return the discounted sum of its rewards."""
        return float(np.sum(self.reward * gamma ** np.arange(len(self), dtype=np.float64)))


def spaces_of(spec: EnvSpec) -> Spaces:
    """Return spaces that describe what is stored of an environment: the same spec follows from them.

    A space of one key is no Dict; several choices are a MultiDiscrete, and parts of several kinds a Tuple.

    Raises:
        UsageError: what is stored of an action is not what the environment takes, and only flags say how.
    """
    if bins := spec.action.bins:
        raise UsageError(f"a dataset cannot say what the choices of --continuous_as_bins={bins} stand for")
    leaves: dict[str, Space] = {
        key: spaces.Box(0, one.high, one.shape, np.uint8)
        if one.dtype == "uint8"
        else spaces.Box(-np.inf, np.inf, one.shape, np.float32)
        for key, one in spec.observations.items()
    }
    shown = leaves[SINGLE_KEY] if leaves.keys() == {SINGLE_KEY} else spaces.Dict(leaves)
    return shown, _action_space(spec.action)


def _action_space(action: ActionSpec) -> Space:
    sizes = [part.size for part in action.parts]
    if all(part.kind == "categorical" for part in action.parts):
        return spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)
    bounds, leaves, begin = _bounds_of(action), list[Space](), 0
    for part in action.parts:
        if part.is_real:
            low, high = (ends[begin : begin + part.size].astype(np.float32) for ends in bounds)
            leaves.append(spaces.Box(low, high, dtype=np.float32))
            begin += part.size
        else:
            leaves.append(spaces.Discrete(part.size) if part.kind == "categorical" else spaces.MultiBinary(part.size))
    return leaves[0] if len(leaves) == 1 else spaces.Tuple(leaves)


def _bounds_of(action: ActionSpec) -> list[Array]:
    """The lowest and the highest of all real numbers, as the environment takes them."""
    ends: list[Array] = [np.array(end or (), np.float64) for end in (action.low, action.high)]
    if action.scale is None or action.shift is None:
        return ends
    squashed = np.array(action.is_squashed)[np.array(action.is_real)]
    return [
        np.where(squashed, sign, end) * action.scale + action.shift for sign, end in zip((-1, 1), ends, strict=True)
    ]


def form_of(action: ActionSpec) -> ActionForm:
    """Return the form in which actions are stored."""
    return ActionForm(action.scale is not None, any(action.is_squashed), action.bins)


_units_of = cache(ActionUnits)


def in_units(action: ActionSpec, stored: Array) -> Array:
    """Return stored actions [L, A] in the units of the environment, within its bounds where they are scaled."""
    units = _units_of(action)
    return units(stored).astype(stored.dtype) if units.differ else stored


def given_actions(space: Space, action: Array) -> Any:
    """Return actions [L, A] as a space of `spaces_of` describes them; continuous ones are clipped to their bounds.

    Args:
        space: of the actions.
        action: in the units of the environment, see `in_units`.
    """
    if isinstance(space, spaces.Discrete):
        return action[:, 0].astype(space.dtype)
    if isinstance(space, spaces.Tuple):
        widths = [leaf.shape[0] if leaf.shape else 1 for leaf in space.spaces]
        parts = np.split(action, np.cumsum(widths)[:-1], axis=1)
        return tuple(given_actions(leaf, part) for leaf, part in zip(space.spaces, parts, strict=True))
    if isinstance(space, spaces.Box):
        return np.clip(action, space.low, space.high).astype(space.dtype)
    return action.astype(space.dtype)


def stored_actions(space: Space, values: Any, action: ActionSpec) -> Array:
    """Return actions [L, A] as they are stored, of values as any action space describes them.

    Of a squashed number the one before tanh is stored, which of a bound is finite: `SQUASHED_BOUND`.

    Raises:
        ValueError: a value is no action of the space.
    """
    columns: Any = np.concatenate(_action_columns(space, values), axis=1)
    if columns.shape[1] != action.num_values or not np.isfinite(columns).all():
        raise ValueError("an action is none of its space")
    _check_choices(columns, action)
    stored: Array = columns.astype(action.dtype)
    if action.scale is None or action.shift is None:
        return stored
    real, squashed = np.array(action.is_real), np.array(action.is_squashed)
    numbers = (columns.astype(np.float64)[:, real] - action.shift) / action.scale
    largest = np.tanh(SQUASHED_BOUND)
    inside = np.arctanh(np.clip(numbers, -largest, largest))
    stored[:, real] = np.where(squashed[real], inside, numbers)
    return stored


def _check_choices(columns: Any, action: ActionSpec) -> None:
    """Refuse choices in actions [L, A] that there are not (ValueError)."""
    begin = 0
    for part in action.parts:
        choices = columns[:, begin : begin + part.num_values]
        begin += part.num_values
        most = {"categorical": part.size - 1, "bernoulli": 1}.get(part.kind)
        if most is not None and ((choices < 0) | (choices > most)).any():
            raise ValueError("an action is none of its space")


def _action_columns(space: Space, values: Any) -> list[Any]:
    parts = children(space)
    if parts is not None:
        return [column for key, part in parts for column in _action_columns(part, values[key])]
    array = np.asarray(values)
    start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
    return [(array - start).reshape(len(array), -1)]


def episode_of(
    name: str, described: Spaces, spec: EnvSpec, raw: Mapping[str, Any], form: ActionForm = AS_THEY_ARE
) -> Episode:
    """Make an episode of arrays under Minari's names, checked against the spaces.

    Args:
        name: of where they come from.
        described: the spaces.
        spec: what follows from them.
        raw: observations [L+1, *], actions, rewards, terminations and truncations [L, *], and infos by name if any.
            Dict and Tuple spaces have dicts and tuples of arrays.
        form: in which those who acted have stored actions. In another one than that of the spec probabilities mean
            something else, and are left out.

    Raises:
        ValueError, SpaceMismatch: something does not fit, or is not finite.
    """
    reward: FloatArray = np.asarray(raw["rewards"], np.float32).reshape(-1)
    steps = len(reward)
    for key, values in _leaves(described[0], raw["observations"]):
        if len(values) != steps + 1:
            there = f"there are {len(values)}" + (f" under {key}" if key else "")
            raise Unfit(f"its arrays have different lengths: {steps} steps need {steps + 1} observations, {there}")
    writer = ObservationWriter(name, *described)
    obs = writer.empty(steps + 1)
    writer.write_batch(obs, raw["observations"])
    action = stored_actions(described[1], raw["actions"], spec.action)
    infos = {key: np.asarray(value)[:steps] for key, value in dict(raw.get("infos") or {}).items()}
    if any(spec.action.is_real) and form != form_of(spec.action):
        infos = {key: value for key, value in infos.items() if key not in OF_BEHAVIOUR}
    if SAMPLED_ACTION in infos:
        action = infos.pop(SAMPLED_ACTION).astype(action.dtype).reshape(action.shape)
        _check_choices(action, spec.action)
    ended = [np.asarray(raw[key], np.bool_).reshape(-1) for key in ("terminations", "truncations")]
    named = {"actions": action, "terminations": ended[0], "truncations": ended[1], **infos}
    for key, values in named.items():
        if not steps or len(values) != steps:
            raise Unfit(f"its arrays have different lengths: {steps} rewards and {len(values)} {key}")
    if (ended[0] | ended[1])[:-1].any():
        raise ValueError("it goes on after its end")
    # Where others have called something else the same, it says nothing of a policy.
    widths = {"logits": (spec.action.num_logits,), "log_prob": (), "value": ()}
    infos = {key: one for key, one in infos.items() if one.shape[1:] == widths.get(key, one.shape[1:])}
    thoughts = [infos[key] for key in widths.keys() & infos.keys()]
    real = [array for array in (reward, action, *obs.values(), *thoughts) if array.dtype.kind == "f"]
    if not all(np.isfinite(array).all() for array in real):
        raise ValueError("it holds what is not finite")
    return Episode(obs, action, reward, bool(ended[0][-1]), infos)


def _leaves(space: Space, values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a space, each with its key; what has another form than the space is left to who reads it."""
    parts = children(space)
    if parts is None:
        yield key, values
    elif len(values) == len(parts) if isinstance(values, tuple | list) else isinstance(values, Mapping):
        for name, part in parts:
            if not isinstance(values, Mapping) or name in values:
                yield from _leaves(part, values[name], f"{key}.{name}" if key else str(name))


# Spaces as JSON, in the form of Minari's metadata.


def space_to_json(space: Space) -> str:
    """Return a space of `spaces_of` as Minari's metadata has it."""
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
    """Return the space that metadata describes; nothing is imported or evaluated for it.

    Raises:
        ValueError, KeyError, TypeError, AssertionError: it describes none that can be learned from.
    """
    plain = json.loads(text) if isinstance(text, str) else text
    _refuse_many(plain)
    space = _space_of(plain)
    _refuse_large(space)
    return space


_NUMBERS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_DTYPES = {name: np.dtype(name) for name in _NUMBERS.split()}
"""Types of numbers by the name that metadata has for them; others, as of text, can have any size."""
MOST_SPACES, MOST_CHOICES, MOST_NUMBERS = 1000, 1 << 16, 1 << 23
"""Of spaces in a space, of all choices and bits that these have, and of their numbers."""


def _refuse_large(space: Space) -> None:
    """Refuse a space that takes more memory than its description (ValueError)."""
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
    """Refuse spaces in spaces without end (ValueError), before any is made."""
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
        return spaces.Dict({str(name): _space_of(one, f"{inner}{name}") for name, one in plain["subspaces"].items()})
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


# From the steps of rows to whole episodes.


@dataclass(frozen=True)
class Steps:
    """T steps of R rows, time-major, as a slot holds them; a step that only resets follows each end (NEXT_STEP).

    Attributes:
        obs: [T+1, R, *] by key.
        first: [T+1, R], the observation starts an episode.
        valid: [T, R], the step was really taken.
        reward, terminated, truncated: [T, R].
        action: [T, R, A].
        infos: [T, R, *] by name.
    """

    obs: Mapping[str, Array]
    first: BoolArray
    valid: BoolArray
    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    action: Array
    infos: Mapping[str, Array]

    @property
    def named(self) -> dict[str, Array]:
        """Return what is kept of a step, [T, R, *] by name, and what is seen, [T+1, R, *]."""
        seen = {f"obs.{key}": array for key, array in self.obs.items()}
        return seen | {"action": self.action, "reward": self.reward} | {f"info.{k}": v for k, v in self.infos.items()}


class _Piece(NamedTuple):
    """Steps of one row that follow each other, in arrays [R, T, *] that many pieces share."""

    arrays: Mapping[str, Array]
    row: int
    begin: int
    end: int
    is_own: bool = False

    def of(self, name: str, more: int = 0) -> Array:
        array: Array = self.arrays[name][self.row, self.begin : self.end + more]
        return array


def _together(pieces: Sequence[_Piece]) -> _Piece:
    """Copies of pieces as one, so that the arrays which others share can go."""
    own = {name: np.concatenate([one.of(name) for one in pieces])[None] for name in pieces[0].arrays}
    return _Piece(own, 0, 0, own["reward"].shape[1], is_own=True)


PIECES = 8
"""Of an open episode, after which they are copied together: shared arrays live as long as any piece of them."""


class EpisodeAssembler:
    """Puts the steps of rows together to whole episodes; what has no beginning or no end is dropped and counted.

    Args:
        rows: R.
        skips_first: the first episode of each row has no beginning, whatever `first` says.

    Attributes:
        dropped_episodes, dropped_steps: that will be in no episode.
        open_steps: of episodes that have no end yet, in order of rows.
        step_bytes: of one step, as soon as there is one.
        shared_bytes: of the arrays of all rows that open episodes may hold, beside their own steps; see `compact`.
    """

    def __init__(self, rows: int, skips_first: bool = False) -> None:
        self._pieces: list[list[_Piece]] = [[] for _ in range(rows)]
        self._skips = [skips_first] * rows
        self.open_steps = [0] * rows
        self.dropped_episodes = self.dropped_steps = self.step_bytes = 0
        self._shared: deque[int] = deque(maxlen=PIECES)  # those of before are held by no piece that is not its own

    @property
    def shared_bytes(self) -> int:
        """Return how much may be held beside them."""
        return sum(self._shared)

    def compact(self) -> None:
        """Copy the steps of open episodes, so that they hold none of other rows; that costs time."""
        if not self._shared:
            return
        self._shared.clear()
        for pieces in self._pieces:
            own = sum(one.is_own for one in pieces)
            if own < len(pieces):
                pieces[own:] = [_together(pieces[own:])]

    def add(self, steps: Steps) -> Iterator[Episode]:
        """Take in the steps that follow those of before; yield the episodes that end in them."""
        ended = (steps.terminated | steps.truncated) & steps.valid
        stops: list[list[int]] = [[] for _ in self._pieces]
        for row, t in np.argwhere((ended | ~steps.valid).T).tolist():
            stops[row].append(t)
        arrays = {name: array.swapaxes(0, 1).copy() for name, array in steps.named.items()}
        self.step_bytes = sum(array[0, 0].nbytes for array in arrays.values())
        self._shared.append(sum(array.nbytes for array in arrays.values()))
        first, length = steps.first, len(ended)
        for row, ends in enumerate(stops):
            begin = 0
            for t in ends:
                if ended[t, row]:
                    self._append(_Piece(arrays, row, begin, t + 1), first)
                    if self._skips[row]:
                        self._skips[row] = False
                        self.break_off(row)
                    yield from self._finished(row, bool(steps.terminated[t, row]))
                else:
                    self._append(_Piece(arrays, row, begin, t), first)
                    if self._pieces[row]:  # nothing is open behind an end: this is one that failed
                        self._skips[row] = False
                    self.break_off(row)
                begin = t + 1
            self._append(_Piece(arrays, row, begin, length), first)
            newest = self._pieces[row][-PIECES:]
            if len(newest) == PIECES and not any(one.is_own for one in newest):
                self._pieces[row][-PIECES:] = [_together(newest)]

    def break_off(self, row: int) -> None:
        """Drop the episode of a row that has begun and will have no end; what follows of it has no beginning."""
        self.dropped_episodes += bool(self._pieces[row])
        self.dropped_steps += self.open_steps[row]
        self._pieces[row], self.open_steps[row] = [], 0

    def close(self) -> None:
        """Drop all that has no end yet."""
        for row in range(len(self._pieces)):
            self.break_off(row)

    def _append(self, piece: _Piece, first: BoolArray) -> None:
        steps = piece.end - piece.begin
        if steps <= 0:
            return
        row = piece.row
        if self._pieces[row] or first[piece.begin, row]:
            self._pieces[row].append(piece)
            self.open_steps[row] += steps
        else:
            self.dropped_steps += steps

    def _finished(self, row: int, terminated: bool) -> Iterator[Episode]:
        pieces = self._pieces[row]
        self._pieces[row], self.open_steps[row] = [], 0
        if not pieces:
            return
        whole: dict[str, dict[str, Any]] = {"obs": {}, "info": {}, "": {}}
        for name in pieces[0].arrays:
            kind, dot, key = name.partition(".")
            more = kind == "obs"
            parts = [*(one.of(name) for one in pieces[:-1]), pieces[-1].of(name, more)]
            whole[kind if dot else ""][key if dot else name] = np.concatenate(parts)
        of_steps = whole[""]
        yield Episode(whole["obs"], of_steps["action"], of_steps["reward"], terminated, whole["info"])
