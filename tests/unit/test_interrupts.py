import contextlib
import os
import signal

import pytest

from algorithms.cli import run_command
from algorithms.runtime.signals import SignalWatch
from utils.errors import Interrupted


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


def test_a_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: interrupt() or 0) == Interrupted.exit_code  # type: ignore[func-returns-value]
    assert capsys.readouterr().err == "error: interrupted\n"
