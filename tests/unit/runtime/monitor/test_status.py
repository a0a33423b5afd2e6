import errno
import json
import os
from pathlib import Path

import pytest

from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.messages import LearnerReport
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.status import STATUS_SECONDS, Status
from appo.utils.run_folder import RunFolder
from tests.unit.runtime.monitor.test_monitor import episodes


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Monitor:
    monkeypatch.setattr("appo.algorithms.runtime.monitor.monitor.time.monotonic", lambda: 1000.0)
    monitor = Monitor(tmp_path, LoggingConfig(tensorboard=False), [{}], Budget(1000, seconds=20.0))
    monkeypatch.setattr("appo.algorithms.runtime.monitor.monitor.time.monotonic", lambda: 1007.5)
    return monitor


def test_before_there_is_a_monitor_the_state_is_all(tmp_path: Path) -> None:
    Status(tmp_path).write("starting")
    status = RunFolder(tmp_path).read_status()
    assert status.pop("time") > 0
    assert status == {
        "state": "starting", "reason": "", "pid": os.getpid(), "totals": {}, "return_mean": [], "budget": {},
        "machine": {},
    }  # fmt: skip


def test_it_holds_counters_returns_times_and_the_budget(tmp_path: Path, monitor: Monitor) -> None:
    status = Status(tmp_path)
    status.counters, status.budget = monitor.status, {"env_steps": 1000, "episode_return": None}
    monitor.handle(LearnerReport(0, 3, {"env_steps": 400, "samples": 100, "discarded": 0, "updates": 2}, {}))
    monitor.handle(episodes((0, 1.0, 10), (0, 4.0, 30)))
    status.write("finished", "because")
    found = RunFolder(tmp_path).read_status()
    assert {name: found[name] for name in ("state", "reason", "seconds", "elapsed_seconds", "return_mean")} == {
        "state": "finished", "reason": "because", "seconds": 7.5, "elapsed_seconds": 7.5, "return_mean": [2.5]
    }  # fmt: skip
    assert found["seconds_left"] == 12.5  # without a speed yet, those of the clock
    assert (found["share"], found["env_steps"], found["policies"][0]["reward/mean"]) == (0.4, 400, 2.5)
    assert (found["totals"]["env_steps"], found["budget"]) == (400, {"env_steps": 1000, "episode_return": None})
    monitor.close()


def test_while_training_it_is_refreshed_every_few_seconds_and_waits_for_no_disk(
    tmp_path: Path, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Status(tmp_path)
    status.counters = monitor.status

    def waits(descriptor: int) -> None:
        raise AssertionError("fsync")

    monkeypatch.setattr(os, "fsync", waits)
    written = []
    for tenth in range(50):
        before = (tmp_path / "status.json").stat().st_ino if written else None
        status.tick(1000.0 + tenth / 10)
        if (tmp_path / "status.json").stat().st_ino != before:
            written.append(tenth / 10)
    assert written == [0.0, STATUS_SECONDS, 2 * STATUS_SECONDS]
    assert RunFolder(tmp_path).read_status()["state"] == "training"
    monitor.close()


def test_a_full_disk_costs_nothing_but_the_status(
    tmp_path: Path, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Status(tmp_path)
    status.counters = monitor.status
    status.write("starting")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    status.tick(1000.0)
    assert RunFolder(tmp_path).read_status()["state"] == "starting"
    assert not list(tmp_path.glob(".status*"))
    monitor.close()


@pytest.mark.parametrize("before", [100, 500, 5000, 100_000])
def test_how_a_run_has_ended_is_written_over_what_was_there_where_the_disk_is_full(
    tmp_path: Path, monitor: Monitor, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """No byte more than it had: a status is replaced whole otherwise."""
    run, status = RunFolder(tmp_path), Status(tmp_path)
    status.counters = monitor.status
    run.status.write_text(json.dumps({"state": "training", "more": "x" * (before - 35)}) + "\n")
    size = run.status.stat().st_size

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    status.write("interrupted", "by Ctrl-C")
    found = run.read_status()
    assert run.status.stat().st_size == size
    assert found["state"] == ("training" if before == 100 else "interrupted")
    assert ("policies" in found) == (before >= 5000)
    if before > 100:
        assert (found["reason"], found["pid"]) == ("by Ctrl-C", os.getpid())
    monitor.close()


@pytest.mark.parametrize("content", [None, "", "{", "[1]", json.dumps({"state": "finished"})])
def test_what_cannot_be_read_is_no_status(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    assert RunFolder(tmp_path).read_status() == ({"state": "finished"} if content == '{"state": "finished"}' else {})
