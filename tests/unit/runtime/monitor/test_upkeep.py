"""Logs that others write are kept within their bounds while a run trains."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from algorithms.runtime.monitor.upkeep import Upkeep
from utils.run_folder import RunFolder

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    return folder


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_logs_that_grow_are_shortened_and_one_line_says_so(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    for actor in range(3):
        run.log(f"actor_{actor}").write_bytes(b"x" * (3 * MIB))
    run.log("learner_0").write_bytes(b"short")
    upkeep = Upkeep(run, MIB)
    upkeep.look()
    upkeep.look()
    sizes = {path.name: path.stat().st_size for path in run.logs.iterdir()}
    assert all(size <= 0.75 * MIB for size in sizes.values())
    assert sizes["learner_0.log"] == 5
    (line,) = said(caplog)
    assert "grows beyond 1 MiB" in line
    assert "--max_log_mb" in line


def test_a_gigabyte_printed_at_once_is_shortened_while_its_process_lives(run: RunFolder) -> None:
    script = "import os; os.truncate(1, 1 << 30); print('last words', flush=True); input()"
    with run.log("actor_0").open("ab") as output:
        child = subprocess.Popen([sys.executable, "-c", script], stdout=output, stdin=subprocess.PIPE)
    with Upkeep(run, MIB):
        deadline = time.monotonic() + 30
        while not (0 < run.log("actor_0").stat().st_size < MIB and b"last words" in run.log("actor_0").read_bytes()):
            assert time.monotonic() < deadline
    child.communicate(b"\n")
    assert child.returncode == 0


def test_what_is_printed_last_is_shortened_at_the_end(run: RunFolder) -> None:
    with Upkeep(run, MIB):
        run.log("actor_0").write_bytes(b"y" * (2 * MIB))
    assert run.log("actor_0").stat().st_size <= 0.75 * MIB


def test_folders_that_go_away_and_files_that_are_no_logs_hinder_nobody(run: RunFolder, tmp_path: Path) -> None:
    upkeep = Upkeep(run, MIB)
    (run.logs / "folder.log").mkdir()
    os.mkfifo(run.logs / "pipe.log")
    (tmp_path / "other").write_bytes(b"z" * (2 * MIB))
    (run.logs / "link.log").symlink_to(tmp_path / "other")
    upkeep.look()
    os.rename(run.logs, tmp_path / "away")
    upkeep.look()
    assert (tmp_path / "other").stat().st_size == 2 * MIB
    assert not run.logs.exists()
