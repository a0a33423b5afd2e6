"""The replay in the process that owns it: insertion of slots and paced draws of batches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from appo.algorithms.replay.storage import Pace, ReplayPlan, ReplayStorage, Samples, column_shapes
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.ownership import columns_used, note_columns_used
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import TrajectoryReady
from appo.envs.spec import EnvSpec

OF_STEP = ("action", "num_frames", "policy_version")
FOLLOWED = {
    "alpha": "priority_alpha",
    "priority_epsilon": "priority_epsilon",
    "eta": "priority_eta",
    "n_steps": "n_steps",
    "gamma": "gamma",
    "replay_ratio": "uses_per_step",
}
"""Field of a plan that may change during a run -> name of the value in the flags, if present."""

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Name of a tensor of a batch -> shape and dtype."""


def batch_shapes(plan: ReplayPlan, spec: EnvSpec, rollout: int, rnn_state_size: int) -> Shapes:
    """Return the tensors of a batch of single steps or of whole columns."""
    a = column_shapes(spec, rollout, rnn_state_size)
    steps, count = (rollout, plan.columns_of_batch(rollout)) if plan.sequences else (1, plan.batch_size)
    obs = {f"obs.{key}": ((steps + 1, count, *o.shape), o.dtype) for key, o in spec.observations.items()}
    of_step = {name: ((steps, count, *a[name][0][1:]), a[name][1]) for name in OF_STEP}
    flags = dict.fromkeys(("valid", "terminated", "truncated"), ((steps, count), "bool"))
    numbers = dict.fromkeys(("reward", "recorded.discount"), ((steps, count), "float32"))
    numbers |= {"recorded.weight": ((1, count), "float32")}
    lengths = {"recorded.length": ((steps, count), "int64")} if plan.sequences else {}
    state = {"rnn_state": ((1, count, rnn_state_size), "float32")}
    return {**obs, **of_step, **flags, **numbers, **lengths, "first": ((steps + 1, count), "bool"), **state}


class ReplayPart:
    """Inserts every column into a replay exactly once, across crashes, and draws batches.

    A batch of single steps is [1, B], with observations [2, B, *] at t and t+m, n-step rewards, and the recorded
    `discount` and `weight`. Weights are 1 / (N P(i)) over the largest weight of the batch; the learner raises them to
    beta, which depends on the progress of training. With `--batch_replay` a batch has whole columns: [T, B],
    observations [T+1, B, *], and `length`, the m of every step.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        storage: ReplayStorage,
        trajectories: Trajectories,
        policies: tuple[int, int],
        random: np.random.Generator,
    ) -> None:
        self.plan, self.storage, self.trajectories, self.random = plan, storage, trajectories, random
        self.policy, self.num_policies = policies
        self.pace = Pace(*storage.pace.tolist())
        self.figures = Figures()
        self.retired, self.discarded = False, 0  # whether nothing is inserted or drawn any more; steps since then

    def set_pace(self, **changes: int) -> None:
        """Change counts of the pace, also in shared memory for a successor of this process."""
        self.pace = self.pace._replace(**changes)
        self.storage.pace[:] = self.pace

    def begin(self, samples: int, env_steps: int) -> None:
        """Note the counts at the first process of a start; only steps inserted from now on owe uses."""
        totals = self.storage.totals
        before = {"samples": samples - totals.samples, "env_steps": env_steps - totals.env_steps}
        self.set_pace(**before, used=0, starts=totals.samples + 1 if self.pace.starts else 0, known=1)

    @property
    def owes(self) -> bool:
        """Whether a batch is due: training has begun, and inserted steps still owe uses."""
        if not self.pace.starts or self.retired:
            return False
        ratio = self.plan.replay_ratio
        return not ratio or self.pace.used + self.plan.batch_size <= ratio * self.since_start

    @property
    def holds_actors(self) -> bool:
        """Whether owed uses forbid insertion now."""
        return self.plan.replay_ratio > 0 and self.owes

    @property
    def since_start(self) -> int:
        """Steps inserted since training began; 0 before."""
        return self.storage.totals.samples + 1 - self.pace.starts if self.pace.starts else 0

    def mine(self, slot: int) -> Array:
        """Return the valid steps of the policy, [T, R]."""
        return self.trajectories.valid_of(slot, self.policy if self.num_policies > 1 else None)

    def insert(self, message: TrajectoryReady) -> int:
        """Insert the unused columns of a slot that contain steps of the policy; return the number of these steps."""
        slot, t, began = message.slot, self.trajectories, time.perf_counter()
        valid = self.mine(slot)
        rows, steps, inserted = valid.shape[1], 0, 0
        error = self.storage.first_errors(t, slot, valid)
        for row in range(columns_used(t, message), rows):
            count = int(np.count_nonzero(valid[:, row]))
            if count and not self.storage.holds(slot * rows + row, message.sequence):
                if self.retired:
                    self.discarded += count
                else:
                    self.storage.insert(t, slot, row, valid[:, row], error[:, row])
                    inserted += count
            steps += count
            note_columns_used(t, message, row + 1)
        size = self.storage.size
        is_filled = size >= self.plan.learning_starts or (size > 0 and self.storage.oldest > 1)  # enough, or all room
        if not self.pace.starts and is_filled:
            self.set_pace(starts=self.storage.totals.samples + 1)
        if inserted:
            self.figures.add("insert_us", 1e6 * (time.perf_counter() - began) / inserted)
        return steps

    def draw(self, staging: Mapping[str, Array]) -> Samples:
        """Draw a batch into tensors of `batch_shapes`; the batch counts as used."""
        began = time.perf_counter()
        columns = self.plan.columns_of_batch(self.storage.rollout) if self.plan.sequences else self.plan.batch_size
        samples = self.storage.draw(columns, self.random)
        self.storage.note_drawn(samples)
        if self.plan.sequences:
            self._copy_columns(samples, staging)
        else:
            self._copy_steps(samples, staging)
        if self.plan.relabel is not None:
            self.plan.relabel(self.storage, samples, staging)
        weight = 1.0 / samples.probability
        staging["recorded.weight"][:] = weight / weight.max() if self.plan.prioritized else 1.0
        self.set_pace(used=self.pace.used + int(np.count_nonzero(staging["valid"])))
        inserted = self.storage.samples_before(samples.column)
        self.figures.add("age_samples", float(np.mean(self.storage.totals.samples - inserted)))
        self.figures.add("sample_ms", 1e3 * (time.perf_counter() - began))
        return samples

    @np.errstate(over="ignore")  # a loss that is not finite makes no step
    def _copy_steps(self, samples: Samples, staging: Mapping[str, Array]) -> None:
        """Copy single steps, with the observation after the n-step return."""
        storage, arrays = self.storage, self.storage.arrays
        column, step = samples.column, samples.step
        returns = storage.returns_of(samples)
        later = storage.rollout - returns.room  # the step of the observation after the return
        for key in storage.spec.observations:
            storage.read_obs(key, column, step, staging[f"obs.{key}"][0])
            storage.read_obs(key, (returns.end - later) // storage.rollout, later, staging[f"obs.{key}"][1])
        for name in OF_STEP:
            staging[name][0] = arrays[name][column, step]
        staging["rnn_state"][0] = arrays["rnn_state"][column, 0]
        staging["reward"][0], staging["recorded.discount"][0] = returns.reward, returns.discount
        staging["terminated"][0], staging["truncated"][0] = returns.terminated, returns.truncated
        staging["valid"][:], staging["first"][:] = True, False

    def _copy_columns(self, samples: Samples, staging: Mapping[str, Array]) -> None:
        """Copy whole columns, with an n-step return per step."""
        storage, arrays = self.storage, self.storage.arrays
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

    def update(self, samples: Samples, error: Array) -> None:
        """Set the priorities of samples from errors [T, B]; negative: no error."""
        began = time.perf_counter()
        self.storage.update(samples, error)
        self.figures.add("update_ms", 1e3 * (time.perf_counter() - began))

    def follow(self, flags: Any) -> None:
        """Follow other flags from now on; after a change of the ratio only new steps owe uses."""
        known = {name: getattr(flags, flag) for name, flag in FOLLOWED.items() if hasattr(flags, flag)}
        plan = replace(self.plan, **known)
        if plan == self.plan:
            return
        if plan.replay_ratio != self.plan.replay_ratio and self.pace.starts:
            self.set_pace(used=0, starts=self.storage.totals.samples + 1)
        self.plan = self.storage.plan = plan


class Figures:
    """Means of figures since the last `take`."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float) -> None:
        """Add a value."""
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Return the means and start afresh."""
        means = {name: total / count for name, (total, count) in self.sums.items()}
        self.sums = {}
        return means
