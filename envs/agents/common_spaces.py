"""One space for agents whose spaces differ: shorter vectors end in zeros, choices that only others have are masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from envs.spaces import Space, described
from envs.spec import Array
from utils.errors import UsageError

T = TypeVar("T")
Translation = Callable[[Any], Any]


class CommonSpaces:
    """The spaces in which all agents of an environment find room, and the way there and back.

    Args:
        name: the environment's name in messages.
        agents: their names.
        observation_spaces, action_spaces: of each agent.

    Attributes:
        observation_space, action_space: of every agent.
        masks: [M] per agent, the choices it has; None where all have the same.

    Raises:
        UsageError: there are no such spaces, with the reason.
    """

    def __init__(
        self, name: str, agents: Sequence[str], observation_spaces: Sequence[Space], action_spaces: Sequence[Space]
    ) -> None:
        self.observation_space = _common(name, "observation", agents, observation_spaces, _common_observation)
        self.action_space = _common(name, "action", agents, action_spaces, _common_action)
        self._pads = [_pad(own, self.observation_space) for own in observation_spaces]
        differ = any(own != self.action_space for own in action_spaces)
        self._translations = [_translation(own) if differ else _same for own in action_spaces]
        self.masks: list[Array] | None = None
        if differ and isinstance(self.action_space, spaces.Discrete):
            choices, sizes = np.arange(self.action_space.n), [space.n for space in _of(spaces.Discrete, action_spaces)]
            self.masks = [(choices < size).astype(np.int8) for size in sizes]

    def observation(self, agent: int, observation: Any) -> Any:
        """An agent's observation in the common space; one that is not of its own space stays as it is."""
        return self._pads[agent](observation)

    def action(self, agent: int, action: Any) -> Any:
        """What an action of the common space is for an agent."""
        return self._translations[agent](action)

    def mask(self, agent: int, mask: Any) -> Any:
        """What an agent may choose, of all choices there are; `mask` is what the environment says of it, or None."""
        if self.masks is None:
            return mask
        allowed = self.masks[agent].copy()
        if mask is not None:
            own = np.ravel(mask) != 0
            if own.size != allowed.sum():
                return mask  # whoever checks its size says so
            allowed[: own.size] = own
        return allowed


def _of(kind: type[T], own: Sequence[Space]) -> list[T]:
    return [space for space in own if isinstance(space, kind)]


def _common(
    name: str, what: str, agents: Sequence[str], own: Sequence[Space], join: Callable[[Sequence[Space]], Space]
) -> Space:
    """The space with room for all, or a `UsageError` that names two agents and says why there is none."""
    if all(space == own[0] for space in own):
        return own[0]
    try:
        return join(own)
    except ValueError as reason:
        other = next(i for i, space in enumerate(own) if space != own[0])
        both = f"{agents[0]} ({described(own[0])}) and {agents[other]} ({described(own[other])})"
        raise UsageError(f"{name}: no {what} space has room for both agents, {both}: {reason}") from None


def _common_observation(own: Sequence[Space]) -> Space:
    if all(space == own[0] for space in own):
        return own[0]
    if len({(type(space), space.dtype) for space in own}) > 1:
        raise ValueError("their kinds or types differ")
    join = _JOINS.get(type(own[0]))
    if join is None:
        raise ValueError(f"spaces of kind {type(own[0]).__name__} must be equal")
    return join(own)


def _common_dict(own: Sequence[Any]) -> Space:
    if any(set(space.spaces) != set(own[0].spaces) for space in own):
        raise ValueError("their keys differ")
    return spaces.Dict({key: _common_observation([space[key] for space in own]) for key in own[0].spaces})


def _common_box(own: Sequence[Any]) -> Space:
    if len({space.shape for space in own}) > 1 and any(len(space.shape) != 1 for space in own):
        raise ValueError("only vectors can be filled up with zeros, an image would then show something else")
    shape = max(space.shape for space in own)
    low = np.min([_filled(space.low, shape) for space in own], axis=0)
    high = np.max([_filled(space.high, shape) for space in own], axis=0)
    return spaces.Box(low, high, dtype=own[0].dtype.type)


def _common_bits(own: Sequence[Any]) -> Space:
    if any(len(space.shape) != 1 for space in own):
        raise ValueError("only vectors can be filled up with zeros")
    return spaces.MultiBinary(max(space.shape[0] for space in own))


def _common_choice(own: Sequence[Any]) -> Space:
    if any(space.start != own[0].start for space in own):
        raise ValueError("their first choices differ")
    return spaces.Discrete(max(int(space.n) for space in own), start=int(own[0].start))


_JOINS: dict[type[Space], Callable[[Sequence[Any]], Space]] = {
    spaces.Dict: _common_dict,
    spaces.Box: _common_box,
    spaces.MultiBinary: _common_bits,
    spaces.Discrete: _common_choice,
}


def _common_action(own: Sequence[Space]) -> Space:
    if discrete := _of(spaces.Discrete, own):
        if len(discrete) == len(own):
            return spaces.Discrete(max(int(space.n) for space in discrete))
    elif len({(type(space), space.shape, space.dtype) for space in own}) == 1 and isinstance(own[0], spaces.Box):
        return _common_box(own)
    raise ValueError("choices (Discrete) that an agent lacks can be masked, nothing else can")


def _same(value: Any) -> Any:
    return value


def _pad(own: Space, common: Space) -> Translation:
    """Puts observations of an agent's own space into the common one; whoever writes them says what is wrong."""
    if isinstance(own, spaces.Dict) and isinstance(common, spaces.Dict):
        pads = {key: _pad(part, common[key]) for key, part in own.spaces.items()}
        return lambda shown: _pad_dict(pads, shown)
    if own.shape is None or common.shape is None or own.shape == common.shape:
        return _same
    own_shape, shape = own.shape, common.shape
    return lambda shown: _filled(np.asarray(shown), shape) if np.shape(shown) == own_shape else shown


def _pad_dict(pads: dict[Any, Translation], shown: Any) -> Any:
    if not isinstance(shown, dict) or shown.keys() != pads.keys():
        return shown
    return {key: pads[key](part) for key, part in shown.items()}


def _translation(own: Space) -> Translation:
    """Makes actions of the common space an agent's own."""
    if isinstance(own, spaces.Discrete):
        start = int(own.start)
        return lambda action: start + action
    assert isinstance(own, spaces.Box)
    low, high = own.low, own.high
    return lambda action: np.clip(action, low, high)


def _filled(array: Array, shape: tuple[int, ...]) -> Array:
    """A vector that ends in zeros, as long as the shape says; any other array has that shape already."""
    if array.shape == shape:
        return array
    filled = np.zeros(shape, array.dtype)
    filled[: len(array)] = array
    return filled
