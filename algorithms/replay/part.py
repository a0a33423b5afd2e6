"""A replay as the process that has it sees it: it inserts what is handed over and draws batches, at a pace."""

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
    "replay_ratio": "replay_ratio",
}
"""What of a plan may change while a run learns -> the flag that says it."""

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Name of a tensor of a batch -> its shape and dtype."""


def batch_shapes(plan: ReplayPlan, spec: EnvSpec, rollout: int, segments: int, rnn_state_size: int) -> Shapes:
    """Return the tensors of a batch of single steps, or of whole columns.

    Args:
        plan: of the replay; its `batch_size` says how many steps or, in whole columns, how many columns there are.
        spec: of the environment.
        rollout: T.
        segments: of backpropagation through time in a column.
        rnn_state_size: H.
    """
    a = column_shapes(spec, rollout, segments, rnn_state_size)
    steps, count = (rollout, plan.columns_of_batch(rollout)) if plan.sequences else (1, plan.batch_size)
    obs = {f"obs.{key}": ((steps + 1, count, *o.shape), o.dtype) for key, o in spec.observations.items()}
    of_step = {name: ((steps, count, *a[name][0][1:]), a[name][1]) for name in OF_STEP}
    flags = dict.fromkeys(("valid", "terminated", "truncated"), ((steps, count), "bool"))
    numbers = dict.fromkeys(("reward", "recorded.discount"), ((steps, count), "float32"))
    numbers |= {"recorded.weight": ((1, count), "float32")}
    lengths = {"recorded.length": ((steps, count), "int64")} if plan.sequences else {}
    state = {"rnn_state": ((segments if plan.sequences else 1, count, rnn_state_size), "float32")}
    return {**obs, **of_step, **flags, **numbers, **lengths, "first": ((steps + 1, count), "bool"), **state}


class ReplayPart:
    """Inserts columns into a replay, each once whoever dies in between, and draws batches from it.

    Batches are of single steps, [1, B] with observations [2, B, *] at t and t+m, n-step rewards and, among what is
    recorded, `discount` and `weight`. Weights are 1 / (N P(i)) over the largest of the batch; the learner raises them
    to beta, as it knows how far training is. With `--batch_replay` they are of whole columns: [T, B] with observations
    [T+1, B, *], and `length` says m of every step.

    Args:
        plan: of the replay.
        storage: the replay.
        trajectories: the shared arrays.
        policies: the policy that trains, and of how many.
        random: of what is drawn.

    Attributes:
        pace: as it is noted in shared memory.
        figures: means of what it costs.
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

    # ---- pace

    def set_pace(self, **changes: int) -> None:
        """Note another pace, for whoever comes after this process too."""
        self.pace = self.pace._replace(**changes)
        self.storage.pace[:] = self.pace

    def begin(self, samples: int, env_steps: int) -> None:
        """Note, in the first process of a start, from where it counts; uses are owed of what enters from now on.

        Args:
            samples: agent steps that have entered before, as they are told.
            env_steps: frames behind them.
        """
        totals = self.storage.totals
        before = {"samples": samples - totals.samples, "env_steps": env_steps - totals.env_steps}
        self.set_pace(**before, used=0, starts=totals.samples + 1 if self.pace.starts else 0, known=1)

    @property
    def owes(self) -> bool:
        """Whether a batch is due: training has begun, and the uses of what has been inserted are not all made."""
        if not self.pace.starts:
            return False
        return not self.plan.replay_ratio or self.pace.used + self._samples_of_batch <= self._owed

    @property
    def holds_actors(self) -> bool:
        """Whether nothing may be inserted now, as uses are owed."""
        return self.plan.replay_ratio > 0 and self.owes

    @property
    def _samples_of_batch(self) -> int:
        return self.plan.batch_size

    @property
    def _owed(self) -> float:
        """Uses of all steps inserted since training began."""
        return self.plan.replay_ratio * self.since_start

    @property
    def since_start(self) -> int:
        """Steps inserted since training began; 0 before."""
        return self.storage.totals.samples + 1 - self.pace.starts if self.pace.starts else 0

    @property
    def _is_filled(self) -> bool:
        """Whether training may begin: there are steps enough, or as many as the replay has room for."""
        size = self.storage.size
        return size >= self.plan.learning_starts or (size > 0 and self.storage.oldest > 1)

    # ---- in

    def mine(self, slot: int) -> Array:
        """[T, R] valid steps of the policy."""
        valid: Array = self.trajectories.valid[slot]
        if self.num_policies == 1:
            return valid
        mine: Array = valid & (self.trajectories.policy_id[slot, : len(valid)] == self.policy)
        return mine

    def insert(self, message: TrajectoryReady) -> int:
        """Insert the columns of a slot that have steps of the policy and are not used; how many steps these have."""
        slot, t, began = message.slot, self.trajectories, time.perf_counter()
        valid = self.mine(slot)
        rows, steps, inserted = valid.shape[1], 0, 0
        error = self.storage.first_errors(t, slot, valid)
        for row in range(columns_used(t, message), rows):
            count = int(np.count_nonzero(valid[:, row]))
            if count and not self.storage.holds(slot * rows + row, message.sequence):
                self.storage.insert(t, slot, row, valid[:, row], error[:, row])
                inserted += count
            steps += count
            note_columns_used(t, message, row + 1)
        if not self.pace.starts and self._is_filled:
            self.set_pace(starts=self.storage.totals.samples + 1)
        if inserted:
            self.figures.add("insert_us", 1e6 * (time.perf_counter() - began) / inserted)
        return steps

    # ---- out

    def draw(self, staging: Mapping[str, Array]) -> Samples:
        """Draw a batch, which counts as used, into tensors of `batch_shapes`."""
        began = time.perf_counter()
        columns = self.plan.columns_of_batch(self.storage.rollout) if self.plan.sequences else self.plan.batch_size
        samples = self.storage.draw(columns, self.random)
        self.storage.note_drawn(samples)
        if self.plan.sequences:
            self._copy_columns(samples, staging)
        else:
            self._copy_steps(samples, staging)
        weight = 1.0 / samples.probability
        staging["recorded.weight"][:] = weight / weight.max() if self.plan.prioritized else 1.0
        self.set_pace(used=self.pace.used + int(np.count_nonzero(staging["valid"])))
        inserted = self.storage.samples_before(samples.column)
        self.figures.add("age_samples", float(np.mean(self.storage.totals.samples - inserted)))
        self.figures.add("sample_ms", 1e3 * (time.perf_counter() - began))
        return samples

    @np.errstate(over="ignore")  # a loss that is not finite makes no step
    def _copy_steps(self, samples: Samples, staging: Mapping[str, Array]) -> None:
        """Copy single steps, with the observation that follows the n-step return."""
        storage, arrays = self.storage, self.storage.arrays
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
        staging["valid"][:], staging["first"][:] = True, False

    def _copy_columns(self, samples: Samples, staging: Mapping[str, Array]) -> None:
        """Copy whole columns, each step with its n-step return."""
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
        """Give what was drawn the priorities that follow from these errors [T, B], negative where a step has none."""
        began = time.perf_counter()
        self.storage.update(samples, error)
        self.figures.add("update_ms", 1e3 * (time.perf_counter() - began))

    def follow(self, flags: Any) -> None:
        """Sum rewards and keep the pace as these flags say, from now on; uses are owed of what enters from now on."""
        plan = replace(self.plan, **{name: getattr(flags, flag) for name, flag in FOLLOWED.items()})
        if plan == self.plan:
            return
        if plan.replay_ratio != self.plan.replay_ratio and self.pace.starts:
            self.set_pace(used=0, starts=self.storage.totals.samples + 1)
        self.plan = self.storage.plan = plan


class Figures:
    """Means of figures since they were last taken."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float) -> None:
        """Take in a value."""
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Return the means, and begin anew."""
        means = {name: total / count for name, (total, count) in self.sums.items()}
        self.sums = {}
        return means
