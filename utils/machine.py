"""Cores, threads, priorities and memory of this process."""

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import math
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING

from appo.utils.errors import UsageError

if TYPE_CHECKING:
    from psutil import Process

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

_NEVER = -1  # becomes the largest size_t

_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # of glibc before 2.35 on 64 bit

_TOP_PAD_BYTES = 64 << 20

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number close to 2^63

_ARM_NAMES = ("CPU implementer", "CPU part", "CPU variant")

_CGROUPS = Path("/sys/fs/cgroup")

_PROC = Path("/proc")


def allowed_cores() -> tuple[int, ...]:
    """The numbers of the cores this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def available_cores() -> int:
    """How many cores this process can keep busy: `core_time`, rounded up."""
    return max(1, math.ceil(core_time()))


def core_time() -> float:
    """Seconds of CPU time per second that this process and its children have: its cores, or the quota of its cgroup."""
    quota = cpu_quota(_CGROUPS, _PROC)
    cores = len(allowed_cores())
    return float(cores if quota is None else min(cores, quota))


def processor_name() -> str:
    """The model of the processor as /proc/cpuinfo names it, by numbers on ARM; empty where it does not."""
    lines = (line.partition(":") for line in (_read(_PROC / "cpuinfo") or "").splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    return values.get("model name") or " ".join(f"{name} {values[name]}" for name in _ARM_NAMES if name in values)


def available_memory_bytes() -> int:
    """Memory that can be used before the machine swaps or the cgroup's limit kills; page cache counts as free."""
    candidates = [parse_available(_read(_PROC / "meminfo") or ""), cgroup_free_bytes(_CGROUPS, _PROC)]
    known = [size for size in candidates if size is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_quota(cgroups: Path, proc: Path) -> float | None:
    """The smallest CPU quota, in cores, of this process's cgroup and those above it; None without one."""

    def version_1(group: Path) -> float | None:
        return parse_cfs(_read(group / "cpu.cfs_quota_us") or "", _read(group / "cpu.cfs_period_us") or "")

    def version_2(group: Path) -> float | None:
        return parse_cpu_max(_read(group / "cpu.max") or "")

    return _smallest(cgroups, proc, "cpu", version_1, version_2)


def cgroup_free_bytes(cgroups: Path, proc: Path) -> int | None:
    """Limit minus usage, the smallest of this process's cgroup and those above it; None without a limit."""

    def version_1(group: Path) -> float | None:
        return _free(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

    def version_2(group: Path) -> float | None:
        return _free(group, "memory.max", "memory.current", "inactive_file")

    free = _smallest(cgroups, proc, "memory", version_1, version_2)
    return None if free is None else int(free)


def free_pids() -> int | None:
    """How many more processes and threads may be started here; None where nothing limits them.

    That of the user counts all of theirs, which nobody tells: they are taken for none.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    free = [] if limit == resource.RLIM_INFINITY or os.geteuid() == 0 else [limit]
    return min([*free, *[n for n in [cgroup_free_pids(_CGROUPS, _PROC)] if n is not None]], default=None)


def cgroup_free_pids(cgroups: Path, proc: Path) -> int | None:
    """Limit of processes and threads minus those there are, of this process's cgroup and those above it."""

    def free(group: Path) -> int | None:
        return _free(group, "pids.max", "pids.current", "")

    found = _smallest(cgroups, proc, "pids", free, free)
    return None if found is None else int(found)


class KernelKills:
    """The processes that the kernel has killed as memory was short, since this was made.

    Args:
        cgroups, proc: where the kernel shows them.
    """

    def __init__(self, cgroups: Path = _CGROUPS, proc: Path = _PROC) -> None:
        self._cgroups, self._proc = cgroups, proc
        self._of_group, self._of_machine = self._counts()

    def explain(self) -> bool | None:
        """Return whether the kernel has killed a process, each of which explains one death; None: it does not say.

        A kill that only the machine has counted may be one in another container.
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
        """Return the kills in this process's cgroup, or the nearest above that shows any, and on the machine."""
        groups = [group / "memory.events" for group in _groups(self._cgroups, self._proc, "", (".", "unified"))]
        groups += [group / "memory.oom_control" for group in _groups(self._cgroups, self._proc, "memory", ("memory",))]
        counts = (_count_of(_read(file), "oom_kill") for file in groups)
        shown = next((count for count in counts if count is not None), None)
        return shown, _count_of(_read(self._proc / "vmstat"), "oom_kill")


def _count_of(text: str | None, key: str) -> int | None:
    return next((int(line.split()[1]) for line in (text or "").splitlines() if line.startswith(f"{key} ")), None)


def parse_cpu_max(text: str) -> float | None:
    """Cores of a cgroup v2 `cpu.max`: "200000 100000" is 2.0, "max 100000" is None."""
    words = text.split()
    return parse_cfs(words[0], words[1]) if len(words) == 2 else None


def parse_cfs(quota: str, period: str) -> float | None:
    """Cores of cgroup v1's `cpu.cfs_quota_us` and `cpu.cfs_period_us`; None when unlimited or unreadable."""
    try:
        quota_us, period_us = int(quota), int(period)
    except ValueError:
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def parse_memory_limit(text: str) -> int | None:
    """Bytes of `memory.max` or `memory.limit_in_bytes`; None when unlimited or unreadable."""
    try:
        limit = int(text)
    except ValueError:
        return None
    return limit if 0 <= limit < _UNLIMITED_BYTES else None


def parse_available(text: str) -> int | None:
    """`MemAvailable` of /proc/meminfo in bytes; None when it is not there."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "MemAvailable:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def parse_stat(text: str, key: str) -> int:
    """The number of a key in `memory.stat`; 0 when it is not there."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return 0


def parse_cgroups(text: str) -> dict[str, PurePosixPath]:
    """Path by controller of /proc/self/cgroup; the one of cgroup v2 under the name ""."""
    paths = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, found, path = rest.partition(":")
        if found:
            paths.update(dict.fromkeys(controllers.split(","), PurePosixPath(path)))
    return paths


class Descendants:
    """CPU time of the processes that this one, or one of those, has started.

    To find them all processes of the machine are looked through, so that is done at every tenth call only.
    """

    SCAN_CALLS = 10

    def __init__(self) -> None:
        self._process = psutil().Process()
        self._known: list[Process] = []
        self._calls = 0
        self._most = 0.0

    def cpu_seconds(self) -> float:
        """Of those that live and those that were waited for; never decreases."""
        if self._calls % self.SCAN_CALLS == 0:
            self._known = self._process.children(recursive=True)
        self._calls += 1
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        living = 0.0
        for process in self._known:
            with contextlib.suppress(psutil().Error):  # it has ended
                times = process.cpu_times()
                living += times.user + times.system
        self._most = max(self._most, ended.ru_utime + ended.ru_stime + living)
        return self._most


def family_memory_bytes() -> tuple[int, int] | None:
    """Memory of this process alone, and with its descendants; None where the kernel does not say.

    What several share is divided among them, and so counted once in their sum.
    """
    this = psutil().Process()
    sizes = []
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil().Error, OSError, AttributeError):  # ended, not ours, no smaps
            sizes.append(process.memory_full_info().pss)
    return (sizes[0], sum(sizes)) if sizes else None


@cache
def psutil() -> ModuleType:
    """Return the module of that name, imported when it is first needed: it takes 10 to 40 ms."""
    return importlib.import_module("psutil")


def multiplies_bf16() -> bool:
    """Whether the processor has instructions that multiply bf16 numbers; emulated, bf16 is slower than float32."""
    return parse_bf16(_read(_PROC / "cpuinfo") or "")


def parse_bf16(text: str) -> bool:
    """Whether the flags of /proc/cpuinfo (x86) or its features (ARM) name such instructions."""
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags.split()))
    return False


_threads = 1


def threads() -> int:
    """How many threads `limit_threads` has last allowed this process; one where nobody has asked for more."""
    return _threads


def limit_threads(count: int) -> None:
    """Let the numeric libraries of this process and of its children use that many threads.

    Environment variables reach libraries not loaded yet and children; threadpoolctl and torch those already loaded.
    """
    global _threads  # noqa: PLW0603 - it is of the whole process, as what it stands for
    _threads = count
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(count)))
    if "numpy" in sys.modules or "torch" in sys.modules:
        importlib.import_module("threadpoolctl").threadpool_limits(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def set_niceness(increment: int, *, group: bool = False) -> int:
    """Give way to other processes by that much more than the parent does; returns the niceness that results.

    Acts on the calling thread and on threads it starts later, so it is called at process entry. A negative increment
    without the right to it changes nothing.

    Args:
        increment: at most 19 results.
        group: act on all threads of all processes of this one's group instead, at any time.
    """
    with contextlib.suppress(PermissionError):
        if group:
            os.setpriority(os.PRIO_PGRP, 0, min(19, os.nice(0) + increment))
        else:
            return os.nice(increment)
    return os.nice(0)


def pin_to(cores: frozenset[int]) -> bool:
    """Keep this process on these cores; False where nothing was changed (no cores, not allowed)."""
    usable = cores & set(allowed_cores())
    if not usable:
        return False
    try:
        os.sched_setaffinity(0, usable)
    except OSError:
        return False
    return True


def affinity_plan(num_workers: int, cores: Sequence[int]) -> list[frozenset[int]]:
    """The cores of each worker; an empty set means: not pinned.

    Fewer workers than cores: neighbouring cores, as evenly as possible. More: whole rounds are pinned one to a core;
    the workers of an incomplete last round are left to the scheduler, as pinning them would slow the cores they share.
    With a CPU quota below the number of cores nobody is pinned by the caller: the first cores are everyone's choice.
    """
    if not cores or num_workers <= 0:
        return [frozenset()] * max(0, num_workers)
    if num_workers < len(cores):
        edges = [worker * len(cores) // num_workers for worker in range(num_workers + 1)]
        return [frozenset(cores[start:end]) for start, end in itertools.pairwise(edges)]
    pinned = num_workers - num_workers % len(cores)
    return [frozenset({cores[w % len(cores)]}) if w < pinned else frozenset() for w in range(num_workers)]


def allocator_settings() -> bool:
    """Keep freed memory in the process instead of giving it back to the kernel; False without glibc.

    By default glibc maps and unmaps every large tensor, so that each update faults its memory in again: a NatureCNN
    update in fp32 took 958 us/sample before and 690 after. Costs memory that stays with the process. torch's huge pages
    are asked for too, which it reads when it is imported.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    mapped = libc.mallopt(_M_MMAP_THRESHOLD, _NEVER) or libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
    trimmed = libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    padded = libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
    return bool(mapped and trimmed and padded)


def _smallest(
    cgroups: Path,
    proc: Path,
    controller: str,
    version_1: Callable[[Path], float | None],
    version_2: Callable[[Path], float | None],
) -> float | None:
    limits = [version_2(group) for group in _groups(cgroups, proc, "", (".", "unified"))]
    limits += [version_1(group) for group in _groups(cgroups, proc, controller, (controller, "cpu,cpuacct"))]
    return min((limit for limit in limits if limit is not None), default=None)


def _groups(cgroups: Path, proc: Path, controller: str, mounts: tuple[str, ...]) -> Iterator[Path]:
    """The directory of this process's cgroup and all above it; in a container often only the top one exists."""
    path = parse_cgroups(_read(proc / "self" / "cgroup") or "").get(controller)
    if path is None or ".." in path.parts:
        path = PurePosixPath("/")
    for mount in mounts:
        for ancestor in (path, *path.parents):
            yield cgroups / mount / ancestor.relative_to(ancestor.anchor)


def _free(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit = parse_memory_limit(_read(group / limit_name) or "")
    usage = parse_memory_limit(_read(group / usage_name) or "")
    if limit is None or usage is None:
        return None
    return max(0, limit - usage + parse_stat(_read(group / "memory.stat") or "", cache_name))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # processes may be named anything
    except OSError:
        return None


# Which device the networks run on.


def choose_device(wanted: str) -> str:
    """The device of the networks, found out without importing torch.

    Raises:
        UsageError: CUDA is wanted, and there is no NVIDIA device or torch is built without.
    """
    if wanted == "cpu":
        return "cpu"
    obstacle = cuda_obstacle()
    if obstacle and wanted == "cuda":
        raise UsageError(f"--device=cuda: {obstacle}")
    return "cpu" if obstacle else "cuda"


def cuda_obstacle() -> str | None:
    """Why networks cannot run on a GPU, as far as files tell; None if they can."""
    if not has_gpu():
        return "no NVIDIA GPU is visible on this machine"
    return None if _torch_has_cuda() else "torch is a build for the CPU, though there is an NVIDIA GPU"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there and not hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return visible and any(Path(path).exists() for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))


@cache
def _torch_has_cuda() -> bool:
    """Return what the file says that torch takes its version from."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] is not None


# How busy the machine is, all its programs together.


class OtherPrograms:
    """Work of programs other than this one, and those it has started, on its cores from now on."""

    def __init__(self) -> None:
        self._before = _spent()

    def share(self) -> float:
        """Share of the CPU time of this program's cores that others have taken since then, from 0 to 1."""
        seconds, busy, own = (now - before for now, before in zip(_spent(), self._before, strict=True))
        return taken_by_others(seconds, busy - own, len(allowed_cores()), core_time())


def _spent() -> tuple[float, float, float]:
    """Seconds of the clock, those in which our cores were busy, and CPU time of this program; 0 what is not told."""
    busy = own = 0.0
    this = psutil().Process()
    with contextlib.suppress(psutil().Error, OSError):  # a container without /proc/stat
        each = psutil().cpu_times(percpu=True)
        cores = [each[core] for core in allowed_cores() if core < len(each)]
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil().Error):  # it has ended
                own += sum(process.cpu_times()[:4])  # those of children that were waited for included
        busy = sum(sum(core[:8]) - core.idle - core.iowait for core in cores)
    return time.monotonic(), busy, own


def taken_by_others(seconds: float, others: float, cores: int, core_time: float) -> float:
    """Share of the CPU time that a program may use which others have left it too little for.

    Args:
        seconds: of the clock.
        others: CPU time of theirs on the cores.
        cores: how many there are.
        core_time: CPU time per second that the program may use, less than its cores where there is a quota.
    """
    if seconds <= 0:
        return 0.0
    left = cores - others / seconds
    return min(1.0, max(0.0, (core_time - left) / core_time))


class Usage:
    """CPU time, memory and GPUs that are in use on this machine, in percent.

    Args:
        gpus: whom to ask about GPUs; None: NVIDIA's own library, where it and a GPU are there.
    """

    def __init__(self, gpus: "Nvml | None" = None) -> None:
        self._gpus = gpus
        self._looked = False

    def read(self) -> dict[str, float]:
        """Return what is in use now, CPU time since the last call: the first one does not know it."""
        busy, memory = psutil().cpu_percent(), psutil().virtual_memory().percent
        figures = {"machine_memory_percent": float(memory)}
        if self._looked:
            figures["machine_cpu_percent"] = float(busy)
        elif self._gpus is None:
            self._gpus = Nvml.find()
        self._looked = True
        for index, (computing, used) in enumerate(self._gpus.read() if self._gpus else ()):
            figures |= {f"gpu{index}_percent": computing, f"gpu{index}_memory_percent": used}
        return figures


class Nvml:
    """NVIDIA's management library, as far as it says how busy GPUs are (docs.nvidia.com/deploy/nvml-api).

    Args:
        library: loaded and initialized.
    """

    NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def find(cls) -> "Nvml | None":
        """Load it; None where there is no GPU, or no library that can be initialized."""
        for name in cls.NAMES if has_gpu() else ():
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(name)
                if library.nvmlInit_v2() == 0:
                    return cls(library)
        return None

    def read(self) -> list[tuple[float, float]]:
        """Of every GPU the percent of time in which it computes, and of memory in use; [] where it does not say."""
        count, found = ctypes.c_uint(), list[tuple[float, float]]()
        failed = self._library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(0 if failed else count.value):
            gpu, rates, sizes = ctypes.c_void_p(), (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
            failed = self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
            failed = failed or self._library.nvmlDeviceGetUtilizationRates(gpu, ctypes.byref(rates))
            failed = failed or self._library.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(sizes))
            if failed:
                return []
            total, _, used = sizes
            found.append((float(rates[0]), 100.0 * used / max(1, total)))
        return found
