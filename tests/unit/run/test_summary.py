"""`appo runs`: folders as runs leave them, and as they should not."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms import cli
from appo.algorithms.run.summary import RunSummary, summaries, summary
from appo.utils import checkpoint_files
from appo.utils.lock import RunLock

NOW = 1_700_000_000.0


def write_run(
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    metrics: list[dict[str, Any]] | None = None,
    active: float = NOW,
) -> Path:
    """A run directory with these files, last changed at that time."""
    directory.mkdir(parents=True)
    for name, content in (("config.json", config), ("status.json", status)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    if metrics is not None:
        lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in metrics]
        (directory / "metrics.jsonl").write_text("".join(lines))
    for path in directory.iterdir():
        os.utime(path, (active, active))
    return directory


def flags(**changed: Any) -> dict[str, Any]:
    return {"env": "CartPole-v1", "algo": "APPO", "num_policies": 1, "train_for_env_steps": 1000, **changed}


def reports(*returns: float | None, policy: int = 0) -> list[dict[str, Any]]:
    """A report for every mean return, 100 env steps apart; None: no episode has ended yet."""
    return [
        {"elapsed_seconds": i, "policy": policy, "env_steps": 100 * (i + 1)}
        | ({} if value is None else {"reward/mean": value, "reward/max": value + 1000})
        for i, value in enumerate(returns)
    ]


def keep_best(directory: Path, value: float, metric: str = "reward/mean", policy: int = 0) -> None:
    state = {"env_steps": 100, "best": {"metric": metric, "value": value}}
    files = {"state.json": json.dumps(state).encode()}
    checkpoint_files.save(directory / f"checkpoint_p{policy}" / "best", checkpoint_files.checkpoint_name(100), files)


def found(directory: Path) -> RunSummary:
    run = summary(directory)
    assert run is not None
    return run


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.run("runs", argv) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_everything_that_is_said_of_a_run(tmp_path: Path) -> None:
    totals = {"env_steps": 750}
    status = {"state": "finished", "reason": "enough", "share": 0.75, "totals": totals, "return_mean": [15.0]}
    directory = write_run(
        tmp_path / "a", config=flags(), status=status, metrics=reports(None, 20.0, 31.5, -4.0), active=NOW
    )
    assert found(directory) == RunSummary(
        "a", "CartPole-v1", "APPO", "finished", "enough", 750, 0.75, None, 31.5, 15.0, NOW
    )
    status["return_mean"] = []  # no episode has ended since it was started again
    (directory / "status.json").write_text(json.dumps(status))
    assert found(directory).last_return == -4.0
    status["return_mean"] = [40.0]  # newer than the last report
    (directory / "status.json").write_text(json.dumps(status))
    assert (found(directory).best_return, found(directory).last_return) == (40.0, 40.0)


@pytest.mark.parametrize("state", ["starting", "training"])
def test_a_run_that_trains_and_one_that_has_crashed(tmp_path: Path, state: str) -> None:
    """As soon as nobody holds the lock, whoever says that it trains is dead."""
    directory = write_run(tmp_path / "a", config=flags(), status={"state": state, "totals": {}})
    assert found(directory).state == "crashed"  # no lock was ever taken
    with RunLock(directory / ".lock") as lock:
        assert found(directory).state == state
        lock.release()
        assert found(directory).state == "crashed"
    with RunLock(directory / ".lock"):  # having looked leaves nothing behind that would keep others out
        assert found(directory).state == state


@pytest.mark.parametrize("state", ["finished", "interrupted", "failed"])
def test_a_run_that_has_ended(tmp_path: Path, state: str) -> None:
    directory = write_run(tmp_path / "a", config=flags(), status={"state": state, "totals": {"env_steps": 1}})
    assert found(directory).state == state


def test_a_run_that_failed_before_its_flags_were_saved(tmp_path: Path) -> None:
    status = {"state": "failed", "reason": "there is no environment X", "totals": {}, "return_mean": []}
    run = found(write_run(tmp_path / "a", status=status))
    assert run == RunSummary("a", None, None, "failed", "there is no environment X", None, None, None, None, None, NOW)


def test_progress_of_a_run_whose_status_is_old(tmp_path: Path) -> None:
    """Killed before a status with counters was written: reports and flags know more. A torn last line is no report."""
    directory = write_run(tmp_path / "a", config=flags(), status={"state": "starting"}, metrics=reports(1.0, 2.0, 1.5))
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"elapsed_seconds":9,"policy":0,"env_steps":900,"reward/mean":9')
    run = found(directory)
    assert (run.state, run.env_steps, run.share, run.last_return) == ("crashed", 300, 0.3, 1.5)


def test_the_policy_that_is_furthest_says_how_far_a_population_is(tmp_path: Path) -> None:
    records = [{"policy": policy, "env_steps": steps} for policy, steps in enumerate((300, 450))]
    directory = write_run(tmp_path / "a", config=flags(), status={"state": "starting"}, metrics=records)
    assert (found(directory).env_steps, found(directory).share) == (750, 0.45)


def test_the_status_says_how_far_a_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = {"state": "training", "totals": {"env_steps": 250}, "seconds_left": 30.4, "share": 0.25}
    directory = write_run(tmp_path / "a", config=flags(), status=status)
    assert (found(directory).share, found(directory).seconds_left) == (0.25, None)  # crashed
    with RunLock(directory / ".lock"):
        assert (found(directory).share, found(directory).seconds_left) == (0.25, 30.4)
        assert "25%  30 s" in listed(capsys, f"--train_dir={tmp_path}")
    for written, share in ((None, None), ("half", None), (1e300, 1.0)):  # no limit, and edited twice
        (directory / "status.json").write_text(json.dumps(status | {"totals": {}, "share": written}))
        assert found(directory).share == share


def test_policies_are_taken_together(tmp_path: Path) -> None:
    both = [r for pair in zip(reports(1.0, 7.0, 3.0), reports(2.0, 5.0, 4.0, policy=1), strict=True) for r in pair]
    directory = write_run(tmp_path / "a", config=flags(num_policies=2), status={"state": "failed"}, metrics=both)
    run = found(directory)
    assert (run.env_steps, run.best_return, run.last_return) == (600, 7.0, 4.0)
    keep_best(directory, 6.0, policy=0)
    keep_best(directory, 6.5, policy=1)
    assert found(directory).best_return == 6.5


def test_a_policy_that_never_learns_has_no_best_return(tmp_path: Path) -> None:
    opponent = [{**one, "env_steps": 0} for one in reports(9.0, 9.0, policy=1)]
    metrics = [*reports(1.0, 3.0), *opponent]
    directory = write_run(tmp_path / "a", config=flags(num_policies=2), status={"state": "failed"}, metrics=metrics)
    assert (found(directory).best_return, found(directory).last_return) == (3.0, 3.0)


def test_the_first_episodes_to_end_are_not_the_best_return(tmp_path: Path) -> None:
    metrics = [one | {"reward/episodes": 60 * place} for place, one in enumerate(reports(9.0, 8.0, 3.0, 2.0))]
    directory = write_run(tmp_path / "a", config=flags(stats_avg=100), status={"state": "failed"}, metrics=metrics)
    assert found(directory).best_return == 3.0
    directory = write_run(tmp_path / "b", config=flags(stats_avg=200), status={"state": "failed"}, metrics=metrics)
    assert found(directory).best_return == 9.0  # no window is full


def test_the_best_checkpoint_knows_the_best_return(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "a", config=flags(), status={"state": "failed"}, metrics=reports(8.0, 3.0))
    keep_best(directory, 5.0, metric="stats/true_reward/mean")  # says nothing of returns
    assert found(directory).best_return == 8.0
    keep_best(directory, 5.0)
    assert found(directory).best_return == 5.0
    (directory / "checkpoint_p0/best/ckpt_000000000100/state.json").write_text("{")
    assert found(directory).best_return == 8.0


def test_only_the_end_of_a_long_log_is_read_where_that_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = reports(*(float(i % 97) for i in range(5000)))
    directory = write_run(tmp_path / "a", config=flags(), status={"state": "failed"}, metrics=many)
    assert (directory / "metrics.jsonl").stat().st_size > 4 * (1 << 16)
    run = found(directory)
    assert (run.best_return, run.last_return, run.env_steps) == (96.0, float(4999 % 97), 500_000)
    keep_best(directory, 96.0)

    def forbidden(metrics: Path) -> None:
        raise AssertionError(f"{metrics} is read as a whole")

    monkeypatch.setattr("appo.algorithms.run.summary._reported_returns", forbidden)
    assert found(directory) == run


DAMAGED: dict[str, tuple[str, str]] = {
    "torn_config": ("config.json", '{"env": "CartPole-v1", '),
    "config_is_no_mapping": ("config.json", "[]"),
    "torn_status": ("status.json", '{"state": "trai'),
    "empty_status": ("status.json", ""),
    "binary": ("status.json", "\udcff\udcfe"),
}
STRANGE: dict[str, dict[str, Any]] = {
    "numbers": {"state": 3, "reason": 4, "totals": 5},
    "lists": {"state": ["finished"], "totals": [1], "return_mean": {}, "share": [2], "seconds": {}},
    "nothing": {},
    "infinite": {"state": "finished", "totals": {"env_steps": None}},
}


def test_broken_runs_hide_no_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = {"state": "finished", "share": 1.0, "totals": {"env_steps": 1000}}
    write_run(tmp_path / "good", config=flags(), status=status)
    for name, (file, text) in DAMAGED.items():
        directory = write_run(tmp_path / name, config=flags(), status={"state": "finished"})
        (directory / file).write_bytes(text.encode(errors="surrogateescape"))
    for name, status in STRANGE.items():
        write_run(tmp_path / name, config=flags(env=7, num_policies="x", train_for_env_steps={}), status=status)
    directory = write_run(tmp_path / "noise", config=flags(), status={"state": "failed"})
    (directory / "metrics.jsonl").write_bytes(b'\0\xff\n[1]\n{"policy":0,"reward/mean":x}\n{"reward/mean":NaN,"a":1}\n')
    (tmp_path / "config_is_a_folder" / "config.json").mkdir(parents=True)
    (tmp_path / "no_run").mkdir()
    (tmp_path / "file").touch()
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    runs = {run.name: run for run in summaries({path.name: path for path in tmp_path.iterdir()})}
    assert set(runs) == {"good", "noise", "config_is_a_folder", *DAMAGED, *STRANGE}
    assert runs["good"] == RunSummary("good", "CartPole-v1", "APPO", "finished", "", 1000, 1.0, None, None, None, NOW)
    assert {runs[name].state for name in (*DAMAGED, "config_is_a_folder")} == {"damaged"}
    assert [runs[name].state for name in STRANGE] == ["unknown", "unknown", "unknown", "finished"]
    assert (runs["noise"].best_return, runs["noise"].last_return) == (None, None)
    assert runs["torn_status"].env == "CartPole-v1"
    assert len(listed(capsys, f"--train_dir={tmp_path}").splitlines()) == len(runs) + 1
    assert len(json.loads(listed(capsys, f"--train_dir={tmp_path}", "--json"))) == len(runs)


def test_the_last_active_run_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, active in (("b", 100.0), ("c", 300.0), ("a", 200.0), ("d", 200.0)):
        write_run(tmp_path / name, config=flags(), active=active)
    directory = write_run(tmp_path / "e", config=flags(), metrics=[], active=0.0)
    os.utime(directory / "metrics.jsonl", (250.0, 250.0))  # what was written last counts
    assert [run.name for run in summaries({path.name: path for path in tmp_path.iterdir()})] == [
        "c",
        "e",
        "a",
        "d",
        "b",
    ]
    names = [line.split()[0] for line in listed(capsys, f"--train_dir={tmp_path}").splitlines()]
    assert names == ["run", "c", "e", "a", "d", "b"]
    assert [run["name"] for run in json.loads(listed(capsys, f"--train_dir={tmp_path}", "--json"))] == names[1:]


def test_a_line_per_run_in_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"state": "finished", "share": 0.25, "totals": {"env_steps": 12345}}
    group = tmp_path / "group"
    write_run(group / "first", config=flags(train_for_env_steps=50_000), status=status, metrics=reports(1.0, 475.25))
    write_run(group / "other", config=flags(env="Acrobot-v1"), active=NOW - 7200)
    monkeypatch.setattr(time, "time", lambda: NOW + 150)
    assert listed(capsys, f"--train_dir={tmp_path}", "--experiments_root=group") == (
        "run    env          algo  state     env steps  budget  left  best return  last return     active\n"
        "first  CartPole-v1  APPO  finished     12,345     25%     -       475.25       475.25  2 min ago\n"
        "other  Acrobot-v1   APPO  unknown           -       -     -            -            -    2 h ago\n"
    )


def test_folders_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, f"--train_dir={tmp_path}") == f"no runs in {tmp_path}\n"
    assert listed(capsys, f"--train_dir={tmp_path}", "--json") == "[]\n"
    for argv, text in (
        ([f"--train_dir={tmp_path}/none"], f"error: there is no folder {tmp_path}/none: --train_dir names"),
        ([f"--train_dir={'x' * 300}"], f"error: cannot list {'x' * 77}...: File name too long"),
        ([f"--train_dir={tmp_path}", "--experiments_root=../x"], "error: --experiments_root=.. is no name"),
        (["--train_dri=x"], "error: unknown flag --train_dri; did you mean --train_dir?"),
    ):
        assert cli.run_command(lambda argv=argv: cli.run("runs", argv)) == 2  # type: ignore[misc]
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith(text)
