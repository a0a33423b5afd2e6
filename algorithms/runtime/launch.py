"""How processes come into being: the fork server, the probing process, and quiet signals meanwhile."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Literal

from algorithms.runtime.janitor import Janitor, kill_group
from algorithms.runtime.messages import Message
from algorithms.runtime.process import cause_of_death, crash_report, stack_of
from algorithms.runtime.signals import SignalWatch
from utils.errors import EnvironmentFailure

Outbox = Callable[[Message], None]

QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.1
ROOT = Path(__file__).resolve().parents[2]
ORIGINAL_PATH, MAIN_PID = "APPO_ORIGINAL_PYTHONPATH", "APPO_MAIN_PID"


class _Server:
    """What the one fork server of this process has loaded; it cannot be changed once it runs."""

    has_torch: bool | None = None


@contextmanager
def signals_blocked() -> Iterator[None]:
    """While entered, signals wait: a child inherits the mask and so never sees a Ctrl-C before it can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server(janitor: Janitor, *, with_torch: bool) -> None:
    """Start the fork server, whose children start in milliseconds; it loads its modules while main goes on.

    It must find our packages wherever it is started from, and must not find a stranger's `utils` in the working
    directory; so it is told where they are and that the working directory is no place for packages.
    """
    modules = ["algorithms.appo.fork_server"] + ["algorithms.appo.build"] * with_torch
    multiprocessing.set_forkserver_preload(modules)
    if _Server.has_torch is None:
        _Server.has_torch = with_torch
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH", ORIGINAL_PATH, MAIN_PID)}
    os.environ[ORIGINAL_PATH] = before["PYTHONPATH"] or ""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before["PYTHONPATH"]])])
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ[MAIN_PID] = str(os.getpid())
    try:
        with signals_blocked():  # by itself: starting the tracker unblocks SIGINT and SIGTERM again (CPython 3.11)
            multiprocessing.resource_tracker.ensure_running()
        with signals_blocked():
            multiprocessing.forkserver.ensure_running()
        janitor.watch_directory(Path(multiprocessing.util.get_temp_dir()))  # the server's socket lies there
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def context(method: Literal["spawn", "forkserver"]) -> SpawnContext | ForkServerContext:
    """The multiprocessing context of a start method."""
    return multiprocessing.get_context("spawn") if method == "spawn" else multiprocessing.get_context("forkserver")


def can_fork(device: str) -> bool:
    """Whether processes with a network may be forked: on the CPU, from a server that has torch loaded."""
    return device == "cpu" and bool(_Server.has_torch)


def ask_process(
    target: Callable[..., None],
    arguments: tuple[object, ...],
    *,
    log_path: Path,
    timeout_seconds: float,
    signals: SignalWatch,
    janitor: Janitor,
) -> object:
    """Run `target(pipe, log_path, *arguments)` in a process that leads a group; return the one thing it sends.

    Raises:
        EnvironmentFailure: it died or took too long.
        Interrupted: a signal came meanwhile.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, log_path, *arguments), daemon=False)
    with signals.raising():  # the fork server answers when it has loaded its modules; it has blocked signals itself
        process.start()
    theirs.close()
    janitor.watch(process.pid or 0)
    deadline = time.monotonic() + timeout_seconds
    try:
        while True:
            signals.check()
            if ours.poll(POLL_SECONDS):
                return ours.recv()
            if time.monotonic() > deadline:
                late = f"making the environment took longer than {timeout_seconds:g} seconds"
                raise _failure(late, stack_of(process, log_path))
    except EOFError:
        process.join(1.0)
        death = cause_of_death("the process that tried the environment", process.exitcode)
        raise _failure(death, crash_report(log_path)) from None
    finally:
        process.kill()
        process.join(1.0)
        ours.close()
        kill_group(process.pid or 0)
        janitor.forget(process.pid or 0)


def _failure(summary: str, traceback: str) -> EnvironmentFailure:
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
