"""Commands that are run in another directory than the repository."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.patience import HANG_SECONDS

OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSAFEPATH")
"""Variables by which a command would find the repository, or this environment."""


def completed(cwd: Path, words: Sequence[str | Path], hidden: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
    """Run a command there, without the variables that are hidden."""
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def run(*words: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed; it sees neither the repository nor this environment's paths."""
    done = completed(cwd, words, OURS)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout
