"""Storage of a replay: columns of T steps in shared memory, which survive the process that writes them.

Only the learner's process inserts. The word of a place reports progress: odd while a column is written, then twice the
number of the column. The note beside a column holds all totals, which become valid with that store. `recover` rebuilds
cursor, totals and tree from words, notes and leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from appo.algorithms.replay.frame_stores import Packed
from appo.algorithms.replay.frames import FrameRing, stack_of
from appo.algorithms.replay.sum_tree import SumTree, padded
from appo.algorithms.runtime.memory.arena import Arena, Array, Field
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.weights import barrier
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import EnvSpec

log = logging.getLogger(__name__)

EVICTED = -1  # the word of a column whose frames are being overwritten
Number = TypeVar("Number", int, Array)
Q_TAKEN, Q_MAX = "q_taken", "q_max"
"""Recorded by acting policies: value of the taken action and largest value, [T, R]."""


@dataclass(frozen=True)
class ReplayPlan:
    """Capacity, priorities and batches of a replay.

    Attributes:
        capacity: agent steps of the run, shared among the policies.
        alpha: exponent of priorities; 0 is uniform.
        priority_epsilon: constant added to every absolute error.
        prioritized: whether errors decide the draw; otherwise every step is equally probable.
        n_steps: largest number of summed rewards.
        gamma: discount per step.
        batch_size: B, steps per batch.
        replay_ratio: uses per agent step; 0: as many as the learner manages.
        learning_starts: agent steps of a policy before the first batch.
        sequences: whether whole columns are drawn, with a priority each.
        eta: share of the largest error in the priority of a column; the mean error has the rest.
        rescaled: whether errors are differences of h(return), the network's prediction.
        compressed_share: memory of compressed frames relative to plain frames; None: plain frames.
        relabel: function that changes drawn batches, for example their goals and rewards, called with the storage, the
            samples and the tensors of the batch (`part.batch_shapes`); None: no change.
    """

    capacity: int
    alpha: float
    priority_epsilon: float
    prioritized: bool
    n_steps: int
    gamma: float
    batch_size: int
    replay_ratio: float
    learning_starts: int
    sequences: bool = False
    eta: float = 0.9
    rescaled: bool = False
    compressed_share: float | None = None
    relabel: Callable[[ReplayStorage, Samples, Mapping[str, Array]], None] | None = None

    def share(self, shards: int) -> ReplayPlan:
        """Return the plan of a shard: capacity and first steps are divided among the shards."""
        return replace(self, **{name: -(-getattr(self, name) // shards) for name in ("capacity", "learning_starts")})

    def columns_of_batch(self, rollout: int) -> int:
        """Return the number of whole columns of `rollout` steps in a batch."""
        return max(1, self.batch_size // rollout)

    def leaves_per_column(self, rollout: int) -> int:
        """Return L, the number of priorities of a column."""
        return 1 if self.sequences else rollout


class ColumnNote(NamedTuple):
    """Facts of a column; totals include all columns up to this column.

    Attributes:
        place: origin, slot * R + row.
        sequence: number of the slot's hand-over.
        samples, env_steps: inserted valid steps, and frames behind them.
        unsampled: valid steps that are never drawn, because the steps after them are unknown.
        dropped: steps overwritten before any batch contained them.
        previous: number of the column whose last observation is the first here; 0: not in this replay.
    """

    place: int = 0
    sequence: int = 0
    samples: int = 0
    env_steps: int = 0
    unsampled: int = 0
    dropped: int = 0
    previous: int = 0


class Samples(NamedTuple):
    """Drawn steps, [B].

    Attributes:
        column, step: place of each; step 0 for whole columns.
        word: word of the column at the draw.
        probability: probability of each draw.
    """

    column: Array
    step: Array
    word: Array
    probability: Array


class Outcomes(NamedTuple):
    """Rewards and ends of steps, flat, for n-step returns.

    Attributes:
        valid, reward, terminated, truncated: values of each step.
        same_step: whether the observation after a truncated step belongs to the next episode and must not follow the
            step.
    """

    valid: Array
    reward: Array
    terminated: Array
    truncated: Array
    same_step: bool


class NStep(NamedTuple):
    """N-step returns, [B].

    Attributes:
        length: m, number of summed steps; 0: the step was not taken, or the steps after it are unknown.
        reward: sum over k < m of gamma^k r_{t+k}.
        discount: gamma^m, factor of the value of observation t+m; 0 after a terminated step.
        terminated, truncated: end of the last summed step.
        end: index of the step after the last summed step; at the end of a column, one more than the last index.
        room: steps from there to the end of the column.
    """

    length: Array
    reward: Array
    discount: Array
    terminated: Array
    truncated: Array
    end: Array
    room: Array


def n_step_returns(
    outcomes: Outcomes,
    start: Array,
    room: Array,
    stride: int,
    n_steps: int,
    gamma: float,
    following: Array | None = None,
) -> NStep:
    """Sum rewards over at most n steps, up to the end of the episode or of the known columns.

    Args:
        outcomes: all steps, flat.
        start: [B] indices of the first steps.
        room: [B] steps from there to the end of the column, at least 1.
        stride: distance between successive steps in `outcomes`.
        n_steps: n.
        gamma: discount per step.
        following: [N] place of the column that continues each of N columns, which lie one after the other in
            `outcomes`, or -1; None: a sum ends with the column.
    """
    length, reward, factor = np.zeros(len(start), np.int64), np.zeros(len(start)), np.ones(len(start))
    terminated, truncated = np.zeros((2, len(start)), np.bool_)
    going = np.ones(len(start), np.bool_)
    end, room = start.copy(), room.copy()
    for _ in range(n_steps):
        if following is not None:
            _go_on(end, room, going, following, len(outcomes.valid) // len(following))
        at = np.where(room > 0, end, end - stride)
        going = going & (room > 0) & outcomes.valid[at]
        if outcomes.same_step:
            going &= ~outcomes.truncated[at]
        reward += np.where(going, factor * outcomes.reward[at], 0.0)
        factor = np.where(going, factor * gamma, factor)
        length += going
        end += stride * going
        room -= going
        terminated |= going & outcomes.terminated[at]
        truncated |= going & outcomes.truncated[at]
        going = going & ~terminated & ~truncated
        if not going.any():
            break
    return NStep(length, reward, np.where(terminated, 0.0, factor), terminated, truncated, end, room)


def _go_on(end: Array, room: Array, going: Array, following: Array, rollout: int) -> None:
    """Move the indices [B] that have reached the end of a column to the beginning of the following column, if any."""
    ended = np.flatnonzero(going & (room == 0))
    column = following[end[ended] // rollout - 1]
    known = column >= 0
    end[ended[known]] = column[known] * rollout
    room[ended[known]] = rollout


def rescaled_value(x: Array) -> Array:
    """Return h(x) as `ops.q_learning` does for tensors (arXiv:1805.11593, prop. A.2)."""
    h: Array = np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x
    return h


def num_columns(plan: ReplayPlan, rollout: int, num_policies: int) -> int:
    """Return N, the number of columns of a policy: at least two, because the newest is never overwritten."""
    return max(2, -(-plan.capacity // (rollout * num_policies)))


def replay_fields(
    plan: ReplayPlan, spec: EnvSpec, topology: Topology, rnn_state_size: int = 0, policy: int = 0
) -> list[Field]:
    """Declare the shared memory of a policy's replay; recurrent states have H = `rnn_state_size` numbers."""
    n = num_columns(plan, topology.rollout, topology.num_policies)
    return fields_of_columns(f"replay.{policy}", plan, spec, n, column_shapes(spec, topology.rollout, rnn_state_size))


def fields_of_columns(
    prefix: str, plan: ReplayPlan, spec: EnvSpec, n: int, columns: Mapping[str, tuple[tuple[int, ...], str]]
) -> list[Field]:
    """Declare the shared memory of a replay of N columns."""
    (rollout,) = columns["valid"][0]
    fields = [
        Field(f"{prefix}.word", (n,), "int64"),
        Field(f"{prefix}.note", (n, len(ColumnNote._fields)), "int64"),
        Field(f"{prefix}.leaf", (padded(n * plan.leaves_per_column(rollout)),), "float64"),
        Field(f"{prefix}.largest", (1,), "float64"),  # error so far
        Field(f"{prefix}.pace", (len(Pace._fields),), "int64"),
        *(Field(f"{prefix}.{name}", (n, *shape), dtype, fills=True) for name, (shape, dtype) in columns.items()),
    ]
    for key, observation in spec.observations.items():
        stack = stack_of(observation, single=plan.compressed_share is not None)
        if stack is None:
            fields.append(
                Field(f"{prefix}.obs.{key}", (n, rollout + 1, *observation.shape), observation.dtype, fills=True)
            )
        else:
            fields += FrameRing.declare(f"{prefix}.obs.{key}", stack, n, rollout, plan.compressed_share)
    return fields


class Pace(NamedTuple):
    """Counts that decide the pace of a replay.

    Attributes:
        used: samples drawn so far.
        starts: samples inserted when the first batch was due, plus 1; 0: not yet due.
        samples, env_steps: the learner's counts before the first insertion of this start.
        known: 1 if the two counts are noted.
    """

    used: int = 0
    starts: int = 0
    samples: int = 0
    env_steps: int = 0
    known: int = 0


def column_shapes(spec: EnvSpec, rollout: int, rnn_state_size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> shape and dtype of a column without observations, as in `Trajectories`."""
    return {
        "first": ((rollout + 1,), "bool"),
        "valid": ((rollout,), "bool"),
        "reward": ((rollout,), "float32"),
        "terminated": ((rollout,), "bool"),
        "truncated": ((rollout,), "bool"),
        "num_frames": ((rollout,), "int32"),
        "action": ((rollout, spec.action.num_values), spec.action.dtype),
        "policy_version": ((rollout,), "int64"),
        "rnn_state": ((1, rnn_state_size), "float32"),  # before the column, the segment of backpropagation
        "drawn": ((rollout,), "bool"),
    }


class ReplayStorage:
    """The replay of a policy, attached with the content that another process has left.

    Fields in the arena have the names of `replay_fields` unless `prefix` names others.

    Attributes:
        columns: N.
        rollout: T.
        arrays: content of columns beside observations by name, [N, ...].
        obs: observations stored unchanged by key, [N, T+1, *].
        rings: stacks, and images to be compressed, by key.
        leaves: L, leaves of a column: one per step, or a single one.
        tree: sums over the leaves.
        newest: number of the last inserted column, counted from 1.
        size: number of samples that can be drawn.
        totals: note of the newest column.
    """

    def __init__(self, plan: ReplayPlan, spec: EnvSpec, arena: Arena, policy: int, prefix: str = "") -> None:
        self.plan, self.spec, self.arena, self._prefix = plan, spec, arena, prefix or f"replay.{policy}"
        self.word, self._note = self._array("word"), self._array("note")
        self.largest, self.pace = self._array("largest"), self._array("pace")
        self.columns: int
        self.rollout: int
        self.columns, self.rollout = self._array("valid").shape
        self.arrays = {name: self._array(name) for name in column_shapes(spec, 1, 1)}
        single = plan.compressed_share is not None
        stacks = {key: stack_of(observation, single=single) for key, observation in spec.observations.items()}
        self.rings = {
            key: FrameRing(arena, f"{self._prefix}.obs.{key}", stack) for key, stack in stacks.items() if stack
        }
        self.obs = {key: self._array(f"obs.{key}") for key, stack in stacks.items() if not stack}
        self.leaves = plan.leaves_per_column(self.rollout)
        self._has_warned = False
        self._leaf = self._array("leaf")[: self.columns * self.leaves].reshape(self.columns, self.leaves)
        self.recover()

    def _array(self, name: str) -> Array:
        return self.arena[f"{self._prefix}.{name}"]

    def shared(self) -> dict[str, Array]:
        """Return every array of the replay by name."""
        names = ["word", "note", "leaf", "largest", "pace", *self.arrays, *(f"obs.{key}" for key in self.obs)]
        names += [f"obs.{key}.{part}" for key, ring in self.rings.items() for part in ring.names]
        return {name: self._array(name) for name in names}

    def recover(self) -> None:
        """Rebuild cursor, totals and tree; a column whose insertion was interrupted does not count."""
        self._leaf[self.word % 2 == 1] = 0.0
        complete = self.word[(self.word > 0) & (self.word % 2 == 0)] // 2
        self.newest = int(complete.max(initial=0))
        self.oldest = int(complete.min(initial=self.newest + 1))
        self.totals = ColumnNote(*self._note[self._place(self.newest)].tolist()) if self.newest else ColumnNote()
        self._link()
        self.size = self._drawable(np.flatnonzero(self._leaf.any(axis=1)))
        self.tree = SumTree(self._array("leaf"))
        self._ready_columns = 0  # whose memory is reserved

    def _link(self) -> None:
        """Find the column that continues each column, and the newest column from every row of a slot, in the notes."""
        number = np.arange(self.oldest, self.newest + 1)
        number = number[self.word[self._place(number)] == 2 * number]
        place, note = self._place(number), self._note[self._place(number)]
        previous = note[:, ColumnNote._fields.index("previous")]
        known = np.isin(previous, number) & (previous < number)
        self._following = np.full(self.columns, -1)
        self._following[self._place(previous[known])] = place[known]
        self._newest_from = dict(zip(note[:, 0].tolist(), number.tolist(), strict=True))

    def _previous(self, trajectories: Trajectories, slot: int, row: int) -> int:
        """Return the number of the column continued by a column of a slot; 0: no column here."""
        place = int(trajectories.continues[slot]) * trajectories.valid.shape[2] + row
        number = self._newest_from.get(place, 0) if place >= 0 else 0
        if number < self.oldest:
            return 0
        note = ColumnNote(*self._note[self._place(number)].tolist())
        return number if note.sequence == trajectories.follows[slot] else 0

    def _place(self, number: Number) -> Number:
        return (number - 1) % self.columns

    def _drawable(self, place: Array | int) -> int:
        """Return the number of steps that can be drawn from columns, alone or with the column."""
        leaf = self._leaf[place]
        return int(np.count_nonzero(self.arrays["valid"][place] & (leaf > 0) if self.plan.sequences else leaf))

    def holds(self, place: int, sequence: int) -> bool:
        """Return whether the newest column came from this place and hand-over, a fact that its slot may lack."""
        return (self.totals.place, self.totals.sequence) == (place, sequence)

    def insert(self, trajectories: Trajectories, slot: int, row: int, valid: Array, error: Array) -> int:
        """Insert a column of a slot in place of the oldest; return the number of valid steps.

        Readers see only complete columns. `valid` [T] are the steps of the policy, `error` [T] the first priorities
        from `first_errors`.
        """
        number = self.newest + 1
        place = self._place(number)
        stacked = {key: trajectories.obs[key][slot, :, row] for key in self.rings}
        plans = {key: self.rings[key].plan(obs) for key, obs in stacked.items()}
        packed = {key: self.rings[key].pack(obs, plans[key]) for key, obs in stacked.items()}
        dropped = self._make_room(number, packed)
        self.word[place] = 2 * number - 1
        barrier()
        self.reserve_columns(place + 1)
        for name, array in self.arrays.items():
            if name not in ("valid", "drawn"):
                array[place] = getattr(trajectories, name)[slot, :, row]
        self.arrays["valid"][place], self.arrays["drawn"][place] = valid, False
        for key, array in self.obs.items():
            array[place] = trajectories.obs[key][slot, :, row]
        for key, ring in self.rings.items():
            ring.write(place, self._end(key), plans[key], packed[key])
        self.tree.set(self._leaves_at(place), self._leaves_of(error[None])[0])
        count, frames = int(np.count_nonzero(valid)), int(self.arrays["num_frames"][place][valid].sum())
        before = self.totals
        self.totals = ColumnNote(
            place=slot * trajectories.valid.shape[2] + row,
            sequence=int(trajectories.sequence[slot]),
            samples=before.samples + count,
            env_steps=before.env_steps + frames,
            unsampled=before.unsampled + int(np.count_nonzero(valid & (error < 0))),
            dropped=before.dropped + dropped,
            previous=self._previous(trajectories, slot, row),
        )
        self._note[place] = self.totals
        barrier()
        self.word[place] = 2 * number
        self.newest, self.size = number, self.size + self._drawable(place)
        self._newest_from[self.totals.place], self._following[place] = number, -1
        if self.totals.previous:
            self._following[self._place(self.totals.previous)] = place
        return count

    def _make_room(self, number: int, packed: Mapping[str, Packed]) -> int:
        """Evict columns in the place or the frames of the next; return the number of their steps never drawn."""
        dropped, oldest = 0, self.oldest
        while self.oldest <= self.newest and (
            self.oldest <= number - self.columns
            or not all(
                ring.store.has_room(int(ring.frames_of(self._place(self.oldest))[0]), self._end(key), packed[key])
                for key, ring in self.rings.items()
            )
        ):
            place = self._place(self.oldest)
            self.word[place] = EVICTED
            barrier()
            self.size -= self._drawable(place)
            self._following[place] = -1
            dropped += int(np.count_nonzero(self.arrays["valid"][place] & ~self.arrays["drawn"][place]))
            self.tree.set(self._leaves_at(place), np.zeros(self.leaves))
            self.oldest += 1
        kept = number - self.oldest + 1
        if oldest < self.oldest and kept < 0.9 * self.columns and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the replay has room for %d of %d trajectories only, because their images share too few frames"
                " (--replay_capacity counts on stacks of frames, and on long episodes)",
                *(kept, self.columns),
            )
        return dropped

    def _end(self, key: str) -> int:
        return int(self.rings[key].frames_of(self._place(self.newest))[1]) if self.newest else 0

    def reserve_columns(self, count: int) -> None:
        """Reserve the memory of the first `count` places and of some more, without frames."""
        if count <= self._ready_columns:
            return
        self._ready_columns = min(self.columns, count + 63)
        for name in (*self.arrays, *(f"obs.{key}" for key in self.obs), *(f"obs.{key}.index" for key in self.rings)):
            array = self._array(name)
            self.arena.reserve(f"{self._prefix}.{name}", self._ready_columns * (array.nbytes // self.columns))

    def first_errors(self, trajectories: Trajectories, slot: int, valid: Array) -> Array:
        """Return the absolute n-step errors [T, R] of a slot from recorded values; -1: not to be drawn.

        `valid` [T, R] are the steps of the policy. Where the value of observation t+m is not recorded, as at the end of
        a column, the column's largest error stands in; in a column without any error, the largest error so far.
        """
        t = trajectories
        rollout, rows = valid.shape
        flat = [a.ravel() for a in (valid, t.reward[slot], t.terminated[slot], t.truncated[slot])]
        outcomes = Outcomes(flat[0], flat[1], flat[2], flat[3], self.spec.same_step)
        start = np.arange(rollout * rows)
        step = start // rows
        returns = n_step_returns(outcomes, start, rollout - step, rows, self.plan.n_steps, self.plan.gamma)
        error = np.full(rollout * rows, np.nan)
        if Q_TAKEN in t.recorded:
            later = np.minimum(start + returns.length * rows, rollout * rows - rows + start % rows)
            value = np.where(returns.terminated, 0.0, t.recorded[Q_MAX][slot].ravel()[later])
            known = returns.terminated | (step + returns.length < rollout)
            error = self._difference(returns.reward + returns.discount * value, t.recorded[Q_TAKEN][slot].ravel())
            error[~known] = np.nan
        drawable = returns.length > 0
        error[~(np.isfinite(error) & drawable)] = -1.0
        table = error.reshape(rollout, rows)
        largest = table.max(axis=0)
        self.largest[0] = max(self.largest[0], largest.max())
        largest = np.where(largest < 0, self.largest[0] or 1.0, largest)
        drawn: Array = np.where(drawable.reshape(rollout, rows), np.where(table < 0, largest, table), -1.0)
        return drawn

    def _difference(self, target: Array, value: Array) -> Array:
        """Return absolute errors, in units of the network, of values in units of return."""
        if self.plan.rescaled:
            target, value = rescaled_value(target), rescaled_value(value)
        error: Array = np.abs(target - value)
        return error

    def _leaves_at(self, place: int) -> Array:
        return place * self.leaves + np.arange(self.leaves)

    def _leaves_of(self, error: Array) -> Array:
        """Return leaves [B, L]: (error + epsilon)^alpha (arXiv:1511.05952, eq. 1), or 1 without priorities.

        Errors are [B, T] for columns, [B, 1] for single steps; negative: no error. The error of a whole column is eta
        times the largest error plus 1 - eta times the mean (Kapturowski et al. 2019, R2D2, section 2.3).
        """
        known = np.asarray(error >= 0)
        if self.plan.sequences:
            mean = np.where(known, error, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
            mixed = self.plan.eta * error.max(axis=1) + (1 - self.plan.eta) * mean
            error, known = mixed[:, None], np.asarray(known.any(axis=1))[:, None]
        if not self.plan.prioritized:
            return known.astype(np.float64)
        leaf = (np.maximum(error, 0.0) + self.plan.priority_epsilon) ** self.plan.alpha
        return np.where(known, leaf, 0.0)

    def draw(self, count: int, random: np.random.Generator) -> Samples:
        """Draw samples in proportion to their leaves, one from each of `count` equal parts of the sum."""
        leaf = self.tree.sample(count, random)
        column, step = np.divmod(leaf, self.leaves)
        return Samples(column, step, self.word[column], self.tree.levels[0][leaf] / self.tree.total)

    def note_drawn(self, samples: Samples) -> None:
        """Mark steps as drawn: overwriting no longer counts them as dropped."""
        self.arrays["drawn"][samples.column, slice(None) if self.plan.sequences else samples.step] = True

    def returns_of(self, samples: Samples) -> NStep:
        """Return the n-step returns of samples; single steps go on in the columns that continue theirs."""
        flat = [self.arrays[name].reshape(-1) for name in ("valid", "reward", "terminated", "truncated")]
        outcomes = Outcomes(flat[0], flat[1], flat[2], flat[3], self.spec.same_step)
        start = samples.column * self.rollout + samples.step
        room, following = self.rollout - samples.step, None if self.plan.sequences else self._following
        return n_step_returns(outcomes, start, room, 1, self.plan.n_steps, self.plan.gamma, following)

    def read_obs(self, key: str, column: Array, step: Array, out: Array) -> None:
        """Copy observations [B, *] at columns and steps (0 to T) into contiguous memory."""
        if key in self.rings:
            self.rings[key].read(column, step, out)
            return
        flat = self.obs[key].reshape(self.columns * (self.rollout + 1), -1)
        flat.take(column * (self.rollout + 1) + step, axis=0, out=out.reshape(len(column), -1), mode="clip")

    def update(self, samples: Samples, error: Array) -> int:
        """Set priorities from absolute errors [B], or [T, B] for whole columns; return the number of updated samples.

        Negative errors mean no error. Overwritten columns and errors that are not finite are left out.
        """
        if not self.plan.prioritized:
            return 0
        table = np.atleast_2d(error).T.astype(np.float64)
        current = (self.word[samples.column] == samples.word) & np.isfinite(table).all(axis=1)
        table = table[current]
        self.largest[0] = max(self.largest[0], table.max(initial=0.0))
        leaves = self._leaves_of(table)[:, 0]
        index = samples.column[current] * self.leaves + samples.step[current]
        self.tree.set(index[leaves > 0], leaves[leaves > 0])
        return len(index)

    def samples_before(self, column: Array) -> Array:
        """Return the number of steps inserted up to each of these columns, [B]; the age follows."""
        counted: Array = self._note[column, ColumnNote._fields.index("samples")]
        return counted

    @property
    def mean_priority(self) -> float:
        """Mean of all drawable leaves; 0 without leaves."""
        return self.tree.total / self.size if self.size else 0.0
