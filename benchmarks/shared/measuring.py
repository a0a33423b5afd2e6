"""Parts of all benchmarks: medians, rates, the machine, and the JSON files behind docs/performance.md.

A result file holds one benchmark on one machine: `{"benchmark", "machine", "results": {workload: {...}}}`. Measuring a
workload again replaces the entry of the workload, which contains date and commit. A file can be filled piece by piece.
"""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from appo.utils.errors import AppoError, UsageError
from appo.utils.system.machine import allocator_settings, allowed_cores, available_cores, limit_threads, pin_to

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
MEASURED = ("algorithms", "envs", "utils")
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco", "vizdoom")


class ProcessError(AppoError):
    """A measuring process failed."""


class Point(NamedTuple):
    """Amount of work done until a time."""

    seconds: float
    done: float


class Spread(NamedTuple):
    """Several measurements of a single quantity."""

    median: float
    lowest: float
    highest: float
    runs: int


def spread(values: Sequence[float]) -> Spread:
    """Median and extremes of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def rate(points: Sequence[Point]) -> float:
    """Return counts per second: the slope of the line of best fit.

    Counts of training grow in steps of a batch. The slope depends less on the phase of the first and the last point
    than the difference of both points does.

    Raises:
        ValueError: fewer than two different times.
    """
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def seconds_per_call(function: Callable[[], object], seconds: float, warm_up: int = 3) -> list[float]:
    """Call for `seconds`, at least three times, after warm-up calls that do not count; return the durations."""
    for _ in range(warm_up):
        function()
    durations: list[float] = []
    end = perf_counter() + seconds
    while len(durations) < 3 or perf_counter() < end:
        begin = perf_counter()
        function()
        durations.append(perf_counter() - begin)
    return durations


def steps_per_second_at_most(cores: int, microseconds: Sequence[float]) -> float:
    """Return the speed if all cores were busy with the isolated costs of a step and nothing else."""
    return cores * 1e6 / sum(microseconds)


def in_fresh_processes(function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function with several arguments at once, each in a new interpreter; return the results.

    Raises:
        ProcessError: a process ended without a result, and has printed the reason.
    """
    context = get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in calls]
    started = [
        context.Process(target=_send_result, args=(sender, function, tuple(arguments)))
        for (_, sender), arguments in zip(pipes, calls, strict=True)
    ]
    try:
        for process, (_, sender) in zip(started, pipes, strict=True):
            process.start()
            sender.close()
        answers: dict[Connection, Any] = {}
        while len(answers) < len(pipes):  # a failure ends the loop even if all other processes wait
            for ready in wait([receiver for receiver, _ in pipes if receiver not in answers]):
                assert isinstance(ready, Connection)
                answers[ready] = ready.recv()
        return [answers[receiver] for receiver, _ in pipes]
    except EOFError:
        raise ProcessError(f"{function.__module__}.{function.__name__} failed") from None
    finally:
        for process in started:
            if process.pid is not None:
                process.terminate()
                process.join()


def _send_result(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def on_one_core(core: int = 0) -> None:
    """Give this process a worker's settings before torch is imported: one core, one thread, memory that is kept."""
    cores = allowed_cores()
    pin_to(frozenset({cores[core % len(cores)]}))
    limit_threads(1)
    allocator_settings()


def machine() -> dict[str, Any]:
    """Describe the machine and the packages."""
    words = _cpu_flags()
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in words],
        "gpu": _gpu(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"Linux {platform.release().split('-')[0]}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "packages": {name: installed for name in PACKAGES if (installed := _installed(name))},
    }


def provenance() -> dict[str, str]:
    """Return the date, and the last commit that changed the measured code."""
    commit = _output("git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", *MEASURED) or "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *MEASURED)
    return {"commit": commit + ("+changes" if changed else ""), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"}


def save(path: Path | None, benchmark: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write results by workload into a result file, in place of earlier results; do nothing without a path.

    Raises:
        UsageError: the file belongs to another benchmark or another machine.
    """
    if path is None:
        return
    check(path, benchmark)
    here = machine()
    new: dict[str, Any] = {"benchmark": benchmark, "machine": here, "results": {}}
    content = read(path) if path.exists() else new
    content["machine"] = here
    content["results"] |= {name: _rounded({**result, **provenance()}) for name, result in results.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check(path: Path | None, benchmark: str) -> None:
    """Check that results may be written into the file, if the file exists.

    Raises:
        UsageError: the file belongs to another benchmark or another machine.
    """
    if path is None or not path.exists():
        return
    content = read(path)
    if content["benchmark"] != benchmark or identity(content["machine"]) != identity(machine()):
        measured = f"{content['benchmark']} on {', '.join(map(str, identity(content['machine'])))}"
        raise UsageError(f"{path} holds {measured}; give another --json, or remove it")


def earlier(path: Path | None, workload: str) -> dict[str, Any]:
    """Return a workload's entry of a result file; empty without a file."""
    results = read(path)["results"] if path is not None and path.exists() else {}
    found: dict[str, Any] = results.get(workload, {})
    return found


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def identity(description: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a machine's description that make figures comparable; versions of packages do not count."""
    return tuple(description[name] for name in ("cpu", "cores", "gpu"))


def _rounded(value: Any) -> Any:
    """Round every number to six digits; no measurement has more."""
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _cpu_model() -> str:
    """Return name, family and model, because virtual machines often name only a brand."""
    words = _cpu_words()
    if "model name" not in words:
        return platform.machine()
    return f"{words['model name']} (family {words.get('cpu family', '?')}, model {words.get('model', '?')})"


def _cpu_flags() -> set[str]:
    words = _cpu_words()
    return set((words.get("flags") or words.get("Features") or "").split())


def _cpu_words() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first core."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gpu() -> str | None:
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*words: str) -> str:
    """Return the output of a command; empty if the command is missing or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
