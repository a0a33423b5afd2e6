"""Batches read by the learner process itself, in runs without actors."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered
from appo.algorithms.runtime.memory.ownership import LearnerLedger


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
