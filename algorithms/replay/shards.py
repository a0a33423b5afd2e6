"""Replays in processes of their own (Ape-X, arXiv:1803.00933, section 3), each with a share of the slots.

A shard inserts, draws and updates priorities beside the learner, which only trains. Batches and errors travel through
shared memory (`BatchRing`), so each process may die at any moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from appo.algorithms.replay.batch_ring import SHOWN, BatchRing, Told
from appo.algorithms.replay.keeper import ReplayFile
from appo.algorithms.replay.part import ReplayPart, batch_shapes
from appo.algorithms.replay.storage import (
    Pace,
    ReplayPlan,
    ReplayStorage,
    column_shapes,
    fields_of_columns,
    num_columns,
)
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.units import Units
from appo.algorithms.runtime.messages import Address, Message, SlotReleased, TrajectoryReady, Wake
from appo.algorithms.runtime.roles import LEARNER
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import EnvSpec
from appo.utils.failpoints import failpoint
from appo.utils.timing import COPYING, FRAMEWORK, clock


def shard_prefix(policy: int, shard: int) -> str:
    """Return the start of the names of a shard's fields."""
    return f"replay.{policy}.{shard}"


def num_shards(arena: Arena, policy: int) -> int:
    """Return the number of shards of a policy's replay; 0: the learner owns the replay."""
    count = 0
    while f"{shard_prefix(policy, count)}.told" in arena:
        count += 1
    return count


def shard_fields(
    plan: ReplayPlan, spec: EnvSpec, topology: Topology, rnn_state_size: int, places: tuple[int, int]
) -> list[Field]:
    """Declare the shared memory of all shards of a policy, of the batches, and of the learner's notes."""
    policy, shards = places
    rollout, own = topology.rollout, plan.share(shards)
    columns, n = column_shapes(spec, rollout, rnn_state_size), num_columns(own, rollout, topology.num_policies)
    shapes = batch_shapes(plan, spec, rollout, rnn_state_size)
    fields = [Field(f"replay.{policy}.before", (3,), "int64")]  # samples, env steps, and 1 when these are known
    for shard in range(shards):
        prefix = shard_prefix(policy, shard)
        fields += fields_of_columns(prefix, own, spec, n, columns)
        fields += BatchRing.declare(prefix, plan, shapes)
    return fields


def make_shard(
    address: Address, context: Context, plan: ReplayPlan, trajectories: Trajectories, path: Path | None
) -> ReplayShard:
    """Make a shard with the content of shared memory, of the file, or empty."""
    arena, seeds, (policy, shard) = context.arena, context.seeds, (address.index, address.member)
    assert arena is not None
    assert seeds is not None
    own, prefix = plan.share(num_shards(arena, policy)), shard_prefix(policy, shard)
    storage = ReplayStorage(own, context.spec, arena, policy, prefix)
    is_first = not Pace(*storage.pace.tolist()).known  # in this start
    file = None if path is None else ReplayFile(path, storage)
    if is_first and file is not None:
        file.load()
    part = ReplayPart(own, storage, trajectories, (policy, context.num_policies), np.random.default_rng(seeds))
    if is_first:
        part.begin(0, 0)
    return ReplayShard(address, part, BatchRing(arena, prefix), Units(arena, shard), file)


class ReplayShard:
    """Inserts slots and draws batches ahead of the learner at the pace of the plan."""

    def __init__(
        self, address: Address, part: ReplayPart, ring: BatchRing, units: Units, file: ReplayFile | None = None
    ) -> None:
        self.address, self.part, self.ring, self.units, self.file = address, part, ring, units, file
        self.ledger = LearnerLedger(part.trajectories, address.index)
        self.queue: deque[TrajectoryReady] = deque()
        part.set_pace(used=ring.filled_uses)  # of a batch that was cut off nothing is used
        self._tell()

    def handle(self, message: Message) -> Iterator[Message]:
        """Queue a slot."""
        if isinstance(message, TrajectoryReady) and self.ledger.accept(message):
            self.queue.append(message)
        yield from ()

    @property
    def _may_draw(self) -> bool:
        return self.part.owes and self.ring.has_room

    @property
    def _may_insert(self) -> bool:
        return bool(self.queue) and not self.part.holds_actors

    def pending(self) -> bool:
        """Return whether errors, a due batch or a slot wait."""
        return self.ring.unanswered > 0 or self._may_draw or self._may_insert

    def work(self) -> Iterator[Message]:
        """Read errors, draw a due batch, insert a slot unless uses are owed; notify learner and actor."""
        clock.enter(COPYING)
        self.part.figures.add("waiting_slots", len(self.queue))
        self.part.figures.add("held", float(bool(self.queue) and self.part.holds_actors))
        while self.ring.unanswered:
            self.part.update(*self.ring.next_errors())
            self.ring.answer()
        released = None
        if self._may_draw:
            samples = self.part.draw(self.ring.next_tensors)
            failpoint("replay.drawn")
            self.ring.commit(samples, self.part.pace.used)
        if self._may_insert:  # without a ratio batches are due for ever, and a quick learner has always room for one
            message = self.queue.popleft()
            self.part.insert(message)
            failpoint("replay.inserted")
            released = SlotReleased(self.address.index, message.slot, message.sequence)
            self.ledger.release(released)
        self._tell()
        self.units.add()
        clock.enter(FRAMEWORK)
        if released is not None:
            yield released
        yield Wake(Address(LEARNER.name, self.address.index))

    def _tell(self) -> None:
        """Write the learner's view of the shard."""
        storage, pace = self.part.storage, self.part.pace
        totals = storage.totals
        self.ring.told[:] = Told(
            samples=pace.samples + totals.samples,
            env_steps=pace.env_steps + totals.env_steps,
            unsampled=totals.unsampled,
            dropped=totals.dropped,
            size=storage.size,
            priority=storage.tree.total,
            since=self.part.since_start,
        )
        for name, (total, count) in self.part.figures.sums.items():
            self.ring.figures[SHOWN.index(name)] += total, count
        self.part.figures.sums.clear()
