import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from algorithms.run import observers
from algorithms.run.observers import CommandBeside, ObserverProcess
from utils.errors import UsageError


class Watched(list[int]):
    """Stands for a janitor; holds the processes that it watches."""

    watch, forget = list.append, list.remove


def test_it_leads_a_group_in_the_session_of_main_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session of its own it would get a fair share of the cores, however low its priority."""
    monkeypatch.setattr(observers, "own_command", lambda words: [sys.executable, "-c", "import time; time.sleep(60)"])
    watched = Watched()
    with ObserverProcess(["evaluate"], tmp_path / "log", cast(Any, watched)):
        (pid,) = watched
        assert (os.getpgid(pid), os.getsid(pid)) == (pid, os.getsid(0))
    assert watched == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_command_is_waited_for_and_its_answer_is_what_it_has_printed(tmp_path: Path) -> None:
    watched, looks = Watched(), 0
    command = CommandBeside(["runs", f"--train_dir={tmp_path}", "--json"], cast(Any, watched))
    with command:
        assert len(watched) == 1
        while command.is_running(0.02):
            looks += 1
    assert looks > 0
    assert watched == []
    assert command.output() == "[]\n"


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    command = CommandBeside(["runs", "--train_dirr=x"], cast(Any, Watched()))
    with command:
        while command.is_running(0.1):
            pass
    with pytest.raises(UsageError, match=r"^appo runs failed: unknown flag --train_dirr; did you mean --train_dir\?$"):
        command.output()


def test_a_command_that_is_left_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "own_command", lambda words: [sys.executable, "-c", "import time; time.sleep(60)"])
    watched = Watched()
    with CommandBeside(["evaluate"], cast(Any, watched)) as command:
        (pid,) = watched
        assert command.is_running(0.0)
    assert watched == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(UsageError, match=r"^appo evaluate failed: exit code -9$"):
        command.output()
