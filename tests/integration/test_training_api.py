"""Training from a program: reports, saving, stopping, and what the caller's process keeps."""

import contextlib
import itertools
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from appo import Report, Result, Training, load_policy, train
from appo.algorithms.runtime.callbacks import Callbacks
from appo.algorithms.runtime.checkpointing import Checkpointing
from appo.utils import checkpoint_files
from appo.utils.errors import DirectoryInUse, NothingTrained, NotSaved, ResourceError, UsageError
from appo.utils.lock import RunLock
from appo.utils.metrics import read_metrics
from appo.utils.run_folder import RunFolder
from tests.integration.runs import SMALL
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _threads_of_the_caller() -> Iterator[None]:
    """More than a run gives itself, or nobody would notice that it takes them away."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    yield
    torch.set_num_threads(before)


def state() -> list[Any]:
    """What a run must give back."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)]
    random = torch.get_rng_state().tolist()
    return [*handlers, dict(os.environ), torch.get_num_threads(), resource.getrlimit(resource.RLIMIT_NOFILE), random]


def test_a_run_is_iterated_saved_and_goes_on(tmp_path: Path) -> None:
    before = state()
    flags = SMALL | {"train_dir": tmp_path, "experiment": "a", "train_for_env_steps": 3000}
    reports: list[Report] = []
    with Training(flags, report_seconds=0.0) as run:
        for report in run:
            reports.append(report)
            if len(reports) == 5:
                run.save()
                loaded = checkpoint_files.load(run.directory / "checkpoint_p0")
                assert loaded is not None
                assert loaded.found.step >= report.env_steps
    assert [r.env_steps for r in reports] == sorted(r.env_steps for r in reports)
    result = run.result
    assert result == Result(result.reason, 0, tmp_path / "a", reports[-1])
    assert result.reason.startswith("every policy has learned from ")
    last = read_metrics(tmp_path / "a" / "metrics.jsonl")[-1]
    assert result.report.env_steps == last["env_steps"] >= 3000
    assert result.report.figures[0]["reward/mean"] == result.report.episode_return == last["reward/mean"]
    assert state() == before
    assert result.reason in (tmp_path / "a" / "README.md").read_text()

    again = train(flags)
    assert (again.exit_code, again.report.env_steps) == (0, last["env_steps"])
    assert again.reason.startswith("finished before: ")
    more = train(flags, train_for_env_steps=4000)
    assert more.report.env_steps >= 4000
    assert load_policy(tmp_path / "a").env_steps == more.report.env_steps


def test_stopping_saves(tmp_path: Path) -> None:
    with Training(SMALL, train_dir=str(tmp_path), experiment="a", report_seconds=0.0) as run:
        with pytest.raises(UsageError, match="has not ended"):
            _ = run.result
        for report in run:
            if report.env_steps >= 500:
                weights = run.weights()
                run.stop()
    assert (run.result.reason, run.result.exit_code) == ("stopped by the program", 130)
    policy = load_policy(run.directory)
    assert policy.env_steps == run.result.report.env_steps >= 500
    assert {name: value.shape for name, value in policy.get_weights().items()} == {
        name: value.shape for name, value in weights.items()
    }
    policy.set_weights(weights)


def test_stopping_on_a_disk_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Checkpointing, *, regular: bool = True) -> None:
        raise ResourceError("the disk is full")

    run = Training(SMALL, train_dir=tmp_path, experiment="a", report_seconds=0.0)

    def stop() -> None:
        with run:
            for report in run:
                if report.env_steps:
                    monkeypatch.setattr(Checkpointing, "finish", refuse)
                    run.stop()

    with pytest.raises(NotSaved, match="stopped by the program, and what was learned last is not saved: the disk is"):
        stop()
    assert run.result.exit_code == 74


def test_a_run_ends_where_another_one_has_begun_in_the_place_of_its_folder(tmp_path: Path) -> None:
    run = Training(SMALL, train_dir=tmp_path, experiment="a", report_seconds=0.0, save_every_sec=1)
    folder = tmp_path / "a"

    def lose_the_folder() -> None:
        with run, contextlib.ExitStack() as other:
            reports = iter(run)
            assert next(report for report in reports if report.env_steps)
            theirs = tmp_path / "theirs"
            theirs.mkdir()
            other.enter_context(RunLock(theirs / ".lock"))
            (theirs / "config.json").write_text("theirs")
            for number in itertools.count():  # again if the run is faster, which makes its folder anew
                folder.rename(tmp_path / f"elsewhere_{number}")
                with contextlib.suppress(OSError):
                    theirs.rename(folder)
                    break
            for _ in reports:
                pass

    with pytest.raises(DirectoryInUse, match="run a is in use by pid") as caught:
        lose_the_folder()
    assert caught.value.exit_code == 75
    assert (folder / "config.json").read_text() == "theirs"
    assert not list(folder.glob("checkpoint_*"))


def test_leaving_the_block_stops_and_saves_also_with_an_error(tmp_path: Path) -> None:
    run = Training(SMALL, train_dir=tmp_path, experiment="a", report_seconds=0.0)

    def fail() -> None:
        with run:
            for report in run:
                if report.env_steps:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert run.result.exit_code == 130
    assert load_policy(tmp_path / "a").env_steps == run.result.report.env_steps > 0
    with Training(SMALL, train_dir=tmp_path, experiment="b") as never:
        pass
    assert never.result.reason == "ended before it began"
    with pytest.raises(UsageError, match="only a run that is being iterated over"):
        Training(SMALL).save()


def test_a_run_that_trains_nothing_leaves_its_page(tmp_path: Path) -> None:
    with pytest.raises(NothingTrained):
        train(SMALL, train_dir=tmp_path, experiment="a", train_for_seconds=0.2, rollout=1024, batch_size=1 << 20)
    assert "nothing is trained" in (tmp_path / "a" / "README.md").read_text()


def test_ctrl_c_while_the_page_is_written_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.run.main.leave_page", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, train_dir=tmp_path, experiment="a", train_for_env_steps=500)
    assert load_policy(tmp_path / "a").env_steps >= 500


def test_ctrl_c_saves_and_is_passed_on(tmp_path: Path) -> None:
    def run() -> None:
        with Training(SMALL, train_dir=tmp_path, experiment="a", report_seconds=0.0) as training:
            for report in training:
                if report.env_steps:
                    os.kill(os.getpid(), signal.SIGINT)

    before = state()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert load_policy(tmp_path / "a").env_steps > 0
    assert state() == before


@pytest.mark.parametrize("inference", ["serial", pytest.param("local", marks=pytest.mark.slow)])
def test_it_runs_in_any_thread(tmp_path: Path, inference: str) -> None:
    results: list[Result] = []
    flags = SMALL | {"train_dir": tmp_path, "train_for_env_steps": 1000, "inference": inference}
    before = state()[:4]
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.append(train(flags)))
        thread.start()
        thread.join(HANG_SECONDS)
    assert [result.directory.name for result in results] == ["Counter-v0_1", "Counter-v0_2"]
    assert all(result.report.env_steps >= 1000 for result in results)
    assert state()[:4] == before
    assert not multiprocessing.active_children()


def test_weights_can_be_set_while_it_trains(tmp_path: Path) -> None:
    flags = SMALL | {"train_dir": tmp_path, "experiment": "a", "learning_rate": 0.0, "normalize_input": False}
    with Training(flags, report_seconds=0.0, normalize_returns=False) as run:
        for report in run:
            if report.env_steps:
                weights = {name: value + 1.0 for name, value in run.weights().items()}
                run.set_weights(weights)
                break
        with pytest.raises(UsageError, match=r"^the model has no weights wrong$"):
            run.set_weights({**weights, "wrong": 1})
        name = next(iter(weights))
        with pytest.raises(UsageError, match=rf"^weights {name} must have shape .*, got none$"):
            run.set_weights({other: value for other, value in weights.items() if other != name})
        with pytest.raises(UsageError, match="there is no policy 1 whose weights can be set"):
            run.set_weights(weights, policy=1)
    kept = load_policy(run.directory).get_weights()
    assert all(np.array_equal(kept[name], weights[name]) for name in weights)
    with pytest.raises(UsageError, match="weights can only be set while a run trains"):
        run.set_weights(weights)
    with pytest.raises(UsageError, match="there is no policy 0 whose weights can be set"):
        Training(flags).set_weights(weights)


@pytest.mark.slow
def test_it_is_evaluated_while_it_trains(tmp_path: Path) -> None:
    with Training(SMALL, train_dir=tmp_path, experiment="a", report_seconds=0.0) as run:
        for report in run:
            if report.env_steps:
                break
        before = run.report().env_steps
        found = run.evaluate(episodes=3, seed=7, flags={"horizon": 2})
        assert [(one["mode"], one["episodes"]) for one in found] == [("sampled", 3), ("most_probable", 3)]
        assert all(one["env_steps"] >= report.env_steps for one in found)
        assert run.report().env_steps > before
        with pytest.raises(UsageError, match=r"^appo evaluate failed: .*--flags gamma: an evaluation plays"):
            run.evaluate(flags={"gamma": 0.5})
    kept = read_metrics(run.directory / "eval" / "results.jsonl")
    assert [one["mean"] for one in kept] == [one["mean"] for one in found]


@pytest.mark.slow
def test_a_callback_that_saves_is_turned_off_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Saves(Callbacks):
        def on_train_result(self, policy: int, figures: dict[str, float]) -> None:
            with pytest.raises(UsageError, match="a step of the run is under way"):
                run.set_weights(run.weights())
            run.save()

    run = Training(SMALL, train_dir=str(tmp_path), experiment="a", train_for_env_steps=2000, callbacks=[Saves()])
    with run:
        for _ in run:
            pass
    assert run.result.report.env_steps >= 2000
    text = "a step of the run is under way: save, evaluate and set weights between two reports"
    assert text in caplog.text
    assert text in " ".join(RunFolder(run.directory).read_status()["warnings"])


def test_a_run_is_entered_once(tmp_path: Path) -> None:
    run = Training(SMALL, train_dir=str(tmp_path), experiment="a", train_for_env_steps=500)
    with pytest.raises(UsageError, match="enter the run first"):
        next(iter(run))
    with run:
        for _ in run:
            pass
    with pytest.raises(UsageError, match="make another Training"), run:
        pass
    assert run.result.report.env_steps >= 500


def test_it_is_exported_while_it_trains(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with Training(SMALL, train_dir=tmp_path, experiment="a", report_seconds=0.0) as run:
        for report in run:
            if report.env_steps:
                assert run.export(tmp_path / "policy.onnx") == tmp_path / "policy.onnx"
                break
    assert (tmp_path / "policy.onnx").stat().st_size > 100


def test_reports_wait_for_env_steps_and_metrics_are_of_chosen_workers(tmp_path: Path) -> None:
    flags = SMALL | {"train_dir": tmp_path, "experiment": "a", "train_for_env_steps": 3000}
    with Training(flags, report_seconds=0.0, report_env_steps=1000) as run:
        with pytest.raises(UsageError, match="has not begun"):
            run.collect_metrics()
        seen = []
        for report in run:
            seen.append(report.env_steps)
            found = run.collect_metrics()
    *regular, _ = seen  # the last one comes at the end, whenever that is
    assert all(later - earlier >= 1000 for earlier, later in zip([0, *regular], regular, strict=False))
    assert seen[0] >= 1000  # it was looked at after every turn, from 0 on
    assert found.keys() == {"actor_0", "main"}
    assert found["actor_0"]["collected"] >= 3000
    assert sum(found["main"].values()) == pytest.approx(1.0)
    assert run.collect_metrics(["actor_0"]) == {"actor_0": run.collect_metrics()["actor_0"]}
    with pytest.raises(UsageError, match=r"^no worker actor_1 has reported; did you mean actor_0\?$"):
        run.collect_metrics(["actor_1"])


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (
            {"env": "CartPole-v1", "lerning_rate": 1},
            {},
            "config: unknown flag lerning_rate; did you mean learning_rate",
        ),
        ({}, {"env": "CartPole-v1", "gamma": "high"}, "flags: --gamma must be a finite number, got high"),
        ({"model": {"gamma": 0.9}}, {}, "config: gamma is a flag of learning, not of model"),
        ({"gamma": 0.9, "learning": {"gamma": 0.9}}, {}, "config: gamma is there twice"),
        ({"learning": {3: 4}}, {}, "config: 3 is no name of a flag"),
        ({}, {}, "--env is required"),
    ],
)
def test_wrong_flags_are_one_line(config: dict[str, Any], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Training(config, **flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_by_part_and_a_whole_config(tmp_path: Path) -> None:
    nested = Training({"env": {"env": "CartPole-v1"}, "learning": {"gamma": 0.9}}, train_dir=tmp_path, gamma=0.8)
    assert (nested.config.learning.gamma, nested.config.env.env) == (0.8, "CartPole-v1")
    assert Training(nested.config).config == nested.config
    assert np.isclose(Training(nested.config, gamma=0.7).config.learning.gamma, 0.7)


SCRIPT = """
from appo import train
train(env="toy/Counter-v0", inference="local", num_workers=1, train_for_env_steps=100, train_dir="runs")
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 1
    assert 'put what it does under `if __name__ == "__main__":`' in done.stderr


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python_api.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert names["result"].exit_code == 0
    assert names["run"].result.reason == "stopped by the program"
