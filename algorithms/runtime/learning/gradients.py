"""Gradients that workers beside the actors compute, on their way to the learner, which applies them one by one.

They lie in a ring in the arena, an entry for each trajectory. An entry is committed, and later applied, by one store of
its number; the slot is released after the commit. So whoever is killed, a successor finds what is left to do, and no
trajectory is learned from or counted twice.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from algorithms.runtime.learning.batches import Batch, BatchCounts, Entered, Feedback
from algorithms.runtime.memory.arena import Arena, Array, Field
from algorithms.runtime.memory.learner_state import StateBlock
from algorithms.runtime.memory.slots import LearnerLedger, Trajectories
from algorithms.runtime.memory.weights import barrier
from algorithms.runtime.messages import Address, SlotReleased, TrajectoryReady, Wake
from algorithms.runtime.roles import Role

PLACES = 4
"""Entries of an actor that there is memory for: entry n is in place n % PLACES, the first one is 1."""

GRADIENT = "gradient"
"""In `Batch.recorded` of an entry."""


class Note(NamedTuple):
    """What an entry says of itself beside its gradient; steps and frames are totals of the actor with this entry."""

    samples: int
    frames: int
    slot: int
    sequence: int
    version: int


class GradientRing:
    """The gradients of one policy. A worker beside each actor writes, the learner of the policy reads.

    Args:
        arena: the shared memory.
        policy: whose gradients.
    """

    def __init__(self, arena: Arena, policy: int) -> None:
        names = ("vector", "note", "committed", "applied", "before")
        self._vector, self._note, self._committed, self._applied, self.before = (
            arena[f"gradients.{policy}.{name}"] for name in names
        )

    @staticmethod
    def declare(policy: int, num_actors: int, num_weights: int) -> list[Field]:
        """The arena fields of one policy with P weights."""
        return [
            Field(f"gradients.{policy}.vector", (num_actors, PLACES, num_weights), "float32"),
            Field(f"gradients.{policy}.note", (num_actors, PLACES, len(Note._fields)), "int64"),
            Field(f"gradients.{policy}.committed", (num_actors, 16), "int64"),  # a row has cache lines of its own
            Field(f"gradients.{policy}.applied", (num_actors, 16), "int64"),
            Field(f"gradients.{policy}.before", (3,), "int64"),  # this start: samples, env steps, 1: that is known
        ]

    def waiting(self) -> Array:
        """Entries of each actor that are committed and not applied, [A]."""
        waiting: Array = self._committed[:, 0] - self._applied[:, 0]
        return waiting

    def has_room(self, actor: int) -> bool:
        """Whether an entry of the actor can be committed; the last applied one stays, as it holds the totals."""
        return bool(self.waiting()[actor] < PLACES - 1)

    def holds(self, actor: int, slot: int, sequence: int) -> bool:
        """Whether the last entry of the actor is of this hand-over: then only its release has been lost."""
        return self._last(self._committed, actor)[2:4] == (slot, sequence)

    def commit(self, actor: int, gradient: Array, batch: Batch, message: TrajectoryReady, version: int) -> None:
        """Add an entry.

        Args:
            actor: whose trajectories these are; there must be room.
            gradient: [N] of the parameters, with N <= P.
            batch: what it was computed from.
            message: the hand-over of the slot.
            version: of the weights it was computed with.
        """
        number, last = int(self._committed[actor, 0]) + 1, self._last(self._committed, actor)
        samples = last.samples + int(batch.valid.sum())
        frames = last.frames + int(batch.num_frames[batch.valid].sum())
        self._vector[actor, number % PLACES, : len(gradient)] = gradient
        self._note[actor, number % PLACES] = Note(samples, frames, message.slot, message.sequence, version)
        barrier()
        self._committed[actor, 0] = number

    def apply(self, actor: int) -> Batch:
        """Take the next entry of an actor off; a batch of its steps [1, B] that has nothing but the gradient [P]."""
        number = int(self._applied[actor, 0]) + 1
        samples = Note(*self._note[actor, number % PLACES].tolist()).samples - self._last(self._applied, actor).samples
        version = int(self._note[actor, number % PLACES, Note._fields.index("version")])
        gradient = torch.from_numpy(self._vector[actor, number % PLACES].copy())
        barrier()
        self._applied[actor, 0] = number
        none, valid = torch.empty(0), torch.ones(1, samples, dtype=torch.bool)
        versions = torch.full((1, samples), version)
        return Batch({}, none, valid, none, none, none, none, none, {GRADIENT: gradient}, versions, none)

    def unapplied_samples(self) -> int:
        """Steps in the entries that are not applied."""
        return self._totals(self._committed)[0] - self._totals(self._applied)[0]

    def applied_totals(self) -> tuple[int, int]:
        """Samples and env steps in the entries that are applied, those from before this start included."""
        samples, frames = self._totals(self._applied)
        return int(self.before[0]) + samples, int(self.before[1]) + frames

    def _last(self, ends: Array, actor: int) -> Note:
        return Note(*self._note[actor, int(ends[actor, 0]) % PLACES].tolist())

    def _totals(self, ends: Array) -> tuple[int, int]:
        notes = [self._last(ends, actor) for actor in range(len(ends))]
        return sum(note.samples for note in notes), sum(note.frames for note in notes)


class GradientSource:
    """Gives a learner one gradient after the other, as `recorded` of a batch that has nothing else.

    A step counts as a sample when the gradient that it is part of is applied. The counts follow from the ring, so that
    a kill between two stores makes none of them wrong.

    Args:
        ring: where the gradients are.
        policy: that learns.
        trajectories: the slots, which others release.
        block: of the learner's state.
        role: of the workers that compute gradients, woken when there is room; they are beside actors.
    """

    staged_samples, hold = 0, False

    def __init__(
        self, ring: GradientRing, policy: int, trajectories: Trajectories, block: StateBlock, role: Role
    ) -> None:
        self.ring, self.policy, self.trajectories, self.role = ring, policy, trajectories, role
        noted, state = LearnerLedger(trajectories, policy).noted(), block.read()
        known = state.meta if state is not None and not any(noted.values()) else noted
        self._told = known["samples"], known["env_steps"]
        self._released_before, self._actor = noted["released"], 0
        if not ring.before[2]:  # the first learner of this start
            ring.before[:] = (*self._told, 1)

    @property
    def waiting(self) -> int:
        """Gradients to apply."""
        return int(self.ring.waiting().sum())

    def counts(self) -> BatchCounts:
        """What became of the trajectories, as the arena says it."""
        t = self.trajectories
        is_held = (t.owner >> self.policy & 1 > 0) & (t.released[:, self.policy] < t.sequence)
        held, seen = int(is_held.sum()), int(t.sequence.sum()) - self._released_before
        in_flight = int(np.count_nonzero(t.valid[is_held])) + self.ring.unapplied_samples()
        return BatchCounts(seen, seen - held, 0, in_flight, held)

    def add(self, message: TrajectoryReady) -> None:
        """Leave the slot to the worker that computes gradients: a successor of a learner hears of it."""

    def fill(self, version: int) -> Iterator[SlotReleased | Wake]:
        """There is nothing to be moved."""
        yield from ()

    def take(self) -> Batch | None:
        """Return a gradient of the actor with most of them, or None."""
        waiting = self.ring.waiting()
        self._actor = int(waiting.argmax())
        return self.ring.apply(self._actor) if waiting[self._actor] else None

    def entered(self) -> Entered:
        """Return what has been applied since the last call; at first, what a predecessor has applied and not told."""
        totals = self.ring.applied_totals()
        entered = Entered(totals[0] - self._told[0], totals[1] - self._told[1])
        self._told = totals
        return entered

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased | Wake]:
        """Wake the worker whose gradient was applied: there is room for another one."""
        yield Wake(Address(self.role.name, self.policy, self._actor))

    def resize(self, columns: int) -> None:
        """A gradient is one of a whole slot."""

    def weights_replaced(self) -> None:
        """A gradient of other weights is applied all the same, as it is of a few updates before."""

    def metrics(self) -> dict[str, float]:
        """Return nothing: the worker's counts say it all."""
        return {}
