"""One space for agents with different spaces: shorter vectors end in zeros, and masks forbid choices of other agents.

An id beside the padded observation distinguishes the agents, if a single network plays all.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from appo.envs.spaces import NO_BOUND, Space, allowed_by, described
from appo.envs.spec import MASK_KEY, SINGLE_KEY, Array
from appo.utils.errors import UsageError

T = TypeVar("T")
Translation = Callable[[Any], Any]
AGENT_ID = "agent_id"
"""The key with the index of the agent among all agents, as a choice, for agents with different spaces."""


class CommonSpaces:
    """The spaces with room for all agents of an environment, and conversion in both directions.

    Args:
        name: name of the environment in messages.
        agents: names of the agents.
        observation_spaces, action_spaces: spaces of each agent.
        ids: whether observations of agents with different spaces contain the agent's id.
        scaled: whether [-1, 1] stands for each agent's own bounds if the bounds differ; else actions are clipped.

    Attributes:
        differ: whether the spaces differ.
        has_ids: whether observations contain ids.
        observation_space, action_space: spaces of every agent.
        masks: [M] per agent, the agent's choices; None if all agents have the same.

    Raises:
        UsageError: there are no such spaces, with the reason.
    """

    def __init__(
        self,
        name: str,
        agents: Sequence[str],
        observation_spaces: Sequence[Space],
        action_spaces: Sequence[Space],
        *,
        ids: bool = False,
        scaled: bool = False,
    ) -> None:
        self.observation_space = _common(name, "observation", agents, observation_spaces, _common_observation)
        self.action_space = _common(name, "action", agents, action_spaces, partial(_common_action, scaled=scaled))
        self._is_dict = isinstance(self.observation_space, spaces.Dict)
        self._pads = [_pad(own, self.observation_space) for own in observation_spaces]
        differ = any(own != self.action_space for own in action_spaces)
        mapped = _mapped(action_spaces) if scaled and differ else None
        self._translations = [_translation(own, mapped) if differ else _same for own in action_spaces]
        self.differ = differ or any(own != self.observation_space for own in observation_spaces)
        common = self.observation_space
        parts = dict(common.spaces) if isinstance(common, spaces.Dict) else {SINGLE_KEY: common}
        self.has_ids = ids and self.differ and AGENT_ID not in parts
        if self.has_ids:
            self.observation_space = spaces.Dict({**parts, AGENT_ID: spaces.Discrete(len(agents))})
        self.masks: list[Array] | None = None
        if differ and isinstance(self.action_space, spaces.Discrete):
            choices, sizes = np.arange(self.action_space.n), [space.n for space in _of(spaces.Discrete, action_spaces)]
            self.masks = [(choices < size).astype(np.int8) for size in sizes]

    def observation(self, agent: int, observation: Any) -> Any:
        """Return an agent's observation in the common space; an observation outside the agent's own stays unchanged."""
        padded = self._pads[agent](observation)
        if not self.has_ids:
            return padded
        if self._is_dict:
            return {**padded, AGENT_ID: agent} if isinstance(padded, dict) else padded
        return {SINGLE_KEY: padded, AGENT_ID: agent}

    def action(self, agent: int, action: Any) -> Any:
        """Return an action of the common space as one of an agent."""
        return self._translations[agent](action)

    def mask(self, agent: int, mask: Any) -> Any:
        """Return the mask of an agent among all choices; `mask` is the environment's own mask, or None."""
        if self.masks is None:
            return mask
        allowed = self.masks[agent].copy()
        if mask is not None:
            own = np.ravel(mask)
            if own.size != allowed.sum():
                return mask  # whoever checks its size says so
            allowed[: own.size] = allowed_by(own)
        return allowed


def _of(kind: type[T], own: Sequence[Space]) -> list[T]:
    return [space for space in own if isinstance(space, kind)]


def _common(
    name: str, what: str, agents: Sequence[str], own: Sequence[Space], join: Callable[[Sequence[Space]], Space]
) -> Space:
    """Return the space with room for all, or raise a `UsageError` with two agents and the reason."""
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
    if (join := _JOINS.get(type(own[0]))) is None:
        raise ValueError(f"spaces of kind {type(own[0]).__name__} must be equal")
    return join(own)


def _common_dict(own: Sequence[Any]) -> Space:
    if any(set(space.spaces) != set(own[0].spaces) for space in own):
        raise ValueError("their keys differ")
    return spaces.Dict({key: _common_observation([space[key] for space in own]) for key in own[0].spaces})


def _common_box(own: Sequence[Any]) -> spaces.Box:
    if len({space.shape for space in own}) > 1 and any(len(space.shape) != 1 for space in own):
        raise ValueError("only vectors can be filled up with zeros, an image would then show something else")
    shape = max(space.shape for space in own)
    low = np.min([_filled(space.low, shape) for space in own], axis=0)
    return spaces.Box(low, np.max([_filled(space.high, shape) for space in own], axis=0), dtype=own[0].dtype.type)


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


def _common_action(own: Sequence[Space], *, scaled: bool) -> Space:
    if discrete := _of(spaces.Discrete, own):
        if len(discrete) == len(own):
            return spaces.Discrete(max(int(space.n) for space in discrete))
    elif len({(type(space), space.shape, space.dtype) for space in own}) == 1 and isinstance(own[0], spaces.Box):
        box = _common_box(own)
        if (mapped := _mapped(own) if scaled else None) is None:
            return box
        low, high = np.where(mapped, -1.0, box.low), np.where(mapped, 1.0, box.high)
        return spaces.Box(low, high, dtype=np.dtype(box.dtype).type)
    raise ValueError("choices (Discrete) that an agent lacks can be masked, nothing else can")


def _mapped(own: Sequence[Space]) -> Array | None:
    """Which numbers of the actions have two bounds for every agent; None if actions are choices."""
    boxes = _of(spaces.Box, own)
    if not boxes:
        return None
    mapped: Array = (np.abs(np.stack([bound for box in boxes for bound in (box.low, box.high)])) < NO_BOUND).all(axis=0)
    return mapped


def _same(value: Any) -> Any:
    return value


def _pad(own: Space, common: Space) -> Translation:
    """Put observations of an agent's own space into the common space; the writer of rows reports errors."""
    if isinstance(own, spaces.Dict) and isinstance(common, spaces.Dict):
        pads = {key: (_pad_mask if key == MASK_KEY else _pad)(part, common[key]) for key, part in own.spaces.items()}
        return lambda shown: (
            {key: pads[key](part) for key, part in shown.items()}
            if isinstance(shown, dict) and shown.keys() == pads.keys()
            else shown
        )
    if own.shape is None or common.shape is None or own.shape == common.shape:
        return _same
    own_shape, shape = own.shape, common.shape
    return lambda shown: _filled(np.asarray(shown), shape) if np.shape(shown) == own_shape else shown


def _pad_mask(own: Space, common: Space) -> Translation:
    """Put masks of an agent's own choices into the common space; choices that the agent lacks are forbidden."""
    if not (isinstance(own, spaces.Box) and isinstance(common, spaces.Box) and own.shape < common.shape):
        return _pad(own, common)
    own_shape, lowest = own.shape, common.low[own.shape[0] :]  # 0, or very low for masks that are added to logits
    return lambda shown: np.concatenate([shown, lowest]) if np.shape(shown) == own_shape else shown


def _translation(own: Space, mapped: Array | None) -> Translation:
    """Makes actions of the common space an agent's own."""
    if isinstance(own, spaces.Discrete):
        start = int(own.start)
        return lambda action: start + action
    assert isinstance(own, spaces.Box)
    low, high, dtype = own.low, own.high, own.dtype
    if mapped is None:
        return lambda action: np.clip(action, low, high)
    least, most = np.where(mapped, low, -1.0), np.where(mapped, high, 1.0)
    middle, half = (most + least) / 2, (most - least) / 2
    return lambda action: np.clip(middle + half * action, low, high).astype(dtype)


def _filled(array: Array, shape: tuple[int, ...]) -> Array:
    """Return a vector with zeros at the end, as long as the shape; any other array already has the shape."""
    if array.shape == shape:
        return array
    filled = np.zeros(shape, array.dtype)
    filled[: len(array)] = array
    return filled
