"""A ring of gradients: workers beside the actors compute gradients, and the learner applies them one by one.

The ring in the arena has an entry for each trajectory. A single store of its number commits an entry, and a later store
applies or drops the entry. The slot is released after the commit. After a kill at any point the replacement finds the
remaining work, and no trajectory is learned from or counted twice.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered, Feedback
from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.weights import barrier
from appo.algorithms.runtime.messages import Address, SlotReleased, TrajectoryReady, Wake
from appo.algorithms.runtime.roles import Role

PLACES = 4
"""Places for entries of an actor: entry n is in place n % PLACES; the first entry is 1."""

GRADIENT, FIGURES = "gradient", "figures"
"""Names in `Batch.recorded` of an entry."""


class GradientNote(NamedTuple):
    """The numbers of an entry beside its gradient; samples and frames are totals of the actor, this entry included."""

    samples: int
    frames: int
    slot: int
    sequence: int
    version: int


class Before(NamedTuple):
    """Counts from before this start; `known` is 1 after the first learner has started."""

    samples: int
    env_steps: int
    discarded: int
    known: int


class GradientRing:
    """The gradients of one policy. A worker beside each actor writes, the learner of the policy reads."""

    def __init__(self, arena: Arena, policy: int) -> None:
        names = ("vector", "figures", "note", "committed", "dropped", "applied", "before")
        self._vector, self._figures, self._note, self._committed, self._dropped, self._applied, self.before = (
            arena[f"gradients.{policy}.{name}"] for name in names
        )

    @staticmethod
    def declare(policy: int, num_actors: int, num_weights: int, num_figures: int) -> list[Field]:
        """Return the arena fields of one policy with P weights and at most F figures beside a gradient."""
        return [
            Field(f"gradients.{policy}.vector", (num_actors, PLACES, num_weights), "float32"),
            Field(f"gradients.{policy}.figures", (num_actors, PLACES, num_figures), "float64"),
            Field(f"gradients.{policy}.note", (num_actors, PLACES, len(GradientNote._fields)), "int64"),
            Field(f"gradients.{policy}.committed", (num_actors, 16), "int64"),  # a row has cache lines of its own
            Field(f"gradients.{policy}.dropped", (num_actors, PLACES, 2), "int64"),  # samples and frames, as totals
            Field(f"gradients.{policy}.applied", (num_actors, 16), "int64"),  # dropped entries included
            Field(f"gradients.{policy}.before", (len(Before._fields),), "int64"),
        ]

    def waiting(self) -> Array:
        """Return the number of committed entries of each actor not yet applied, [A]."""
        waiting: Array = self._committed[:, 0] - self._applied[:, 0]
        return waiting

    def has_room(self, actor: int) -> bool:
        """Return whether an entry can be committed; the last applied entry stays, because it contains the totals."""
        return bool(self.waiting()[actor] < PLACES - 1)

    def holds(self, actor: int, slot: int, sequence: int) -> bool:
        """Return whether the last entry of the actor is of this hand-over: then only the release was lost."""
        return self._last(self._committed, actor)[2:4] == (slot, sequence)

    def commit(
        self, actor: int, gradient: Array, figures: Array, batch: Batch, message: TrajectoryReady, version: int
    ) -> None:
        """Add an entry.

        Args:
            actor: actor of the trajectories, with room for an entry.
            gradient: gradient [N] of the parameters, with N <= P.
            figures: numbers [M] for the learner beside the gradient, with M <= F.
            batch: batch of the gradient.
            message: hand-over of the slot.
            version: version of the weights used.
        """
        number, last = int(self._committed[actor, 0]) + 1, self._last(self._committed, actor)
        samples = last.samples + int(batch.valid.sum())
        frames = last.frames + int(batch.num_frames[batch.valid].sum())
        self._vector[actor, number % PLACES, : len(gradient)] = gradient
        self._figures[actor, number % PLACES, : len(figures)] = figures
        self._note[actor, number % PLACES] = GradientNote(samples, frames, message.slot, message.sequence, version)
        barrier()
        self._committed[actor, 0] = number

    def next_version(self, actor: int) -> int:
        """Return the version of the weights of the next entry of an actor, which must exist."""
        return self._entry(actor, int(self._applied[actor, 0]) + 1).version

    def apply(self, actor: int) -> Batch:
        """Remove the next entry of an actor; return a batch of its steps [1, B] with gradient [P] and figures [F]."""
        number = int(self._applied[actor, 0]) + 1
        samples, version = self._samples_and_frames(actor, number)[0], self._entry(actor, number).version
        recorded = {
            GRADIENT: torch.from_numpy(self._vector[actor, number % PLACES].copy()),
            FIGURES: torch.from_numpy(self._figures[actor, number % PLACES].copy()),
        }
        self._take_off(actor, number, (0, 0))
        none, valid = torch.empty(0), torch.ones(1, samples, dtype=torch.bool)
        return Batch({}, none, valid, none, none, none, none, none, recorded, torch.full((1, samples), version), none)

    def drop(self, actor: int) -> None:
        """Remove the next entry of an actor without applying the gradient."""
        number = int(self._applied[actor, 0]) + 1
        self._take_off(actor, number, self._samples_and_frames(actor, number))

    def unapplied_samples(self) -> int:
        """Return the number of steps in waiting entries."""
        return self._totals(self._committed)[0] - self._totals(self._applied)[0]

    def applied_totals(self) -> tuple[int, int]:
        """Return samples and env steps in applied entries, earlier starts included."""
        (samples, frames), dropped = self._totals(self._applied), self._totals_dropped()
        before = Before(*self.before.tolist())
        return before.samples + samples - dropped[0], before.env_steps + frames - dropped[1]

    def discarded_total(self) -> int:
        """Return samples in dropped entries, samples discarded in earlier starts included."""
        return Before(*self.before.tolist()).discarded + self._totals_dropped()[0]

    def _take_off(self, actor: int, number: int, dropped: tuple[int, int]) -> None:
        """Store the totals of samples and frames dropped with this entry, then its number."""
        self._dropped[actor, number % PLACES] = self._dropped[actor, (number - 1) % PLACES] + dropped
        barrier()
        self._applied[actor, 0] = number

    def _entry(self, actor: int, number: int) -> GradientNote:
        return GradientNote(*self._note[actor, number % PLACES].tolist())

    def _samples_and_frames(self, actor: int, number: int) -> tuple[int, int]:
        """Return samples and frames of an entry alone."""
        entry, previous = self._entry(actor, number), self._entry(actor, number - 1)
        return entry.samples - previous.samples, entry.frames - previous.frames

    def _last(self, ends: Array, actor: int) -> GradientNote:
        return self._entry(actor, int(ends[actor, 0]))

    def _totals(self, ends: Array) -> tuple[int, int]:
        notes = [self._last(ends, actor) for actor in range(len(ends))]
        return sum(note.samples for note in notes), sum(note.frames for note in notes)

    def _totals_dropped(self) -> tuple[int, int]:
        rows = [self._dropped[actor, int(self._applied[actor, 0]) % PLACES] for actor in range(len(self._applied))]
        return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)


class GradientSource(BatchSource):
    """Gives a learner one gradient after another, in `recorded` of a batch without other contents.

    A step counts as a sample when its gradient is applied, as discarded when its gradient is dropped. All counts follow
    from the ring, and stay right after a kill between two stores. After a replacement of the weights, gradients of the
    former weights are too old by their versions.

    Args:
        trajectories: slots, released by other workers.
        role: role of the workers computing gradients beside actors; they are woken when an entry becomes free.
        max_policy_lag: lag of the weights, in versions, from which a gradient is dropped.
    """

    def __init__(
        self,
        ring: GradientRing,
        policy: int,
        trajectories: Trajectories,
        block: StateBlock,
        role: Role,
        max_policy_lag: int,
    ) -> None:
        self.ring, self.policy, self.trajectories, self.role = ring, policy, trajectories, role
        self.max_policy_lag, self._version = max_policy_lag, 0
        noted, state = LearnerLedger(trajectories, policy).noted(), block.read()
        known = state.meta if state is not None and not any(noted.values()) else noted
        self._told = known["samples"], known["env_steps"]
        self._discarded_before, self._released_before, self._actor = known["discarded"], noted["released"], 0
        if not Before(*ring.before.tolist()).known:  # the first learner of this start
            ring.before[:] = Before(*self._told, self._discarded_before, known=1)

    @property
    def waiting(self) -> int:
        """Return the number of gradients waiting to be applied."""
        return int(self.ring.waiting().sum())

    def counts(self) -> BatchCounts:
        """Return the counts of the trajectories by their fate, as stored in the arena."""
        t = self.trajectories
        is_held = (t.owner >> self.policy & 1 > 0) & (t.released[:, self.policy] < t.sequence)
        held, seen = int(is_held.sum()), int(t.sequence.sum()) - self._released_before
        in_flight = int(np.count_nonzero(t.valid[is_held])) + self.ring.unapplied_samples()
        return BatchCounts(seen, seen - held, self.ring.discarded_total() - self._discarded_before, in_flight, held)

    def fill(self, version: int) -> Iterator[SlotReleased | Wake]:
        """Drop gradients too old for weights of this version, and wake workers with a free entry."""
        self._version = version
        for actor, waiting in enumerate(self.ring.waiting().tolist()):
            old = 0
            while old < waiting and self._is_old(actor):
                self.ring.drop(actor)
                old += 1
            if old:
                yield self._wake(actor)

    def take(self) -> Batch | None:
        """Return a gradient of the actor with most of them, or None."""
        waiting = self.ring.waiting()
        self._actor = int(waiting.argmax())
        is_usable = waiting[self._actor] and not self._is_old(self._actor)  # old: arrived since `fill`, which drops it
        return self.ring.apply(self._actor) if is_usable else None

    def entered(self) -> Entered:
        """Return the steps applied since the last call, at first including unreported steps of a predecessor."""
        totals = self.ring.applied_totals()
        entered = Entered(totals[0] - self._told[0], totals[1] - self._told[1])
        self._told = totals
        return entered

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased | Wake]:
        """Wake the worker whose gradient was applied, because an entry is free."""
        yield self._wake(self._actor)

    def _is_old(self, actor: int) -> bool:
        return self._version - self.ring.next_version(actor) >= self.max_policy_lag

    def _wake(self, actor: int) -> Wake:
        return Wake(Address(self.role.name, self.policy, actor))
