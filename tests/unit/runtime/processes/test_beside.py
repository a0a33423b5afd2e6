import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from appo.algorithms.runtime.processes import beside
from appo.algorithms.runtime.processes.beside import RestartedCommand, answer_of
from appo.algorithms.runtime.processes.janitor import kill_group
from appo.utils.errors import UsageError
from tests.patience import HANG_SECONDS


@pytest.fixture(autouse=True)
def _as_long_as_a_killed_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "JOIN_SECONDS", HANG_SECONDS)


class Watched(list[int]):
    """Stands for a janitor; holds the processes that it watches."""

    watch, forget = list.append, list.remove


def test_it_leads_a_group_in_the_session_of_main_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session of its own it would get a fair share of the cores, however low its priority."""
    monkeypatch.setattr(
        beside, "own_command", lambda words, path: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    watched = Watched()
    with RestartedCommand(["evaluate"], tmp_path / "log", cast(Any, watched)):
        (pid,) = watched
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))
    assert watched == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_is_started_again_with_a_line_and_given_up_when_that_is_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        beside, "own_command", lambda words, path: [sys.executable, "-S", "-c", "import sys; sys.exit(7)"]
    )
    watched, now = Watched(), 1e6
    with RestartedCommand(["evaluate"], tmp_path / "log", cast(Any, watched)) as observer:
        while observer.plain()["state"] != "given up":
            lines = len(caplog.records)
            if observer.plain()["state"] == "running":
                assert observer._command is not None
                observer._command.exit_code(30.0)
            observer.look(now)
            if len(caplog.records) > lines:
                assert watched == []
                assert "appo evaluate ended with exit code 7" in caplog.records[-1].message
                (tmp_path / "log").unlink()  # with its folder, for example
            now += 10.0
    assert observer.plain() == {"state": "given up", "restarts": 5}
    assert len(caplog.records) == 6


def test_one_that_cannot_be_started_again_is_tried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        beside, "own_command", lambda words, path: [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    )
    watched, now = Watched(), 1e6
    with RestartedCommand(["evaluate"], tmp_path / "log", cast(Any, watched)) as observer:
        kill_group(watched[0])
        assert observer._command is not None
        observer._command.exit_code(30.0)
        observer.look(now)
        monkeypatch.setattr(beside, "own_command", lambda words, path: ["/missing"])
        observer.look(now + 10)
        assert (observer.plain()["state"], watched) == ("ended", [])
        monkeypatch.setattr(
            beside, "own_command", lambda words, path: [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        )
        observer.look(now + 20)
        assert observer.plain() == {"state": "running", "restarts": 1}
    assert ["could not be started" in record.message for record in caplog.records] == [False, True]


def test_a_command_is_waited_for_and_its_answer_is_what_it_has_printed(tmp_path: Path) -> None:
    watched, looks = Watched(), list[int]()

    def meanwhile() -> bool:
        looks.append(len(watched))
        return len(looks) % 2 == 0

    assert answer_of(["runs", f"--train_dir={tmp_path}", "--json"], cast(Any, watched), meanwhile) == "[]\n"
    assert set(looks) == {1}
    assert watched == []


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match=r"^appo runs failed: unknown flag --train_dirr; did you mean --train_dir\?$"):
        answer_of(["runs", "--train_dirr=x"], cast(Any, Watched()), lambda: False)


def test_a_command_ends_when_main_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        beside, "own_command", lambda words, path: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    watched, pids = Watched(), list[int]()

    def fails() -> bool:
        pids.extend(watched)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_of(["evaluate"], cast(Any, watched), fails)
    assert watched == []
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_command_that_is_killed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        beside, "own_command", lambda words, path: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    watched = Watched()

    def kill() -> bool:
        kill_group(watched[0])
        return False

    with pytest.raises(UsageError, match=r"^appo evaluate failed: exit code -9$"):
        answer_of(["evaluate"], cast(Any, watched), kill)
