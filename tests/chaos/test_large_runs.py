"""Files of a run that are larger than memory: they are sampled, at once and in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.runs import ROOT
from tests.patience import HANG_SECONDS

LARGE = 6 << 30
MEASURED = """
import sys, time
from appo.algorithms.cli import main
code = main()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # rusage has that of tests too
print(code, time.process_time(), int(peak.split()[1]) / 1024, file=sys.stderr)
"""


def lines(first: int, count: int) -> bytes:
    records = (
        {"policy": 0, "env_steps": i, "elapsed_seconds": i / 10, "reward/mean": i / 100}
        for i in range(first, first + count)
    )
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def plant(directory: Path, kind: str) -> None:
    """A run with a metrics.jsonl of 6 GB that takes no place on the disk: beginning and end are records, or nothing."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"env": "CartPole-v1"}')
    (directory / "status.json").write_text('{"state": "finished", "totals": {"env_steps": 5}}')
    path = directory / "metrics.jsonl"
    path.write_bytes(lines(0, 1000))
    if kind != "small":
        os.truncate(path, LARGE)
    if kind == "records":
        with path.open("r+b") as file:
            file.seek(LARGE - (1 << 17))
            file.write(b"\n" + lines(10**6, 1000))
            file.truncate()


def measured(cwd: Path, *words: str) -> tuple[float, float, str]:
    """Seconds on a core (others may use it, too) and MiB that a command takes, and what it prints."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    *warnings, last = done.stderr.splitlines()
    code, seconds, mebibytes = map(float, last.split())
    assert (code, warnings) == (0, []), done.stderr
    return seconds, mebibytes, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "records"])
def test_files_larger_than_memory_are_sampled(tmp_path: Path, kind: str) -> None:
    plant(tmp_path / "train_dir" / "small", "small")
    plant(tmp_path / "train_dir" / "large", kind)
    seconds, mebibytes, out = measured(tmp_path, "runs")
    assert (seconds < 1, mebibytes < 100) == (True, True), (seconds, mebibytes)
    assert [line.split()[0] for line in out.splitlines()[1:]] in (["large", "small"], ["small", "large"])
    seconds, mebibytes, _ = measured(tmp_path, "top", "large", "--once")
    assert (seconds < 1, mebibytes < 100) == (True, True), (seconds, mebibytes)
    plant(tmp_path / "train_dir" / "other", "small")
    for words in (
        ("compare", "small", "large"),
        ("plot", "small", "large", "-o", "x.svg"),
        ("report", "small", "large"),
    ):
        _, usual, _ = measured(tmp_path, *(word.replace("large", "other") for word in words))
        seconds, mebibytes, out = measured(tmp_path, *words)
        assert (seconds < 10, mebibytes < usual + 100) == (True, True), (seconds, mebibytes, usual)
        if words[0] == "compare":
            assert ("10009.9" in out) == (kind == "records") or "10.0" in out
