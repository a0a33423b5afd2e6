"""Action masks: sources of masks, and masks that are refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from appo.envs.conversion import as_numpy, row_of_batched
from appo.envs.spaces import NO_BOUND, MaskForm, Space, children, choices_of, shown_mask
from appo.envs.spec import MASK_KEY, ActionSpec, Array, BoolArray, EnvSpec, row_name
from appo.utils.errors import NothingAllowed, SpaceMismatch

CHOICES = spaces.Discrete | spaces.MultiDiscrete
METHOD = "action_masks"
"""The method of an environment that returns the mask; sb3-contrib uses the same name."""

BY_METHOD = f"the method {METHOD}() of the environment"


class FindsMask:
    """Finds the mask in the observation of an environment, or else in the info.

    Attributes:
        form: form of the masks.
        shown: place of the mask in observations; None: no mask there.
    """

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self.form, self.shown = MaskForm(action_space), shown_mask(observation_space)

    def find(self, observation: Any, info: Mapping[str, Any]) -> BoolArray | None:
        """Return the mask [M]; None without a mask (ValueError: as `MaskForm.flat`)."""
        if self.shown is not None:
            return self.form.flat(self.shown.of(observation), additive=self.shown.is_additive)
        return None if info.get(MASK_KEY) is None else self.form.flat(info[MASK_KEY])


class AllowedActions(FindsMask):
    """Tests whether an action of an environment is allowed by the environment's mask."""

    def __init__(self, observation_space: Space, action_space: Space):
        super().__init__(observation_space, action_space)
        self._space = action_space
        sizes, starts = np.array(choices_of(action_space)).reshape(-1, 2).T
        self._offsets = np.cumsum(sizes) - sizes - starts  # what makes choices entries of a mask

    def __call__(self, action: Any, observation: Any, info: Mapping[str, Any]) -> bool:
        """False where the mask in the observation, or else in info, forbids a choice of the action."""
        try:
            allowed = self.find(observation, info) if self.form.size else None
        except (ValueError, LookupError, TypeError):
            return True  # what writes it refuses it, and says why
        return allowed is None or bool(allowed[np.array(choices_in(self._space, action)) + self._offsets].all())


def choices_in(space: Space, action: Any) -> list[int]:
    """Return all categorical choices of an action, in the order of storage."""
    of_parts = (choice for key, part in children(space) or () for choice in choices_in(part, action[key]))
    return np.ravel(action).tolist() if isinstance(space, CHOICES) else list(of_parts)


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
                raise NothingAllowed(f"{MASK_KEY}: expected at least one allowed choice, got all zero")
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
            bounds = list(zip(action.low or (), action.high or (), strict=True))[num_reals : num_reals + size]
            bounded = [low > -NO_BOUND and high < NO_BOUND for low, high in bounds]
            values += [random.uniform(*b) if both else random.normal() for b, both in zip(bounds, bounded, strict=True)]
            num_reals += size
    return np.array([values], action.dtype)


class ActionMasks(FindsMask):
    """Writes the masks that come in `info`, and finds masks that leave no choice.

    The mask of a final observation may be empty, because no action follows. Such a mask is filled up: the policy
    computes an action anyway, which is not used.

    Args:
        name: name of the environment in messages.
        spec: spec of the environment; the mask covers all categorical parts, one after the other.
        observation_space, action_space: spaces of one agent.
    """

    def __init__(self, name: str, spec: EnvSpec, observation_space: Space, action_space: Space):
        super().__init__(observation_space, action_space)
        self.name, self.in_info = name, spec.mask_in_info
        self._num_agents = spec.num_agents
        self._begins = np.cumsum([0, *self.form.sizes[:-1]])

    def write_row(self, obs: dict[str, Array], row: int, info: Mapping[str, Any]) -> None:
        """Write the mask from the info of one environment.

        Raises:
            SpaceMismatch: the mask is missing, of another size, or has other values.
        """
        obs[MASK_KEY][row] = self.choices(None, info)

    def write_batch(self, obs: dict[str, Array], infos: Mapping[str, Any], rows: Sequence[int] | Array) -> None:
        """Write the masks from the infos of a vector environment for some rows.

        Raises:
            SpaceMismatch: a mask is missing, of another size, or has other values.
        """
        for row in rows:
            self.write_row(obs, int(row), mask_of_batched(infos, int(row), self.form.size))

    def write_final(self, final_obs: dict[str, Array], infos: Mapping[str, Any], ended: BoolArray) -> None:
        """Write the masks of final observations [R, *] of `ended` rows [R] from the infos of the last steps.

        No action follows, so a mask may be missing, and every choice is then allowed.

        Raises:
            SpaceMismatch: a mask is of another size, or has other values.
        """
        for row in np.flatnonzero(ended).tolist() if self.in_info else ():
            info = mask_of_batched(infos, row, self.form.size)
            final_obs[MASK_KEY][row] = 1 if info.get(MASK_KEY) is None else self.choices(None, info)

    def choices(self, observation: Any, info: Mapping[str, Any]) -> BoolArray:
        """Return the mask [M] after an observation and an info of the environment (SpaceMismatch: as `write_row`)."""
        try:
            allowed = self.find(observation, info)
        except ValueError as error:
            raise SpaceMismatch(f"{self.name}: {self._where}: {error}") from None
        if allowed is None:
            raise SpaceMismatch(f"{self.name}: {self._where}: expected a mask, got none")
        return allowed

    def stuck(self, obs: dict[str, Array], ended: BoolArray, first_row: int = 0) -> dict[int, NothingAllowed]:
        """Return the failures of masks [R, *] that leave no choice, by row; nearly always none.

        Masks of rows whose episode has ended, [R], are filled up.
        """
        masks = obs[MASK_KEY].reshape(len(ended), -1)
        stuck = (np.add.reduceat(masks, self._begins, axis=1, dtype=np.int64) == 0).any(axis=1)
        if not stuck.any():
            return {}
        masks[stuck & ended] = 1
        rows = [first_row + row for row in np.flatnonzero(stuck & ~ended).tolist()]
        said = f"{self.name}: {self._where}: expected at least one allowed choice, got all zero in "
        return {row: NothingAllowed(said + row_name(row, self._num_agents)) for row in rows}

    def require(self, obs: dict[str, Array], row: int) -> None:
        """Raise `NothingAllowed` if the mask of a row that goes on leaves nothing to choose."""
        for failure in self.stuck({MASK_KEY: obs[MASK_KEY][row : row + 1]}, np.zeros(1, np.bool_), row).values():
            raise failure

    @property
    def _where(self) -> str:
        return f"observation key {self.shown.name}" if self.shown else f"info key {MASK_KEY}"


def mask_of_batched(infos: Mapping[str, Any], row: int, size: int) -> dict[str, Any]:
    """Return the info of a row of a vector as far as masks go.

    Its masks are an entry per row, or parts of a mask, batched each; a dict is always batched.
    """
    said = {key: infos[key] for key in (MASK_KEY, f"_{MASK_KEY}") if key in infos}
    parts = said.get(MASK_KEY)
    parts = tuple(map(as_numpy, parts)) if isinstance(parts, tuple) else parts
    of_parts = isinstance(parts, tuple) and all(isinstance(part, np.ndarray) and part.ndim > 1 for part in parts)
    if of_parts and parts and sum(part[0].size for part in parts if len(part)) == size != parts[0].size:
        said[MASK_KEY] = list(zip(*parts, strict=False))
    return row_of_batched(said, row)


def why_unmasked(spec: EnvSpec) -> str:
    """Return why a mask in an info is not taken; empty if masks are taken, or the observation has a mask."""
    if spec.action_mask:
        return ""
    if any(part.kind == "categorical" for part in spec.action.parts):
        return "a step gave one and the first reset none: give it with every reset too"
    return "a mask is for choices, and the actions have none"


def masks_said(spec: EnvSpec) -> str:
    """Return one line about whether and where masks were found; empty for an environment without choices."""
    if spec.mask_source:
        return f"actions are masked by {spec.mask_source}"
    return "actions are not masked" if any(part.kind == "categorical" for part in spec.action.parts) else ""
