import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appo.algorithms.cli import run_command
from appo.utils.errors import Interrupted, StopNow, Terminated
from appo.utils.system.interrupts import SAME_PRESS_SECONDS
from appo.utils.system.signal_watch import SignalWatch


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def watched(*, lost: bool) -> int:
    with contextlib.suppress(KeyboardInterrupt):  # as a callback of an import does
        if lost:
            interrupt()
    with SignalWatch() as signals:
        signals.check()
    return 0


def test_a_ctrl_c_that_python_has_lost_ends_the_run() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert run_command(lambda: watched(lost=True)) == Interrupted.exit_code
    assert run_command(lambda: watched(lost=False)) == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_ctrl_c_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reached = []
    monkeypatch.setattr("appo.utils.system.interrupts.time.monotonic", lambda: 100.0)

    def command() -> int:
        try:
            interrupt()
        finally:
            interrupt()
            reached.append(True)
        return 0

    assert run_command(command) == Interrupted.exit_code
    assert reached
    assert capsys.readouterr().err == "error: interrupted\n"


def test_what_interrupted_one_command_is_not_said_to_the_next() -> None:
    assert run_command(lambda: watched(lost=True)) == Interrupted.exit_code
    assert watched(lost=False) == 0


class InterruptedAtItsEnd:
    def __del__(self) -> None:
        interrupt()


def test_a_ctrl_c_that_python_drops_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        InterruptedAtItsEnd()
        return watched(lost=False)

    assert run_command(command) == Interrupted.exit_code
    assert capfd.readouterr().err == "error: interrupted by Ctrl-C\n"


class Interrupting:
    def __set_name__(self, owner: type, name: str) -> None:
        interrupt()


def test_a_ctrl_c_that_python_makes_another_error_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        type("Owner", (), {"field": Interrupting()})  # up to Python 3.11, a RuntimeError from the KeyboardInterrupt
        return 0

    assert run_command(command) == Interrupted.exit_code
    assert capsys.readouterr().err == "error: interrupted\n"


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_command(lambda: interrupt() or 0) == 0  # type: ignore[func-returns-value]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: interrupt() or 0) == Interrupted.exit_code  # type: ignore[func-returns-value]
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("ignored", [False, True])
def test_what_a_command_has_begun_is_ended_before_a_signal_ends_it(
    tmp_path: Path, number: signal.Signals, ignored: bool
) -> None:
    """With a signal that was ignored when the command began, as by nohup, it goes on."""
    code = f"""
import os, signal, sys, tempfile
from appo.algorithms.cli import run_command
def command():
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        os.kill(os.getpid(), {int(number)})
    return 7
signal.signal({int(number)}, signal.SIG_IGN if {ignored} else signal.SIG_DFL)
sys.exit(run_command(command))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == ((7, "") if ignored else (-number, "error: interrupted\n"))
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_a_command_that_does_not_end() -> None:
    code = """
import os, signal, sys
from appo.algorithms.cli import run_command
from appo.utils.system import interrupts
interrupts.SAME_PRESS_SECONDS = 1e9
def command():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)  # as a shell passes it on
        print("still here", flush=True)
        interrupts.SAME_PRESS_SECONDS = 0.0
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached", flush=True)
sys.exit(run_command(command))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "still here\n")


def test_a_first_ctrl_c_after_sigterm_does_not_end_without_saving(capfd: pytest.CaptureFixture[str]) -> None:
    with SignalWatch() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert "Ctrl-C again ends at once without saving" in capfd.readouterr().err
        with pytest.raises(Terminated, match="ended by SIGTERM"):
            signals.check()
        signals._pressed -= SAME_PRESS_SECONDS
        with pytest.raises(StopNow):
            os.kill(os.getpid(), signal.SIGINT)
