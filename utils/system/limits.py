"""The number of files and sockets that this process may have open."""

import os
import resource

MANY = 1 << 16


def raise_limit() -> None:
    """Raise the limit above the default of shells, up to the hard limit, for this process and later children."""
    (soft, hard), wanted = resource.getrlimit(resource.RLIMIT_NOFILE), raised_limit()
    if wanted is not None and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def raised_limit() -> int | None:
    """Return the limit after `raise_limit`; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(soft, MANY if hard == resource.RLIM_INFINITY else min(MANY, hard))


def limit() -> int | None:
    """Return the present limit; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """Return the number of open files and sockets."""
    return len(os.listdir("/proc/self/fd"))
