"""The main loop: handle reports of the workers, request checkpoints, and end the run in time and without leftovers."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Protocol, Self

from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.checkpointing import Checkpointing
from appo.algorithms.runtime.messages import Message, WorkerFailed
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.status import Status
from appo.algorithms.runtime.processes.pool import POLL_SECONDS, Workers
from appo.utils.errors import DirectoryInUse, Interrupted, NotSaved, ResourceError, StopNow
from appo.utils.system.signal_watch import SignalWatch

log = logging.getLogger(__name__)

Turns = Generator[None, None, str]
"""A run in steps, one after each look at the workers; returns the reason of the end. Closed early, it saves nothing
more.
"""

STOP_SECONDS = 4.0


def run_to_end(turns: Turns) -> str:
    """Take all turns of a run; return the reason of its end."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return str(end.value)


class Population(Protocol):
    """The part of main that changes the policies of a run while they learn."""

    def handle(self, message: Message) -> None:
        """Handle a report."""

    def tick(self) -> Iterator[Message]:
        """Yield messages to workers."""

    def close(self) -> None:
        """Wait until all decisions are on disk."""


class Segments(Protocol):
    """Parts of a run. Each part starts like a run that resumes from the checkpoint between the parts.

    Attributes:
        end: env steps at the end of the present segment.
    """

    end: int

    def next(self) -> Workers:
        """Make the workers of the next segment. Workers of the last one have ended; the blocks hold their states."""


class Runner:
    """The main loop of a run, one `turn` at a time. The exit stops the workers and saves.

    The caller enters the signals; a run without segments is not divided.

    Attributes:
        population: changes the policies while they learn; None for a single policy.
        has_lost_files: returns whether files of the run disappeared after the last call.
    """

    population: Population | None = None
    has_lost_files: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        workers: Workers,
        monitor: Monitor,
        checkpointing: Checkpointing,
        budget: Budget,
        signals: SignalWatch,
        status: Status,
        segments: Segments | None = None,
    ) -> None:
        self.workers, self.monitor, self.checkpointing = workers, monitor, checkpointing
        self.budget, self.signals, self.status, self.segments = budget, signals, status, segments

    def __enter__(self) -> Self:
        return self

    def turn(self) -> str | None:
        """Look at the workers once; return the reason if the run is over.

        Raises:
            Interrupted: a signal asks for the end.
            DirectoryInUse: the folder was moved and another run has begun in its place.
            AppoError: a worker failed.
        """
        monitor = self.monitor
        self.signals.check()
        for message in self.workers.poll(POLL_SECONDS):
            self._handle(message)
            self.checkpointing.handle(message)
        now = time.monotonic()
        if self.has_lost_files():
            monitor.write_summaries(now)
            self.checkpointing.lost()
        monitor.tick(now)
        self.status.tick(now)
        for request in self.checkpointing.tick(now):
            self.workers.send(request)
        for order in self.population.tick() if self.population else ():
            self.workers.send(order)
        if reason := self.budget.spent(monitor.policies, monitor.collected, now - monitor.started):
            return reason
        if self.segments and all(policy.totals["env_steps"] >= self.segments.end for policy in monitor.policies):
            self._stop()
            monitor.write_summaries(time.monotonic())
            try:
                self.checkpointing.finish()
            except ResourceError as error:  # what is in memory is the same; a later start would repeat this segment
                log.warning("checkpoint not saved: %s", error)
            monitor.begin_segment()
            self.workers = self.segments.next()  # continues like a start that resumes
            self.workers.start()
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all processes. Save, except after StopNow, and after DirectoryInUse: another run has begun there.

        Raises:
            NotSaved: a signal ended the run, and the state cannot be saved.
            AppoError: the state of a run that is over cannot be saved.
        """
        at_once = isinstance(error, StopNow)
        try:
            self.monitor.console.close()  # later lines stand below the panel
            if error is None:
                self._finish()
            elif isinstance(error, Exception) and not isinstance(error, DirectoryInUse):
                try:
                    self._finish()
                except Exception as failure:
                    log.warning("what was learned last is not saved: %s: %s", type(failure).__name__, failure)
                    if isinstance(error, Interrupted):
                        lost = str(failure) or type(failure).__name__
                        raise NotSaved(f"{error}, and what was learned last is not saved: {lost}") from None
        except StopNow:
            at_once = True
            raise
        finally:
            self.workers.close()
            self.monitor.close(with_last=not isinstance(error, DirectoryInUse))  # the folder is another run's then
            if self.population and not at_once:  # the disk may never answer
                self.population.close()

    def _handle(self, message: Message) -> None:
        self.monitor.handle(message)
        if self.population:
            self.population.handle(message)

    def _stop(self) -> None:
        for message in self.workers.stop(time.monotonic() + STOP_SECONDS):
            if isinstance(message, WorkerFailed):
                log.warning("%s failed at its end: %s", message.process, message.summary)
            self._handle(message)
        self.workers.close()

    def _finish(self) -> None:
        """Stop the workers, handle their last reports and save.

        A run in segments resumes only from the end of a segment, or from the end of its budget.
        """
        whole = self.segments is None or self.budget.reached(self.monitor.policies) is not None
        self._stop()
        self.monitor.write_last()
        self.checkpointing.finish(regular=whole)
        if not whole:
            log.info("--deterministic_resume: what was learned since the last checkpoint is not saved")
        log.info("%s", self.monitor.line())
