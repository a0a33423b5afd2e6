"""The sources of algorithms that train on every trajectory once, in the order in which they come."""

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
    """Make batches of whole columns; the flags say how many columns and how old they may be.

    Args:
        context: of the learner.
        trajectories: the shared arrays.
        sampling: flags of sampling.
        device: of the batches.
        hold: release slots only after training; None: as `--num_minibatches_to_accumulate=0` says.
        max_policy_lag: limit of the algorithm's own below that of `--max_policy_lag`, in versions.
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
    """Gives batches part by part, so that neither slots nor staging ever hold more than a part or a round of them.

    Slots hold one trajectory of every environment, and a batch is filled by as many rounds as it needs. A slot goes
    back as soon as it is copied, while the batch still lacks columns that are not on their way; those of the last round
    wait for the step. So nobody begins a trajectory with weights that change while it is acted.

    Args:
        source: of the parts; it must not hold slots, unless it is the source of lockstep, which keeps its rounds.
        parts: of a batch.
        on_policy: hold the slots of the last round; several policies cannot, as they would wait for each other's.
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
        """Steps in the part that is being filled, and in those that are in the gradient."""
        return self.source.staged_samples + self._added.samples

    @property
    def waiting(self) -> int:
        """Slots that are not used up, and those that should go back."""
        return self.source.waiting + (len(self.held) if self._lacking() > 0 else 0)

    def counts(self) -> BatchCounts:
        """Return what became of the trajectories."""
        counts, held = self.source.counts(), len(self.held)
        return counts._replace(
            released=counts.released - held,
            held=counts.held + held,
            discarded=counts.discarded + self._discarded,
            in_flight=counts.in_flight + self._added.samples,
        )

    def add(self, message: TrajectoryReady) -> None:
        """Queue a slot in the source."""
        self.source.add(message)

    def resize(self, columns: int) -> None:
        """Make parts of so many columns, beginning with the next new part."""
        self.source.resize(columns)

    def fill(self, version: int) -> Iterator[SlotReleased]:
        """Copy what waits into the part; release slots that the batch still needs."""
        yield from self._pass_on(self.source.fill(version))

    def take(self) -> Batch | None:
        """Return a part when it is full; its tensors are overwritten by the next `fill`, or the one after."""
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
        """Go on with the next part; after the last one the weights are published, and slots are needed again."""
        self._taken %= self.parts
        yield from self._pass_on(self.source.trained(feedback))

    def weights_replaced(self) -> None:
        """Discard the columns of the batch that has been begun, those in the gradient included."""
        self.source.weights_replaced()
        self._discarded += self._added.samples
        self._taken, self._added = 0, Entered()

    def _pass_on(self, released: Iterator[SlotReleased]) -> Iterator[SlotReleased]:
        """Say what the source says, but for the slots that must not go back yet."""
        for message in released:
            if self._withholds:
                self.held.append(message)
            else:
                yield message
        while self.held and self._lacking() > 0:
            yield self.held.popleft()

    def _lacking(self) -> int:
        """Columns that the batch needs beyond those that are here, or will come from slots that are being filled."""
        source = self.source
        num_slots, _, rows = map(int, source.trajectories.valid.shape)
        waiting = sum(rows - columns_used(source.trajectories, message) for message in source.queue)
        acting = num_slots - source.counts().held - len(self.held)
        here = self._taken * source.num_columns + source.filled + waiting
        return self.parts * source.num_columns - here - acting * rows
