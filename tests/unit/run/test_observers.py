import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from algorithms.run import observers
from algorithms.run.observers import ObserverProcess


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
