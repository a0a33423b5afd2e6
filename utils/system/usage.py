"""CPU time, memory and GPUs used by this process, its descendants and other programs."""

import contextlib
import ctypes
import importlib
import resource
import time
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from appo.utils.system.devices import has_gpu
from appo.utils.system.machine import allowed_cores, core_time

if TYPE_CHECKING:
    from psutil import Process


@cache
def psutil() -> ModuleType:
    """Return the module psutil, imported at the first use: the import takes 10 to 40 ms."""
    return importlib.import_module("psutil")


class Descendants:
    """CPU time of the descendants of this process; only every tenth call searches all processes for new ones."""

    SCAN_CALLS = 10

    def __init__(self) -> None:
        self._process = psutil().Process()
        self._known: list[Process] = []
        self._calls, self._most = 0, 0.0

    def cpu_seconds(self) -> float:
        """Return the CPU time of live descendants and of children that were waited for; never decreases."""
        if self._calls % self.SCAN_CALLS == 0:
            self._known = self._process.children(recursive=True)
        self._calls += 1
        ended, living = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
        for process in self._known:
            with contextlib.suppress(psutil().Error):  # the process has ended
                times = process.cpu_times()
                living += times.user + times.system
        self._most = max(self._most, ended.ru_utime + ended.ru_stime + living)
        return self._most


def family_memory_bytes() -> tuple[int, int] | None:
    """Return the bytes of this process alone and with all descendants; None if the kernel reports none.

    Shared memory is divided among the processes (PSS), so the sum counts each page once.
    """
    this = psutil().Process()
    sizes = []
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil().Error, OSError, AttributeError):  # ended, not ours, a kernel without smaps
            sizes.append(process.memory_full_info().pss)
    return (sizes[0], sum(sizes)) if sizes else None


class OtherPrograms:
    """Work of other programs on the cores of this program, from now on."""

    def __init__(self) -> None:
        self._before = _spent()

    def share(self) -> float:
        """Return the share of this program's CPU time that other programs have taken, from 0 to 1."""
        seconds, busy, own = (now - before for now, before in zip(_spent(), self._before, strict=True))
        return taken_by_others(seconds, busy - own, len(allowed_cores()), core_time())


def _spent() -> tuple[float, float, float]:
    """Return seconds of the clock, of busy cores, and of this program's CPU time; unknown numbers are 0."""
    busy = own = 0.0
    this = psutil().Process()
    with contextlib.suppress(psutil().Error, OSError):  # a container without /proc/stat
        each = psutil().cpu_times(percpu=True)
        cores = [each[core] for core in allowed_cores() if core < len(each)]
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil().Error):  # the process has ended
                own += sum(process.cpu_times()[:4])  # children that were waited for included
        busy = sum(sum(core[:8]) - core.idle - core.iowait for core in cores)
    return time.monotonic(), busy, own


def taken_by_others(seconds: float, others: float, cores: int, core_time: float) -> float:
    """Return the share of a program's CPU time for which other programs have left too little.

    Args:
        seconds: seconds of the clock.
        others: CPU time of other programs on the cores.
        cores: number of cores.
        core_time: CPU time per second that the program may use: under a quota, less than the number of cores.
    """
    return min(1.0, max(0.0, (core_time - (cores - others / seconds if seconds > 0 else core_time)) / core_time))


class Usage:
    """CPU time, memory and GPUs in use on this machine, in percent.

    Args:
        gpus: source of the figures of GPUs; None: NVIDIA's library, if the library and a GPU exist.
    """

    def __init__(self, gpus: "Nvml | None" = None) -> None:
        self._gpus, self._looked = gpus, False

    def read(self) -> dict[str, float]:
        """Return the present figures; CPU time is measured since the last call, and missing in the first."""
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
    """The load of GPUs, from NVIDIA's management library (docs.nvidia.com/deploy/nvml-api)."""

    NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def find(cls) -> "Nvml | None":
        """Load the library; None without a GPU, or without a library that can be initialized."""
        for name in cls.NAMES if has_gpu() else ():
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(name)
                if library.nvmlInit_v2() == 0:
                    return cls(library)
        return None

    def read(self) -> list[tuple[float, float]]:
        """Return, for every GPU, the percent of time spent computing and of memory in use; [] if a call fails."""
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
