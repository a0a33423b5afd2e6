"""System calls that tell the kernel when a process dies and how long its turns are, or ask it about a process."""

import contextlib
import ctypes
import functools
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

TURN_SECONDS = 0.01
"""For which a process that computes without end keeps its core while others wait; 1 to 4 ms are usual.

With longer ones an actor, which has a tenth of the learner's weight, would wait for half a second and more beside
several other programs.
"""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SCHED_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}  # sched_getattr and sched_setattr, which libc has not
_SCHED_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr: the first field is its size, the sixth the turn

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


def bound_to_us() -> Callable[[], None]:
    """Return a `preexec_fn` with which a program that the calling thread starts gets SIGKILL when this thread ends."""
    return functools.partial(die_with_parent, os.getpid())


def adopt_orphans(*, yes: bool = True) -> None:
    """Become the parent of descendants whose own parents end: processes that an actor leaves behind can be found.

    Who has them must ask for their ends, or they stay zombies.

    Args:
        yes: from now on; False: no longer.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def die_earlier(score: int) -> None:
    """Make this process that much likelier to be chosen when the kernel must kill one for its memory, 0 to 1000.

    That is more than its parent, which a container may have started with a score of its own.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # another system, or a container without /proc
        path.write_text(str(min(1000, int(path.read_text()) + score)))


def take_long_turns(seconds: float = TURN_SECONDS) -> float:
    """Let the calling thread, and those it starts, run that long before another of its priority has its turn.

    With more processes than cores, every switch costs the caches: Pong on two cores is 5 % faster. Whoever wakes and
    has shorter turns, as other programs do, still interrupts.

    Returns:
        How long turns are now; 0 where the kernel does not say (Linux before 6.12, other systems).
    """
    libc, machine = ctypes.CDLL(None, use_errno=True), os.uname().machine
    if machine not in _SCHED_CALLS or not hasattr(libc, "syscall"):
        return 0.0
    get, change = _SCHED_CALLS[machine]
    buffer = ctypes.create_string_buffer(_SCHED_ATTRIBUTES.size)
    if libc.syscall(get, 0, buffer, len(buffer), 0):
        return 0.0
    fields = list(_SCHED_ATTRIBUTES.unpack(buffer))
    fields[5] = round(seconds * 1e9)
    buffer.raw = _SCHED_ATTRIBUTES.pack(*fields)
    libc.syscall(change, 0, buffer, 0)
    libc.syscall(get, 0, buffer, len(buffer), 0)
    return float(_SCHED_ATTRIBUTES.unpack(buffer)[5]) / 1e9


def sleeps(pid: int) -> bool:
    """Return whether a process sleeps or is dead, and does not run, lack a core, read a disk or stand stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone, or another system
        return True
    return stat.rpartition(")")[2].split()[0] in "SXZ"
