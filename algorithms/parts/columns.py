"""Sources for algorithms that train on every trajectory once, in order of arrival."""

from collections import deque
from collections.abc import Iterator, Sequence

from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.config import SamplingConfig
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered, Feedback
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.gpu_batches import DeviceStaging
from appo.algorithms.runtime.learning.staging import Staging
from appo.algorithms.runtime.memory.ownership import columns_used
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady


def make_column_batches(
    context: Context,
    trajectories: Trajectories,
    sampling: SamplingConfig,
    device: Device,
    *,
    hold: bool | None = None,
    max_policy_lag: int | None = None,
) -> ColumnBatches:
    """Make batches of whole columns; flags decide their number and age.

    With `hold`, slots are released only after training; None: with `--num_minibatches_to_accumulate=0`.
    `max_policy_lag` is the algorithm's own limit below `--max_policy_lag`, in versions.
    """
    columns, lag = context.flags.macro_batch_columns, sampling.max_policy_lag
    if max_policy_lag is not None:
        lag = min(lag, max_policy_lag)
    if hold is None:
        hold = sampling.num_minibatches_to_accumulate == 0
    return ColumnBatches(
        DeviceStaging(trajectories, device) if context.buffered else Staging(trajectories),
        context.policy,
        columns,
        lag,
        hold,
        context.num_policies,
        rounds=sampling.lockstep,
    )


class StreamedBatches(BatchSource):
    """Returns batches in parts, so slots and staging contain at most a part or a round.

    Slots contain one trajectory of every environment; several rounds fill a batch. A copied slot is released while the
    batch needs more columns than are on the way; slots of the last round wait for the optimizer step. No trajectory
    begins with weights that change during acting.

    Args:
        source: source of the parts; only lockstep's source, which keeps its rounds, may hold slots.
        parts: parts of a batch.
        on_policy: hold the slots of the last round; impossible for several policies, which would wait for each other.
    """

    def __init__(self, source: ColumnBatches, parts: int, *, on_policy: bool) -> None:
        self.source, self.parts = source, parts
        self._withholds = on_policy and not source.hold
        self.hold = source.hold or on_policy
        self.held: deque[SlotReleased] = deque()
        self._taken, self._added, self._entered = 0, Entered(), Entered()  # added: of the parts of this batch
        self._discarded = 0

    @property
    def staged_samples(self) -> int:
        """Steps in the unfinished part, and in the parts of the gradient."""
        return self.source.staged_samples + self._added.samples

    @property
    def waiting(self) -> int:
        """Unused slots, and slots to be released."""
        return self.source.waiting + (len(self.held) if self._lacking() > 0 else 0)

    def counts(self) -> BatchCounts:
        """Return the counts of the trajectories."""
        counts, held = self.source.counts(), len(self.held)
        return counts._replace(
            released=counts.released - held,
            held=counts.held + held,
            discarded=counts.discarded + self._discarded,
            in_flight=counts.in_flight + self._added.samples,
        )

    def add(self, message: TrajectoryReady) -> None:
        """Queue a slot."""
        self.source.add(message)

    def resize(self, columns: int) -> None:
        """Make parts of `columns` columns from the next part on."""
        self.source.resize(columns)

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Copy waiting columns into the part; release slots that the batch still needs."""
        yield from self._pass_on(self.source.fill(version))

    def take(self) -> Batch | None:
        """Return a full part; the next `fill`, or the one after, overwrites the tensors."""
        batch = self.source.take()
        if batch is None:
            return None
        part, before = self.source.entered(), self._added
        whole = Entered(before.samples + part.samples, before.env_steps + part.env_steps, earlier=before.samples)
        self._taken += 1
        if self._taken < self.parts:
            self._added, self._entered = whole, Entered(whole=False)
        else:
            self._added, self._entered = Entered(), whole
        return batch

    def metrics(self) -> dict[str, float]:
        """Return the figures of the source."""
        return self.source.metrics()

    def entered(self) -> Entered:
        """Return the steps of the batch, once and with its last part."""
        entered, self._entered = self._entered, Entered()
        return entered

    def trained(self, feedback: Sequence[Feedback] = ()) -> Iterator[SlotReleased]:
        """Continue with the next part; after the last part weights are published, and slots are needed again."""
        self._taken %= self.parts
        yield from self._pass_on(self.source.trained(feedback))

    def weights_replaced(self) -> None:
        """Discard the columns of the open batch, parts in the gradient included."""
        self.source.weights_replaced()
        self._discarded += self._added.samples
        self._taken, self._added = 0, Entered()

    def _pass_on(self, released: Iterator[SlotReleased]) -> Iterator[SlotReleased]:
        """Pass messages on, without the slots that must wait."""
        for message in released:
            if self._withholds:
                self.held.append(message)
            else:
                yield message
        while self.held and self._lacking() > 0:
            yield self.held.popleft()

    def _lacking(self) -> int:
        """Return the columns that the batch needs beyond present columns and slots being filled."""
        source = self.source
        num_slots, _, rows = map(int, source.trajectories.valid.shape)
        waiting = sum(rows - columns_used(source.trajectories, message) for message in source.queue)
        acting = num_slots - source.counts().held - len(self.held)
        here = self._taken * source.num_columns + source.filled + waiting
        return self.parts * source.num_columns - here - acting * rows
