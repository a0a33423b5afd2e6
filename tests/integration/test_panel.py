"""Training on a (pseudo-)terminal, as a person sees it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.runs import ROOT, command_line
from tests.patience import HANG_SECONDS
from tests.unit.runtime.terminals import Terminal

pytestmark = pytest.mark.slow


def watch(terminal: Terminal, process: "subprocess.Popen[bytes]", until: Callable[[list[str]], bool]) -> list[str]:
    """Read what is drawn until the terminal shows it, or the process has ended."""
    deadline = time.monotonic() + HANG_SECONDS
    while process.poll() is None and not until(terminal.lines()):
        assert time.monotonic() < deadline, "\n".join(terminal.lines())
        select.select([terminal.master], [], [], 0.2)
    return terminal.lines()


def shows_where_time_goes(lines: list[str]) -> bool:
    return any("bottleneck" in line for line in lines) and any("losses      value" in line for line in lines)


@pytest.mark.parametrize(
    ("number", "exit_code", "last"),
    [
        (signal.SIGINT, 130, "interrupted by Ctrl-C; go on with the same command and --experiment=run"),
        (signal.SIGTERM, 143, "ended by SIGTERM; go on with the same command and --experiment=run"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_however_it_ends_the_terminal_is_as_before(tmp_path: Path, number: int, exit_code: int, last: str) -> None:
    words = command_line(tmp_path / "run", env="CartPole-v1", num_workers=1, num_envs_per_worker=4)
    with Terminal(columns=80, rows=40) as terminal:
        streams = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
        environment = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "train_appo.py"), *words]
        with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as process:
            try:
                lines = watch(terminal, process, shows_where_time_goes)
                assert shows_where_time_goes(lines), "\n".join(lines)
                process.send_signal(number)
                watch(terminal, process, lambda lines: False)
            finally:
                process.kill()
        lines = terminal.lines()
        assert process.returncode == exit_code, "\n".join(lines)
        assert sum(line.startswith("╭─ run · CartPole-v1 · training ─") for line in lines) == 1
        assert last in lines[-1]
        assert "Traceback" not in "\n".join(lines)
        assert b"\x1b[?" not in terminal.written
        assert (tmp_path / "run" / "README.md").exists() == (number != signal.SIGKILL)
