"""The tracker beside a run, with a module that takes the place of wandb: what it does must not matter."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from algorithms.run.config import Config
from algorithms.runtime.monitor.wandb import Tracker, wandb_settings
from algorithms.runtime.processes.janitor import Janitor

DEADLINE_SECONDS = 30.0
WANDB = """
import json, os, sys, time
class Run:
    def __init__(self, **settings):
        self.file = open(os.environ["FAKE_FILE"], "w")
        self.write(settings)
    def write(self, value):
        self.file.write(json.dumps(value) + "\\n")
        self.file.flush()
    def log(self, values):
        self.write(values)
    def finish(self):
        self.write("finished")
def init(**settings):
    if os.environ["FAKE_MODE"] == "dead":
        raise RuntimeError("no key")
    if os.environ["FAKE_MODE"] == "hanging":
        time.sleep(1000)
    return Run(**settings)
"""


class FakeJanitor(Janitor):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def watch(self, group: int) -> None:
        self.groups.append(group)

    def forget(self, group: int) -> None:
        self.groups.remove(group)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Tracker]:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_FILE", str(tmp_path / "sent.jsonl"))

    def start(mode: str) -> Tracker:
        monkeypatch.setenv("FAKE_MODE", mode)
        return Tracker({"project": "p", "config": {"num_policies": 2}}, tmp_path / "wandb.log", FakeJanitor())

    return start


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_it_gets_every_record_and_ends(start: Callable[[str], Tracker], tmp_path: Path) -> None:
    tracker = start("good")
    assert tracker.janitor.groups == [tracker.pid]  # type: ignore[attr-defined]
    for step in range(3):
        tracker.add(1, {"policy": 1, "env_steps": step, "reward/mean": float("nan"), "train/loss": 0.5})
    tracker.close(DEADLINE_SECONDS)
    lines = [json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines()]
    settings, *records, finished = lines
    assert settings == {"project": "p", "config": {"num_policies": 2}}
    assert records == [{"env_steps": float(step), "p1/train/loss": 0.5} for step in range(3)]
    assert finished == "finished"
    assert (tracker.dropped, tracker.janitor.groups) == (0, [])  # type: ignore[attr-defined]


def test_one_that_dies_costs_its_figures_and_one_warning(
    start: Callable[[str], Tracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = start("dead")
    tracker._process.wait(DEADLINE_SECONDS)
    tracker.add(0, {"env_steps": 1.0})
    tracker.add(0, {"env_steps": 1.0})
    tracker.close(DEADLINE_SECONDS)
    assert tracker.dropped == 2
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the tracker has ended",
        "2 records were not sent to the tracker",
    ]
    assert "no key" in (tmp_path / "wandb.log").read_text()


def test_one_that_hangs_is_never_waited_for(start: Callable[[str], Tracker], caplog: pytest.LogCaptureFixture) -> None:
    """More than the pipe and the tracker hold: the newest stay, and nothing is waited for."""
    tracker = start("hanging")
    record = {f"train/figure_{i}": float(i) for i in range(100)}
    for _ in range(2000):
        tracker.add(0, record)
    tracker.close(0.1)
    assert not is_alive(tracker.pid)
    assert "did not end within 0.1 s and is killed" in caplog.text


def test_settings_name_no_folder() -> None:
    flags = Config.from_flat({"env": "a", "experiment": "b", "train_dir": "/secret/place", "init_from": "/secret/x"})
    settings = wandb_settings(flags.to_flat() | {"seed": 5}, 7.0)
    assert (settings["name"], settings["resume"]) == ("b", "allow")
    assert "secret" not in json.dumps(settings)


def test_only_a_run_that_goes_on_has_the_id_of_an_earlier_one() -> None:
    flags = Config.from_flat({"env": "a", "experiment": "b", "experiments_root": "c/d"}).to_flat() | {"seed": 5}
    others = (wandb_settings(flags | {"experiments_root": "e"}, 7.0), wandb_settings(flags, 8.0))
    ids = [settings["id"] for settings in (wandb_settings(flags, 7.0), wandb_settings(flags, 7.0), *others)]
    assert (ids[0], len(set(ids))) == (ids[1], 3)
    assert all(re.fullmatch(r"b-[0-9a-f]{12}", str(one)) for one in ids)
    long = wandb_settings(flags | {"experiment": "x" * 200}, 7.0)
    assert len(str(long["id"])) <= 128
