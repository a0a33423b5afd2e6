"""How processes come into being: the fork server, the probing process, and quiet signals meanwhile."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Literal

from algorithms.runtime.messages import Message
from algorithms.runtime.signals import SignalWatch
from utils.errors import EnvironmentFailure

Outbox = Callable[[Message], None]

QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.1
ROOT = Path(__file__).resolve().parents[2]
ORIGINAL_PATH = "APPO_ORIGINAL_PYTHONPATH"


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


def start_fork_server(*, with_torch: bool) -> None:
    """Start the fork server, whose children start in milliseconds; it loads its modules while main goes on.

    It must find our packages wherever it is started from, and must not find a stranger's `utils` in the working
    directory; so it is told where they are and that the working directory is no place for packages.
    """
    modules = ["algorithms.runtime.fork_server"] + ["algorithms.appo.build"] * with_torch
    multiprocessing.set_forkserver_preload(modules)
    if _Server.has_torch is None:
        _Server.has_torch = with_torch
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH", ORIGINAL_PATH)}
    os.environ[ORIGINAL_PATH] = before["PYTHONPATH"] or ""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before["PYTHONPATH"]])])
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        with signals_blocked():
            multiprocessing.forkserver.ensure_running()
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
    target: Callable[..., None], arguments: tuple[object, ...], timeout_seconds: float, signals: SignalWatch
) -> object:
    """Run `target(pipe, *arguments)` in a process and return the one thing it sends.

    Raises:
        EnvironmentFailure: it died or took too long.
        Interrupted: a signal came meanwhile.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments), daemon=False)
    with signals_blocked():
        process.start()
    theirs.close()
    deadline = time.monotonic() + timeout_seconds
    try:
        while True:
            signals.check()
            if ours.poll(POLL_SECONDS):
                return ours.recv()
            if time.monotonic() > deadline:
                raise EnvironmentFailure(f"making the environment took longer than {timeout_seconds:g} seconds")
    except EOFError:
        process.join(1.0)
        raise EnvironmentFailure(
            f"the process that tried the environment died with exit code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join(1.0)
        ours.close()


def restore_environment() -> None:
    """In the fork server: undo what `start_fork_server` set for it alone."""
    os.environ.pop("PYTHONSAFEPATH", None)
    original = os.environ.pop(ORIGINAL_PATH, "")
    os.environ.pop("PYTHONPATH", None)
    if original:
        os.environ["PYTHONPATH"] = original
