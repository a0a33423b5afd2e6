import json
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms import cli
from appo.utils.errors import UsageError
from tests.unit.run.test_summary import write_run


def record(seconds: float, env_steps: int, value: float) -> dict[str, Any]:
    return {"elapsed_seconds": seconds, "policy": 0, "env_steps": env_steps, "reward/mean": value}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    flags = {"env": "CartPole-v1", "seed": 1, "learning_rate": 1e-4, "train_dir": "./train_dir", "gamma": 0.99}
    finished = {"state": "finished", "totals": {}}
    slow = [record(0, 0, 0.0), record(7200, 1000, 100.0)]
    fast = [record(0, 0, 10.0), record(1800, 1000, 50.0), record(3600, 2000, 30.0)]
    write_run(tmp_path / "train_dir" / "slow", config=flags, status=finished, metrics=slow)
    changed = flags | {"seed": 2, "learning_rate": 2.5e-4, "train_dir": "/elsewhere", "rollout": 16}
    write_run(tmp_path / "train_dir" / "fast", config=changed, status=finished, metrics=fast)
    return tmp_path


def test_a_table_of_what_differs(folder: Path, capsys) -> None:
    assert cli.run("compare", ["slow", "fast"]) == 0
    assert (
        capsys.readouterr().out
        == """\
                          slow      fast

flags that differ
seed                         1         2
learning_rate           0.0001   0.00025
rollout                     32        16

state                 finished  finished
env steps                 1000      2000
time                     2.0 h    60 min
env steps per second         0         1
final return            100.00     30.00
best return             100.00     50.00

mean return after env steps
100                      10.00     14.00
250                      25.00     20.00
500                      50.00     30.00
750                      75.00     40.00
1000                    100.00     50.00

mean return after
6 min                     5.00     18.00
15 min                   12.50     30.00
30 min                   25.00     50.00
45 min                   37.50     40.00
60 min                   50.00     30.00
"""
    )


def test_the_best_return_is_of_a_full_window(folder: Path, capsys) -> None:
    metrics = [record(i, i, value) | {"reward/episodes": 60 * i} for i, value in enumerate((9.0, 8.0, 3.0, 2.0))]
    write_run(folder / "lucky", config={"env": "CartPole-v1"}, status={"state": "finished"}, metrics=metrics)
    assert cli.run("compare", ["train_dir/slow", str(folder / "lucky"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["best_return"] == [100.0, 3.0]


def test_the_same_for_programs_and_more_than_two_runs(folder: Path, capsys) -> None:
    empty = write_run(folder / "empty", config={"env": "CartPole-v1"}, status={"state": "starting"})
    assert cli.run("compare", ["slow", "train_dir/fast", str(empty), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == ["slow", "train_dir/fast", str(empty)]
    assert found["flags"]["learning_rate"] == [1e-4, 2.5e-4, 1e-4]
    assert "train_dir" not in found["flags"]
    assert found["results"]["state"] == ["finished", "finished", "crashed"]
    assert found["results"]["best_return"] == [100.0, 50.0, None]
    assert found["return_at_env_steps"]["1000.0"] == [100.0, 50.0, None]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["slow"], "appo compare needs two runs or more, got 1"),
        (["slow", "fats"], "no run fats, neither in train_dir nor as a path; did you mean fast?"),
        (["slow", "fast", "--jsno"], "unknown flag --jsno; did you mean --json?"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, argv: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        cli.run("compare", argv)
    assert str(caught.value) == expected
