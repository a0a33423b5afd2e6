import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import psutil
import pytest

from appo.utils.system import cgroups, machine, usage
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[3]


def run_python(script: str) -> str:
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("others", "cores", "core_time", "share"),
    [
        (0.0, 2, 2.0, 0.0),
        (1.0, 2, 2.0, 0.25),  # in two seconds: half a core of two
        (4.0, 2, 2.0, 1.0),
        (9.0, 2, 2.0, 1.0),  # clocks differ a little
        (-0.5, 2, 2.0, 0.0),
        (100.0, 64, 2.0, 0.0),  # a quota of two cores of 64, of which 14 are idle
        (126.0, 64, 2.0, 0.5),
    ],
)
def test_what_others_take_is_what_they_leave_too_little_of(others, cores, core_time, share) -> None:
    assert usage.taken_by_others(2.0, others, cores, core_time) == share
    assert usage.taken_by_others(0.0, others, cores, core_time) == 0.0


def test_our_own_processes_are_no_other_programs() -> None:
    """A child that computes is ours. What others do meanwhile is not known, but it cannot be more than all there is."""
    began, before = time.monotonic(), usage._spent()
    child = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", child], check=True)
    seconds, busy, own = (now - then for now, then in zip(usage._spent(), before, strict=True))
    elapsed = time.monotonic() - began  # encloses both looks at what is busy
    assert 0.28 <= seconds <= elapsed
    assert own >= 0.28  # the kernel counts in hundredths
    assert busy >= own - 0.05
    assert busy <= (elapsed + 0.05) * len(machine.allowed_cores())


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("200000 100000\n", 2.0), ("150000 100000", 1.5), ("", None), ("5", None), ("a b", None)],
)
def test_cpu_max(text, cores):
    assert cgroups.parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [("-1\n", "100000\n", None), ("50000\n", "100000\n", 0.5), ("", "", None), ("1", "0", None)],
)
def test_cfs_quota(quota, period, cores):
    assert cgroups.parse_cfs(quota, period) == cores


@pytest.mark.parametrize(
    ("text", "size"),
    [("max\n", None), ("1073741824\n", 1 << 30), ("9223372036854771712\n", None), ("0", 0), ("-1", None), ("", None)],
)
def test_memory_limit(text, size):
    assert cgroups.parse_memory_limit(text) == size


def test_meminfo_and_memory_stat():
    meminfo = "MemTotal:       24602620 kB\nMemFree:        1 kB\nMemAvailable:   2048 kB\n"
    assert cgroups.number_of(meminfo, "MemAvailable:") == 2048
    assert cgroups.number_of("MemTotal: 5 kB\nMemAvailable: many kB", "MemAvailable:") is None
    assert cgroups.number_of("anon 5\ninactive_file 4096\n", "inactive_file") == 4096
    assert cgroups.number_of("anon 5\n", "inactive_file") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("flags : fpu avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("model name : bf16\nflags : fpu avx2 avx512f\n", False),
        ("", False),
    ],
)
def test_instructions_for_bf16(text, expected):
    assert machine.parse_bf16(text) is expected


def test_proc_self_cgroup():
    text = "12:cpu,cpuacct:/docker/ab:c\n3:memory:/m\n1:name=systemd:/x\n0::/user.slice\nnonsense\n"
    assert cgroups.parse_cgroups(text) == {
        "cpu": PurePosixPath("/docker/ab:c"),
        "cpuacct": PurePosixPath("/docker/ab:c"),
        "memory": PurePosixPath("/m"),
        "name=systemd": PurePosixPath("/x"),
        "": PurePosixPath("/user.slice"),
    }


def test_version_2_quota_is_the_smallest_up_to_the_top(tmp_path):
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/user.slice/job\n"})
    groups = write(
        tmp_path / "cgroup",
        {"user.slice/job/cpu.max": "800000 100000\n", "user.slice/cpu.max": "300000 100000\n"},
    )
    assert cgroups.cpu_quota(groups, proc) == 3.0
    write(groups, {"user.slice/cpu.max": "max 100000\n"})
    assert cgroups.cpu_quota(groups, proc) == 8.0


@pytest.mark.parametrize("path", ["/", "/docker/not-visible-here", "/../.."])
@pytest.mark.parametrize(("version", "mount"), [(1, "cpu"), (1, "cpu,cpuacct"), (2, "."), (2, "unified")])
def test_a_container_sees_its_own_group_at_the_top(tmp_path, path, version, mount):
    line = f"0::{path}\n" if version == 2 else f"4:cpu,cpuacct:{path}\n"
    files = (
        {"cpu.max": "150000 100000"} if version == 2 else {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}
    )
    proc = write(tmp_path / "proc", {"self/cgroup": line})
    groups = write(tmp_path / "cgroup", {f"{mount}/{name}": text for name, text in files.items()})
    assert cgroups.cpu_quota(groups, proc) == 1.5


def test_without_cgroups_there_is_no_limit(tmp_path):
    assert cgroups.cpu_quota(tmp_path, tmp_path) is None
    assert cgroups.cgroup_free_bytes(tmp_path, tmp_path) is None


def test_page_cache_counts_as_free_memory(tmp_path):
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/job\n9:memory:/m\n"})
    groups = write(
        tmp_path / "cgroup",
        {
            "job/memory.max": "1000\n",
            "job/memory.current": "900\n",
            "job/memory.stat": "inactive_file 300\n",
            "memory/m/memory.limit_in_bytes": "5000\n",
            "memory/m/memory.usage_in_bytes": "4800\n",
            "memory/m/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
        },
    )
    assert cgroups.cgroup_free_bytes(groups, proc) == 300
    write(groups, {"job/memory.max": "max\n"})
    assert cgroups.cgroup_free_bytes(groups, proc) == 400 - 100
    write(groups, {"memory/m/memory.usage_in_bytes": "9000\n"})
    assert cgroups.cgroup_free_bytes(groups, proc) == 0


def test_the_smallest_limit_of_processes_counts(tmp_path):
    proc = write(tmp_path / "proc", {"self/cgroup": "0::/job/step\n9:pids:/m\n"})
    files = {"job/pids.max": "40\n", "job/pids.current": "30\n", "job/step/pids.max": "max\n"}
    groups = write(tmp_path / "cgroup", files | {"pids/m/pids.max": "100\n", "pids/m/pids.current": "98\n"})
    assert cgroups.cgroup_free_pids(groups, proc) == 2
    write(groups, {"pids/m/pids.max": "max\n"})
    assert cgroups.cgroup_free_pids(groups, proc) == 10
    write(groups, {"job/pids.max": "5\n"})
    assert cgroups.cgroup_free_pids(groups, proc) == 0
    assert cgroups.cgroup_free_pids(tmp_path, tmp_path) is None


GAME = """
import sys, time
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    print("done", flush=True)
    sys.stdin.readline()
"""
PARENT = f"""{GAME}
import subprocess
game = subprocess.Popen([sys.executable, "-c", {GAME!r} + "work(0.5)"], stdin=subprocess.PIPE)
sys.stdin.readline()
game.communicate()
print("gone", flush=True)
work(0.1)
"""


@contextlib.contextmanager
def family() -> Iterator[subprocess.Popen[str]]:
    """A process whose child has used 0.5 s of CPU time and waits; a line ends the child, then it works itself."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "done\n"
        try:
            yield parent
        finally:
            parent.communicate("\n\n", timeout=HANG_SECONDS)


def test_cpu_time_of_what_a_process_has_started() -> None:
    found = usage.Descendants()
    before = found.cpu_seconds()
    with family() as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(usage.Descendants.SCAN_CALLS):
            seen = found.cpu_seconds() - before
        assert seen > 0.45  # but for what clocks of the kernel round
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert [parent.stdout.readline() for _ in range(2)] == ["gone\n", "done\n"]
        assert found.cpu_seconds() - before >= seen  # never less, though the child of the child has ended
    assert found.cpu_seconds() - before > 0.55  # both have ended, and were waited for


def test_this_machine():
    assert machine.allowed_cores() == tuple(sorted(os.sched_getaffinity(0)))
    assert 1 <= machine.available_cores() <= len(machine.allowed_cores())
    assert 1 << 20 < machine.available_memory_bytes() < 1 << 50


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.3, 1), (1.5, 2), (4.0, 4), (100.0, 8)])
def test_a_quota_cuts_the_cores(monkeypatch, quota, expected):
    monkeypatch.setattr(machine, "allowed_cores", lambda: tuple(range(8)))
    monkeypatch.setattr(machine, "cpu_quota", lambda cgroups, proc: quota)
    assert machine.available_cores() == expected
    assert machine.core_time() == min(8.0, quota or 8.0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC\n\nprocessor : 1\nmodel name\t: AMD EPYC\n", "AMD EPYC"),
        ("processor : 0\nCPU part\t: 0xd40\nCPU implementer\t: 0x41\n", "CPU implementer 0x41 CPU part 0xd40"),
        ("", ""),
    ],
)
def test_the_processor_has_a_name(monkeypatch, tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert machine.processor_name() == name


@pytest.mark.parametrize(
    ("num_workers", "cores", "plan"),
    [
        (0, (0, 1), []),
        (2, (), [set(), set()]),
        (1, (0, 1, 2), [{0, 1, 2}]),
        (2, (0, 1, 2), [{0}, {1, 2}]),
        (3, (2, 4, 6, 8, 10, 12, 14, 16), [{2, 4}, {6, 8, 10}, {12, 14, 16}]),
        (2, (5, 7), [{5}, {7}]),
        (4, (0, 1), [{0}, {1}, {0}, {1}]),
        (5, (0, 1), [{0}, {1}, {0}, {1}, set()]),
    ],
)
def test_affinity_plan(num_workers, cores, plan):
    assert machine.affinity_plan(num_workers, cores) == plan


def test_every_core_is_used_and_none_twice_while_there_are_enough():
    for num_cores in range(1, 20):
        for num_workers in range(1, num_cores + 1):
            plan = machine.affinity_plan(num_workers, range(num_cores))
            sizes = [len(cores) for cores in plan]
            assert sum(sizes) == num_cores
            assert frozenset().union(*plan) == set(range(num_cores))
            assert max(sizes) - min(sizes) <= 1


def test_threads_are_limited_for_libraries_loaded_before_and_after_and_for_children():
    script = """
import os, numpy
from appo.utils.system import machine
assert machine.threads() == 1
machine.limit_threads(3)
assert machine.threads() == 3
machine.limit_threads(1)
from threadpoolctl import threadpool_info
assert all(pool["num_threads"] == 1 for pool in threadpool_info()), threadpool_info()
import subprocess, sys
child = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
print(subprocess.run(child, capture_output=True, text=True).stdout.strip(), "torch" in sys.modules)
"""
    assert run_python(script) == "1 False"


def test_niceness_is_relative_to_the_parent_and_pinning_keeps_to_what_is_allowed():
    script = """
import os, subprocess
from appo.utils.system import machine
before = os.nice(0)
print(machine.set_niceness(3) == min(19, before + 3) == os.getpriority(os.PRIO_PROCESS, 0))
os.setpgid(0, 0)
game = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
print(machine.set_niceness(5, group=True) == min(19, before + 8) == os.getpriority(os.PRIO_PROCESS, game.pid))
game.communicate()
core = machine.allowed_cores()[0]
print(machine.pin_to(frozenset({core, 4095})), machine.allowed_cores() == (core,))
print(machine.pin_to(frozenset()), machine.pin_to(frozenset({4095})))
print(machine.allowed_cores() == (core,))
"""
    assert run_python(script).split() == ["True", "True", "True", "True", "False", "False", "True"]


def test_allocator_keeps_freed_memory_in_the_process():
    script = """
import os, resource
from appo.utils.system import machine
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytes(bytearray(8 << 20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
returned = faults()
applied = machine.allocator_settings()
faults()
print(applied, returned, faults(), os.environ["THP_MEM_ALLOC_ENABLE"])
"""
    applied, returned, kept, huge_pages = run_python(script).split()
    assert huge_pages == "1"
    if applied == "True":
        assert int(kept) * 10 < int(returned)


def test_memory_of_a_family_is_that_of_all_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = usage.family_memory_bytes()
    assert alone is not None
    assert 0 < alone[0] <= alone[1]  # other tests may have left a fork server
    # The kernel divides shared pages anew whenever any process ends; so sizes of their own make the sum exact.
    monkeypatch.setattr(psutil.Process, "memory_full_info", lambda process: SimpleNamespace(pss=process.pid))
    with family() as parent:
        members = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        assert {parent.pid, psutil.Process(parent.pid).children()[0].pid} < set(members)
        assert usage.family_memory_bytes() == (os.getpid(), sum(members))


def test_memory_that_the_kernel_does_not_tell_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refused)
    assert usage.family_memory_bytes() is None


# --- kills for want of memory


V2, V1 = "0::/job\n", "4:memory:/job\n"


@pytest.mark.parametrize(
    ("cgroup", "file", "changes", "verdicts"),
    [
        (V2, "job/memory.events", {"group": 1}, [True, False]),
        (V2, "job/memory.events", {"group": 2, "vmstat": 2}, [True, True, None, None, False]),
        (V2, "memory.events", {"group": 1}, [True, False]),  # a container sees its own group at the top
        (V2, "unified/job/memory.events", {"group": 1}, [True, False]),
        (V1, "memory/job/memory.oom_control", {"group": 1}, [True, False]),
        (V1, "memory/memory.oom_control", {}, [False, False]),
        (V2, "job/memory.events", {"vmstat": 1}, [None, False]),  # perhaps in another container
        (V2, "", {"vmstat": 1}, [None, False]),
        (V2, "", {}, [False]),
        (V2, "", {"vmstat": None}, [None, None]),  # no kernel that tells
    ],
)
def test_the_kernel_is_asked_whether_it_has_killed(
    tmp_path: Path, cgroup: str, file: str, changes: dict[str, int | None], verdicts: list[bool | None]
) -> None:
    def show(group: int, vmstat: int | None) -> None:
        write(tmp_path, {"proc/self/cgroup": cgroup})
        if vmstat is not None:
            write(tmp_path, {"proc/vmstat": f"pgfault 5\noom_kill {vmstat}\n"})
        if file:
            write(tmp_path, {f"cgroup/{file}": f"oom 9\nunder_oom 0\noom_kill {group}\noom_group_kill 0\n"})

    show(7, None if changes.get("vmstat", 0) is None else 3)
    kills = cgroups.KernelKills(tmp_path / "cgroup", tmp_path / "proc")
    rises = {name: rise or 0 for name, rise in changes.items()}
    if rises:
        show(7 + rises.get("group", 0), None if changes.get("vmstat", 0) is None else 3 + rises.get("vmstat", 0))
    assert [kills.explain() for _ in verdicts] == verdicts
