"""The meaning of gymnasium's spaces for memory and models: which can be learned from and acted in, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from appo.envs.config import EnvConfig
from appo.envs.spec import MASK_KEY, SINGLE_KEY, ActionPart, ActionSpec, Array, BoolArray, EnvSpec, ObservationSpec
from appo.utils.errors import SpaceMismatch, UsageError

Space = spaces.Space[Any]
NO_BOUND = 1e9
"""Bounds of an action from this size on count as no bound: many spaces declare the largest number of the type."""

FRAMES = "num_frames_of_flags"
"""The attribute of a space for `ObservationSpec.frames`."""


class ActionForm(NamedTuple):
    """Units in which policies act in a Box.

    Attributes:
        scaled: in [-1, 1] between finite bounds, and from -1 or up to 1 at a single bound; else in the space's units.
        squashed: numbers with two finite bounds are drawn from a Gaussian squashed by tanh.
        bins: number of choices that stand for every number, which needs two finite bounds; None: numbers.
    """

    scaled: bool = False
    squashed: bool = False
    bins: int | None = None

    @classmethod
    def of(cls, config: EnvConfig) -> ActionForm:
        """Return the form in the flags."""
        return cls(
            config.action_scaling == "auto", config.action_distribution == "tanh_gaussian", config.continuous_as_bins
        )


AS_THEY_ARE = ActionForm()


def spec_of(
    observation_space: Space,
    action_space: Space,
    *,
    num_agents: int = 1,
    frames_per_step: int = 1,
    same_step: bool = False,
    mask_in_info: bool = False,
    form: ActionForm = AS_THEY_ARE,
) -> EnvSpec:
    """Describe the spaces of one agent; a mask in `info` counts only if the observation has none.

    Raises:
        UsageError: a space cannot be learned from or acted in; names the space and the reason.
    """
    observations = observation_specs(observation_space)
    action = _action_spec(action_space, form)
    num_choices = sum(part.size for part in action.parts if part.kind == "categorical")
    shown = shown_mask(observation_space)
    if shown is not None:
        _require_mask_of(shown, action_space)
    elif mask_in_info:
        observations[MASK_KEY] = ObservationSpec((num_choices,), "uint8")
    source = f"observation key {shown.name}" if shown else f"info key {MASK_KEY}" if mask_in_info else ""
    return EnvSpec(
        observations,
        action,
        num_agents,
        frames_per_step,
        same_step,
        num_choices if source else 0,
        mask_in_info and shown is None,
        mask_source=source,
        notes=tuple(_unlike_bytes(observation_space)),
    )


def _unlike_bytes(space: Space) -> Iterator[str]:
    """Yield a line for every vector of bytes with unlike bounds: networks divide all entries by the largest one."""
    for key, leaf in flat_observation_spaces(space):
        if not isinstance(leaf, spaces.Box) or leaf.dtype != np.uint8 or len(leaf.shape) > 2:
            continue
        if (leaf.high != (most := leaf.high.max(initial=0))).any():
            yield (
                f"bytes of the observation key {key} are divided by the largest bound, {most}: entries with smaller"
                " bounds hardly count; declare float32, each entry of which --normalize_input normalizes"
            )


def require_spec(name: str, spec: EnvSpec, observation_space: Space, action_space: Space) -> None:
    """Check that the spaces of an environment equal the first environment's, for which memory and models were made.

    Raises:
        SpaceMismatch: the spaces differ.
    """
    form = ActionForm(spec.action.scale is not None, any(spec.action.is_squashed), spec.action.bins)
    found = spec_of(observation_space, action_space, mask_in_info=spec.mask_in_info, form=form)
    for what, own, first in (
        ("observations", found.observations, spec.observations), ("actions", found.action, spec.action)
    ):  # fmt: skip
        if own != first:
            raise SpaceMismatch(f"{name}: its {what} have another space than those of the first one that was made")


def observation_specs(space: Space) -> dict[str, ObservationSpec]:
    """How the observations of a space are stored, by key.

    Raises:
        UsageError: a leaf of the space cannot be learned from, or there is none.
    """
    observations = {key: _observation_spec(key, leaf) for key, leaf in flat_observation_spaces(space)}
    if not observations:
        raise UsageError(f"unsupported observation space {space}: it holds no key")
    return observations


def note_frames(space: Space, count: int | None) -> None:
    """Note in a space the number of frames that flags have stacked into images; None: none."""
    for _, leaf in flat_observation_spaces(space) if count is not None else ():
        vars(leaf)[FRAMES] = count


def layers(env: Any) -> Iterator[Any]:
    """Yield the wrappers of an environment, outermost first, and then the environment."""
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("env")


def frames_per_step(env: object) -> int:
    """Simulator frames behind a step, for families that count frames (Atari, VizDoom); 1 for all others."""
    unwrapped = getattr(env, "unwrapped", env)
    if isinstance(said := getattr(unwrapped, "appo_frames_per_step", None), int):  # of a pool
        return said
    registered = getattr(unwrapped, "spec", None)
    if not str(getattr(registered, "entry_point", "")).startswith(("ale_py", "vizdoom")):
        return 1
    for layer in layers(env):  # the outermost wrapper that skips frames decides
        if isinstance(skip := getattr(layer, "__dict__", {}).get("frame_skip"), int):
            return skip
    skip = getattr(registered, "kwargs", {}).get("frameskip")
    return skip if isinstance(skip, int) else 1  # a pair is a random skip: its mean would be a guess


def num_agents_of(env: Any) -> int:
    """Agents of an environment whose methods use lists, with an entry per agent; 0 for other environments.

    The environment declares agents by `num_agents` above 1, or by `is_multiagent`, which decides if present.

    Raises:
        UsageError: the environment has several agents and no number of agents.
    """
    unwrapped = getattr(env, "unwrapped", env)
    said, count = getattr(unwrapped, "is_multiagent", None), getattr(unwrapped, "num_agents", None)
    known = int(count) if isinstance(count, int | np.integer) and not isinstance(count, bool) else 0
    if not (known > 1 if said is None else said):
        return 0
    if known < 1:
        raise UsageError(f"{type(unwrapped).__name__}.num_agents must be the number of its agents, got {count!r}")
    return known


def find_out_agents(env: Any) -> None:
    """Find out whether an environment has several agents, if only `num_agents` above 1 is a sign.

    A reset decides: other environments count opponents in an attribute of the same name.
    """
    count, unwrapped = num_agents_of(env), getattr(env, "unwrapped", env)
    if not count or getattr(unwrapped, "is_multiagent", None) is not None:
        return
    begun = env.reset()
    if not isinstance(begun, tuple) or len(begun) != 2:
        return  # what makes the loop refuse it
    observation, infos = begun
    in_lists = isinstance(observation, list | tuple | np.ndarray) and len(observation) == count
    unwrapped.is_multiagent = isinstance(infos, list | tuple) or (
        in_lists and not _is_of(env.observation_space, observation)
    )


def _is_of(space: Space, observation: Any) -> bool:
    """Return whether the result of `reset` is one observation, by its shape: the loop checks the rest."""
    if space.shape is None:
        return observation in space
    try:
        return bool(np.shape(observation) == space.shape)
    except ValueError:  # a list of arrays of unequal shapes
        return False


def rows_said(env: Any, num_agents: int) -> str:
    """Return one line with the agent of every row; empty for one agent."""
    if num_agents < 2:
        return ""
    said = getattr(getattr(env, "unwrapped", env), "rows_said", None)
    return said if isinstance(said, str) else f"{num_agents} agents of each environment are rows, as in its lists"


def flat_observation_spaces(space: Space) -> list[tuple[str, Space]]:
    """Leaves of an observation space with their keys, in the order of the space.

    Raises:
        UsageError: two leaves get one key ("a.b" next to "b" inside "a").
    """
    leaves = _leaves("", space)
    keys = [key for key, _ in leaves]
    for twice in (key for key in keys if keys.count(key) > 1):
        raise UsageError(f"unsupported observation space: two entries are both called {twice}")
    return leaves


def children(space: Space) -> list[tuple[str | int, Space]] | None:
    """The parts of a Dict or Tuple by key or index; None for a leaf."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None


def flat_action_spaces(space: Space) -> list[Space]:
    """Leaves of an action space in the order in which their values are stored."""
    parts = children(space)
    return [space] if parts is None else [leaf for _, part in parts for leaf in flat_action_spaces(part)]


def choices_of(space: Space) -> list[tuple[int, int]]:
    """Number of choices and first choice of every component of all Discrete and MultiDiscrete, in stored order."""
    if isinstance(space, spaces.Discrete):
        return [(int(space.n), int(space.start))]
    if isinstance(space, spaces.MultiDiscrete):
        return list(zip(space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist(), strict=True))
    return [choice for _, part in children(space) or () for choice in choices_of(part)]


def _leaves(prefix: str, space: Space) -> list[tuple[str, Space]]:
    parts = children(space)
    if is_mask(prefix):  # wherever it stands, and of how many parts it is
        return [(MASK_KEY, space)]
    if parts is None:
        return [(prefix or SINGLE_KEY, space)]
    return [leaf for key, part in parts for leaf in _leaves(f"{prefix}.{key}" if prefix else str(key), part)]


def _observation_spec(key: str, space: Space) -> ObservationSpec:
    match space:
        case _ if key == MASK_KEY:
            return ObservationSpec(ShownMask((), space).shape, "uint8")
        case spaces.Box() if space.dtype == np.uint8:
            high = max(1, int(space.high.max(initial=0)))
            return ObservationSpec(space.shape, "uint8", high=high, frames=vars(space).get(FRAMES, 1))
        case spaces.Box():
            return ObservationSpec(space.shape, "float32", frames=vars(space).get(FRAMES, 1))
        case spaces.MultiBinary():
            return ObservationSpec(space.shape, "uint8", high=1)
        case spaces.Discrete() | spaces.MultiDiscrete():  # one-hot: the size of a choice carries no order
            return ObservationSpec((sum(size for size, _ in choices_of(space)),), "uint8", high=1)
        case _:
            raise UsageError(f"unsupported observation space {described(space)} (key {key}): {_refusal(space)}")


def _action_spec(space: Space, form: ActionForm) -> ActionSpec:
    leaves = flat_action_spaces(space)
    parts = [part for leaf in leaves for part in _action_parts(leaf, form)]
    boxes = [leaf for leaf in leaves if isinstance(leaf, spaces.Box)]
    numbers = [_stored(low, high, form) for box in boxes for low, high in _bounds(box)]
    if not sum(part.num_values for part in parts):
        raise UsageError(f"unsupported action space {space}: it leaves nothing to choose")
    if not numbers:
        return ActionSpec(tuple(parts))
    low, high, scale, shift = zip(*numbers, strict=True)
    return ActionSpec(tuple(parts), low, high, *((scale, shift) if form.scaled or form.bins else ()))


def _stored(low: float, high: float, form: ActionForm) -> tuple[float, float, float, float]:
    """Return the bounds of a stored number, and scale and shift on the way to the environment's number."""
    if form.bins:  # evenly spaced, the bounds among them (Tang and Agrawal 2020, arXiv:1901.10500, section 3.1)
        return 0.0, form.bins - 1.0, (high - low) / (form.bins - 1), low
    if not form.scaled:
        return low, high, 1.0, 0.0
    has_low, has_high = low > -NO_BOUND, high < NO_BOUND
    if has_low and has_high:
        return *((-inf, inf) if form.squashed else (-1.0, 1.0)), (high - low) / 2, (high + low) / 2
    if has_low:
        return -1.0, inf, 1.0, low + 1.0
    return (-inf, 1.0, 1.0, high - 1.0) if has_high else (-inf, inf, 1.0, 0.0)


def _bounds(box: spaces.Box) -> list[tuple[float, float]]:
    return list(zip(box.low.reshape(-1).tolist(), box.high.reshape(-1).tolist(), strict=True))


def _action_parts(space: Space, form: ActionForm) -> list[ActionPart]:
    match space:
        case spaces.Discrete() | spaces.MultiDiscrete():
            return [ActionPart("categorical", size) for size, _ in choices_of(space)]
        case spaces.MultiBinary():
            return [ActionPart("bernoulli", prod(space.shape))]
        case spaces.Box() if np.issubdtype(space.dtype, np.floating) and form.bins:
            if any(low <= -NO_BOUND or high >= NO_BOUND for low, high in _bounds(space)):
                raise UsageError(
                    f"--continuous_as_bins={form.bins} needs numbers with two bounds, the environment has"
                    f" {described(space)}"
                )
            return [ActionPart("bins", form.bins)] * prod(space.shape)
        case spaces.Box() if np.issubdtype(space.dtype, np.floating) and form.squashed:
            within = [low > -NO_BOUND and high < NO_BOUND for low, high in _bounds(space)]
            runs = [(bounded, len(list(run))) for bounded, run in groupby(within)]
            return [ActionPart("tanh_gaussian" if bounded else "gaussian", size) for bounded, size in runs]
        case spaces.Box() if np.issubdtype(space.dtype, np.floating):
            return [ActionPart("gaussian", prod(space.shape))]
        case spaces.Box():
            raise UsageError(
                f"unsupported action space {described(space)}: a Box of {space.dtype} is neither continuous nor "
                "a choice; MultiDiscrete is supported"
            )
        case _:
            raise UsageError(f"unsupported action space {described(space)}: {_refusal(space)}")


_REASONS: Mapping[type[Space], str] = {
    spaces.Text: "text has no fixed size",
    spaces.Sequence: "its length varies from step to step",
    spaces.Graph: "its size varies from step to step",
    spaces.OneOf: "its parts exclude each other",
}


def _refusal(space: object) -> str:
    if not isinstance(space, spaces.Space):
        name = f"{type(space).__module__}.{type(space).__qualname__}"
        return _OF_OLD_GYM if name.startswith("gym.") else f"{name} is no space of gymnasium"
    reasons = (reason for kind, reason in _REASONS.items() if isinstance(space, kind))
    return next(reasons, "only Box, Discrete, MultiDiscrete, MultiBinary and Dict or Tuple of them work")


_OF_OLD_GYM = (
    "it is of gym.spaces, the old package, not of gymnasium.spaces: `import gymnasium as gym` where it is made, or"
    " wrap the environment by shimmy.GymV21CompatibilityV0 or GymV26CompatibilityV0"
)


def described(space: Space) -> str:
    """Return the space in one line: a Text prints its whole alphabet, a large Box its bounds."""
    text = " ".join(str(space).split())
    return text if len(text) <= 80 else type(space).__name__


FORBIDS = -100.0
"""From this logit on, an entry of an additive mask forbids its choice: exp(-104) is 0 as a float32."""


class MaskForm:
    """The form of the masks of an action space: an array, or tuples, lists and dicts like the space.

    Attributes:
        size: entries of a mask, one for each choice of all categorical parts.
    """

    def __init__(self, space: Space) -> None:
        parts = children(space)
        if isinstance(space, spaces.MultiDiscrete):
            nested = space.nvec.ndim > 1
            parts = [(i, spaces.MultiDiscrete(n) if nested else spaces.Discrete(n)) for i, n in enumerate(space.nvec)]
        self._parts = [(key, MaskForm(part)) for key, part in parts or ()]
        self.sizes = [size for size, _ in choices_of(space)]
        self.size = sum(self.sizes)

    def flat(self, mask: Any, *, additive: bool = False) -> BoolArray:
        """Return a mask [M] of any of these forms: true where allowed.

        Args:
            mask: mask of the environment.
            additive: whether 0 allows, and a value far below 0 forbids.

        Raises:
            ValueError: the mask is of another form, or has other values; contains the expected and found form.
        """
        if type(mask) is np.ndarray and mask.dtype != object and mask.size == self.size:
            return allowed_by(mask.reshape(-1), additive=additive)
        chunks = self._chunks(mask)
        ends, own = (np.cumsum([0, *sizes]).tolist() for sizes in (map(len, chunks), self.sizes))
        crosses = any(
            any(begin < one < end for one in own) and not {begin, end} <= set(own) for begin, end in pairwise(ends)
        )
        if ends[-1] != self.size or crosses:
            found = " + ".join(str(len(chunk)) for chunk in chunks)
            entries = f"{self.size} entries" if len(chunks) < 2 else f"{' + '.join(map(str, self.sizes))} entries"
            raise ValueError(f"expected {entries}, got {found or 'none'}")
        return np.concatenate([allowed_by(chunk, additive=additive) for chunk in chunks])

    def _chunks(self, mask: Any) -> list[Array]:
        """Return arrays for whole parts, one after the other; None allows all, as in gymnasium's `sample`."""
        if mask is None:
            return [np.ones(self.size, np.bool_)]
        if isinstance(mask, Mapping):
            return self._chunks_of_dict(mask)
        if isinstance(mask, tuple | list) or (isinstance(mask, np.ndarray) and mask.dtype == object and mask.ndim):
            if len(mask) == len(self._parts) and not all(np.isscalar(one) for one in mask):
                return [chunk for (_, part), one in zip(self._parts, mask, strict=True) for chunk in part._chunks(one)]
            if any(isinstance(one, tuple | list | Mapping) or np.ndim(one) for one in mask):
                return [chunk for one in mask for chunk in self._chunks(one)]
        return [np.ravel(mask.tolist() if isinstance(mask, np.ndarray) and mask.dtype == object else mask)]

    def _chunks_of_dict(self, mask: Mapping[Any, Any]) -> list[Array]:
        parts = {key: part for key, part in self._parts if isinstance(key, str)}
        if unknown := [key for key in mask if key not in parts]:
            raise ValueError(f"expected the keys {', '.join(parts) or 'of no dict'}, got {unknown[0]}")
        if missing := [key for key, part in parts.items() if part.size and key not in mask]:
            raise ValueError(f"expected a mask for {missing[0]}, got none")
        return [chunk for key, part in parts.items() for chunk in part._chunks(mask.get(key))]


def allowed_by(mask: Any, *, additive: bool = False) -> BoolArray:
    """Return where an array of any shape allows a choice: by 1, or by 0 in an `additive` mask.

    Raises:
        ValueError: the array has other values.
    """
    if mask.dtype.kind not in "biuf":
        raise ValueError(f"expected entries 0 and 1, got {mask.dtype}")
    allowed: BoolArray = mask == 0 if additive else mask == 1
    odd = mask[~allowed & ~(mask <= FORBIDS if additive else mask == 0)]
    if odd.size:
        wanted = f"entries 0 (allowed) and below {FORBIDS:g}" if additive else "entries 0 (not now) and 1 (allowed)"
        hint = "; a mask that is added to logits is given as `mask == 0`" if (odd <= FORBIDS).any() else ""
        raise ValueError(f"expected {wanted}, got {odd.flat[0]}{hint}")
    return allowed


def is_mask(key: object) -> bool:
    """Return whether the last part of an observation key is the key of a mask."""
    return str(key).rpartition(".")[2] == MASK_KEY


class ShownMask(NamedTuple):
    """The mask in an observation."""

    path: tuple[str | int, ...]
    space: Space

    @property
    def name(self) -> str:
        """Return the key for messages."""
        return ".".join(map(str, self.path))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in storage."""
        if isinstance(self.space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
            return self.space.shape
        return (sum(prod(leaf.shape or ()) for leaf in flat_action_spaces(self.space)),)

    @property
    def is_additive(self) -> bool:
        """Return whether the mask is added to logits: the space has no entry above 0."""
        return all(
            isinstance(leaf, spaces.Box) and (leaf.high <= 0).all() and (leaf.low < 0).all()
            for leaf in flat_action_spaces(self.space)
        )

    def of(self, observation: Any) -> Any:
        """Return the mask in an observation."""
        for key in self.path:
            observation = observation[key]
        return observation


def shown_mask(space: Space, path: tuple[str | int, ...] = ()) -> ShownMask | None:
    """Return where the observations of a space show a mask; None: nowhere."""
    if path and is_mask(path[-1]):
        return ShownMask(path, space)
    return next(filter(None, (shown_mask(part, (*path, key)) for key, part in children(space) or ())), None)


def _require_mask_of(mask: ShownMask, action_space: Space) -> None:
    """Raise a `UsageError` if a mask in the observation fits no choices of the action."""
    form, name = MaskForm(action_space), f"observation key {mask.name}"
    kinds = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete, spaces.Discrete)
    if any(not isinstance(leaf, kinds) for leaf in flat_action_spaces(mask.space)):
        raise UsageError(f"{name} must be an array of 0 and 1, or a Tuple or Dict of them like the action space")
    if not form.size or prod(mask.shape) != form.size:
        raise UsageError(f"{name} has {prod(mask.shape)} entries for {form.size} action choices")
    try:
        form.flat(_ones(mask.space))
    except ValueError as error:
        raise UsageError(f"{name} does not fit the action space {described(action_space)}: {error}") from None


def _ones(space: Space) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _ones(part) for key, part in space.spaces.items()}
    return tuple(map(_ones, space.spaces)) if isinstance(space, spaces.Tuple) else np.ones(space.shape or (), np.bool_)
