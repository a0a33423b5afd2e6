"""Batches read by the learner process itself, in runs without actors."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, BatchSource, Entered
from appo.algorithms.runtime.memory.ownership import LearnerLedger


class ReadBatches(BatchSource):
    """Reads batches in the process of the learner, for runs without actors and slots.

    The position in the files is the number of samples. The learner worker stores the number in its ledger for a
    replacement and in the state for a later start, and both continue reading there. A thread reads the next batch
    during training.

    Args:
        read: function of samples and columns, which returns the batch of so many columns at this position.
        columns: columns of a batch.
        ledger: ledger of the learner, updated before every `take`.
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
        """Return the next batch, and begin to read the batch behind."""
        place = self.ledger.noted()["samples"], self.columns
        reading = self._ahead[1] if self._ahead and self._ahead[0] == place else self._reading(place)
        batch = reading.result()
        valid = batch.valid
        self._entered = Entered(int(valid.sum()), int(batch.num_frames[valid].sum()))
        following = place[0] + self._entered.samples, self.columns
        self._ahead = following, self._reading(following)
        return batch

    def _reading(self, place: tuple[int, int]) -> "Future[Batch]":
        return self._thread.submit(self.read, *place)

    def entered(self) -> Entered:
        """Return the steps of the batch, once: every step read counts."""
        entered, self._entered = self._entered, Entered()
        return entered

    def resize(self, columns: int) -> None:
        """Set the number of columns from now on."""
        self.columns = columns
