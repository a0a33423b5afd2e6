"""Cores, threads, priorities and free memory of this process."""

import contextlib
import ctypes
import importlib
import itertools
import math
import os
import resource
import sys
from collections.abc import Sequence

from appo.utils.system.cgroups import (
    CGROUPS,
    PROC,
    cgroup_free_bytes,
    cgroup_free_pids,
    cpu_quota,
    kernel_text,
    least,
    number_of,
)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1  # becomes the largest size_t


def allowed_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def available_cores() -> int:
    """Return how many cores this process can keep busy: `core_time`, rounded up."""
    return max(1, math.ceil(core_time()))


def core_time() -> float:
    """Return the seconds of CPU time per second for this process and its children: cores, or the cgroup's quota."""
    quota, cores = cpu_quota(CGROUPS, PROC), len(allowed_cores())
    return float(cores if quota is None else min(cores, quota))


def processor_name() -> str:
    """Return the processor's model from /proc/cpuinfo, as numbers on ARM; "" if unknown."""
    lines = (line.partition(":") for line in kernel_text(PROC / "cpuinfo").splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    arm = ("CPU implementer", "CPU part", "CPU variant")
    return values.get("model name") or " ".join(f"{name} {values[name]}" for name in arm if name in values)


def available_memory_bytes() -> int:
    """Return the memory left before the machine swaps or the cgroup's limit kills; page cache counts as free."""
    available = number_of(kernel_text(PROC / "meminfo"), "MemAvailable:")
    free = least([None if available is None else available * 1024, cgroup_free_bytes(CGROUPS, PROC)])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free is None else free


def free_pids() -> int | None:
    """Return how many processes and threads may be started; None without a limit.

    The user's limit counts all processes of the user, a number that Linux does not report: none are assumed.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    of_user = None if limit == resource.RLIM_INFINITY or os.geteuid() == 0 else limit
    return least([of_user, cgroup_free_pids(CGROUPS, PROC)])


def multiplies_bf16() -> bool:
    """Return whether the processor multiplies bf16 numbers; emulated, bf16 is slower than float32."""
    return parse_bf16(kernel_text(PROC / "cpuinfo"))


def parse_bf16(text: str) -> bool:
    """Return whether the flags (x86) or features (ARM) in /proc/cpuinfo contain bf16 instructions."""
    lines = (line.partition(":") for line in text.splitlines())
    flags = next((flags for name, _, flags in lines if name.strip().lower() in ("flags", "features")), "")
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags.split()))


_threads = 1


def threads() -> int:
    """Return the number of threads that `limit_threads` has last set for this process; 1 before."""
    return _threads


def limit_threads(count: int) -> None:
    """Set the number of threads for the numeric libraries of this process and its children.

    Environment variables reach children and libraries not loaded yet; threadpoolctl and torch reach loaded libraries.
    """
    global _threads  # noqa: PLW0603 - the whole process has a single number
    _threads = count
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(count)))
    if "numpy" in sys.modules or "torch" in sys.modules:
        importlib.import_module("threadpoolctl").threadpool_limits(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def set_niceness(increment: int, *, group: bool = False) -> int:
    """Raise the niceness above the parent's; return the result.

    The change affects the calling thread and threads started later, so call at process entry. Without the right, a
    negative increment has no effect.

    Args:
        increment: number to add; the result is at most 19.
        group: change all threads of all processes in this process's group instead, at any time.
    """
    with contextlib.suppress(PermissionError):
        if group:
            os.setpriority(os.PRIO_PGRP, 0, min(19, os.nice(0) + increment))
        else:
            return os.nice(increment)
    return os.nice(0)


def pin_to(cores: frozenset[int]) -> bool:
    """Keep this process on these cores; return False if nothing changed (no cores, not allowed)."""
    with contextlib.suppress(OSError):
        if usable := cores & set(allowed_cores()):
            os.sched_setaffinity(0, usable)
            return True
    return False


def affinity_plan(num_workers: int, cores: Sequence[int]) -> list[frozenset[int]]:
    """Return the cores of each worker; an empty set leaves a worker to the scheduler.

    Fewer workers than cores get neighbouring cores, as evenly as possible. More workers are pinned one to a core in
    whole rounds; the workers of an incomplete last round are not pinned, because pinning would slow the shared cores.
    Callers pin no worker under a CPU quota below the number of cores: all programs choose the first cores.
    """
    if not cores or num_workers <= 0:
        return [frozenset()] * max(0, num_workers)
    if num_workers < len(cores):
        edges = [worker * len(cores) // num_workers for worker in range(num_workers + 1)]
        return [frozenset(cores[start:end]) for start, end in itertools.pairwise(edges)]
    pinned = num_workers - num_workers % len(cores)
    return [frozenset({cores[w % len(cores)]}) if w < pinned else frozenset() for w in range(num_workers)]


def allocator_settings() -> bool:
    """Keep freed memory in the process instead of returning the memory to the kernel; False without glibc.

    By default glibc maps and unmaps every large tensor, so each update faults its memory in again: a NatureCNN update
    in fp32 took 958 us/sample before and 690 after. The process keeps more memory. torch uses huge pages if imported
    later.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    # 32 MiB is the largest threshold of glibc before 2.35 on 64 bit.
    mapped = libc.mallopt(_M_MMAP_THRESHOLD, _NEVER) or libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    return bool(mapped and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER) and libc.mallopt(_M_TOP_PAD, 64 << 20))
