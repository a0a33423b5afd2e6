"""Limits of this process's cgroup: CPU time, memory, processes; and kills by the kernel for want of memory.

Functions take the folders in which the kernel shows cgroups and processes, and look at versions 1 and 2 of cgroups.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")

Number = TypeVar("Number", int, float)


def cpu_quota(cgroups: Path, proc: Path) -> float | None:
    """Return the smallest CPU quota, in cores, of this process's cgroup and those above it; None without a quota."""
    quotas = [parse_cpu_max(kernel_text(group / "cpu.max")) for group in _groups(cgroups, proc, "")]
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas += [parse_cfs(*(kernel_text(group / name) for name in names)) for group in _groups(cgroups, proc, "cpu")]
    return least(quotas)


def cgroup_free_bytes(cgroups: Path, proc: Path) -> int | None:
    """Return limit minus usage, the smallest of this process's cgroup and those above it; None without a limit."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    free = [_free(group, "memory.max", "memory.current", "inactive_file") for group in _groups(cgroups, proc, "")]
    return least(free + [_free(group, *names) for group in _groups(cgroups, proc, "memory")])


def cgroup_free_pids(cgroups: Path, proc: Path) -> int | None:
    """Return how many processes and threads may be added, the smallest number up to the top; None without a limit."""
    groups = (*_groups(cgroups, proc, ""), *_groups(cgroups, proc, "pids"))
    return least([_free(group, "pids.max", "pids.current", "") for group in groups])


class KernelKills:
    """Processes that the kernel has killed for want of memory since the object was made."""

    def __init__(self, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        self._cgroups, self._proc = cgroups, proc
        self._of_group, self._of_machine = self._counts()

    def explain(self) -> bool | None:
        """Return whether the kernel has killed a process; None if unknown. Each kill explains a single death.

        A kill that only the machine has counted may have happened in another container.
        """
        group, whole = self._counts()
        if group is not None and self._of_group is not None and group > self._of_group:
            self._of_group += 1
            return True
        if whole is not None and self._of_machine is not None and whole > self._of_machine:
            self._of_machine += 1
            return None
        return None if group is None and whole is None else False

    def _counts(self) -> tuple[int | None, int | None]:
        """Return the kills in this process's cgroup, or the nearest above with a count, and on the machine."""
        files = [group / "memory.events" for group in _groups(self._cgroups, self._proc, "")]
        files += [group / "memory.oom_control" for group in _groups(self._cgroups, self._proc, "memory")]
        counts = (number_of(kernel_text(file), "oom_kill") for file in files)
        shown = next((count for count in counts if count is not None), None)
        return shown, number_of(kernel_text(self._proc / "vmstat"), "oom_kill")


def parse_cpu_max(text: str) -> float | None:
    """Return the cores of a cgroup v2 `cpu.max`: "200000 100000" is 2.0, "max 100000" is None."""
    words = text.split()
    return parse_cfs(words[0], words[1]) if len(words) == 2 else None


def parse_cfs(quota: str, period: str) -> float | None:
    """Return the cores of cgroup v1's `cpu.cfs_quota_us` and `cpu.cfs_period_us`; None if unlimited or unreadable."""
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def parse_memory_limit(text: str) -> int | None:
    """Return the bytes of `memory.max` or `memory.limit_in_bytes`; None if unlimited or unreadable."""
    try:
        limit = int(text)
    except ValueError:
        return None
    return limit if 0 <= limit < 1 << 60 else None  # cgroup v1 writes a number close to 2^63 for "no limit"


def number_of(text: str, key: str) -> int | None:
    """Return the number after a key, from a text with a key and a number per line; None without the key."""
    rows = (line.split() for line in text.splitlines())
    return next((int(row[1]) for row in rows if len(row) > 1 and row[0] == key and row[1].isdigit()), None)


def parse_cgroups(text: str) -> dict[str, PurePosixPath]:
    """Return path by controller from /proc/self/cgroup; the name of cgroup v2 is ""."""
    paths = {}
    for line in text.splitlines():
        controllers, found, path = line.partition(":")[2].partition(":")
        if found:
            paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    return paths


def kernel_text(path: Path) -> str:
    """Return the text of a file of the kernel; "" if the file is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # names of processes may be any bytes
    except OSError:
        return ""


def least(limits: Iterable[Number | None]) -> Number | None:
    """Return the smallest limit; None without a limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _groups(cgroups: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and those above; in a container often only the top one exists."""
    path = parse_cgroups(kernel_text(proc / "self" / "cgroup")).get(controller)
    if path is None or ".." in path.parts:
        path = PurePosixPath("/")
    for mount in (controller, "cpu,cpuacct") if controller else (".", "unified"):
        yield from (cgroups / mount / one.relative_to(one.anchor) for one in (path, *path.parents))


def _free(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit = parse_memory_limit(kernel_text(group / limit_name))
    usage = parse_memory_limit(kernel_text(group / usage_name))
    if limit is None or usage is None:
        return None
    return max(0, limit - usage + (number_of(kernel_text(group / "memory.stat"), cache_name) or 0))
