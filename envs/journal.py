"""The journal of a group: actions of the environments, kept in memory that outlives the process."""

import struct
from typing import Any, NamedTuple, Self

import numpy as np

from appo.envs.spec import ActionSpec, Array

MOST_BYTES = 1 << 20  # of the actions of one group
LEAST_STEPS, MOST_STEPS = 1024, 65_536
HEAD_WORDS = 16  # 128 bytes, so that no two writers share a cache line
NOBODY = -1
PLACES = ("step", "reset", "first reset", "init", "close")
Shape = tuple[tuple[int, ...], str]
"""With the name of a dtype."""

_KEPT, _STEPS, _INSIDE, _PLACE, _TOGETHER = range(5)  # words of a head
_RECORD = struct.Struct("=q9Q")
_RECORD_WORDS = 16
_NO_STATE, _PCG64, _OTHER_STATE = range(3)
_LOW = (1 << 64) - 1
_UNKNOWN_STATE = {"bit_generator": "not kept: it is no PCG64"}


class Story(NamedTuple):
    """Calls of an environment before a failure.

    Attributes:
        place: call that failed: "init", "first reset", a later "reset", a "step" or "close".
        seed: seed of the first reset.
        random_state: state of the random numbers before the episode's reset; None for the first reset, or without
            gymnasium's random numbers.
        actions: stored actions since the episode's reset, the failed step's included; for a vector, of all
            environments.
        num_steps: number of steps, larger than the number of actions if the oldest actions are forgotten.
        seeds: seeds of all environments of a vector, which step, and fail, together; [] for a single environment.
    """

    place: str
    seed: int
    random_state: dict[str, Any] | None
    actions: list[Any]
    num_steps: int
    seeds: list[int]


class _Beginning(NamedTuple):
    seed: int
    random_state: dict[str, Any] | None
    step: int  # of the group
    walked: list[list[float]]


class JournalMemory(NamedTuple):
    """Arrays of a journal, which begin as zeros.

    Attributes:
        head: [16] int64: whether a journal exists, steps so far, environment whose code runs, call (index of `PLACES`),
            and whether the environments step together.
        begun: [E, 16] uint64: beginning of each environment's episode.
        actions: [K, E, V]: actions of step n at n modulo K; V values for all agents of an environment.
        walked: [E, W, V]: actions before the first step of the group.
    """

    head: Array
    begun: Array
    actions: Array
    walked: Array

    @staticmethod
    def shapes(num_envs: int, num_agents: int, action: ActionSpec, walk_steps: int) -> dict[str, Shape]:
        """Shape and dtype of every attribute."""
        values = num_agents * action.num_values
        steps = max(LEAST_STEPS, min(MOST_STEPS, MOST_BYTES // (num_envs * values * np.dtype(action.dtype).itemsize)))
        return {
            "head": ((HEAD_WORDS,), "int64"),
            "begun": ((num_envs, _RECORD_WORDS), "uint64"),
            "actions": ((steps, num_envs, values), action.dtype),
            "walked": ((num_envs, walk_steps, values), action.dtype),
        }


class Journal:
    """Remembers the actions of a group, for each environment since the episode began.

    A step costs a copy of the actions, and two words for the environment whose code runs. The oldest steps are
    forgotten.

    Args:
        num_envs: number of environments in the group.
        memory: memory that outlives the process; None: nothing outlives the process.
        together: whether the environments are a vector.

    Attributes:
        inside: [1], environment whose code runs, or `NOBODY`.
    """

    def __init__(self, num_envs: int, memory: JournalMemory | None = None, *, together: bool = False) -> None:
        self._begun = [_Beginning(0, None, 0, []) for _ in range(num_envs)]
        self._coming = self._begun[0]
        self._count = 0  # steps of the group
        self._actions = memory.actions if memory else None
        self._walked = memory.walked if memory else None
        self._records = memory.begun.data.cast("B") if memory else None
        self._head = memory.head.data if memory else np.zeros(HEAD_WORDS, np.int64).data
        self._head[_STEPS] = 0
        self._head[_TOGETHER] = int(together)
        self.inside = self._head[_INSIDE : _INSIDE + 1]
        self.leaves()
        self.place = "step"
        self._head[_KEPT] = 1

    @property
    def place(self) -> str:
        """Return what is being done to an environment: see `Story`."""
        return PLACES[self._head[_PLACE]]

    @place.setter
    def place(self, place: str) -> None:
        self._head[_PLACE] = PLACES.index(place)

    def enters(self, index: int, place: str) -> None:
        """From now on the code of an environment runs."""
        self.place = place
        self.inside[0] = index

    def leaves(self) -> None:
        """Note that the call returned."""
        self.inside[0] = NOBODY

    def add(self, action: Array) -> None:
        """Remember the actions [E, V] of a step."""
        if self._actions is None:
            self._actions = np.empty((LEAST_STEPS, *action.shape), action.dtype)
        self._actions[self._count % len(self._actions)] = action
        self._count += 1
        self._head[_STEPS] = self._count

    def walk(self, index: int, action: Array) -> None:
        """Remember an action [V] of a single environment before the first step of the group."""
        walked = self._begun[index].walked
        if self._walked is not None and len(walked) < self._walked.shape[1]:
            self._walked[index, len(walked)] = action
        walked.append(action.tolist())
        self._keep(index)

    def begins(self, index: int, seed: int | None, random_state: dict[str, Any] | None) -> None:
        """An environment is about to be reset."""
        self._coming = _Beginning(self._begun[index].seed if seed is None else seed, random_state, self._count, [])
        self.place = "reset" if seed is None else "first reset"
        if seed is not None:
            self.began(index, self.place)  # whatever was before counts no more

    def began(self, index: int, place: str = "step") -> None:
        """Note that the reset returned."""
        self._begun[index] = self._coming
        self._keep(index)
        self.place = place

    def story(self, index: int) -> Story:
        """Return the calls of an environment until the failure."""
        place = self.place
        begun = _Beginning(0, None, self._count, []) if place == "init" else self._begun[index]
        end = self._count - (place == "reset")  # in place of its last action it was reset
        num_steps = len(begun.walked) + max(0, end - begun.step)
        actions: list[Any] = begun.walked + [action[index].tolist() for action in self._taken(begun.step, end)]
        return Story(place, begun.seed, begun.random_state, actions if len(actions) == num_steps else [], num_steps, [])

    def story_of_all(self) -> Story:
        """Return the calls of a vector until the failure."""
        begun = self._begun[0]
        actions = [action.tolist() for action in self._taken(begun.step, self._count)]
        return Story(self.place, begun.seed, None, actions, self._count - begun.step, [one.seed for one in self._begun])

    @classmethod
    def left_in(cls, memory: JournalMemory) -> Self:
        """The journal of a process that has ended."""
        journal = cls(len(memory.begun))
        _, journal._count, journal.inside[0], place, together = memory.head[: _TOGETHER + 1].tolist()
        journal._head[_PLACE], journal._head[_TOGETHER] = place, together
        journal._actions = memory.actions
        journal._begun = [_unpacked(memory, index) for index in range(len(memory.begun))]
        return journal

    def _taken(self, begin: int, end: int) -> list[Array]:
        """Return the actions [E, V] of steps of the group; [] if not all are remembered."""
        if self._actions is None or begin < self._count - len(self._actions):
            return []
        return [self._actions[step % len(self._actions)] for step in range(begin, end)]

    def _keep(self, index: int) -> None:
        if self._records is not None:
            begun = self._begun[index]
            place = index * _RECORD_WORDS * 8
            _RECORD.pack_into(
                self._records, place, begun.seed, begun.step, len(begun.walked), *_packed(begun.random_state)
            )


def unfinished(memory: JournalMemory) -> tuple[int, Story] | None:
    """In which environment's code a process has ended, and its story; None where it was in none.

    A vector, whose environments are stepped together, is -1.
    """
    if not memory.head[_KEPT]:
        return None
    journal = Journal.left_in(memory)
    if (index := journal.inside[0]) == NOBODY:
        return None
    return (-1, journal.story_of_all()) if memory.head[_TOGETHER] else (index, journal.story(index))


def _packed(state: dict[str, Any] | None) -> tuple[int, ...]:
    """The state of random numbers in seven words; gymnasium gives an environment a PCG64, others are not kept."""
    if state is None:
        return _NO_STATE, 0, 0, 0, 0, 0, 0
    if state.get("bit_generator") != "PCG64":
        return _OTHER_STATE, 0, 0, 0, 0, 0, 0
    at, step = state["state"]["state"], state["state"]["inc"]
    return _PCG64, at >> 64, at & _LOW, step >> 64, step & _LOW, state["has_uint32"], state["uinteger"]


def _unpacked(memory: JournalMemory, index: int) -> _Beginning:
    seed, step, num_walked, kind, *words = _RECORD.unpack_from(memory.begun[index])
    at, increment = (high << 64 | low for high, low in (words[:2], words[2:4]))
    state = {"state": {"state": at, "inc": increment}, "has_uint32": words[4], "uinteger": words[5]}
    states = {_NO_STATE: None, _PCG64: {"bit_generator": "PCG64", **state}}
    return _Beginning(seed, states.get(kind, _UNKNOWN_STATE), step, memory.walked[index, :num_walked].tolist())
