"""The fork server: start, environment variables, signals and failures."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from appo.algorithms.runtime.processes.janitor import Janitor
from appo.utils.errors import PACKAGE, ResourceError, UsageError
from appo.utils.system import machine
from appo.utils.system.signal_watch import QUIET
from appo.utils.values import shown

StartMethod = Literal["spawn", "forkserver"]
POLL_SECONDS = 0.1
END_SECONDS = 0.5  # for the kernel to end a killed process, unless the process waits for a disk
MOST_BELLS = 150  # of a forked process: the server passes at most 251 descriptors, some for queues
ANSWER_SECONDS = 120.0  # loading torch takes a few seconds, and many times longer from a slow disk
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes: the kernel takes 107 for a socket
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (mkdtemp makes a folder of its own in it)
ORIGINAL_FOLDER: str = getattr(multiprocessing.process, "ORIGINAL_DIR", None) or ""
"""Working directory at the start of the program; the path of the main script is relative to the directory."""

ORIGINAL_PATH, MAIN_PID = "APPO_ORIGINAL_PYTHONPATH", "APPO_MAIN_PID"
WAIT_POLICY = "OMP_WAIT_POLICY"


class _Server:
    """The fork server of the calling process: preloaded torch, the thread that started it, the caller's variables."""

    has_torch: bool | None = None
    environment: Mapping[str, str] | None = None
    starter: threading.Thread | None = None


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while entered: a child inherits the mask, so Ctrl-C cannot kill the child during its start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def server_must_answer() -> Iterator[None]:
    """Kill, while entered, a fork server that does not answer, so no start of a process blocks for ever.

    A timer's thread kills the server after `ANSWER_SECONDS`; the waiting start then fails. The server is also killed if
    its socket was removed, for example by a cleaner of temporary files. multiprocessing restarts a dead server, so the
    environment variables of the server are set while entered.

    Raises:
        TimeoutError: the server did not answer.
        FileNotFoundError: the socket was removed.
    """
    given_up = threading.Event()

    def give_up() -> None:
        given_up.set()
        _kill_server()

    watch = threading.Timer(ANSWER_SECONDS, give_up)
    watch.daemon = True
    watch.start()
    try:
        with server_environment():
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
    """Return the error for a fork server that ended at a start, with the two usual causes: free memory and pids."""
    free, pids = machine.available_memory_bytes() >> 20, machine.free_pids()
    return ResourceError(
        f"the fork server ended when it was to start a process: {free} MiB of memory are free, and "
        f"{'any number of' if pids is None else pids} more processes may be started"
    )


def start_fork_server(janitor: Janitor, preload: Sequence[str], *, with_torch: bool) -> bool:
    """Start the fork server, whose children start in milliseconds; the server loads modules while main continues.

    The server must find the packages of appo from every working directory, and must not import a foreign `utils` from
    the working directory: environment variables provide the path and exclude the working directory.

    Args:
        janitor: janitor, which removes the folder of the socket if main is killed.
        preload: modules that the server loads for all children.
        with_torch: whether the modules import torch.

    Returns:
        Whether the server is new; a process that trained before has a server already.

    Raises:
        UsageError: the calling process has a fork server of its own, whose children would not end with a run.
    """
    multiprocessing.set_forkserver_preload(list(preload))
    is_new = _Server.has_torch is None
    pid_before = _server_pid()
    if is_new and pid_before is not None:
        raise UsageError("this process has a fork server of its own already: train in a process without one")
    if is_new:
        _Server.has_torch = with_torch
    with server_environment():
        with signals_blocked():  # apart: starting the tracker unblocks SIGINT and SIGTERM again (CPython 3.11)
            multiprocessing.resource_tracker.ensure_running()
        directory = _socket_folder()
        directory.mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed the folder
        with signals_blocked():
            multiprocessing.forkserver.ensure_running()
        if _server_pid() != pid_before:
            _Server.starter = threading.current_thread()
        janitor.watch(directory)
    return is_new


@contextmanager
def without_missing_script() -> Iterator[None]:
    """Hide a main script without a file, such as stdin, while entered; children would try to run the script."""
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
    """Return multiprocessing's temporary folder for the socket of the server, with a path short enough for a socket.

    Raises:
        UsageError: TMPDIR is too long and no short folder is writable.
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
def server_environment() -> Iterator[None]:
    """Set, while entered, the environment variables of started processes: packages, parent and passive waiting.

    Threads of a learner that spin at a barrier take cores from actors. The wait policy is read when torch is loaded; in
    a spawned process the user's script may import torch before any line of appo runs.
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
    """Kill the fork server if the calling thread started the server and is not the main thread.

    The kernel would kill the server at the end of the thread, but slightly later than Python reports the end: the next
    run could find a dying server.
    """
    pid, thread = _server_pid(), threading.current_thread()
    if pid is not None and _Server.starter is thread and thread is not threading.main_thread():
        _stop_server()


def renew(environment: Mapping[str, str]) -> None:
    """Kill, before a run, a fork server of a run before with other environment variables: its children have the old.

    A server with living children is that of a run that goes on.
    """
    if _Server.environment not in (None, environment):
        if any(isinstance(child, ForkServerProcess) for child in multiprocessing.active_children()):
            return
        if _server_pid() is not None:
            _stop_server()
            _Server.has_torch = None
    _Server.environment = environment


def _stop_server() -> None:
    _kill_server()
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def abandon(processes: Sequence[BaseProcess]) -> None:
    """Remove killed processes without a reported end from multiprocessing, or the interpreter's exit would wait.

    The fork server reports the exit of its children. A stopped server cannot report, so the server is killed.
    """
    if processes:
        _kill_server()
    for process in processes:
        process.join(END_SECONDS)
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def wake_tracker() -> None:
    """Continue multiprocessing's resource tracker if stopped: main's exit may wait for the tracker."""
    if pid := getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _server_pid() -> int | None:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


def server_of(method: str | None) -> int:
    """Return the pid of the server that starts processes by a method; 0: none does."""
    return (_server_pid() or 0) if method == "forkserver" else 0


def context(method: StartMethod) -> SpawnContext | ForkServerContext:
    """Return the multiprocessing context of a start method."""
    return multiprocessing.get_context("spawn") if method == "spawn" else multiprocessing.get_context("forkserver")


def can_fork(device: str, bells: int = 0) -> bool:
    """Return whether a process with a network and `bells` doorbells may be forked; otherwise the process is spawned."""
    # CUDA does not survive a fork.
    return device == "cpu" and bool(_Server.has_torch) and bells <= MOST_BELLS


def restore_environment() -> None:
    """Undo, in the fork server, the environment variables set by `start_fork_server` for the server alone."""
    original = os.environ.get(ORIGINAL_PATH)
    for name in (MAIN_PID, "PYTHONSAFEPATH", ORIGINAL_PATH, "PYTHONPATH"):
        os.environ.pop(name, None)
    if original:
        os.environ["PYTHONPATH"] = original
