"""System calls for death with the parent, orphans, the memory score and turns on a core."""

import contextlib
import ctypes
import functools
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

TURN_SECONDS = 0.01
"""Time for which a computing process keeps a core while more processes wait; 1 to 4 ms are usual.

With longer turns an actor, with a tenth of the learner's weight, would wait for half a second and more beside several
programs.
"""

_SCHED_CALLS = {"x86_64": (315, 314), "aarch64": (275, 274)}  # sched_getattr and sched_setattr, missing in libc
_SCHED_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr: the first field is the size, the sixth the turn
server_pid: int | None = None
"""Pid of the fork server, in the server and its children."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel for SIGKILL at the end of the thread that started the calling process.

    Args:
        parent_pid: expected parent. The kernel sends no signal for a parent already dead. If the parent has changed,
            the process kills itself.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def bound_to_us() -> Callable[[], None]:
    """Return a `preexec_fn` with which a started program gets SIGKILL at the end of the calling thread."""
    return functools.partial(die_with_parent, os.getpid())


def adopt_orphans(*, yes: bool = True) -> None:
    """Become the parent of orphaned descendants, to find the processes of a dead actor; with `yes=False`, stop.

    The parent must reap the orphans, or the orphans stay zombies.
    """
    ctypes.CDLL(None).prctl(36, int(yes), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def die_earlier(score: int) -> None:
    """Raise the score (0 to 1000) by which the kernel selects processes to kill when memory is short.

    The score is added to the score of the parent, because a container may start with a score above 0.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # a container without /proc
        path.write_text(str(min(1000, int(path.read_text()) + score)))


def take_long_turns(seconds: float = TURN_SECONDS) -> float:
    """Lengthen the turns of the calling thread, and of threads that it starts, beside threads of equal priority.

    With more processes than cores, every switch costs the caches: Pong on two cores is 5 % faster. A waking thread with
    shorter turns, for example of another program, still interrupts.

    Returns:
        Length of a turn in seconds; 0 if the kernel does not report the length (Linux before 6.12).
    """
    libc, machine = ctypes.CDLL(None), os.uname().machine
    if machine not in _SCHED_CALLS:
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
    """Return whether a process sleeps or is dead: not running, short of a core, reading a disk or stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # ended
        return True
    return stat.rpartition(")")[2].split()[0] in "SXZ"
