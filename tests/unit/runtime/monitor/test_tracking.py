"""Trackers beside a run, with modules that take the place of their packages: what they do must not matter."""

import io
import json
import os
import queue
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appo.algorithms.run.config import Config
from appo.algorithms.run.observers import check_observers
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.tracker_process import MOST_WAITING, _read
from appo.algorithms.runtime.monitor.trackers import TRACKERS, asked_trackers, wandb_settings
from appo.algorithms.runtime.monitor.tracking import Tracker
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.utils.errors import UsageError
from tests.patience import HANG_SECONDS

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
        raise RuntimeError(f"no key at {os.getpid() + 10000}\\nfor you")
    if os.environ["FAKE_MODE"] == "fickle":
        raise RuntimeError(f"reason {os.getpid() % 1000}")
    if os.environ["FAKE_MODE"] == "mute":
        Run.log = lambda self, values: 1 / 0
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
        settings = {"project": "p", "config": {"num_policies": 2}}
        return Tracker("wandb", settings, tmp_path / "wandb.log", FakeJanitor())

    return start


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_it_gets_every_record_and_ends(start: Callable[[str], Tracker], tmp_path: Path) -> None:
    tracker = start("good")
    assert tracker.janitor.groups == [tracker.pid]  # type: ignore[attr-defined]
    for step in range(3):
        tracker.add(1, {"policy": 1, "env_steps": step, "reward/mean": float("nan"), "train/loss": 0.5})
    tracker.close(HANG_SECONDS)
    lines = [json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines()]
    settings, *records, finished = lines
    assert settings == {"project": "p", "config": {"num_policies": 2}}
    assert records == [{"env_steps": float(step), "p1/train/loss": 0.5} for step in range(3)]
    assert finished == "finished"
    assert (tracker.dropped, tracker.janitor.groups) == (0, [])  # type: ignore[attr-defined]


def test_a_slow_tracker_loses_the_oldest_records() -> None:
    waiting: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
    lines = b"".join(b'{"number": %d}\n' % number for number in range(MOST_WAITING + 5))
    _read(io.BytesIO(lines + b'{"number": 9'), waiting)
    records = [waiting.get_nowait() for _ in range(waiting.qsize())]
    assert records == [*({"number": number} for number in range(5, MOST_WAITING + 5)), None]


def test_a_line_that_is_torn_by_the_end_of_main_ends_it_as_well(
    start: Callable[[str], Tracker], tmp_path: Path
) -> None:
    tracker = start("good")
    tracker.add(0, {"env_steps": 1.0})
    os.write(tracker._pipe.fileno(), b'{"env_steps": 2.0, "pol')
    tracker.close(HANG_SECONDS)
    assert tracker._process.returncode == 0
    _, record, finished = (json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines())
    assert (record, finished) == ({"env_steps": 1.0}, "finished")


def test_one_that_dies_costs_its_figures_and_one_warning(
    start: Callable[[str], Tracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = start("dead")
    tracker._process.wait(HANG_SECONDS)
    tracker.add(0, {"env_steps": 1.0})
    tracker.add(0, {"env_steps": 1.0})
    tracker.close(HANG_SECONDS)
    assert tracker.dropped == 2
    ended, dropped = (record.message for record in caplog.records)
    assert re.match(r"the tracker wandb ended with exit code 3; starting it again \(restart 1\), see .*", ended)
    assert dropped == "2 records were not sent to the tracker wandb"
    assert "no key" in (tmp_path / "wandb.log").read_text()


def test_one_that_dies_is_started_again_under_the_same_id_and_gets_what_comes(
    start: Callable[[str], Tracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = start("good")
    for life in range(3):
        first = tracker.pid
        os.killpg(first, signal.SIGKILL)
        tracker._process.wait(HANG_SECONDS)
        now = time.monotonic()
        tracker.look(now)
        assert tracker.plain() == {"state": "ended", "restarts": life}
        assert len(caplog.records) == life + 1
        tracker.look(now + 0.4)
        assert tracker.plain()["state"] == "ended"
        tracker.look(now + 2.1)
        assert tracker.plain() == {"state": "running", "restarts": life + 1}
        assert tracker.pid != first
        assert tracker.janitor.groups == [tracker.pid]  # type: ignore[attr-defined]
    tracker.add(0, {"env_steps": 5.0})
    tracker.close(HANG_SECONDS)
    lines = [json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines()]
    assert lines == [{"project": "p", "config": {"num_policies": 2}}, {"env_steps": 5.0}, "finished"]
    assert tracker.dropped == 0


@pytest.mark.parametrize(
    ("mode", "seconds", "starts", "last"),
    [
        ("dead", 10.0, 3, "failed 3 times with 'RuntimeError: no key at ...'"),
        ("dead", 100.0, 3, "failed 3 times with 'RuntimeError: no key at ...'"),
        ("mute", 100.0, 3, "failed 3 times with 'ZeroDivisionError: division by zero'"),
        ("fickle", 10.0, 6, "ended with exit code 3, as 6 times soon after its start"),
    ],
)
def test_a_tracker_that_fails_at_every_start_is_given_up_with_its_reason(
    start: Callable[[str], Tracker], caplog: pytest.LogCaptureFixture, mode: str, seconds: float, starts: int, last: str
) -> None:
    """Three times for one reason are enough, also where an attempt takes longer than the time that settles a start."""
    tracker, now = start(mode), time.monotonic()
    while tracker.plain()["state"] != "given up":
        tracker.add(0, {"env_steps": 5.0})
        tracker._process.wait(HANG_SECONDS)
        now += seconds
        tracker.look(now)
        tracker.look(now + 10.0)
        now += 10.0
    assert tracker.plain() == {"state": "given up", "restarts": starts - 1}
    assert [record.message.count("not started again") for record in caplog.records] == [0] * (starts - 1) + [1]
    assert caplog.records[-1].message == (
        f"the tracker wandb {last}: not started again; see {tracker.log_path}"
        " (wandb login, or WANDB_MODE=offline where there is no network)"
    )
    tracker.dropped = 0
    tracker.add(0, {"env_steps": 5.0})
    tracker.close(HANG_SECONDS)
    assert tracker.dropped == 1


def test_one_that_hangs_is_never_waited_for(start: Callable[[str], Tracker], caplog: pytest.LogCaptureFixture) -> None:
    """More than the pipe and the tracker hold: the newest stay, and nothing is waited for."""
    tracker = start("hanging")
    record = {f"train/figure_{i}": float(i) for i in range(100)}
    for _ in range(2000):
        tracker.add(0, record)
    tracker.close(0.1)
    assert tracker._process.wait(HANG_SECONDS) == -signal.SIGKILL
    assert "did not end within 0.1 s and is killed" in caplog.text


def test_settings_name_no_folder() -> None:
    flags = Config.from_flat({"env": "a", "experiment": "b", "train_dir": "/secret/place", "init_from": "/secret/x"})
    flags = replace(flags, output=replace(flags.output, output="/secret/data"))
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


# The other trackers, whose packages are replaced by modules that note what is called.


MODULES = {
    "wandb": """
import notes
def init(**settings):
    notes.write("init", settings)
    return notes.Run()
""",
    "trackio": """
import notes
def init(project, name=None, group=None, config=None, resume="never"):
    notes.write("init", {"project": project, "name": name, "group": group, "resume": resume, "config": config})
    return notes.Run()
""",
    "mlflow": """
import notes, os
from types import SimpleNamespace as Has
def set_experiment(name):
    notes.write("set_experiment", name)
    return Has(experiment_id="7")
def search_runs(experiment_ids, filter_string, max_results, output_format):
    assert (experiment_ids, max_results, output_format) == (["7"], 1, "list")
    notes.write("search_runs", filter_string)
    return [Has(info=Has(run_id="before"))] if os.environ.get("FAKE_MODE") == "again" else []
def start_run(run_id=None, run_name=None, tags=None):
    notes.write("start_run", {"run_id": run_id, "run_name": run_name, "tags": tags})
def log_params(params):
    assert len(params) <= 100
    assert all(len(value) <= 6000 for value in params.values())
    notes.write("log_params", params)
def log_metrics(metrics, step=None):
    notes.write("log", metrics, step)
def end_run():
    notes.write("finish", None)
""",
}
NOTES = """
import json, os
def write(*what):
    with open(os.environ["FAKE_FILE"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class Run:
    def log(self, figures, step=None):
        write("log", figures, step)
    def finish(self):
        write("finish", None)
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules lie that note what is called; each process of a tracker writes into one file."""
    for name, text in {**MODULES, "notes": NOTES}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def flat_flags(**changed: object) -> dict[str, object]:
    flags = Config.from_flat({"env": "a", "experiment": "b", "train_dir": "/secret", "wandb_tags": ["t"], **changed})
    return flags.to_flat() | {"seed": 5}


def notes_of(fakes: Path, name: str, monkeypatch: pytest.MonkeyPatch, **changed: object) -> list[list[object]]:
    """What a tracker's module was called with, for two records of a run."""
    monkeypatch.setenv("FAKE_FILE", str(fakes / f"{name}.jsonl"))
    settings = TRACKERS[name].settings(flat_flags(**changed), 7.0)
    tracker = Tracker(name, settings, fakes / f"{name}.log", FakeJanitor())
    for step in (100, 200):
        tracker.add(1, {"policy": 1, "env_steps": step, "stats/a(b)/mean": 0.5, "train/loss": float("nan")})
    tracker.close(HANG_SECONDS)
    assert tracker.dropped == 0
    return [json.loads(line) for line in (fakes / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_is_told_of_the_run_and_gets_its_figures(fakes: Path, name: str, monkeypatch) -> None:
    (_, told), *logged, finished = notes_of(fakes, name, monkeypatch, num_policies=2)
    assert (told["project"], told["group"], told["resume"], told["config"]["wandb_tags"]) == (
        "appo",
        None,
        "allow",
        ["t"],
    )
    assert re.fullmatch(r"b-[0-9a-f]{12}", told["id" if name == "wandb" else "name"])
    assert "secret" not in json.dumps(told)
    steps = (None, None) if name == "wandb" else (100, 200)  # those of wandb count records
    assert logged == [
        ["log", {"env_steps": float(100 * (i + 1)), "p1/stats/a(b)/mean": 0.5}, step] for i, step in enumerate(steps)
    ]
    assert finished == ["finish", None]


def test_mlflow_gets_parameters_once_and_metrics_by_names_that_it_takes(fakes: Path, monkeypatch) -> None:
    found = notes_of(fakes, "mlflow", monkeypatch, experiments_root="group")
    assert [call[0] for call in found] == [
        "set_experiment", "search_runs", "start_run", *["log_params"] * (len(found) - 6), "log", "log", "finish"
    ]  # fmt: skip
    assert found[0][1] == "appo"
    tags = found[2][1]["tags"]  # type: ignore[index, call-overload]
    assert found[1][1] == f"tags.`appo.id` = '{tags['appo.id']}'"
    assert (found[2][1]["run_name"], tags["appo.group"], tags["appo.tag.0"]) == ("b", "group", "t")  # type: ignore[index, call-overload]
    parameters = {name: value for call in found if call[0] == "log_params" for name, value in call[1].items()}  # type: ignore[attr-defined]
    assert len(parameters) > 100
    assert (parameters["rollout"], parameters["env"]) == (str(Config().learning.rollout), "a")
    assert [call[1:] for call in found[-3:-1]] == [
        [{"env_steps": float(step), "stats/a_b_/mean": 0.5}, step] for step in (100, 200)
    ]


def test_a_run_that_goes_on_is_the_same_one_at_mlflow(fakes: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "again")
    found = notes_of(fakes, "mlflow", monkeypatch)
    assert [call[0] for call in found] == ["set_experiment", "search_runs", "start_run", "log", "log", "finish"]
    assert found[2][1] == {"run_id": "before", "run_name": None, "tags": None}


def test_trackers_share_the_time_in_which_they_may_send_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are told that nothing more comes before any is waited for; the first takes four of five seconds."""
    now, calls = [100.0], list[tuple[str, str, float]]()
    monkeypatch.setattr("appo.algorithms.runtime.monitor.monitor.time.monotonic", lambda: now[0])

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def add(self, policy: int, record: object) -> None:
            calls.append((self.name, "add", 0.0))

        def end(self) -> None:
            calls.append((self.name, "end", 0.0))

        def close(self, timeout_seconds: float) -> None:
            calls.append((self.name, "close", timeout_seconds))
            now[0] += 4.0

    monitor = Monitor(tmp_path, LoggingConfig(tensorboard=False), [{}], Budget(1000))
    monitor.trackers = [Noting(name) for name in "abc"]  # type: ignore[misc]
    monitor.close()
    assert calls == [
        *((name, "add", 0.0) for name in "abc"), *((name, "end", 0.0) for name in "abc"),
        ("a", "close", 5.0), ("b", "close", 1.0), ("c", "close", 0.0),
    ]  # fmt: skip


def test_the_old_flag_is_the_first_of_the_new_ones() -> None:
    assert asked_trackers(["mlflow", "wandb", "mlflow"], with_wandb=True) == ["wandb", "mlflow"]
    assert asked_trackers([], with_wandb=True) == ["wandb"]
    assert asked_trackers(("trackio", "mlflow"), with_wandb=False) == ["trackio", "mlflow"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"track": ["wandb", "mlfow"]}, "--track=mlfow is not one of wandb, trackio, mlflow; did you mean mlflow?"),
        ({"track": ["trackio"]}, '--track=trackio needs the package trackio: pip install "appo[trackio]"'),
        ({"track": ["mlflow"]}, '--track=mlflow needs the package mlflow: pip install "appo[mlflow]"'),
        ({"with_wandb": True}, '--with_wandb needs the package wandb: pip install "appo[wandb]"'),
    ],
)
def test_a_tracker_that_is_not_there_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], expected: str
) -> None:
    there = ["wandb"] if "track" in flags else []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    with pytest.raises(UsageError) as caught:
        check_observers(Config.from_flat({"env": "a", **flags}))
    assert str(caught.value) == expected
