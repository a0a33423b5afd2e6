"""The source of batches that are drawn from a replay (Ape-X, arXiv:1803.00933; priorities: arXiv:1511.05952)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algorithms.apex.keeper import ReplayFile
from algorithms.apex.storage import Pace, ReplayPlan, ReplayStorage, Samples
from algorithms.runtime.algorithm import Context
from algorithms.runtime.learning.batches import Batch, BatchCounts, Entered, Feedback
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.learner_state import StateBlock
from algorithms.runtime.memory.slots import LearnerLedger, Trajectories, columns_used, note_columns_used
from algorithms.runtime.messages import SlotReleased, TrajectoryReady

log = logging.getLogger(__name__)

OF_STEP = ("action", "num_frames", "policy_version")
FOLLOWED = {
    "alpha": "priority_alpha",
    "priority_epsilon": "priority_epsilon",
    "eta": "priority_eta",
    "n_steps": "n_steps",
    "gamma": "gamma",
    "replay_ratio": "replay_ratio",
}
"""What of a plan may change while a run learns -> the flag that says it."""


class ReplaySource:
    """Inserts what is handed over into a replay, releases the slots at once, and gives batches drawn from it.

    A step enters when it is inserted. While the learner owes uses of what has entered, slots wait and so hold the
    actors; while none are owed, the learner waits. All of that is in shared memory: a learner that takes the place of
    one that died goes on with the same replay, pace and counts.

    Batches are of single steps, [1, B] with observations [2, B, *] at t and t+m, n-step rewards and, among what is
    recorded, `discount` and `weight`. Weights are 1 / (N P(i)) over the largest of the batch; the learner raises them
    to beta, as it knows how far training is. With `--batch_replay` they are of whole columns: [T, B] with observations
    [T+1, B, *], and `length` says m of every step.

    Args:
        plan: of the replay.
        context: of the learner, with the shared memory.
        trajectories: the shared arrays.
        lockstep: slots are taken in rounds, one of every group, and released when their uses are made.
        path: of the file in which the replay is kept; None: there is none.

    Attributes:
        file: of the replay, from which the first learner of a start has taken it.
    """

    staged_samples = 0

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
        self.plan, self.trajectories, self.hold = plan, trajectories, lockstep
        self.policy, self.num_policies = context.policy, context.num_policies
        self.storage = storage = ReplayStorage(plan, context.spec, context.arena, self.policy)
        self.queue: deque[TrajectoryReady] = deque()
        self.held: list[TrajectoryReady] = []
        self.queued_samples = self.trajectories_seen = self.released = self._version = 0
        self._taken = 0.0  # when the last batch was
        self.random = np.random.default_rng(context.seeds.spawn(1)[0])
        self._figures = _Figures()
        noted, state = LearnerLedger(trajectories, self.policy).noted(), StateBlock(context.arena, self.policy).read()
        known = state.meta if state is not None and not any(noted.values()) else noted
        self._told = int(known["samples"]), int(known["env_steps"])
        self.file = None if path is None else ReplayFile(path, storage)
        is_first = not Pace(*storage.pace.tolist()).known  # learner of this start
        if is_first and self.file is not None and self.file.load():
            log.info("the replay goes on with %d steps of %s", storage.size, path)
        self.pace = Pace(*storage.pace.tolist())
        if is_first:
            totals = storage.totals
            before = {"samples": self._told[0] - totals.samples, "env_steps": self._told[1] - totals.env_steps}
            starts = totals.samples + 1 if self.pace.starts else 0  # uses are owed of what enters in this start
            self._set_pace(**before, used=0, starts=starts, known=1)
        self._drawn: Samples | None = None
        self._draw_of(plan.batch_size)

    # ---- pace

    def _set_pace(self, **changes: int) -> None:
        self.pace = self.pace._replace(**changes)
        self.storage.pace[:] = self.pace

    @property
    def is_ready(self) -> bool:
        """Whether a batch is due: training has begun, and the uses of what has been inserted are not all made."""
        if not self.pace.starts:
            return False
        return not self.plan.replay_ratio or self.pace.used + self._samples_per_batch <= self._owed

    @property
    def _owed(self) -> float:
        """Uses of all steps inserted since training began."""
        return self.plan.replay_ratio * (self.storage.totals.samples + 1 - self.pace.starts)

    @property
    def waiting(self) -> int:
        """Batches that are due and slots that can be taken."""
        return int(self.is_ready) or len(self._takeable)

    @property
    def _takeable(self) -> deque[TrajectoryReady]:
        whole_round = len(self.queue) + len(self.held) == len(self.trajectories.owner)
        return self.queue if whole_round or not self.hold else deque()

    # ---- in

    def add(self, message: TrajectoryReady) -> None:
        """Queue a slot unless the message is of an earlier hand-over."""
        if message.sequence == self.trajectories.sequence[message.slot]:
            self.queue.append(message)
            self.trajectories_seen += 1
            start = columns_used(self.trajectories, message)
            self.queued_samples += int(np.count_nonzero(self._mine(message.slot)[:, start:]))
            if self.hold:
                self.queue = deque(sorted(self.queue))

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Insert what waits until a batch is due, or all of it if actors are not to be held; release the slots."""
        self._version = version
        self._figures.add("waiting_slots", len(self.queue))
        self._figures.add("held", float(bool(self.queue) and self.is_ready and self.plan.replay_ratio > 0))
        while self._takeable and not (self.plan.replay_ratio and self.is_ready):
            message = self.queue.popleft()
            self._insert(message)
            if self.hold:
                self.held.append(message)
            else:
                yield self._release(message)
        if self.hold and not self.queue and not self.is_ready:
            yield from self._release_held()

    def _insert(self, message: TrajectoryReady) -> None:
        """Insert the columns of a slot that have steps of the policy, each once whoever dies in between."""
        slot, t, began = message.slot, self.trajectories, time.perf_counter()
        valid = self._mine(slot)
        rows, inserted = valid.shape[1], 0
        error = self.storage.first_errors(t, slot, valid)
        for row in range(columns_used(t, message), rows):
            count = int(np.count_nonzero(valid[:, row]))
            if count and not self.storage.holds(slot * rows + row, message.sequence):
                self.storage.insert(t, slot, row, valid[:, row], error[:, row])
                inserted += count
            self.queued_samples -= count
            note_columns_used(t, message, row + 1)
        if not self.pace.starts and self.storage.size >= self.plan.learning_starts:
            self._set_pace(starts=self.storage.totals.samples + 1)
        if inserted:
            self._figures.add("insert_us", 1e6 * (time.perf_counter() - began) / inserted)

    def _mine(self, slot: int) -> Array:
        """[T, R] valid steps of this policy."""
        valid: Array = self.trajectories.valid[slot]
        if self.num_policies == 1:
            return valid
        mine: Array = valid & (self.trajectories.policy_id[slot, : len(valid)] == self.policy)
        return mine

    def _release(self, message: TrajectoryReady) -> SlotReleased:
        self.released += 1
        return SlotReleased(self.policy, message.slot, message.sequence)

    def _release_held(self) -> Iterator[SlotReleased]:
        held, self.held = self.held, []
        for message in held:
            yield self._release(message)

    def counts(self) -> BatchCounts:
        """Return the counts of the trajectories; nothing is discarded."""
        held = len(self.queue) + len(self.held)
        return BatchCounts(self.trajectories_seen, self.released, 0, self.queued_samples, held)

    def entered(self) -> Entered:
        """Return what has been inserted since the last call; at first, what a predecessor has inserted and not told."""
        totals = self.storage.totals
        now = self.pace.samples + totals.samples, self.pace.env_steps + totals.env_steps
        entered = Entered(now[0] - self._told[0], now[1] - self._told[1])
        self._told = now
        return entered

    # ---- out

    def take(self) -> Batch | None:
        """Draw a batch if one is due; its tensors are overwritten by the next one."""
        if not self.is_ready:
            return None
        began = time.perf_counter()
        self._drawn = samples = self.storage.draw(self._columns, self.random)
        self.storage.note_drawn(samples)
        if self.plan.sequences:
            self._copy_columns(samples)
        else:
            self._copy_steps(samples)
        weight = 1.0 / samples.probability
        self._staging["recorded.weight"][:] = weight / weight.max() if self.plan.prioritized else 1.0
        valid = self._staging["valid"]
        self._set_pace(used=self.pace.used + int(np.count_nonzero(valid)))
        inserted = self.storage.samples_before(samples.column)
        self._figures.add("age_samples", float(np.mean(self.storage.totals.samples - inserted)))
        self._figures.add("age_updates", float(np.mean(self._version - self._staging["policy_version"][valid])))
        self._taken = time.perf_counter()
        self._figures.add("sample_ms", 1e3 * (self._taken - began))
        return Batch.of({name: torch.from_numpy(array) for name, array in self._staging.items()})

    def _copy_steps(self, samples: Samples) -> None:
        """Copy single steps, with the observation that follows the n-step return."""
        storage, staging, arrays = self.storage, self._staging, self.storage.arrays
        column, step = samples.column, samples.step
        returns = storage.returns_of(samples)
        for key in storage.spec.observations:
            storage.read_obs(key, column, step, staging[f"obs.{key}"][0])
            storage.read_obs(key, column, step + returns.length, staging[f"obs.{key}"][1])
        for name in OF_STEP:
            staging[name][0] = arrays[name][column, step]
        steps_per_segment = storage.rollout // arrays["rnn_state"].shape[1]
        staging["rnn_state"][0] = arrays["rnn_state"][column, step // steps_per_segment]
        staging["reward"][0], staging["recorded.discount"][0] = returns.reward, returns.discount
        staging["terminated"][0], staging["truncated"][0] = returns.terminated, returns.truncated

    def _copy_columns(self, samples: Samples) -> None:
        """Copy whole columns, each step with its n-step return."""
        storage, staging, arrays = self.storage, self._staging, self.storage.arrays
        column, (rollout, count) = samples.column, staging["reward"].shape
        step, columns = np.repeat(np.arange(rollout + 1), count), np.tile(column, rollout + 1)
        for key, observation in storage.spec.observations.items():
            storage.read_obs(key, columns, step, staging[f"obs.{key}"].reshape(len(step), *observation.shape))
        every = slice(0, rollout * count)
        returns = storage.returns_of(samples._replace(column=columns[every], step=step[every]))
        for name, array in (("reward", returns.reward), ("recorded.discount", returns.discount)):
            staging[name][:] = array.reshape(rollout, count)
        staging["recorded.length"][:] = returns.length.reshape(rollout, count)
        staging["valid"][:] = staging["recorded.length"] > 0
        for name in (*OF_STEP, "first", "terminated", "truncated", "rnn_state"):
            staging[name][:] = arrays[name][column].swapaxes(0, 1)

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased]:
        """Give what was drawn the priorities that the learner says, and follow the flags with which it learns.

        Args:
            feedback: "priority", absolute errors [T, B] in the order of the batch, negative where a step has none; and
                "flags", if they may change while it learns.
        """
        began, drawn = time.perf_counter(), self._drawn
        for said in feedback:
            if drawn is not None:
                self.storage.update(drawn, np.asarray(said["priority"]))
            if "flags" in said:
                self._follow(said["flags"])
        if feedback:
            self._figures.add("train_ms", 1e3 * (began - self._taken))
            self._figures.add("update_ms", 1e3 * (time.perf_counter() - began))
        if self.hold and not self.queue and not self.is_ready:
            yield from self._release_held()

    def _follow(self, flags: Any) -> None:
        """Sum rewards and keep the pace as these flags say, from now on; uses are owed of what enters from now on."""
        plan = replace(self.plan, **{name: getattr(flags, flag) for name, flag in FOLLOWED.items()})
        if plan == self.plan:
            return
        if plan.replay_ratio != self.plan.replay_ratio and self.pace.starts:
            self._set_pace(used=0, starts=self.storage.totals.samples + 1)
        self.plan = self.storage.plan = plan

    def resize(self, columns: int) -> None:
        """Draw for the next batch so many trajectories, or as many steps as there are in them."""
        self._draw_of(columns * self.storage.rollout)

    def _draw_of(self, samples: int) -> None:
        self._samples_per_batch = samples
        self._columns = max(1, samples // self.storage.rollout) if self.plan.sequences else samples
        shapes = self._shapes(self._columns, self.storage.rollout if self.plan.sequences else 0)
        self._staging = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        self._staging["valid"][:] = True

    def _shapes(self, count: int, rollout: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Name -> shape and dtype of the tensors of a batch of columns, or with a rollout of 0 of single steps."""
        a, spec, steps = self.storage.arrays, self.storage.spec, rollout or 1
        obs = {f"obs.{key}": ((steps + 1, count, *o.shape), o.dtype) for key, o in spec.observations.items()}
        of_step = {name: ((steps, count, *a[name].shape[2:]), a[name].dtype) for name in OF_STEP}
        flags = dict.fromkeys(("valid", "terminated", "truncated"), ((steps, count), np.bool_))
        numbers = dict.fromkeys(("reward", "recorded.discount"), ((steps, count), np.float32))
        numbers |= {"recorded.weight": ((1, count), np.float32)}
        lengths = {"recorded.length": ((steps, count), np.int64)} if rollout else {}
        segments, state_size = a["rnn_state"].shape[1:]
        state = {"rnn_state": ((segments if rollout else 1, count, state_size), np.float32)}
        return {**obs, **of_step, **flags, **numbers, **lengths, "first": ((steps + 1, count), np.bool_), **state}

    def weights_replaced(self) -> None:
        """Keep everything: what is learned from it does not depend on the weights that acted."""

    def metrics(self) -> dict[str, float]:
        """Return the figures of `REPLAY_METRICS`; means since the last call."""
        totals, figures = self.storage.totals, self._figures.take()
        figures |= {"size": self.storage.size, "mean_priority": self.storage.mean_priority}
        figures |= {"dropped": totals.dropped, "unsampled": totals.unsampled}
        if (since := totals.samples + 1 - self.pace.starts) and self.pace.starts:
            figures["uses_per_step"] = self.pace.used / since
        return {f"replay/{name}": float(value) for name, value in figures.items()}


class _Figures:
    """Means of figures since they were last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float) -> None:
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means
