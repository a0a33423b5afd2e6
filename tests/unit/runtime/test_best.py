import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from appo.algorithms.runtime.best_checkpoint import load_best
from appo.algorithms.runtime.memory.state_files import encode
from appo.algorithms.runtime.messages import SaveState
from appo.utils import checkpoint_files, failpoints
from tests.unit.runtime.test_checkpointing import TABLE, Saving, names, state_of


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


def best_of(directory: Path) -> dict[str, object]:
    """Name and mark of the only checkpoint in best/."""
    (name,) = [name for name in names(directory / "checkpoint_p0" / "best") if name.startswith("ckpt")]
    state = json.loads(checkpoint_files.read(directory / "checkpoint_p0" / "best" / name, "state.json", 1 << 20))
    return {"name": name, **state["best"]}


BEST = {"save_best_after": 100, "save_best_every_sec": 10, "save_every_sec": 1000}


def test_the_best_is_kept_alone_and_beside_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST)
    saving.played(9.0, 9.0, env_steps=99)
    assert saving.asked(10.0) == []  # too early
    saving.played(1.0, 3.0, env_steps=100)
    assert saving.asked(9.9) == []  # not looked at yet
    assert saving.asked(0.1) == [SaveState(0)]
    saving.learned(100)
    assert best_of(tmp_path) == {"name": "ckpt_000000000100", "metric": "reward/mean", "value": 2.0}
    assert names(tmp_path / "checkpoint_p0") == ["best"]  # what was asked for, nothing else
    saving.played(0.0, 4.0, env_steps=200)
    assert saving.asked(10.0) == []  # as good is not better
    saving.played(5.0, env_steps=300)
    assert saving.asked(10.0) == [SaveState(0)]
    saving.learned(300)
    assert best_of(tmp_path) == {"name": "ckpt_000000000300", "metric": "reward/mean", "value": 4.5}
    saving.played(8.0, 9.0, env_steps=400)
    saving.blocks[0].write(state_of(400))
    saving.checkpointing.finish()  # better at the very end
    assert best_of(tmp_path) == {"name": "ckpt_000000000400", "metric": "reward/mean", "value": 8.5}
    assert names(tmp_path / "checkpoint_p0") == ["best", "ckpt_000000000400"]


def test_a_window_that_is_not_full_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST)
    saving.played(9.0, env_steps=200)
    assert saving.asked(10.0) == []
    saving.played(9.0, env_steps=200)
    assert saving.asked(10.0) == [SaveState(0)]


def test_what_is_not_finite_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST)
    saving.played(9.0, math.inf, env_steps=200)
    assert saving.asked(10.0) == []
    saving.played(9.0, 8.0, env_steps=300)
    assert saving.asked(10.0) == [SaveState(0)]


def test_without_save_best_after_none_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST | {"save_best_after": -1})
    saving.played(9.0, 9.0, env_steps=200)
    assert saving.asked(10.0) == []


def test_the_best_by_another_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST, save_best_metric="len/min")
    saving.played(9.0, 9.0, env_steps=200)
    assert saving.asked(10.0) == []
    saving.monitor.policies[0].length.append([7, 8])
    assert saving.asked(10.0) == [SaveState(0)]
    saving.learned(200)
    assert best_of(tmp_path) == {"name": "ckpt_000000000200", "metric": "len/min", "value": 7.0}
    # Measured otherwise, whatever comes first is the best.
    again = Saving(tmp_path, monkeypatch, **BEST)
    again.played(-5.0, -5.0, env_steps=300)
    assert again.asked(10.0) == [SaveState(0)]


def test_a_metric_that_no_episode_reports_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST, save_best_metric="stats/foo/mean")
    for env_steps in (200, 300):
        saving.played(9.0, 9.0, env_steps=env_steps)
        assert saving.asked(10.0) == []
    assert caplog.messages == ["no episode has reported stats/foo (--save_best_metric) so far, only reward, len"]


def test_a_later_start_knows_the_best_and_replaces_it_by_a_better_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST)
    saving.played(8.0, 8.0, env_steps=900)
    saving.asked(10.0)
    saving.learned(900)
    again = Saving(tmp_path, monkeypatch, **BEST)  # from an older checkpoint, after a crash
    again.played(7.0, 8.0, env_steps=300)
    assert again.asked(10.0) == []
    again.played(9.0, env_steps=400)
    assert again.asked(10.0) == [SaveState(0)]
    again.learned(400)
    assert best_of(tmp_path) == {"name": "ckpt_000000000400", "metric": "reward/mean", "value": 8.5}


def test_copies_beside_the_best_are_neither_taken_for_it_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST)
    saving.played(8.0, 8.0, env_steps=900)
    saving.asked(10.0)
    saving.learned(900)
    folder = tmp_path / "checkpoint_p0" / "best"
    copies = ["ckpt_000000000900 (copy)", "ckpt_000000000900.bak", "ckpt_9000"]
    for name in copies:
        shutil.copytree(folder / "ckpt_000000000900", folder / name)
    again = Saving(tmp_path, monkeypatch, **BEST)
    assert names(folder) == ["ckpt_000000000900", *copies]
    again.played(9.0, 9.0, env_steps=1000)
    assert again.asked(10.0) == [SaveState(0)]
    again.learned(1000)
    assert names(folder) == [*copies[:2], "ckpt_000000001000", copies[2]]


def test_of_two_best_ones_a_crash_left_the_better_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "checkpoint_p0" / "best"
    for env_steps, value in ((500, 3.0), (700, 2.0), (900, 99.0)):
        state = state_of(env_steps)
        state.meta["best"] = {"metric": "reward/mean", "value": value}
        checkpoint_files.save(parent, checkpoint_files.checkpoint_name(env_steps), encode(state, TABLE))
    (parent / "ckpt_000000000900" / "model.safetensors").write_bytes(b"")
    saving = Saving(tmp_path, monkeypatch, **BEST)
    assert best_of(tmp_path) == {"name": "ckpt_000000000500", "metric": "reward/mean", "value": 3.0}
    assert names(parent) == ["ckpt_000000000500", "corrupt"]
    saving.played(2.0, 3.0, env_steps=1000)
    assert saving.asked(10.0) == []


def test_between_saving_a_best_and_removing_the_one_before_the_better_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disarm: None
) -> None:
    """It may have fewer env steps than the other, after training went back to an older checkpoint."""
    saving = Saving(tmp_path, monkeypatch, **BEST)
    saving.played(8.0, 8.0, env_steps=900)
    saving.asked(10.0)
    saving.learned(900)
    again = Saving(tmp_path, monkeypatch, **BEST)
    again.played(9.0, 9.0, env_steps=400)
    again.asked(10.0)
    failpoints.arm("ckpt.prune:raise")
    with pytest.raises(failpoints.FailpointError):
        again.learned(400)
    failpoints.arm("")
    parent = tmp_path / "checkpoint_p0" / "best"
    assert names(parent) == ["ckpt_000000000400", "ckpt_000000000900"]
    for metric, step in (("reward/mean", 400), ("len/mean", 900)):  # by no metric of theirs, the newer
        loaded = load_best(parent, metric)
        assert loaded is not None
        assert loaded.found == (parent / f"ckpt_{step:012d}", step, ())
    (parent / "ckpt_000000000400" / "state.json").write_bytes(b"{}")
    loaded = load_best(parent, "reward/mean")
    assert loaded is not None
    assert (loaded.found.step, [path.name for path, _ in loaded.found.damaged]) == (900, ["ckpt_000000000400"])
    assert load_best(tmp_path, "reward/mean") is None


def test_a_best_that_a_full_disk_refused_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disarm: None
) -> None:
    saving = Saving(tmp_path, monkeypatch, **BEST)
    saving.played(8.0, 8.0, env_steps=900)
    saving.asked(10.0)
    failpoints.arm("ckpt.rename:enospc")
    saving.learned(900)
    failpoints.arm("")
    assert names(tmp_path / "checkpoint_p0" / "best") == []
    assert saving.asked(10.0) == [SaveState(0)]
    saving.learned(901)
    assert best_of(tmp_path)["name"] == "ckpt_000000000901"
