"""What a process asks of the kernel, and what it does when it is too late for that."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = "import sys; from algorithms.runtime import prctl; prctl.die_with_parent(int(sys.argv[1])); print('lives')"


@pytest.mark.parametrize(
    ("parent", "end"), [(os.getpid, (0, "lives\n")), (lambda: os.getpid() + 2**20, (-signal.SIGKILL, ""))]
)
def test_whoever_finds_another_parent_than_it_was_told_ends_itself(parent, end) -> None:
    """Its parent has died between its birth and its asking to die with it; the kernel does not make up for that."""
    command = [sys.executable, "-S", "-c", CODE, str(parent())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == end
