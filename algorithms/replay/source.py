"""Sources of batches from a replay (Ape-X, arXiv:1803.00933; priorities: arXiv:1511.05952)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from appo.algorithms.replay.batch_ring import SHOWN, BatchRing, Told
from appo.algorithms.replay.keeper import ReplayFile
from appo.algorithms.replay.part import Figures, ReplayPart, batch_shapes
from appo.algorithms.replay.shards import num_shards, shard_prefix
from appo.algorithms.replay.storage import Pace, ReplayPlan, ReplayStorage, Samples
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered, Feedback
from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.ownership import LearnerLedger, columns_used
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import Address, SlotReleased, TrajectoryReady, Wake
from appo.algorithms.runtime.roles import Role


class ReplaySource(BatchSource):
    """Inserts slots into a replay, releases the slots at once, and returns drawn batches.

    A step enters training with the insertion. While the learner owes uses, slots wait and hold the actors; without owed
    uses, the learner waits. Replay, pace and counts are in shared memory, and a replacement learner continues with
    them. `ReplayPart` describes the batches. In lockstep, slots are taken in rounds, one of every group, and a round is
    released when the uses are made.

    Attributes:
        file: file of the replay, which the first learner of a start has loaded; None: no file.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        context: Context,
        trajectories: Trajectories,
        lockstep: bool = False,
        path: Path | None = None,
    ) -> None:
        assert context.arena is not None
        assert context.seeds is not None
        self.trajectories, self.hold, self.policy = trajectories, lockstep, context.policy
        self.storage = storage = ReplayStorage(plan, context.spec, context.arena, self.policy)
        self.queue: deque[TrajectoryReady] = deque()
        self.held: list[TrajectoryReady] = []
        self.queued_samples = self.trajectories_seen = self.released = self._version = 0
        self._taken = 0.0  # when the last batch was
        self._told, _ = _reported(context.arena, trajectories, self.policy)
        self.file = None if path is None else ReplayFile(path, storage)
        is_first = not Pace(*storage.pace.tolist()).known  # learner of this start
        if is_first and self.file is not None:
            self.file.load()
        random = np.random.default_rng(context.seeds.spawn(1)[0])
        self.part = ReplayPart(plan, storage, trajectories, (self.policy, context.num_policies), random)
        if is_first:
            self.part.begin(*self._told)
        self._drawn: Samples | None = None
        self.staging: dict[str, Array] = {}
        self.draw_of(plan.batch_size)

    @property
    def pace(self) -> Pace:
        """Counts of the pace."""
        return self.part.pace

    @property
    def waiting(self) -> int:
        """Due batches and slots that can be taken."""
        return int(self.part.owes) or len(self._takeable)

    @property
    def _takeable(self) -> deque[TrajectoryReady]:
        whole_round = len(self.queue) + len(self.held) == len(self.trajectories.owner)
        return self.queue if whole_round or not self.hold else deque()

    def add(self, message: TrajectoryReady) -> None:
        """Queue a slot unless the message belongs to an earlier hand-over."""
        if message.sequence == self.trajectories.sequence[message.slot]:
            self.queue.append(message)
            self.trajectories_seen += 1
            start = columns_used(self.trajectories, message)
            self.queued_samples += int(np.count_nonzero(self.part.mine(message.slot)[:, start:]))
            if self.hold:
                self.queue = deque(sorted(self.queue))

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Insert waiting slots until a batch is due, or all unless actors are held; release the slots."""
        self._version = version
        self.part.figures.add("waiting_slots", len(self.queue))
        self.part.figures.add("held", float(bool(self.queue) and self.part.holds_actors))
        while self._takeable and not self.part.holds_actors:
            message = self.queue.popleft()
            self.queued_samples -= self.part.insert(message)
            self.held.append(message)
            if not self.hold:
                yield from self._release()
        yield from self._release_round()

    def _release_round(self) -> Iterator[SlotReleased]:
        if self.hold and not self.queue and not self.part.owes:
            yield from self._release()

    def _release(self) -> Iterator[SlotReleased]:
        held, self.held = self.held, []
        for message in held:
            self.released += 1
            yield SlotReleased(self.policy, message.slot, message.sequence)

    def counts(self) -> BatchCounts:
        """Return the counts of trajectories; steps are discarded only after the end of training."""
        held = len(self.queue) + len(self.held)
        return BatchCounts(self.trajectories_seen, self.released, self.part.discarded, self.queued_samples, held)

    def retire(self) -> None:
        """Insert and draw nothing from now on."""
        self.part.retired = True

    def entered(self) -> Entered:
        """Return the steps inserted since the last call; the first call includes unreported steps of a predecessor."""
        totals = self.storage.totals
        now = self.pace.samples + totals.samples, self.pace.env_steps + totals.env_steps
        entered = Entered(now[0] - self._told[0], now[1] - self._told[1])
        self._told = now
        return entered

    def take(self) -> Batch | None:
        """Draw a due batch; the next draw overwrites the tensors."""
        if not self.part.owes:
            return None
        self._drawn = self.part.draw(self.staging)
        age = self._version - self.staging["policy_version"][self.staging["valid"]]
        self.part.figures.add("age_updates", float(np.mean(age)))
        self._taken = time.perf_counter()
        return _as_batch(self.staging)

    def blank(self) -> Batch:
        """Return a batch of zeros."""
        return _as_batch({name: np.zeros_like(array) for name, array in self.staging.items()})

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased]:
        """Update the priorities of the drawn batch, and follow the learner's flags.

        Args:
            feedback: "priority", absolute errors [T, B] in the order of the batch, negative where a step has no error;
                and "flags", if flags may change during training.
        """
        if feedback:
            self.part.figures.add("train_ms", 1e3 * (time.perf_counter() - self._taken))
        for said in feedback:
            if self._drawn is not None:
                self.part.update(self._drawn, np.asarray(said["priority"]))
            if "flags" in said:
                self.part.follow(said["flags"])
        yield from self._release_round()

    def resize(self, columns: int) -> None:
        """Draw batches of `columns` trajectories, or of as many steps."""
        self.draw_of(columns * self.storage.rollout)

    def draw_of(self, samples: int) -> None:
        """Draw batches of `samples` steps."""
        self.part.plan = replace(self.part.plan, batch_size=samples)
        state_size = self.storage.arrays["rnn_state"].shape[-1]
        shapes = batch_shapes(self.part.plan, self.storage.spec, self.storage.rollout, state_size)
        self.staging = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}

    def metrics(self) -> dict[str, float]:
        """Return the figures of `REPLAY_METRICS`; means since the last call."""
        totals, figures = self.storage.totals, self.part.figures.take()
        figures |= {"size": self.storage.size, "mean_priority": self.storage.mean_priority}
        figures |= {"dropped": totals.dropped, "unsampled": totals.unsampled}
        if since := self.part.since_start:
            figures["uses_per_step"] = self.pace.used / since
        return {f"replay/{name}": float(value) for name, value in figures.items()}


class ShardedSource(BatchSource):
    """Returns batches of the shards of a replay in turn; shards insert and release slots.

    A step enters when a shard has inserted it and this source sees the count. All counts are in shared memory.
    """

    def __init__(self, plan: ReplayPlan, context: Context, trajectories: Trajectories, role: Role) -> None:
        assert context.arena is not None
        self.plan, self.policy, self.trajectories, self.role = plan, context.policy, trajectories, role
        count = num_shards(context.arena, self.policy)
        self.rings = [BatchRing(context.arena, shard_prefix(self.policy, shard)) for shard in range(count)]
        self._batches = [[_as_batch(tensors) for tensors in ring.tensors] for ring in self.rings]
        self._told, self._released_before = _reported(context.arena, trajectories, self.policy)
        self._before = context.arena[f"replay.{self.policy}.before"]
        if not self._before[2]:  # the first learner of this start
            self._before[:] = (*self._told, 1)
        self._version, self._shard, self._taken = 0, 0, 0.0
        self._seen = [ring.figures.copy() for ring in self.rings]
        self._figures = Figures()

    @property
    def waiting(self) -> int:
        """Batches ready for training, or uncounted steps."""
        return sum(ring.waiting for ring in self.rings) or int(self._totals() != self._told)

    def counts(self) -> BatchCounts:
        """Return the counts of trajectories from the arena; none is discarded."""
        t, policy = self.trajectories, self.policy
        slots = np.flatnonzero((t.owner >> policy & 1 > 0) & (t.released[:, policy] < t.sequence)).tolist()
        seen, in_flight = int(t.sequence.sum()) - self._released_before, 0
        for slot in slots:
            used = columns_used(t, TrajectoryReady(policy, slot, int(t.sequence[slot]), 0))
            in_flight += int(np.count_nonzero(t.valid[slot, :, used:]))
        return BatchCounts(seen, seen - len(slots), 0, in_flight, len(slots))

    def fill(self, version: int) -> Iterator[SlotReleased | Wake]:
        """Do nothing: shards insert."""
        self._version = version
        yield from ()

    def take(self) -> Batch | None:
        """Return the next batch of the next shard with a batch."""
        for offset in range(1, len(self.rings) + 1):
            shard = (self._shard + offset) % len(self.rings)
            if self.rings[shard].waiting:
                self._shard, self._taken = shard, time.perf_counter()
                batch = self._batches[shard][self.rings[shard].next_place]
                age = self._version - batch.policy_version[batch.valid]
                self._figures.add("age_updates", float(age.double().mean()))
                return batch
        return None

    def entered(self) -> Entered:
        """Return the steps inserted since the last call; the first call includes unreported steps of a predecessor."""
        totals = self._totals()
        entered = Entered(totals[0] - self._told[0], totals[1] - self._told[1])
        self._told = totals
        return entered

    def _totals(self) -> tuple[int, int]:
        samples, env_steps = self._before[:2].tolist()
        told = [Told(*ring.told.tolist()) for ring in self.rings]
        return samples + sum(int(t.samples) for t in told), env_steps + sum(int(t.env_steps) for t in told)

    def blank(self) -> Batch:
        """Return a batch of zeros."""
        return self._batches[0][0].map(torch.zeros_like)

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased | Wake]:
        """Return the errors of the last batch to the shard, and wake the shard."""
        self.rings[self._shard].give_back(np.asarray(feedback[-1]["priority"]) if feedback else None)
        if feedback:
            self._figures.add("train_ms", 1e3 * (time.perf_counter() - self._taken))
        yield Wake(Address(self.role.name, self.policy, self._shard))

    def metrics(self) -> dict[str, float]:
        """Return the figures of `REPLAY_METRICS`, of all shards and of each; means since the last call."""
        found, told = self._figures.take(), [Told(*ring.told.tolist()) for ring in self.rings]
        now = [ring.figures.copy() for ring in self.rings]
        since = np.array([a - b for a, b in zip(now, self._seen, strict=True)])  # [shard, figure, 2]
        self._seen = now
        for name, (total, count) in zip(SHOWN, since.sum(axis=0), strict=True):
            if count:  # what a shard has inserted is a share of all
                found[name] = total / count * (len(self.rings) if name == "age_samples" else 1)
        found |= {name: sum(getattr(t, name) for t in told) for name in ("size", "dropped", "unsampled")}
        found["mean_priority"] = sum(t.priority for t in told) / max(1.0, found["size"])
        if starts := sum(t.since for t in told):
            found["uses_per_step"] = sum(ring.trained_uses for ring in self.rings) / starts
        for shard, (ring, one, sums) in enumerate(zip(self.rings, told, since, strict=True)):
            found |= {
                f"shard_{shard}/{name}": total / count
                for name, (total, count) in zip(SHOWN, sums, strict=True)
                if count
            }
            found |= {
                f"shard_{shard}/size": one.size,
                f"shard_{shard}/mean_priority": one.priority / max(1.0, one.size),
            }
            found |= {f"shard_{shard}/uses_per_step": ring.trained_uses / one.since} if one.since else {}
        return {f"replay/{name}": float(value) for name, value in found.items()}


def _reported(arena: Arena, trajectories: Trajectories, policy: int) -> tuple[tuple[int, int], int]:
    """Return samples and env steps that a predecessor or a checkpoint has reported, and released slots."""
    noted, state = LearnerLedger(trajectories, policy).noted(), StateBlock(arena, policy).read()
    known = state.meta if state is not None and not any(noted.values()) else noted
    return (int(known["samples"]), int(known["env_steps"])), noted["released"]


def _as_batch(tensors: Mapping[str, Array]) -> Batch:
    return Batch.of({name: torch.from_numpy(array) for name, array in tensors.items()})
