"""A ring for each group of environments, with copies of its slots for the writer of a dataset.

An actor copies a full slot before the hand-over and never waits for the writer: if the ring is full, the trajectory is
left out and its steps are counted. Each ring has one writing and one reading process. The number of an entry is stored
last, and a replacement of either process continues from the numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from appo.algorithms.runtime.memory.arena import Array, Field
from appo.algorithms.runtime.memory.slots import Recorded, SharedArrays, Trajectories, dims
from appo.algorithms.runtime.memory.weights import barrier
from appo.envs.spec import BoolArray, EnvSpec

TAKEN = "OutputRing.taken"
"""Name of the field with the counts of entries taken by the writer."""

MOST_PLACES, LEAST_PLACES = 16, 2


class SlotEntry(NamedTuple):
    """The numbers of an entry.

    Attributes:
        number: number of the trajectory in its group.
        total: valid steps of the group, up to and including this entry.
    """

    number: int
    generation: int
    total: int


@dataclass(frozen=True)
class OutputRing(SharedArrays):
    """Rings of G groups with K places each; dimensions as in `Trajectories`. Entry n, from 0 on, is in place n % K."""

    obs: dict[str, Array] = dims("G K T+1 R", "observation")
    first: Array = dims("G K T+1 R", np.bool_)
    valid: Array = dims("G K T R", np.bool_)
    reward: Array = dims("G K T R", np.float32)  # unscaled
    terminated: Array = dims("G K T R", np.bool_)
    truncated: Array = dims("G K T R", np.bool_)
    action: Array = dims("G K T R A", "action")
    policy_version: Array = dims("G K T R", np.int64)
    recorded: dict[str, Array] = dims("G K", "recorded")
    entry: Array = dims("G K E", np.int64)
    committed: Array = dims("G C", np.int64)  # entries of a group; a row has cache lines of its own
    taken: Array = dims("G C", np.int64)  # and, stored before, the valid steps in them
    left_out: Array = dims("G C", np.int64)  # trajectories, and their valid steps, without room
    counts: Array = dims("C", np.int64)  # of the process that writes

    @classmethod
    def plan(cls, sizes: dict[str, int], spec: EnvSpec, recorded: dict[str, Recorded], most_bytes: int) -> list[Field]:
        """Return the fields, with as many places as fit into so many bytes, within the bounds above."""
        more = {"E": len(SlotEntry._fields)}
        one = sum(field.nbytes for field in cls.declare({**sizes, **more, "K": 1}, spec, recorded))
        places = max(LEAST_PLACES, min(MOST_PLACES, most_bytes // one))
        return cls.declare({**sizes, **more, "K": places}, spec, recorded)

    def waiting(self) -> Array:
        """Return the number of entries of each group not yet taken, [G]."""
        waiting: Array = self.committed[:, 0] - self.taken[:, 0]
        return waiting

    def oldest(self, group: int) -> tuple[int, SlotEntry]:
        """Return place and numbers of the next entry of a group, which must exist."""
        place = int(self.taken[group, 0]) % self.entry.shape[1]
        return place, SlotEntry(*self.entry[group, place].tolist())

    def take(self, group: int) -> None:
        """Free the place of the next entry of a group."""
        self.taken[group, 1] = self.oldest(group)[1].total
        barrier()
        self.taken[group, 0] += 1


class GroupTap:
    """Copies the slots of one group into its ring."""

    def __init__(self, ring: OutputRing, trajectories: Trajectories, group: int, generation: int) -> None:
        self.ring, self.trajectories, self.group, self.generation = ring, trajectories, group, generation
        self._reward = np.zeros(trajectories.reward.shape[1:], np.float32)
        self._keeps_reward, self._begun_before, self._begin = False, np.zeros(trajectories.reward.shape[2], np.bool_), 0

    def begin(self, step: int, begun_before: BoolArray) -> None:
        """Note the first step of the first slot, and the rows [R] whose episode had begun before that step."""
        self._begun_before, self._begin = begun_before.copy(), step + 1

    def reward(self, step: int, reward: Array) -> None:
        """Keep the unscaled rewards [R] of a step of the slot in progress."""
        self._keeps_reward = True
        self._reward[step] = reward

    def trajectory(self, slot: int, number: int, steps: int) -> bool:
        """Copy a full slot with its number and count of valid steps; return False if the ring has no room."""
        ring, t, group = self.ring, self.trajectories, self.group
        begin, self._begin = self._begin, 0
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
        ring.first[group, place, :begin, self._begun_before] = False  # learners take these rows for first ones
        ring.reward[group, place] = self._reward if self._keeps_reward else t.reward[slot]
        before = SlotEntry(*ring.entry[group, place - 1].tolist())  # not yet overwritten
        ring.entry[group, place] = SlotEntry(number, self.generation, before.total + steps)
        barrier()
        ring.committed[group, 0] = committed + 1
        return True
