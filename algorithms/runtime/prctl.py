"""What the kernel is told about a process, that it dies with its parent and how soon, and what it tells of one."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1

server_pid: int | None = None
"""In a fork server and its children: the server, see `fork_server`."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask for SIGKILL when the thread that started this process ends.

    Args:
        parent_pid: who the parent should be. The signal is not retroactive: a parent that died before this call is
            noticed by the change of parent, and this process ends itself.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die_earlier(score: int) -> None:
    """Make this process that much likelier to be chosen when the kernel must kill one for its memory, 0 to 1000.

    That is more than its parent, which a container may have started with a score of its own.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # another system, or a container without /proc
        path.write_text(str(min(1000, int(path.read_text()) + score)))


def sleeps(pid: int) -> bool:
    """Whether a process sleeps or is dead, and does not run, lack a core, read a disk or stand stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone, or another system
        return True
    return stat.rpartition(")")[2].split()[0] in "SXZ"
