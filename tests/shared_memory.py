"""Names in /dev/shm, where tests that run at the same time have some too."""

import contextlib
import os
import time
from pathlib import Path

from tests.patience import patient

DIRECTORY = "/dev/shm"


def names() -> set[str]:
    """Those of this user: whether another user's name is mapped nobody else can see."""
    found = set()
    for entry in os.scandir(DIRECTORY):
        with contextlib.suppress(FileNotFoundError):
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                found.add(entry.name)
    return found


def assert_none_abandoned(before: set[str], seconds: float) -> None:
    """Within that time every new name is gone, or some process has it mapped: what nobody has was left behind."""
    began = time.monotonic()
    while abandoned := names() - before - mapped():
        assert time.monotonic() - began < patient(seconds), abandoned
        time.sleep(0.05)


def mapped() -> set[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            lines = maps.read_text(errors="replace").splitlines()
            found |= {line.rpartition("/")[2] for line in lines if f"{DIRECTORY}/" in line}
    return found
