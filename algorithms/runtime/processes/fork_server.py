"""The fork server, from which processes are started, with signals quiet meanwhile."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from appo.algorithms.runtime.messages import Message
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.utils.errors import PACKAGE, ResourceError, UsageError
from appo.utils.system import machine
from appo.utils.system.signal_watch import QUIET
from appo.utils.values import shown

Outbox = Callable[[Message], None]

StartMethod = Literal["spawn", "forkserver"]

POLL_SECONDS = 0.1

END_SECONDS = 0.5  # in which the kernel takes a process away, unless that waits for a disk

MOST_BELLS = 150  # of a process that is forked: the server takes 251 descriptors with it, and some are for queues

ANSWER_SECONDS = 120.0  # loading torch takes a few, and many times that where the disk is slow

LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes: the kernel takes 107 for a socket
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (mkdtemp makes a folder of its own in it)

ORIGINAL_FOLDER: str = getattr(multiprocessing.process, "ORIGINAL_DIR", None) or ""
"""The working directory in which this program began, to which the path of its script is relative."""

ORIGINAL_PATH, MAIN_PID = "APPO_ORIGINAL_PYTHONPATH", "APPO_MAIN_PID"

WAIT_POLICY = "OMP_WAIT_POLICY"


class _Server:
    """The modules that this process's one fork server has loaded, which stay once it runs, and its starter."""

    has_torch: bool | None = None
    starter: threading.Thread | None = None


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while entered: a child inherits the mask and so never sees a Ctrl-C before it can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def server_must_answer() -> Iterator[None]:
    """End, while entered, a fork server that has stopped, or no start would ever return.

    A thread does that: whoever waits for an answer then finds that there is nobody to give one. So is one ended whose
    socket somebody has removed, a cleaner of temporary files for example. And one that has just died is started again
    by multiprocessing itself, which must find what ours finds.

    Raises:
        TimeoutError: it took too long.
        FileNotFoundError: the socket is not there.
    """
    given_up = threading.Event()

    def give_up() -> None:
        given_up.set()
        _kill_server()

    watch = threading.Timer(ANSWER_SECONDS, give_up)
    watch.daemon = True
    watch.start()
    try:
        with _server_environment():
            yield
    except FileNotFoundError:
        _kill_server()
        raise
    except (OSError, EOFError):
        if given_up.is_set():
            raise TimeoutError(f"the fork server did not answer within {ANSWER_SECONDS:g} s") from None
        raise
    finally:
        watch.cancel()


def _kill_server() -> None:
    if pid := _server_pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def server_ended() -> ResourceError:
    """Describe a fork server that ended instead of starting a process, which want of memory and few pids explain."""
    free, pids = machine.available_memory_bytes() >> 20, machine.free_pids()
    return ResourceError(
        f"the fork server ended when it was to start a process: {free} MiB of memory are free, and "
        f"{'any number of' if pids is None else pids} more processes may be started"
    )


def start_fork_server(janitor: Janitor, preload: Sequence[str], *, with_torch: bool) -> bool:
    """Start the fork server, whose children start in milliseconds; it loads its modules while main goes on.

    Args:
        janitor: removes what the server leaves should main be killed.
        preload: modules that it loads, for its children to share.
        with_torch: whether torch is among what they load.

    Returns:
        Whether it is only loading them now; a process that has trained before has one already.

    It must find our packages wherever it is started from, and must not find a stranger's `utils` in the working
    directory; so it is told where they are and that the working directory is no place for packages.

    Raises:
        UsageError: this process has another one, whose children would not die with a run.
    """
    multiprocessing.set_forkserver_preload(list(preload))
    is_new = _Server.has_torch is None
    pid_before = _server_pid()
    if is_new and pid_before is not None:
        raise UsageError("this process has a fork server of its own already: train in a process without one")
    if is_new:
        _Server.has_torch = with_torch
    with _server_environment():
        with signals_blocked():  # by itself: starting the tracker unblocks SIGINT and SIGTERM again (CPython 3.11)
            multiprocessing.resource_tracker.ensure_running()
        directory = _socket_folder()
        directory.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
        with signals_blocked():
            multiprocessing.forkserver.ensure_running()
        if _server_pid() != pid_before:
            _Server.starter = threading.current_thread()
        janitor.watch_directory(directory)
    return is_new


@contextmanager
def without_missing_script() -> Iterator[None]:
    """Hide a main script that is no file, as of stdin, while entered: children would be told to run it."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    is_missing = path is not None and not os.path.isfile(os.path.join(ORIGINAL_FOLDER, path))
    if is_missing:
        del main.__file__
    try:
        yield
    finally:
        if is_missing:
            main.__file__ = path


def _socket_folder() -> Path:
    """Return the temporary folder of multiprocessing, for the server's socket: of a path that is short enough for one.

    Raises:
        UsageError: there is none.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_FOLDER:
        return Path(multiprocessing.util.get_temp_dir())
    short = next((place for place in SHORT_FOLDERS if os.access(place, os.W_OK | os.X_OK)), None)
    if short is None:
        raise UsageError(
            f"TMPDIR={shown(usual)} is too long for sockets, which take {LONGEST_FOLDER} characters: set a shorter one"
        )
    try:
        tempfile.tempdir = short
        return Path(multiprocessing.util.get_temp_dir())
    finally:
        tempfile.tempdir = usual


@contextmanager
def _server_environment() -> Iterator[None]:
    """Let processes started while entered find our packages and their parent, and sleep while they wait.

    Threads of a learner that spin at a barrier take the cores that actors could use. They ask when torch is loaded,
    which a process that is spawned may do before a line of ours runs there: the user's script may import it.
    """
    ours = ("PYTHONPATH", "PYTHONSAFEPATH", ORIGINAL_PATH, MAIN_PID, WAIT_POLICY)
    before = {name: os.environ.get(name) for name in ours}
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    os.environ[ORIGINAL_PATH] = before["PYTHONPATH"] or ""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, [before["PYTHONPATH"]])])
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


def abandon(processes: Sequence[BaseProcess]) -> None:
    """Wait no more for processes that were killed and whose end nobody reports; the interpreter's exit would.

    The end of a process that was forked is told by the server. One that stands stopped tells nothing, so it is ended.
    """
    if processes:
        _kill_server()
    for process in processes:
        process.join(END_SECONDS)
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def wake_tracker() -> None:
    """Let multiprocessing's resource tracker go on, should somebody have stopped it: main's exit may wait for it."""
    if pid := getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _server_pid() -> int | None:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


def context(method: StartMethod) -> SpawnContext | ForkServerContext:
    """Return the multiprocessing context of a start method."""
    return multiprocessing.get_context("spawn") if method == "spawn" else multiprocessing.get_context("forkserver")


def can_fork(device: str, bells: int = 0) -> bool:
    """Return whether a process with a network may be forked: on the CPU, from a server that has torch loaded.

    A process that wakes hundreds of others has more descriptors than the server takes; one that is spawned inherits
    them all.
    """
    return device == "cpu" and bool(_Server.has_torch) and bells <= MOST_BELLS


def restore_environment() -> None:
    """Undo, in the fork server, what `start_fork_server` set for it alone."""
    os.environ.pop(MAIN_PID, None)
    os.environ.pop("PYTHONSAFEPATH", None)
    original = os.environ.pop(ORIGINAL_PATH, "")
    os.environ.pop("PYTHONPATH", None)
    if original:
        os.environ["PYTHONPATH"] = original
