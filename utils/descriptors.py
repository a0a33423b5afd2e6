"""How many files and sockets this process may have open."""

import os
import resource
from pathlib import Path

MANY = 1 << 16


def raise_limit() -> None:
    """Take more of the hard limit than shells give, for this process and those it starts from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if hard == resource.RLIM_INFINITY else min(MANY, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int | None:
    """How many may be open; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """How many are open; 0 on a system that does not tell."""
    directory = Path("/proc/self/fd")
    return len(os.listdir(directory)) if directory.exists() else 0
