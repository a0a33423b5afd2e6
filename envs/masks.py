"""Action masks: where they come from, and what no mask may say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from envs.spaces import Space, children, choices_of, flat_action_spaces
from envs.spec import MASK_KEY, ActionSpec, Array, BoolArray, EnvSpec, row_name
from utils.errors import SpaceMismatch

CHOICES = spaces.Discrete | spaces.MultiDiscrete


def flat_mask(mask: Any) -> BoolArray:
    """A mask [M] from an array or, as gymnasium's `sample` takes it, a tuple of masks: true where allowed."""
    if isinstance(mask, tuple | list):
        return np.concatenate([flat_mask(part) for part in mask]) if mask else np.zeros(0, np.bool_)
    flat: BoolArray = np.ravel(mask) != 0
    return flat


class AllowedActions:
    """Whether an action, as an environment takes it, is allowed by what the environment shows.

    Args:
        space: of the actions.
    """

    def __init__(self, space: Space):
        self._space = space
        leaves = [leaf for leaf in flat_action_spaces(space) if isinstance(leaf, CHOICES)]
        sizes, starts = np.array([choice for leaf in leaves for choice in choices_of(leaf)]).reshape(-1, 2).T
        self._size = int(sizes.sum())
        self._offsets = np.cumsum(sizes) - sizes - starts  # what makes choices entries of a mask

    def __call__(self, action: Any, observation: Any, info: Mapping[str, Any]) -> bool:
        """False where the mask in the observation, or else in info, forbids a choice of the action."""
        shows = isinstance(observation, Mapping) and MASK_KEY in observation
        mask = observation[MASK_KEY] if shows else info.get(MASK_KEY)
        if mask is None or not self._size:
            return True
        flat = flat_mask(mask)
        if flat.size != self._size:
            return True  # `ActionMasks` refuses it, and says why
        return bool(flat[np.array(_choices(self._space, action)) + self._offsets].all())


def _choices(space: Space, action: Any) -> list[int]:
    """All categorical choices of an action, in the order in which they are stored."""
    parts = children(space)
    if parts is not None:
        return [choice for key, part in parts for choice in _choices(part, action[key])]
    return np.ravel(action).tolist() if isinstance(space, CHOICES) else []


def random_action(action: ActionSpec, mask: BoolArray | None, random: np.random.Generator) -> Array:
    """A stored action [1, A]: any allowed choice, any bin, any bits, anything within finite bounds or standard normal.

    A squashed number is uniform after tanh, but for its outermost thousandth.
    """
    values: list[float] = []
    num_choices = num_reals = 0
    for kind, size in action.parts:
        if kind == "categorical":
            allowed = np.arange(size) if mask is None else np.flatnonzero(mask[num_choices : num_choices + size])
            if not len(allowed):
                raise SpaceMismatch(f"{MASK_KEY}: expected at least one allowed choice, got all zero")
            values.append(random.choice(allowed))
            num_choices += size
        elif kind == "bins":
            values += random.integers(size, size=1).tolist()
        elif kind == "bernoulli":
            values += random.integers(2, size=size).tolist()
        elif kind == "tanh_gaussian":
            values += np.arctanh(random.uniform(-0.999, 0.999, size)).tolist()
            num_reals += size
        else:
            ends = zip(action.low or (), action.high or (), strict=True)
            bounds = list(ends)[num_reals : num_reals + size]
            values += [random.uniform(*b) if np.isfinite(b[1] - b[0]) else random.normal() for b in bounds]
            num_reals += size
    return np.array([values], action.dtype)


class ActionMasks:
    """Writes the masks that come in `info`, and refuses those that leave nothing to choose.

    The mask of a final observation may be empty, since nothing is chosen there: it is filled up, for the policy is
    asked for an action all the same, which nobody takes.

    Args:
        name: The environment's name in messages.
        spec: Of the environment; its mask covers all categorical parts, one after the other.
    """

    def __init__(self, name: str, spec: EnvSpec):
        self.name, self.size, self.in_info = name, spec.action_mask, spec.mask_in_info
        self._num_agents = spec.num_agents
        sizes = [part.size for part in spec.action.parts if part.kind == "categorical"]
        self._begins = np.cumsum([0, *sizes[:-1]])

    def write_row(self, obs: dict[str, Array], row: int, info: Mapping[str, Any]) -> None:
        """Write the mask that one environment put into its info.

        Raises:
            SpaceMismatch: it is missing or of another size.
        """
        mask = info.get(MASK_KEY)
        if mask is None:
            self._fail("a mask", "none")
        flat = flat_mask(mask)
        if flat.size != self.size:
            self._fail(f"{self.size} entries", f"{flat.size}")
        obs[MASK_KEY][row] = flat

    def write_batch(self, obs: dict[str, Array], infos: Mapping[str, Any], rows: Sequence[int] | Array) -> None:
        """Write the masks that a vector environment put into its infos for some of its rows.

        Raises:
            SpaceMismatch: one is missing or of another size.
        """
        masks, given = infos.get(MASK_KEY, ()), infos.get(f"_{MASK_KEY}")
        for row in rows:
            said = row < len(masks) and (given is None or given[row])
            self.write_row(obs, int(row), {MASK_KEY: masks[row]} if said else {})

    def check(self, obs: dict[str, Array], ended: BoolArray) -> None:
        """Refuse masks [R, *] that leave nothing to choose, except those of rows whose episode has ended, [R].

        Raises:
            SpaceMismatch: a row that goes on has no choice left.
        """
        masks = obs[MASK_KEY].reshape(len(ended), -1)
        stuck = (np.add.reduceat(masks, self._begins, axis=1, dtype=np.int64) == 0).any(axis=1)
        if not stuck.any():
            return
        going_on = np.flatnonzero(stuck & ~ended)
        if len(going_on):
            self._fail("at least one allowed choice", f"all zero in {row_name(int(going_on[0]), self._num_agents)}")
        masks[stuck] = 1

    def _fail(self, expected: str, got: str) -> NoReturn:
        where = f"info key {MASK_KEY}" if self.in_info else f"observation key {MASK_KEY}"
        raise SpaceMismatch(f"{self.name}: {where}: expected {expected}, got {got}")
