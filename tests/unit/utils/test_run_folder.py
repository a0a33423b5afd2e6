"""Where things lie in a run's folder, as its files on disk say."""

from pathlib import Path

import pytest

from utils.errors import UsageError
from utils.run_folder import RunFolder


def test_everything_lies_where_earlier_versions_have_left_it() -> None:
    run = RunFolder(Path("run"))
    found = (
        run.config, run.history, run.status, run.metrics, run.page, run.curve, run.lineage, run.lineage_picture,
        run.lock, run.logs, run.incidents, run.results, run.videos, run.summaries(1), run.evaluation_summaries(1),
    )  # fmt: skip
    assert [str(path.relative_to("run")) for path in found] == [
        "config.json", "config_history.jsonl", "status.json", "metrics.jsonl", "README.md",
        "plots/learning_curve.png", "lineage.json", "lineage.png", ".lock", "logs", "incidents", "eval/results.jsonl",
        "eval/videos", ".summary/p1", "eval/.summary/p1",
    ]  # fmt: skip
    assert run.log("actor_0") == Path("run/logs/actor_0.log").absolute()


def test_checkpoints_lie_by_policy_and_kind() -> None:
    run = RunFolder(Path("run"))
    kinds = ("best", "best_evaluated", "milestone", "past")
    assert str(run.checkpoints(0)) == "run/checkpoint_p0"
    assert [run.checkpoints(12, kind).relative_to("run/checkpoint_p12").name for kind in kinds] == [
        "best", "best_evaluated", "milestones", "past"
    ]  # fmt: skip


def test_policies_are_those_with_a_folder_that_is_named_as_ours(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert (run.policies(), run.checkpoint_folders()) == ([], [])
    for name in ("checkpoint_p10", "checkpoint_p2", "checkpoint_p02", "checkpoint_px", "checkpoint_p", "checkpoint_p٣"):
        (run.path / name).mkdir(parents=True)
    assert run.policies() == [2, 10]
    assert len(run.checkpoint_folders()) == 6


def test_flags_that_are_missing_are_none_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_config() == {}
    run.config.write_text('{"gamma": 0.5}')
    assert run.read_config() == {"gamma": 0.5}
    run.config.write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is damaged"):
        run.read_config()


@pytest.mark.parametrize("name", ["config", "status"])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    run, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    run.path.mkdir()
    other.write_text('{"secret": 1}')
    getattr(run, name).symlink_to(other)
    if name == "status":
        assert run.read_status() == {}
        return
    with pytest.raises(UsageError, match="cannot read"):
        run.read_config()
