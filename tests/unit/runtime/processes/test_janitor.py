"""A detached janitor cleans up after a main that was killed together with all of its children."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.patience import HANG_SECONDS

MAIN = """
import sys
from pathlib import Path
from appo.algorithms.runtime.processes import janitor as module
from appo.algorithms.runtime.processes.janitor import Janitor
module.JOIN_SECONDS = 600  # to fork, on any machine
janitor = Janitor()
janitor.detached = True
with janitor:
    janitor.watch(Path(sys.argv[1]))
    janitor.revive()
    print("watched", flush=True)
    input()
"""


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_detached_janitor_outlives_the_children_of_main(tmp_path: Path) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    command, pipe = [sys.executable, "-c", MAIN, str(folder)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as main:
        assert main.stdout is not None
        assert main.stdout.readline() == "watched\n"
        for pid in (*children(main.pid), main.pid):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + HANG_SECONDS
    while folder.exists():
        assert time.monotonic() < deadline, "the folder of a killed main stays"
        time.sleep(0.01)


def test_a_detached_janitor_ends_with_main_and_leaves_what_main_takes_back(tmp_path: Path) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    command = [sys.executable, "-c", MAIN, str(folder)]
    subprocess.run(command, input="\n", text=True, check=True, capture_output=True, timeout=HANG_SECONDS)
    assert folder.exists()
