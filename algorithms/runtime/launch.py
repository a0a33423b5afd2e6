"""How processes come into being: the fork server, the probing process, and quiet signals meanwhile."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import FrameType
from typing import Literal

from algorithms.runtime.janitor import Janitor, kill_group
from algorithms.runtime.messages import Message, WorkerFailed
from algorithms.runtime.process import cause_of_death, crash_report, stack_of
from algorithms.runtime.signals import SignalWatch
from algorithms.runtime.supervisor import WorkerError
from utils.errors import AppoError, EnvironmentFailure, UsageError

Outbox = Callable[[Message], None]
StartMethod = Literal["spawn", "forkserver"]

QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.1
MOST_BELLS = 150  # of a process that is forked: the server takes 251 descriptors with it, and some are for queues
CLOSING_SECONDS = 1.0  # that a process that has answered may take to close what it tried
ANSWER_SECONDS = 120.0  # loading torch takes a few, and many times that where the disk is slow
ROOT = Path(__file__).resolve().parents[2]
ORIGINAL_PATH, MAIN_PID = "APPO_ORIGINAL_PYTHONPATH", "APPO_MAIN_PID"
WAIT_POLICY = "OMP_WAIT_POLICY"


class _Server:
    """What the one fork server of this process has loaded, which cannot be changed once it runs, and who started it."""

    has_torch: bool | None = None
    starter: threading.Thread | None = None


@contextmanager
def signals_blocked() -> Iterator[None]:
    """While entered, signals wait: a child inherits the mask and so never sees a Ctrl-C before it can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def server_must_answer() -> Iterator[None]:
    """While entered: a fork server that has stopped is ended, or no start would ever return.

    Only in the main thread: Python allows no handler elsewhere.

    So is one whose socket somebody has removed, a cleaner of temporary files for example. And one that has just died is
    started again by multiprocessing itself, which must find what ours finds.

    Raises:
        TimeoutError: it took too long.
        FileNotFoundError: the socket is not there.
    """

    def give_up(number: int, frame: FrameType | None) -> None:
        _kill_server()
        raise TimeoutError(f"the fork server did not answer within {ANSWER_SECONDS:g} s")

    if threading.current_thread() is not threading.main_thread():
        with _server_environment():
            yield
        return
    handler = signal.signal(signal.SIGALRM, give_up)
    timer = signal.setitimer(signal.ITIMER_REAL, ANSWER_SECONDS)
    try:
        with _server_environment():
            yield
    except FileNotFoundError:
        _kill_server()
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _kill_server() -> None:
    if pid := _server_pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_fork_server(janitor: Janitor, *, with_torch: bool) -> bool:
    """Start the fork server, whose children start in milliseconds; it loads its modules while main goes on.

    Returns:
        Whether it is only loading them now; a process that has trained before has one already.

    It must find our packages wherever it is started from, and must not find a stranger's `utils` in the working
    directory; so it is told where they are and that the working directory is no place for packages.

    Raises:
        UsageError: this process has another one, whose children would not die with a run.
    """
    workers = ["algorithms.appo.build"] * with_torch
    modules = ["algorithms.appo.fork_server", *workers, "algorithms.appo.forking"]
    multiprocessing.set_forkserver_preload(modules)
    is_new = _Server.has_torch is None
    pid_before = _server_pid()
    if is_new and pid_before is not None:
        raise UsageError("this process has a fork server of its own already: train in a process without one")
    if is_new:
        _Server.has_torch = with_torch
    with _server_environment():
        with signals_blocked():  # by itself: starting the tracker unblocks SIGINT and SIGTERM again (CPython 3.11)
            multiprocessing.resource_tracker.ensure_running()
        directory = Path(multiprocessing.util.get_temp_dir())  # for the server's socket
        directory.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
        with signals_blocked():
            multiprocessing.forkserver.ensure_running()
        if _server_pid() != pid_before:
            _Server.starter = threading.current_thread()
        janitor.watch_directory(directory)
    return is_new


@contextmanager
def _server_environment() -> Iterator[None]:
    """While entered, what starts finds our packages and its parent (see `restore_environment`), and waits in its sleep.

    Threads of a learner that spin at a barrier take the cores that actors could use. They ask when torch is loaded,
    which a process that is spawned may do before a line of ours runs there: the user's script may import it.
    """
    ours = ("PYTHONPATH", "PYTHONSAFEPATH", ORIGINAL_PATH, MAIN_PID, WAIT_POLICY)
    before = {name: os.environ.get(name) for name in ours}
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    os.environ[ORIGINAL_PATH] = before["PYTHONPATH"] or ""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before["PYTHONPATH"]])])
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ[MAIN_PID] = str(os.getpid())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def stop_fork_server_of_thread() -> None:
    """End the fork server if this thread has started it and is not the main one.

    The kernel would do so when the thread ends, but a moment after Python says that it has: the next run could still
    find a server that is dying.
    """
    pid, thread = _server_pid(), threading.current_thread()
    if pid is not None and _Server.starter is thread and thread is not threading.main_thread():
        os.kill(pid, signal.SIGKILL)
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _server_pid() -> int | None:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


def context(method: StartMethod) -> SpawnContext | ForkServerContext:
    """The multiprocessing context of a start method."""
    return multiprocessing.get_context("spawn") if method == "spawn" else multiprocessing.get_context("forkserver")


def can_fork(device: str, bells: int = 0) -> bool:
    """Whether a process with a network may be forked: on the CPU, from a server that has torch loaded.

    A process that wakes hundreds of others has more descriptors than the server takes; one that is spawned inherits
    them all.
    """
    return device == "cpu" and bool(_Server.has_torch) and bells <= MOST_BELLS


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
                with signals_blocked():
                    self._process.start()
            else:  # the fork server, which has blocked signals itself, answers when it has loaded its modules
                with self.signals.raising():
                    self._process.start()
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
            kill_group(self._process.pid or 0)
            self.janitor.forget(self._process.pid or 0)

    def finish(self) -> None:
        """Wait until it has closed what it tried, if it has told all that was awaited; `CLOSING_SECONDS` in all.

        Raises:
            Interrupted: a signal came meanwhile.
        """
        self._closed_by = self._closed_by or time.monotonic() + CLOSING_SECONDS
        while not self._is_busy and self._process.is_alive() and time.monotonic() < self._closed_by:
            self._process.join(POLL_SECONDS)
            self.signals.check()

    def answer(self, timeout_seconds: float, about: str = "environment") -> object:
        """The next thing it tells.

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
        """Send it something to answer; nothing happens if it has died."""
        self._is_busy = True
        with contextlib.suppress(OSError):
            self._pipe.send(question)

    def answer_by(self, deadline: float) -> object | None:
        """The next thing it tells until monotonic `deadline`; `WorkerFailed` if it dies before.

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
        """Whether something can be read until then.

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


def restore_environment() -> None:
    """In the fork server: undo what `start_fork_server` set for it alone."""
    os.environ.pop(MAIN_PID, None)
    os.environ.pop("PYTHONSAFEPATH", None)
    original = os.environ.pop(ORIGINAL_PATH, "")
    os.environ.pop("PYTHONPATH", None)
    if original:
        os.environ["PYTHONPATH"] = original
