"""The main loop: listen to the workers, ask for checkpoints, stop when it is time, and leave nothing behind."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.checkpointing import Checkpointing
from appo.algorithms.runtime.messages import Message
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.overview import Status
from appo.algorithms.runtime.processes.pool import POLL_SECONDS, Workers
from appo.utils.errors import DirectoryInUse, Interrupted, NotSaved, ResourceError, StopNow
from appo.utils.system.signal_watch import SignalWatch

log = logging.getLogger(__name__)

Turns = Generator[None, None, str]
"""A run in steps, one after each look at the workers; it returns why it ended. Closed early, it saves nothing more."""

STOP_SECONDS = 4.0


def run_to_end(turns: Turns) -> str:
    """Take all turns of a run; return why it ended."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return str(end.value)


class Population(Protocol):
    """The part of main that changes the policies of a run while they learn."""

    def handle(self, message: Message) -> None:
        """Take in a report."""
        ...

    def tick(self) -> Iterator[Message]:
        """Yield messages to workers."""
        ...

    def close(self) -> None:
        """Wait until all its decisions are on disk."""
        ...


class Segments(Protocol):
    """Parts of a run, each of which begins as a start does that resumes from the checkpoint between them.

    Attributes:
        end: env steps after which the present one is over.
    """

    end: int

    def next(self) -> Workers:
        """Make the workers of the next segment, when the last ones have ended and their states are in the blocks."""
        ...


class Runner:
    """Runs to the end of the budget, a signal or a failure.

    Args:
        workers: all workers.
        monitor: told every report.
        checkpointing: told every report; asks for states.
        budget: when to stop.
        signals: entered by the caller.
        status: written meanwhile.
        segments: of the run, if it is divided into some.

    Attributes:
        population: of the policies, if they are several.
        begun: whether all workers have been ready.
        on_begin: called when they are, for the first time.
        later: what is called once, after so many seconds of training each, in this order.
        has_lost_files: whether what was written has gone away since this was asked last.
    """

    population: Population | None = None
    begun = False
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
        self.on_begin: Callable[[], None] = lambda: None
        self.later: list[tuple[float, Callable[[], None]]] = []

    def turns(self) -> Turns:
        """Run to the end; return why it ended. In any case, no process is left, and what was learned is saved.

        Raises:
            Interrupted: a signal ended it, after saving; `NotSaved` if that was not possible.
            DirectoryInUse: the folder was moved and another run has begun in its place; nothing more is saved.
            AppoError: a worker failed.
        """
        at_once = False
        try:
            try:
                reason = yield from self._train()
            except DirectoryInUse:
                raise  # where it would save another run has begun
            except Exception as error:
                lost = self._save_what_can_be()
                if lost and isinstance(error, Interrupted):
                    raise NotSaved(f"{error}, and what was learned last is not saved: {lost}") from None
                raise
            self._finish()
            return reason
        except StopNow:
            at_once = True
            raise
        finally:
            self.workers.close()
            self.monitor.close()
            if self.population and not at_once:  # the disk may never answer
                self.population.close()

    def _save_what_can_be(self) -> str:
        """Save after a failure, which a failure to save must not hide; return why it is not saved, or nothing."""
        try:
            self._finish()
        except Exception as error:
            log.warning("what was learned last is not saved: %s: %s", type(error).__name__, error)
            return str(error) or type(error).__name__
        return ""

    def _train(self) -> Turns:
        self.workers.start()
        self.begun = True
        self.on_begin()
        self.monitor.started = time.monotonic()
        try:
            return (yield from self._until_it_is_over())
        finally:
            self.monitor.console.close()  # what is said from here on stands below it

    def _until_it_is_over(self) -> Turns:
        monitor = self.monitor
        while True:
            self.signals.check()
            for message in self.workers.poll(POLL_SECONDS):
                self._hear(message)
                self.checkpointing.handle(message)
            now = time.monotonic()
            if self.has_lost_files():
                self.monitor.write_summaries(now)
                self.checkpointing.lost()
            self.monitor.tick(now)
            self.status.tick(now)
            while self.later and now - monitor.started >= self.later[0][0]:
                self.later.pop(0)[1]()
            for request in self.checkpointing.tick(now):
                self.workers.send(request)
            for order in self.population.tick() if self.population else ():
                self.workers.send(order)
            if reason := self.budget.spent(monitor.policies, monitor.collected, now - monitor.started):
                return reason
            if self.segments and all(
                policy.totals["env_steps"] >= self.segments.end for policy in self.monitor.policies
            ):
                self._begin_next_segment(self.segments)
            yield

    def _begin_next_segment(self, segments: Segments) -> None:
        """Save, and go on from there as a later start would."""
        self._stop()
        self.monitor.write_summaries(time.monotonic())
        try:
            self.checkpointing.finish()
        except ResourceError as error:  # what is in memory is the same; a later start would repeat this segment
            log.warning("checkpoint not saved: %s", error)
        self.workers = segments.next()
        self.workers.start()

    def _hear(self, message: Message) -> None:
        self.monitor.handle(message)
        if self.population:
            self.population.handle(message)

    def _stop(self) -> None:
        for message in self.workers.stop(time.monotonic() + STOP_SECONDS):
            self._hear(message)
        self.workers.close()

    def _finish(self) -> None:
        """Stop the workers, take their last reports and save.

        Of a run in segments only a state at the end of one is to be gone on from, and that at the end of the budget.
        """
        whole = self.segments is None or self.budget.reached(self.monitor.policies) is not None
        self._stop()
        self.monitor.write_last()
        self.checkpointing.finish(regular=whole)
        if not whole:
            log.info("--deterministic_resume: what was learned since the last checkpoint is not saved")
        log.info("%s", self.monitor.line())
