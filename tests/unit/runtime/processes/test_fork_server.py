"""Starting processes ends, whatever the fork server does."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes import fork_server
from appo.algorithms.runtime.processes.inquiry import Inquiry, _failure
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.processes.supervisor import WorkerError
from appo.utils.errors import PACKAGE, EnvironmentFailure, UsageError
from appo.utils.system.signal_watch import SignalWatch
from tests.patience import HANG_SECONDS


def test_a_fork_server_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it finds that it has gone, as multiprocessing does."""
    handler = signal.getsignal(signal.SIGALRM)
    answer, silent = os.pipe()
    server = subprocess.Popen(["sleep", "1000"], pass_fds=[silent])
    os.close(silent)
    monkeypatch.setattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", server.pid)
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match=r"did not answer within 0.05 s"), fork_server.server_must_answer():
        read_to_its_end(answer)
    assert server.wait(HANG_SECONDS) == -signal.SIGKILL
    assert signal.getsignal(signal.SIGALRM) == handler
    os.close(answer)


def read_to_its_end(descriptor: int) -> None:
    """As multiprocessing reads an answer."""
    if not os.read(descriptor, 1):
        raise EOFError


def test_a_fork_server_whose_socket_is_gone_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    server = subprocess.Popen(["sleep", "1000"])
    monkeypatch.setattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", server.pid)
    with pytest.raises(FileNotFoundError), fork_server.server_must_answer():
        raise FileNotFoundError
    assert server.wait(HANG_SECONDS) == -signal.SIGKILL


def test_a_fork_server_that_dies_at_the_wrong_moment_is_started_as_ours_is() -> None:
    """By multiprocessing itself, between our look at it and the start of a process."""
    before = dict(os.environ)
    with fork_server.server_must_answer():
        assert os.environ[fork_server.MAIN_PID] == str(os.getpid())
        assert os.environ["PYTHONPATH"].startswith(str(PACKAGE.parent))
    assert dict(os.environ) == before


@pytest.mark.parametrize("wish", [None, "ACTIVE"])
def test_threads_of_what_is_spawned_wait_without_spinning(monkeypatch: pytest.MonkeyPatch, wish: str | None) -> None:
    monkeypatch.delenv(fork_server.WAIT_POLICY, raising=False)
    if wish:
        monkeypatch.setenv(fork_server.WAIT_POLICY, wish)
    ours, theirs = multiprocessing.Pipe()
    process = fork_server.context("spawn").Process(target=tell_policy, args=(theirs,))
    with ours, theirs:
        with fork_server.server_must_answer():
            process.start()
        assert ours.poll(HANG_SECONDS)
        assert ours.recv() == (wish or "PASSIVE")
    process.join(HANG_SECONDS)
    assert os.environ.get(fork_server.WAIT_POLICY) == wish


def tell_policy(pipe: Connection) -> None:
    """Send the value that a library would find."""
    pipe.send(os.environ.get(fork_server.WAIT_POLICY))


def test_a_process_with_more_descriptors_than_the_server_takes_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server._Server, "has_torch", True)
    assert fork_server.can_fork("cpu", fork_server.MOST_BELLS)
    assert not fork_server.can_fork("cpu", fork_server.MOST_BELLS + 1)
    assert fork_server.MOST_BELLS + 100 < multiprocessing.forkserver.MAXFDS_TO_SEND - 4


@contextmanager
def inquiry(target: Callable[..., None], *arguments: object) -> Iterator[Inquiry]:
    """By a process that is spawned."""
    log = Path("probe.log")
    with SignalWatch() as signals, Janitor() as janitor:
        asked = Inquiry(target, arguments, log_path=log, method="spawn", signals=signals, janitor=janitor)
        with asked:
            yield asked


def answer_and_tidy_up(pipe: Connection, log_path: Path, tidy: Path) -> None:
    """Go on until nothing is asked any more, and then write a file."""
    pipe.send(5)
    with contextlib.suppress(EOFError):
        pipe.recv()
    tidy.touch()


def test_who_has_answered_may_tidy_up(tmp_path: Path) -> None:
    with inquiry(answer_and_tidy_up, tmp_path / "tidy") as asked:
        assert asked.answer(HANG_SECONDS) == 5
    assert (tmp_path / "tidy").exists()


def answer_and_stay(pipe: Connection, log_path: Path) -> None:
    """Never end."""
    pipe.send(os.getpid())
    signal.pause()


def test_who_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.runtime.processes.inquiry.CLOSING_SECONDS", 0.2)
    with inquiry(answer_and_stay) as asked:
        pid = asked.answer(HANG_SECONDS)
        asked.finish()  # all the time there is
        monkeypatch.setattr("appo.algorithms.runtime.processes.inquiry.CLOSING_SECONDS", 1e9)
    assert isinstance(pid, int)
    assert not psutil.pid_exists(pid)


def test_nobody_waits_for_who_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.runtime.processes.inquiry.CLOSING_SECONDS", 1e9)
    with inquiry(answer_and_stay) as asked:
        pid = asked.answer(HANG_SECONDS)
        assert asked.answer_by(0.0) is None
    assert isinstance(pid, int)
    assert not psutil.pid_exists(pid)


def leave_a_child(pipe: Connection, log_path: Path) -> None:
    """Die, while what was forked holds the pipe."""
    child = os.fork()
    if child:
        pipe.send(child)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_death_is_noticed_though_a_child_holds_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the kernel has killed elsewhere on the machine would leave the cause open.
    monkeypatch.setattr("appo.algorithms.runtime.processes.process.kernel_kills.explain", lambda: False)
    with inquiry(leave_a_child) as asked:
        child = asked.answer(HANG_SECONDS)
        assert isinstance(child, int)
        answer = asked.answer_by(time.monotonic() + HANG_SECONDS)
        os.kill(child, signal.SIGKILL)
    assert isinstance(answer, WorkerFailed)
    assert answer.summary == "the process that measured was killed by SIGKILL, not by the kernel's out-of-memory killer"


def answer_and_die(pipe: Connection, log_path: Path) -> None:
    """As a crash would."""
    pipe.send(5)
    os.kill(os.getpid(), signal.SIGSEGV)


def test_who_dies_has_failed() -> None:
    with inquiry(answer_and_die) as asked:
        assert asked.answer(HANG_SECONDS) == 5
        answer = asked.answer_by(time.monotonic() + HANG_SECONDS)
    assert isinstance(answer, WorkerFailed)
    assert answer.summary == "the process that measured was killed by SIGSEGV"


def test_a_failure_is_blamed_on_what_was_tried() -> None:
    assert isinstance(_failure("environment", "it died", ""), EnvironmentFailure)
    assert isinstance(_failure("network", "it died", ""), WorkerError)


def test_timers_of_others_go_on() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        with fork_server.server_must_answer():
            assert fork_server.ANSWER_SECONDS < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


LONG = """
import multiprocessing, os, sys, tempfile
from pathlib import Path
from appo.algorithms.runtime.processes import fork_server
from appo.algorithms.runtime.processes.janitor import Janitor
with Janitor() as janitor:
    fork_server.start_fork_server(janitor, [], with_torch=False)
    process = fork_server.context("forkserver").Process(target=os.getpid)
    process.start()
    process.join(600)
    print(process.exitcode, len(multiprocessing.util.get_temp_dir()) < 50)
    print(tempfile.gettempdir() == os.environ["TMPDIR"])
"""


def test_a_temporary_folder_with_a_long_name_has_its_socket_elsewhere(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    root = Path(__file__).parents[4] / "src"
    environment = os.environ | {"TMPDIR": str(long), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", LONG], env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0 True\nTrue\n", "", 0)


def test_no_folder_for_a_socket_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "SHORT_FOLDERS", (str(tmp_path / "missing"),))
    monkeypatch.setattr(fork_server.tempfile, "tempdir", "/" + "y" * 120)
    with pytest.raises(UsageError, match=r"^TMPDIR=/yy.* is too long for sockets, which take \d+ characters"):
        fork_server._socket_folder()


AGAIN = """
import multiprocessing.forkserver, os, signal
from functools import partial
from pathlib import Path
from appo.algorithms.run.preload import preloaded
from appo.algorithms.runtime.processes.fork_server import start_fork_server
from appo.algorithms.runtime.processes.inquiry import Inquiry
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.tools.doctor import try_nothing
from appo.utils.system.signal_watch import SignalWatch
with Janitor() as janitor, SignalWatch() as signals:
    start_fork_server(janitor, preloaded(with_torch=False), with_torch=False)
    for _ in range(2):
        log = Path("probe.log")
        with Inquiry(try_nothing, (), log_path=log, method="forkserver", signals=signals, janitor=janitor) as asked:
            print(asked.answer(600))
        server = multiprocessing.forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
"""


def test_an_inquiry_after_the_death_of_the_fork_server_starts_a_new_one(tmp_path: Path) -> None:
    """The new server has the variables that its modules read."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4] / "src")}
    command = [sys.executable, "-c", AGAIN]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\nTrue\n", "", 0)
