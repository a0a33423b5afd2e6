"""Inquiries: processes that create an environment or a model before training, and report results."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes.fork_server import (
    POLL_SECONDS,
    StartMethod,
    abandon,
    context,
    server_ended,
    server_environment,
    server_of,
    signals_blocked,
    without_missing_script,
)
from appo.algorithms.runtime.processes.janitor import Janitor, kill_group
from appo.algorithms.runtime.processes.process import LOST, cause_of_death, crash_report, exit_code_of, stack_of
from appo.algorithms.runtime.processes.supervisor import WorkerError
from appo.utils.errors import AppoError, EnvironmentFailure
from appo.utils.system.signal_watch import SignalWatch

CLOSING_SECONDS = 1.0  # for a process to close environments after the last answer


class Inquiry:
    """A process with a process group that sends answers, unasked or to questions; killed when the context is left.

    After the last answer the process may close its environments: a kill at once would leave lock files and servers.

    Args:
        target: function of the process, called as `target(pipe, log_path, *arguments)`.
        arguments: further arguments of `target`.
        method: start method; a spawned process need not wait until the fork server has loaded modules.
        signals: signals, checked while waiting.
        janitor: janitor, which kills the group if main is killed.
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
        self._is_busy, self._closed_by, self._server = True, 0.0, 0

    def __enter__(self) -> "Inquiry":
        try:
            with contextlib.ExitStack() as entered:
                if self.method == "spawn":
                    entered.enter_context(signals_blocked())
                else:  # the fork server has blocked signals itself, and answers after loading modules
                    entered.enter_context(self.signals.raising())
                    entered.enter_context(server_environment())  # for a server that multiprocessing starts again
                entered.enter_context(without_missing_script())
                self._process.start()
            self._server = server_of(self.method)
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
        self.close()
        try:
            self.finish()
        finally:
            self._process.kill()
            self._process.join(1.0)
            abandon([self._process] if self._process.is_alive() else [])
            kill_group(self._process.pid or 0)
            self.janitor.forget(self._process.pid or 0)

    @property
    def pipe(self) -> Connection:
        """Return the pipe of the answers, to wait for several inquiries at once."""
        return self._pipe

    def close(self) -> None:
        """Take no more answers; a process without an open question closes its environments and ends."""
        self._pipe.close()
        self._closed_by = self._closed_by or time.monotonic() + CLOSING_SECONDS

    @property
    def has_closed(self) -> bool:
        """Return whether the process has ended, or has had its time to close."""
        return self._is_busy or not self._process.is_alive() or time.monotonic() >= self._closed_by

    def finish(self) -> None:
        """Wait until a process without an open question has closed its environments, at most `CLOSING_SECONDS`.

        Raises:
            Interrupted: a signal arrived.
        """
        self._closed_by = self._closed_by or time.monotonic() + CLOSING_SECONDS
        while not self.has_closed:
            self._process.join(POLL_SECONDS)
            self.signals.check()

    def answer(self, timeout_seconds: float, about: str = "environment") -> object:
        """Return the next answer of the process.

        Raises:
            EnvironmentFailure: the process died or took too long; `WorkerError` for a network.
            Interrupted: a signal arrived.
        """
        try:
            if self._wait(time.monotonic() + timeout_seconds):
                return self._pipe.recv()
        except EOFError:
            death, report = self._death(f"the process that tried the {about}")
            raise _failure(about, death, report) from None
        late = f"making the {about} took longer than {timeout_seconds:g} seconds"
        raise _failure(about, late, stack_of(self._process, self.log_path))

    def ask(self, question: object) -> None:
        """Send a question to the process; do nothing if the process has died."""
        self._is_busy = True
        with contextlib.suppress(OSError):
            self._pipe.send(question)

    @property
    def was_killed(self) -> bool:
        """Return whether a signal, or the end of the fork server, has ended the process."""
        code = exit_code_of(self._process, self._server)
        return code is not None and (code < 0 or code == LOST)

    def answer_by(self, deadline: float, who: str = "the process that measured") -> object | None:
        """Return the next answer, `WorkerFailed` if the process dies, or None at monotonic `deadline`.

        Raises:
            Interrupted: a signal arrived.
        """
        try:
            return self._pipe.recv() if self._wait(deadline) else None
        except EOFError:
            return WorkerFailed("probe", 1, *self._death(who))

    def end_hanging(self, seconds: float) -> WorkerFailed:
        """Kill a process that has sent nothing for so many seconds; return the failure, with Python stacks."""
        report = stack_of(self._process, self.log_path)
        self._process.kill()
        self._process.join(1.0)
        return WorkerFailed("probe", 1, f"nothing has happened for {seconds:g} s", report)

    def _death(self, who: str) -> tuple[str, str]:
        """Return cause and Python stacks of the end of the process."""
        self._process.join(1.0)
        code = exit_code_of(self._process, self._server)
        return cause_of_death(who, code), crash_report(self.log_path, code)

    def _wait(self, deadline: float) -> bool:
        """Return whether an answer arrives before monotonic `deadline`.

        Raises:
            EOFError: the process has ended, though its children may hold the pipe open.
            Interrupted: a signal arrived.
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
