"""Whole episodes: content, spaces, and conversion from and to the arrays of a dataset."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from appo.envs.conversion import ObservationWriter
from appo.envs.spaces import AS_THEY_ARE, ActionForm, Space, children
from appo.envs.spec import SINGLE_KEY, ActionSpec, Array, EnvSpec, FloatArray
from appo.utils.errors import UsageError

Spaces = tuple[Space, Space]
"""Spaces of observations and of actions in a dataset."""

SAMPLED_ACTION = "sampled_action"
"""Info with continuous actions as drawn: a dataset's own actions are within their bounds."""
SQUASHED_BOUND = 4.0
"""Stored number for a bound of actions squashed by tanh; excludes 0.07 % of the range."""
OF_BEHAVIOUR = ("logits", "log_prob", SAMPLED_ACTION)
"""Infos that are valid only for actions stored in the same form."""


class Unfit(ValueError):
    """Undamaged content of a dataset from which nothing can be learned."""


@dataclass(frozen=True)
class Episode:
    """A whole episode of L steps in the form for learners.

    Attributes:
        obs: [L+1, *] by key; the last is the true final observation.
        action: [L, A] as stored in slots.
        reward: [L].
        terminated: whether the last state has no future; otherwise the episode was cut.
        infos: [L, *] by name: facts about the acting policy.
    """

    obs: dict[str, Array]
    action: Array
    reward: FloatArray
    terminated: bool
    infos: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.reward)

    def returns(self, gamma: float) -> float:
        """Return the discounted sum of rewards."""
        return float(np.sum(self.reward * gamma ** np.arange(len(self), dtype=np.float64)))


def spaces_of(spec: EnvSpec) -> Spaces:
    """Return spaces from which the spec of an environment follows again.

    A space of a single key is not a Dict; several choices are a MultiDiscrete, and parts of several kinds a Tuple.

    Raises:
        UsageError: stored actions differ from the environment's, and only flags define the difference.
    """
    if bins := spec.action.bins:
        raise UsageError(f"a dataset cannot say what the choices of --continuous_as_bins={bins} stand for")
    leaves: dict[str, Space] = {
        key: spaces.Box(0, one.high, one.shape, np.uint8)
        if one.dtype == "uint8"
        else spaces.Box(-np.inf, np.inf, one.shape, np.float32)
        for key, one in spec.observations.items()
    }
    shown = leaves[SINGLE_KEY] if leaves.keys() == {SINGLE_KEY} else spaces.Dict([*leaves.items()])  # in order
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
    """Return lowest and highest real numbers in the units of the environment."""
    ends: list[Array] = [np.array(end or (), np.float64) for end in (action.low, action.high)]
    if action.scale is None or action.shift is None:
        return ends
    squashed = np.array(action.is_squashed)[np.array(action.is_real)]
    return [
        np.where(squashed, sign, end) * action.scale + action.shift for sign, end in zip((-1, 1), ends, strict=True)
    ]


def form_of(action: ActionSpec) -> ActionForm:
    """Return the form of stored actions."""
    return ActionForm(action.scale is not None, any(action.is_squashed), action.bins)


def stored_actions(space: Space, values: Any, action: ActionSpec) -> Array:
    """Return actions [L, A] in stored form from values of any action space.

    A squashed number is stored before tanh, finite at a bound: `SQUASHED_BOUND`.

    Raises:
        ValueError: a value is outside the space.
    """
    columns: Any = np.concatenate(_action_columns(space, values), axis=1)
    if columns.shape[1] != action.num_values or not np.isfinite(columns).all():
        raise ValueError("an action is none of its space")
    _check_choices(columns, action)
    stored: Array = columns.astype(action.dtype)
    if action.scale is None or action.shift is None:
        return stored
    real, squashed = np.array(action.is_real), np.array(action.is_squashed)
    scale = np.where(action.scale, action.scale, 1.0)  # 0 for a number with a single value
    numbers = (columns.astype(np.float64)[:, real] - action.shift) / scale
    largest = np.tanh(SQUASHED_BOUND)
    stored[:, real] = np.where(squashed[real], np.arctanh(np.clip(numbers, -largest, largest)), numbers)
    return stored


def _check_choices(columns: Any, action: ActionSpec) -> None:
    begin = 0
    for part in action.parts:
        choices = columns[:, begin : begin + part.num_values]
        begin += part.num_values
        most = {"categorical": part.size - 1, "bernoulli": 1}.get(part.kind)
        if most is not None and ((choices < 0) | (choices > most) | (choices != np.floor(choices))).any():
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
    """Make an episode from arrays with Minari's names, checked against the spaces.

    Args:
        name: origin of the arrays, for messages.
        described: spaces of the dataset.
        spec: spec of the spaces.
        raw: observations [L+1, *]; actions, rewards, terminations and truncations [L, *]; optional infos by name. Dict
            and Tuple spaces have dicts and tuples of arrays.
        form: form of actions in the acting process. Probabilities of another form than the spec's are left out.

    Raises:
        ValueError, SpaceMismatch: arrays do not fit or are not finite.
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
    for key, values in {"actions": action, "terminations": ended[0], "truncations": ended[1]}.items():
        if not steps or len(values) != steps:
            raise Unfit(f"its arrays have different lengths: {steps} rewards and {len(values)} {key}")
    if (ended[0] | ended[1])[:-1].any():
        raise ValueError("it goes on after its end")
    return checked(Episode(obs, action, reward, bool(ended[0][-1]), infos), spec)


def checked(episode: Episode, spec: EnvSpec) -> Episode:
    """Return the episode with arrays of the spec's types.

    Raises:
        ValueError: a key, shape or type does not fit, an action is none of its space, or a number is not finite.
    """
    steps, widths = len(episode), {"logits": (spec.action.num_logits,), "log_prob": (), "value": ()}
    if episode.obs.keys() != spec.observations.keys():
        raise Unfit(f"its observations are {', '.join(episode.obs)} and not {', '.join(spec.observations)}")
    obs = {
        key: _typed(f"observations {key}", episode.obs[key], (steps + 1, *one.shape), one.dtype)
        for key, one in spec.observations.items()
    }
    action = _typed("actions", episode.action, (steps, spec.action.num_values), spec.action.dtype)
    _check_choices(action, spec.action)
    reward: FloatArray = np.asarray(_typed("rewards", episode.reward, (steps,), "float32"), np.float32)
    if not isinstance(episode.terminated, bool | np.bool_):
        raise Unfit("terminated is neither true nor false")
    infos = {key: np.asarray(one) for key, one in episode.infos.items()}
    for key, one in infos.items():
        if len(one) != steps:
            raise Unfit(f"its arrays have different lengths: {steps} rewards and {len(one)} {key}")
    # Where others have called something else the same, it says nothing of a policy.
    infos = {
        key: one
        for key, one in infos.items()
        if key not in widths or (one.shape[1:] == widths[key] and one.dtype.kind in "fiu")
    }
    thoughts = [infos[key] for key in widths.keys() & infos.keys()]
    real = [array for array in (reward, action, *obs.values(), *thoughts) if array.dtype.kind == "f"]
    if not all(np.isfinite(array).all() for array in real):
        raise ValueError("it holds what is not finite")
    return Episode(obs, action, reward, bool(episode.terminated), infos)


def _typed(name: str, values: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    array = np.asarray(values)
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise Unfit(f"its {name} are {list(array.shape)} {array.dtype} and not {list(shape)} {np.dtype(dtype)}")
    return array.astype(dtype, copy=False)


def _leaves(space: Space, values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a space with their keys; `ObservationWriter` handles values in another form."""
    parts = children(space)
    if parts is None:
        yield key, values
    elif len(values) == len(parts) if isinstance(values, tuple | list) else isinstance(values, Mapping):
        for name, part in parts:
            if not isinstance(values, Mapping) or name in values:
                yield from _leaves(part, values[name], f"{key}.{name}" if key else str(name))
