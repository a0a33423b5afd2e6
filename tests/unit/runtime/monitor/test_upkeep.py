"""Logs that others write are kept within their bounds while a run trains."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appo.algorithms.runtime.monitor.upkeep import Belongings, Upkeep
from appo.utils.errors import DirectoryInUse
from appo.utils.lock import RunLock
from appo.utils.run_folder import RunFolder
from tests.patience import HANG_SECONDS

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    return folder


@pytest.fixture
def lock(run: RunFolder) -> Iterator[RunLock]:
    with RunLock(run.lock) as lock:
        yield lock


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_logs_that_grow_are_shortened_and_one_line_says_so(
    run: RunFolder, lock: RunLock, caplog: pytest.LogCaptureFixture
) -> None:
    for actor in range(3):
        run.log(f"actor_{actor}").write_bytes(b"x" * (3 * MIB))
    run.log("learner_0").write_bytes(b"short")
    upkeep = Upkeep(run, lock, MIB)
    upkeep.look()
    upkeep.look()
    sizes = {path.name: path.stat().st_size for path in run.logs.iterdir()}
    assert all(size <= 0.75 * MIB for size in sizes.values())
    assert sizes["learner_0.log"] == 5
    (line,) = said(caplog)
    assert "grows beyond 1 MiB" in line
    assert "--max_log_mb" in line


def test_a_gigabyte_printed_at_once_is_shortened_while_its_process_lives(run: RunFolder, lock: RunLock) -> None:
    script = "import os; os.truncate(1, 1 << 30); print('last words', flush=True); input()"
    with run.log("actor_0").open("ab") as output:
        child = subprocess.Popen([sys.executable, "-c", script], stdout=output, stdin=subprocess.PIPE)
        while run.log("actor_0").stat().st_size <= 1 << 30:  # the last words come after that
            assert child.poll() is None
    with Upkeep(run, lock, MIB):
        deadline = time.monotonic() + HANG_SECONDS
        while not (0 < run.log("actor_0").stat().st_size < MIB and b"last words" in run.log("actor_0").read_bytes()):
            assert time.monotonic() < deadline
    child.communicate(b"\n")
    assert child.returncode == 0


def test_what_is_printed_last_is_shortened_at_the_end(
    run: RunFolder, lock: RunLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appo.algorithms.runtime.monitor.upkeep.END_SECONDS", HANG_SECONDS)
    with Upkeep(run, lock, MIB):
        run.log("actor_0").write_bytes(b"y" * (2 * MIB))
    assert run.log("actor_0").stat().st_size <= 0.75 * MIB


def test_folders_that_go_away_and_files_that_are_no_logs_hinder_nobody(
    run: RunFolder, lock: RunLock, tmp_path: Path
) -> None:
    upkeep = Upkeep(run, lock, MIB)
    (run.logs / "folder.log").mkdir()
    os.mkfifo(run.logs / "pipe.log")
    (tmp_path / "other").write_bytes(b"z" * (2 * MIB))
    (run.logs / "link.log").symlink_to(tmp_path / "other")
    upkeep.look()
    os.rename(run.logs, tmp_path / "away")
    upkeep.look()
    assert (tmp_path / "other").stat().st_size == 2 * MIB
    assert os.listdir(run.logs) == []


# --- a folder that goes away


@pytest.mark.parametrize(
    "lose",
    [
        lambda run: shutil.rmtree(run.path),
        lambda run: run.path.rename(run.path.with_name("elsewhere")),
        lambda run: run.lock.unlink(),
        lambda run: run.config.unlink(),
        lambda run: run.history.unlink(),
        lambda run: run.page.unlink(),
        lambda run: run.lineage.unlink(),
        lambda run: shutil.rmtree(run.logs),
    ],
)
def test_what_goes_away_is_made_again_and_said_once(
    run: RunFolder, lock: RunLock, caplog: pytest.LogCaptureFixture, lose: Callable[[RunFolder], object]
) -> None:
    belongings = Belongings(run, lock)
    belongings.look()
    contents = {
        path: f"{path.name}, written later".encode() for path in (run.config, run.history, run.page, run.lineage)
    }
    for path, content in contents.items():
        path.write_bytes(content)
        belongings.look()
    run.page.write_bytes(contents[run.page] + b", and again")
    belongings.look()
    assert (said(caplog), belongings.newly_lost()) == ([], False)
    lose(run)
    for _ in range(3):
        belongings.look()
    assert {path: path.read_bytes() for path in contents} == contents | {run.page: contents[run.page] + b", and again"}
    assert run.logs.is_dir()
    assert lock.is_in_place()
    (line,) = said(caplog)
    assert "gone away: it is made again" in line
    assert [belongings.newly_lost(), belongings.newly_lost()] == [True, False]


def test_a_folder_that_somebody_else_has_taken_is_left_to_them(
    run: RunFolder, lock: RunLock, caplog: pytest.LogCaptureFixture
) -> None:
    belongings = Belongings(run, lock)
    run.config.write_text("ours")
    belongings.look()
    run.path.rename(run.path.with_name("elsewhere"))
    with RunLock(run.lock):
        run.config.write_text("theirs")
        for _ in range(3):
            belongings.look()
        assert run.config.read_text() == "theirs"
        with pytest.raises(DirectoryInUse, match="run run is in use by pid"):  # in main, which ends the run
            belongings.newly_lost()
    assert said(caplog) == []


def test_files_too_large_to_be_kept_cost_no_memory_and_are_not_missed(run: RunFolder, lock: RunLock) -> None:
    belongings = Belongings(run, lock)
    run.history.write_bytes(b"x" * (MIB + 1))
    belongings.look()
    run.history.unlink()
    belongings.look()
    assert not belongings.newly_lost()


def test_a_file_that_grows_too_large_is_not_kept_any_more(run: RunFolder, lock: RunLock) -> None:
    belongings = Belongings(run, lock)
    run.history.write_bytes(b"x")
    belongings.look()
    run.history.write_bytes(b"x" * (MIB + 1))
    belongings.look()
    run.history.unlink()
    belongings.look()
    assert not belongings.newly_lost()
    assert not run.history.exists()


def test_a_disk_that_refuses_everything_for_a_while_is_said_once_and_looked_after_again(
    run: RunFolder, lock: RunLock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    upkeep, looks = Upkeep(run, lock, MIB), iter([OSError(errno.EIO, "error of the disk")] * 3)

    def look() -> None:
        if (error := next(looks, None)) is not None:
            raise error
        belongings_look()

    belongings_look = upkeep.belongings.look
    monkeypatch.setattr(upkeep.belongings, "look", look)
    with upkeep:
        run.log("actor_0").write_bytes(b"y" * (2 * MIB))
        deadline = time.monotonic() + 30
        while run.log("actor_0").stat().st_size > MIB:
            assert time.monotonic() < deadline
    assert [line for line in said(caplog) if "looked after" in line] == [
        "the files of the run cannot be looked after: [Errno 5] error of the disk"
    ]
