"""Deadlines of tests on a machine whose cores other programs want too, and what runs say of such a machine."""

import os
from pathlib import Path

import pytest

from appo.utils.system.machine import core_time

HANG_SECONDS = 600
"""Ends a test that hangs; no test measures this time."""
LATE = (
    "nothing is trained after ",
    "the disk has not answered for ",
    "the disk answers again, after ",
    "saving what was learned: the disk has not answered for ",
)


def patient(seconds: float) -> float:
    """Return a deadline that is as much longer as the cores are overloaded now: by processes waiting for each core."""
    return seconds * max(1.0, 2.0 * os.getloadavg()[0] / core_time())


def in_time(stderr: str) -> str:
    """Return the lines of a run without those that only tell how slow the machine is now."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith(LATE))


def require_programs_in(folder: Path) -> None:
    """Skip a test whose programs could not be started from the folder."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        pytest.skip(f"{folder} is mounted noexec")
