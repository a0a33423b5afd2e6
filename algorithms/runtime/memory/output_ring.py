"""A ring for each group of environments: copies of its slots, on their way from actors to the writer of a dataset.

A slot is copied when it is full, before it is handed over, so that nobody waits for the writer: where the ring has no
room the trajectory is left out, and its steps are counted. One process writes into a ring and one reads from it; the
number of an entry is stored last. Whoever is killed, a successor goes on with what the numbers say.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.slots import NOTHING_RECORDED, Recorded, SharedArrays, Trajectories, dims
from appo.algorithms.runtime.memory.weights import barrier
from appo.envs.spec import EnvSpec

TAKEN = "OutputRing.taken"
"""Name of the field that counts what has been written."""

MOST_PLACES, LEAST_PLACES = 16, 2


class Entry(NamedTuple):
    """The numbers of an entry.

    Attributes:
        number: of the trajectory, among those of its group.
        generation: of the actor.
        total: valid steps of the group, in this entry and all before it.
        is_first: of this actor, 0 or 1.
    """

    number: int
    generation: int
    total: int
    is_first: int


TOTAL = Entry._fields.index("total")


@dataclass(frozen=True)
class OutputRing(SharedArrays):
    """The rings of G groups, K places each; otherwise as `Trajectories`. Entry n, from 0 on, is in place n % K."""

    obs: dict[str, Array] = dims("G K T+1 R", "observation")
    first: Array = dims("G K T+1 R", np.bool_)
    valid: Array = dims("G K T R", np.bool_)
    reward: Array = dims("G K T R", np.float32)  # as the environment gave it
    terminated: Array = dims("G K T R", np.bool_)
    truncated: Array = dims("G K T R", np.bool_)
    action: Array = dims("G K T R A", "action")
    policy_version: Array = dims("G K T R", np.int64)
    recorded: dict[str, Array] = dims("G K", "recorded")
    entry: Array = dims("G K E", np.int64)
    committed: Array = dims("G C", np.int64)  # entries of a group; a row has cache lines of its own
    taken: Array = dims("G C", np.int64)  # and, stored before, the valid steps in them
    left_out: Array = dims("G C", np.int64)  # trajectories, and valid steps in them, for which there was no room
    counts: Array = dims("C", np.int64)  # of the process that writes

    @classmethod
    def plan(cls, sizes: dict[str, int], spec: EnvSpec, recorded: dict[str, Recorded], most_bytes: int) -> list[Field]:
        """Return the fields, with as many places as fit into so many bytes, but always a few."""
        more = {"E": len(Entry._fields)}
        one = sum(field.nbytes for field in cls.declare({**sizes, **more, "K": 1}, spec, recorded))
        places = max(LEAST_PLACES, min(MOST_PLACES, most_bytes // one))
        return cls.declare({**sizes, **more, "K": places}, spec, recorded)

    @classmethod
    def attach(cls, arena: Arena, spec: EnvSpec, recorded: dict[str, Recorded] | None = None) -> Self:  # type: ignore[override]
        """Return the arrays as laid out in the arena."""
        return super().attach(arena, spec, recorded or NOTHING_RECORDED)

    def waiting(self) -> Array:
        """Return how many entries of each group nobody has taken, [G]."""
        waiting: Array = self.committed[:, 0] - self.taken[:, 0]
        return waiting

    def oldest(self, group: int) -> tuple[int, Entry]:
        """Return the place of the next entry of a group, which must be there, and its numbers."""
        place = int(self.taken[group, 0]) % self.entry.shape[1]
        return place, Entry(*self.entry[group, place].tolist())

    def take(self, group: int) -> None:
        """Give the place of the next entry of a group back."""
        self.taken[group, 1] = self.oldest(group)[1].total
        barrier()
        self.taken[group, 0] += 1


class GroupTap:
    """Copies the slots of one group into its ring.

    Args:
        ring: of the run.
        trajectories: the slots.
        group: whose.
        generation: of its actor.
    """

    def __init__(self, ring: OutputRing, trajectories: Trajectories, group: int, generation: int) -> None:
        self.ring, self.trajectories, self.group, self.generation = ring, trajectories, group, generation
        self._reward = np.zeros(trajectories.reward.shape[1:], np.float32)
        self._keeps_reward, self._is_first = False, True

    def reward(self, step: int, reward: Array) -> None:
        """Keep the rewards [R] of a step of the slot that is being filled, before they are changed."""
        self._keeps_reward = True
        self._reward[step] = reward

    def trajectory(self, slot: int, number: int, steps: int) -> bool:
        """Copy a full slot, with this number and so many valid steps, if there is room; return whether there was."""
        ring, t, group = self.ring, self.trajectories, self.group
        is_first, self._is_first = self._is_first, False
        committed, places = int(ring.committed[group, 0]), ring.entry.shape[1]
        if committed - int(ring.taken[group, 0]) >= places:
            ring.left_out[group, :2] += (1, steps)
            return False
        place = committed % places
        for key, array in ring.obs.items():
            array[group, place] = t.obs[key][slot]
        for name, array in ring.recorded.items():
            array[group, place] = t.recorded[name][slot]
        for name in ("first", "valid", "terminated", "truncated", "action", "policy_version"):
            getattr(ring, name)[group, place] = getattr(t, name)[slot]
        ring.reward[group, place] = self._reward if self._keeps_reward else t.reward[slot]
        total = int(ring.entry[group, place - 1, TOTAL]) + steps  # in the place before, which nobody overwrites yet
        ring.entry[group, place] = Entry(number, self.generation, total, is_first)
        barrier()
        ring.committed[group, 0] = committed + 1
        return True
