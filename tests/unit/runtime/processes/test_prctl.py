"""What a process asks of the kernel, and what it does when it is too late for that."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appo.algorithms.runtime.processes import prctl
from appo.algorithms.runtime.processes.prctl import TURN_SECONDS, sleeps
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[4]
TURNS = """
import os
from appo.algorithms.runtime.processes.prctl import take_long_turns
niceness = os.nice(3)
print(take_long_turns(), take_long_turns(0.004), os.nice(0) - niceness)
"""
CODE = """
import sys
from appo.algorithms.runtime.processes.prctl import *
die_with_parent(int(sys.argv[1]))
print('lives')
"""


@pytest.mark.parametrize(
    ("parent", "end"), [(os.getpid, (0, "lives\n")), (lambda: os.getpid() + 2**20, (-signal.SIGKILL, ""))]
)
def test_whoever_finds_another_parent_than_it_was_told_ends_itself(parent, end) -> None:
    """Its parent has died between its birth and its asking to die with it; the kernel does not make up for that."""
    command = [sys.executable, "-S", "-c", CODE, str(parent())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (done.returncode, done.stdout) == end


def test_who_sleeps_and_who_only_lacks_a_core() -> None:
    def comes_to(expected: bool) -> bool:
        deadline = time.monotonic() + 30
        while sleeps(child.pid) is not expected and time.monotonic() < deadline:
            os.sched_yield()
        return sleeps(child.pid) is expected

    assert not sleeps(os.getpid())  # it runs, or else it could not ask
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert comes_to(True)
        child.send_signal(signal.SIGSTOP)  # it may hold what others wait for, and will go on
        assert comes_to(False)
        child.kill()
    assert sleeps(child.pid)


def test_long_turns_change_nothing_else() -> None:
    command = [sys.executable, "-S", "-c", TURNS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert not done.stderr
    turns, shorter, nicer = done.stdout.split()
    assert (float(turns), float(shorter)) in [(TURN_SECONDS, 0.004), (0.0, 0.0)]  # the latter before Linux 6.12
    assert nicer == "0"


def test_other_processors_have_the_turns_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prctl, "_SCHED_CALLS", {})
    assert prctl.take_long_turns() == 0.0
