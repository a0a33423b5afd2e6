"""Inquiries: processes that try an environment or a model, and tell what they find out."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import time
from collections.abc import Callable
from pathlib import Path

from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes.fork_server import (
    POLL_SECONDS,
    StartMethod,
    abandon,
    context,
    server_ended,
    signals_blocked,
    without_missing_script,
)
from appo.algorithms.runtime.processes.janitor import Janitor, kill_group
from appo.algorithms.runtime.processes.process import cause_of_death, crash_report, stack_of
from appo.algorithms.runtime.processes.supervisor import WorkerError
from appo.utils.errors import AppoError, EnvironmentFailure
from appo.utils.system.signal_watch import SignalWatch

CLOSING_SECONDS = 1.0  # that a process that has answered may take to close what it tried


class Inquiry:
    """A process that leads a group and tells what it finds out, unasked or asked for more; it ends when this is left.

    One that has answered may close its environments first: killed at once, they would leave lock files and servers.

    Args:
        target: called there as `target(pipe, log_path, *arguments)`.
        arguments: for it.
        log_path: of the process.
        method: by which it is started; spawned ones need not wait until the fork server has loaded its modules.
        signals: looked at while waiting.
        janitor: ends the group if main cannot.
    """

    def __init__(
        self,
        target: Callable[..., None],
        arguments: tuple[object, ...],
        *,
        log_path: Path,
        method: StartMethod,
        signals: SignalWatch,
        janitor: Janitor,
    ) -> None:
        self.log_path, self.method, self.signals, self.janitor = log_path, method, signals, janitor
        self._pipe, self._theirs = multiprocessing.Pipe()
        self._process = context(method).Process(target=target, args=(self._theirs, log_path, *arguments), daemon=False)
        self._is_busy, self._closed_by = True, 0.0

    def __enter__(self) -> "Inquiry":
        try:
            if self.method == "spawn":
                with signals_blocked(), without_missing_script():
                    self._process.start()
            else:  # the fork server, which has blocked signals itself, answers when it has loaded its modules
                with self.signals.raising(), without_missing_script():
                    self._process.start()
        except EOFError:
            self._pipe.close()
            raise server_ended() from None
        except BaseException:
            self._pipe.close()
            raise
        finally:
            self._theirs.close()
        self.janitor.watch(self._process.pid or 0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()  # the end of all questions
        try:
            self.finish()
        finally:
            self._process.kill()
            self._process.join(1.0)
            abandon([self._process] if self._process.is_alive() else [])
            kill_group(self._process.pid or 0)
            self.janitor.forget(self._process.pid or 0)

    def finish(self) -> None:
        """Wait until the process has closed what it tried, if it has told all; `CLOSING_SECONDS` in all.

        Raises:
            Interrupted: a signal came meanwhile.
        """
        self._closed_by = self._closed_by or time.monotonic() + CLOSING_SECONDS
        while not self._is_busy and self._process.is_alive() and time.monotonic() < self._closed_by:
            self._process.join(POLL_SECONDS)
            self.signals.check()

    def answer(self, timeout_seconds: float, about: str = "environment") -> object:
        """Return the next answer of the process.

        Args:
            timeout_seconds: for that.
            about: what is tried: the environment or the network.

        Raises:
            EnvironmentFailure: it died or took too long; `WorkerError` if that was with the network.
            Interrupted: a signal came meanwhile.
        """
        try:
            if self._wait(time.monotonic() + timeout_seconds):
                return self._pipe.recv()
        except EOFError:
            death = self._death(f"the process that tried the {about}")
            raise _failure(about, death, crash_report(self.log_path)) from None
        late = f"making the {about} took longer than {timeout_seconds:g} seconds"
        raise _failure(about, late, stack_of(self._process, self.log_path))

    def ask(self, question: object) -> None:
        """Send a question to the process; nothing happens if it has died."""
        self._is_busy = True
        with contextlib.suppress(OSError):
            self._pipe.send(question)

    def answer_by(self, deadline: float) -> object | None:
        """Return the next answer until monotonic `deadline`; `WorkerFailed` if the process dies before.

        Raises:
            Interrupted: a signal came meanwhile.
        """
        try:
            return self._pipe.recv() if self._wait(deadline) else None
        except EOFError:
            return WorkerFailed("probe", 1, self._death("the process that measured"), crash_report(self.log_path))

    def _death(self, who: str) -> str:
        self._process.join(1.0)
        return cause_of_death(who, self._process.exitcode)

    def _wait(self, deadline: float) -> bool:
        """Return whether something can be read until then.

        Raises:
            EOFError: it has ended, though what it has started may hold its end of the pipe.
            Interrupted: a signal came meanwhile.
        """
        self._is_busy = True
        while self._is_busy:
            self.signals.check()
            if self._pipe.poll(min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
                self._is_busy = False
            elif not self._process.is_alive() and not self._pipe.poll():
                raise EOFError
            elif time.monotonic() >= deadline:
                break
        return not self._is_busy


def _failure(about: str, summary: str, traceback: str) -> AppoError:
    if about != "environment":
        return WorkerError(summary, traceback=traceback)
    failure = EnvironmentFailure(summary)
    failure.traceback = traceback
    return failure
