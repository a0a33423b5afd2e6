"""Batches are filled from slots: columns are copied out of the slots that hold them, and the slots go back at once.

A batch is `columns` trajectories of the rollout length; the columns of one slot may go to two batches.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.memory.slots import LearnerLedger, Trajectories, columns_used, note_columns_used
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady, Wake


@dataclass(frozen=True)
class Batch:
    """A batch of trajectories: B columns, time-major. The fields are those of `Trajectories`, see there."""

    obs: dict[str, Tensor]  # [T+1, B, *]
    first: Tensor  # [T+1, B]
    valid: Tensor  # [T, B], and acted by the policy that trains
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    num_frames: Tensor
    action: Tensor  # [T, B, A]
    recorded: dict[str, Tensor]  # [T, B, *], or [F, B, *] where F is 0 unless the environment needs final values
    policy_version: Tensor
    rnn_state: Tensor  # [N, B, H]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Make a batch of tensors by the names of `named`."""
        grouped: dict[str, Any] = {"obs": {}, "recorded": {}}
        for name, tensor in tensors.items():
            group, dot, key = name.partition(".")
            if dot:
                grouped[group][key] = tensor
            else:
                grouped[name] = tensor
        return cls(**grouped)

    @classmethod
    def of_slot(cls, trajectories: Trajectories, slot: int) -> Self:
        """Return all columns of a slot, in the memory of the slot; valid are the steps of every policy."""
        return cls.of({name: torch.from_numpy(array[slot]) for name, array in named_fields(trajectories).items()})

    def named(self) -> dict[str, Tensor]:
        """Return all tensors by their names: those of the fields, obs.KEY, and recorded.NAME."""
        return named_fields(self)

    def signals(self) -> dict[str, Any]:
        """Return the inputs of estimates of returns (`ops.returns`), by the names of their arguments."""
        final_value = self.recorded["final_value"] if len(self.recorded["final_value"]) else None
        names = ("reward", "terminated", "truncated", "valid", "first")
        return {"final_value": final_value, **{name: getattr(self, name) for name in names}}

    def columns(self, index: Tensor | slice) -> Self:
        """Return a batch of some of the columns."""
        if isinstance(index, slice):
            return self.map(lambda tensor: tensor[:, index])
        return self.map(lambda tensor: tensor.index_select(1, index))

    def copy(self) -> Self:
        """Copy the batch to memory of its own: that of a `BatchSource` is overwritten by the next batch."""
        return self.map(lambda tensor: tensor.clone())

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in an order of their own."""
        return list(self.named().values())

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply the function to every tensor; return a batch of the results."""
        return self.of({name: function(tensor) for name, tensor in self.named().items()})


def named_fields(source: Batch | Trajectories) -> dict[str, Any]:
    """Return the fields of a batch, or of trajectories as far as batches have them, one by one by their names."""
    named: dict[str, Any] = {}
    for field in fields(Batch):
        value = getattr(source, field.name)
        if isinstance(value, dict):
            named |= {f"{field.name}.{key}": one for key, one in value.items()}
        else:
            named[field.name] = value
    return named


IS_READ = "is_read"
"""Among what is recorded of a batch, [T, B] bool: steps of datasets. Only batches that mix them with others have it."""

Feedback = Mapping[str, Any]
"""What a learner tells the source of a batch after a step, such as priorities."""


class BatchCounts(NamedTuple):
    """Counts of the trajectories handed over so far, by their fate; steps are valid ones of the policy that trains."""

    trajectories: int  # slots received
    released: int  # slots given back
    discarded: int  # steps too old to train on
    in_flight: int  # steps neither trained nor discarded yet
    held: int  # slots received and not given back


class Entered(NamedTuple):
    """Steps that have entered training for the first time; those of a replay enter once, however often they are used.

    Attributes:
        samples: valid steps.
        env_steps: frames behind them.
        whole: whether the batch taken ends with this; nothing counts of one that goes on.
        earlier: valid steps in the parts of the batch that were taken before.
    """

    samples: int = 0
    env_steps: int = 0
    whole: bool = True
    earlier: int = 0


class BatchSource(ABC):
    """Gives a learner worker its batches. Four members must be written; the others have defaults.

    Attributes:
        hold: whether slots are released only after training.
    """

    hold: bool = False

    @property
    def staged_samples(self) -> int:
        """Return the number of steps in the unfinished batch, which are lost with the process; default: 0."""
        return 0

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Return the number of slots, or of other inputs, that are not used up."""

    @abstractmethod
    def counts(self) -> BatchCounts:
        """Return the counts of the trajectories by their fate."""

    @abstractmethod
    def take(self) -> Batch | None:
        """Return the next batch, or None while the batch is not full."""

    @abstractmethod
    def entered(self) -> Entered:
        """Return the steps that have entered training since the last call."""

    def add(self, message: TrajectoryReady) -> None:  # noqa: B027 (a source may use no slots)
        """Take in a slot that has been handed over; default: leave the slot to other workers."""

    def fill(self, version: int) -> Iterator[SlotReleased | Wake]:
        """Move trajectories that were handed over towards the next batch."""
        return iter(())

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased | Wake]:
        """Go on after training on the last batch and publication of the weights.

        Args:
            feedback: values that the learner yields for the batch, such as priorities.
        """
        return iter(())

    def resize(self, columns: int) -> None:  # noqa: B027 (sizes may be fixed)
        """Make batches of so many columns, beginning with the next new batch; default: keep the size."""

    def weights_replaced(self) -> None:  # noqa: B027 (batches may not depend on the weights that acted)
        """Drop steps that only the weights that acted may train on; default: keep all steps."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the source, tag -> mean since the last call."""
        return {}


class Staging(Protocol):
    """Memory of the batches of `ColumnBatches`: columns are copied into it, slots go back when nothing reads them.

    Attributes:
        trajectories: the shared arrays that are copied from.
        late: whether copies arrive later, so that `take` has to be tried again.
    """

    trajectories: Trajectories
    late: bool

    def allocate(self, columns: int) -> None:
        """Make memory for batches of so many columns."""
        ...

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Copy columns of a slot to `start` and behind; `mine` [T, columns] are the steps of the policy that trains."""
        ...

    def take(self) -> Batch | None:
        """Return the batch that is full, or None while a copy is on its way."""
        ...

    def counted(self) -> tuple[Array, Array]:
        """Return the tensors that are counted of the batch that `take` returned last: valid and num_frames, [T, B]."""
        ...

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot of which nothing more is copied."""
        ...

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield slots, each once, that no copy reads any more."""
        ...

    @property
    def on_their_way(self) -> int:
        """Return how many slots were given back and are still read."""
        ...


class HostStaging:
    """Memory on the host for one batch: a slot is free as soon as it is copied.

    Args:
        trajectories: the shared arrays.
    """

    late = False

    def __init__(self, trajectories: Trajectories) -> None:
        self.trajectories = trajectories
        self.sources: dict[str, Array] = named_fields(trajectories)
        self._free: deque[TrajectoryReady] = deque()
        self.batch: dict[str, Array] = {}

    def allocate(self, columns: int) -> None:
        """Make memory for batches of so many columns."""
        self.batch = {name: staging_for(array, columns) for name, array in self.sources.items()}

    def copy(self, slot: int, index: Array | slice, start: int, mine: Array) -> None:
        """Copy columns of a slot to `start` and behind."""
        end = start + mine.shape[1]
        for name, staging in self.batch.items():
            staging[:, start:end] = self.sources[name][slot][:, index]
        self.batch["valid"][:, start:end] = mine

    def take(self) -> Batch:
        """Return the batch; it is overwritten by the next copies."""
        return Batch.of({name: torch.from_numpy(array) for name, array in self.batch.items()})

    def counted(self) -> tuple[Array, Array]:
        """Return valid and num_frames [T, B] of the batch."""
        return self.batch["valid"], self.batch["num_frames"]

    def give_back(self, message: TrajectoryReady) -> None:
        """Note a slot of which nothing more is copied."""
        self._free.append(message)

    def given_back(self) -> Iterator[TrajectoryReady]:
        """Yield the slots that were given back: nothing reads them."""
        while self._free:
            yield self._free.popleft()

    @property
    def on_their_way(self) -> int:
        """Return 0: copies have arrived."""
        return 0


def staging_for(source: Array, columns: int) -> Array:
    """Return [steps, columns, ...] zeros for a field [S, steps, R, ...]."""
    return np.zeros((source.shape[1], columns, *source.shape[3:]), source.dtype)


class ColumnBatches(BatchSource):
    """Batches of one policy from whole columns, each used once.

    Args:
        staging: memory of the batches; it says where their columns come from.
        policy: whose steps count.
        columns: trajectories per macro batch.
        max_policy_lag: a column whose oldest valid step was acted this many versions ago is discarded.
        hold: release slots only after training (synchronous runs of a single policy).
        num_policies: a column without a step of `policy` is skipped.
        rounds: take slots in rounds, one of every group in the order of the groups, and release a round as a whole
            (lockstep; there is one slot for each group); else first in, first out.
    """

    staged_samples = 0

    def __init__(
        self,
        staging: Staging,
        policy: int,
        columns: int,
        max_policy_lag: int,
        hold: bool,
        num_policies: int,
        *,
        rounds: bool = False,
    ) -> None:
        self.staging, self.trajectories, self.policy, self.num_columns = staging, staging.trajectories, policy, columns
        self.max_policy_lag, self.num_policies, self.rounds = max_policy_lag, num_policies, rounds
        self.hold = rounds or (hold and num_policies == 1)
        self.queue: deque[TrajectoryReady] = deque()
        self.held: list[TrajectoryReady] = []
        self.filled, self._next_columns = 0, columns
        self.staged_samples = self.queued_samples = 0
        self.discarded = self.released = self.trajectories_seen = 0
        self._entered = Entered()
        self.staging.allocate(columns)

    def add(self, message: TrajectoryReady) -> None:
        """Queue a slot unless the message is of an earlier hand-over."""
        if message.sequence == self.trajectories.sequence[message.slot]:
            self.queue.append(message)
            self.trajectories_seen += 1
            self.queued_samples += int(np.count_nonzero(self._mine(message.slot)[:, self._next_column(message) :]))
        if self.rounds:
            self.queue = deque(sorted(self.queue))

    def resize(self, columns: int) -> None:
        """Make batches of so many columns, from the next one on that is begun."""
        self._next_columns = columns

    def weights_replaced(self) -> None:
        """Discard the columns in the batch that is being filled."""
        self.discarded += self.staged_samples
        self.filled = self.staged_samples = 0

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Copy waiting columns into the batch until it is full; release the slots that are used up."""
        yield from self._release_free()
        if not self.filled and self._next_columns != self.num_columns:
            self.num_columns = self._next_columns
            self.staging.allocate(self.num_columns)
        num_rows = self.trajectories.valid.shape[2]
        while self.queue and self.filled < self.num_columns:
            message = self.queue[0]
            start = self._next_column(message)
            fresh = self._fresh(message.slot, start, version)
            room = self.num_columns - self.filled
            end = int(fresh[room]) if len(fresh) > room else num_rows
            staged = self._copy(message.slot, fresh[:room])
            used = int(np.count_nonzero(self._mine(message.slot)[:, start:end]))
            self.discarded += used - staged
            self.queued_samples -= used
            note_columns_used(self.trajectories, message, end)
            if end < num_rows:
                return
            self.queue.popleft()
            if self.hold:
                self.held.append(message)
            else:
                self.staging.give_back(message)
                yield from self._release_free()
        if self.filled < self.num_columns and len(self.held) == len(self.trajectories.owner):
            yield from self._release_lacking()

    def take(self) -> Batch | None:
        """Return the batch when it is full and has arrived, else None; it is overwritten later, see `staging`."""
        if self.filled < self.num_columns:
            return None
        batch = self.staging.take()
        if batch is not None:
            valid, num_frames = self.staging.counted()
            self._entered = Entered(self.staged_samples, int(num_frames[valid].sum()))
            self.filled = self.staged_samples = 0
        return batch

    def entered(self) -> Entered:
        """Return the steps of the batch, once."""
        entered, self._entered = self._entered, Entered()
        return entered

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased]:
        """Release the slots that were held during training, those of rounds when the whole round is used up."""
        if self.rounds and self.queue:
            return
        for message in self.held:
            self.staging.give_back(message)
        self.held = []
        yield from self._release_free()

    def _release_lacking(self) -> Iterator[SlotReleased]:
        """Release as many slots as fill the batch: with every slot of the run held, nothing could arrive.

        What more slots would bring would wait for the next batch, acted by older weights. A round goes as a whole.
        """
        rows = self.trajectories.valid.shape[2]
        count = len(self.held) if self.rounds else -(-(self.num_columns - self.filled) // rows)
        for message in self.held[:count]:
            self.staging.give_back(message)
        self.held = self.held[count:]
        yield from self._release_free()

    @property
    def waiting(self) -> int:
        """Return how many slots are not used up, of rounds only complete ones, or still read; a late batch counts."""
        complete = not self.rounds or len(self.queue) + len(self.held) == len(self.trajectories.owner)
        arriving = self.staging.on_their_way + (self.staging.late and self.filled == self.num_columns)
        return arriving + (len(self.queue) if complete else 0)

    def counts(self) -> BatchCounts:
        """Return the counts of the trajectories by their fate."""
        in_flight = self.staged_samples + self.queued_samples
        held = len(self.queue) + len(self.held) + self.staging.on_their_way
        return BatchCounts(self.trajectories_seen, self.released, self.discarded, in_flight, held)

    def _next_column(self, message: TrajectoryReady) -> int:
        """Return the first column of a hand-over that no batch has had, nor one of a dead learner in this place."""
        return columns_used(self.trajectories, message)

    def _mine(self, slot: int) -> Array:
        """Return the valid steps of this policy, [T, R]."""
        valid: Array = self.trajectories.valid[slot]
        if self.num_policies == 1:
            return valid
        acted: Array = self.trajectories.policy_id[slot, : len(valid)] == self.policy
        return valid & acted

    def _fresh(self, slot: int, start: int, version: int) -> Array:
        """Return columns from `start` on that hold a step of this policy and none that is too old."""
        mine = self._mine(slot)[:, start:]
        acted = np.where(mine, self.trajectories.policy_version[slot, :, start:], version)
        fresh = version - acted.min(axis=0) < self.max_policy_lag
        usable: Array = (fresh & mine.any(axis=0)).nonzero()[0]
        return usable + start

    def _copy(self, slot: int, columns: Array) -> int:
        """Copy columns of a slot to the end of the batch; return the valid steps in them."""
        if not len(columns):
            return 0
        whole = columns[-1] - columns[0] + 1 == len(columns)
        index: Any = slice(int(columns[0]), int(columns[-1]) + 1) if whole else columns
        mine = self._mine(slot)[:, index]
        self.staging.copy(slot, index, self.filled, mine)
        self.filled += len(columns)
        samples = int(np.count_nonzero(mine))
        self.staged_samples += samples
        return samples

    def _release_free(self) -> Iterator[SlotReleased]:
        for message in self.staging.given_back():
            self.released += 1
            yield SlotReleased(self.policy, message.slot, message.sequence)


class ReadBatches(BatchSource):
    """Batches that are read in the learner's process, of a run without actors: there are no slots.

    The place that is read is the number of samples so far. The learner worker keeps it: in its ledger for a learner
    that takes its place, in the state for a later start. So all of them read on where the last one was. While the
    learner trains on a batch, a thread reads the one that follows it.

    Args:
        read: returns the batch of so many columns that follows so many samples; the first argument is the samples.
        columns: of a batch.
        ledger: of the learner, who notes its counts in it before every `take`.
    """

    waiting = 1

    def __init__(self, read: Callable[[int, int], Batch], columns: int, ledger: LearnerLedger) -> None:
        self.read, self.columns, self.ledger = read, columns, ledger
        self._entered = Entered()
        self._thread = ThreadPoolExecutor(1, "reader")
        self._ahead: tuple[tuple[int, int], Future[Batch]] | None = None

    def counts(self) -> BatchCounts:
        """Return zeros: no trajectory is handed over."""
        return BatchCounts(0, 0, 0, 0, 0)

    def take(self) -> Batch:
        """Return the next batch, and let the one behind it be read."""
        place = self.ledger.noted()["samples"], self.columns
        reading = self._ahead[1] if self._ahead and self._ahead[0] == place else self._reading(place)
        batch = reading.result()
        valid = batch.valid
        self._entered = Entered(int(valid.sum()), int(batch.num_frames[valid].sum()))
        following = place[0] + self._entered.samples, self.columns
        self._ahead = following, self._reading(following)
        return batch

    def _reading(self, place: tuple[int, int]) -> "Future[Batch]":
        """Let the batch behind so many samples, of so many columns, be read; whatever is being read comes first."""
        return self._thread.submit(self.read, *place)

    def entered(self) -> Entered:
        """Return the steps of the batch, once: every step that is read counts."""
        entered, self._entered = self._entered, Entered()
        return entered

    def resize(self, columns: int) -> None:
        """Make batches of so many columns from now on."""
        self.columns = columns
