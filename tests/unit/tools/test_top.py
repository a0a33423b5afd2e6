import json
import os
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms import cli
from appo.algorithms.tools.top import ObservedRun
from appo.utils.errors import UsageError
from appo.utils.lock import RunLock
from tests.unit.run.test_summary import flags, reports, write_run
from tests.unit.runtime.monitor.test_panel import OVERVIEW
from tests.unit.runtime.terminals import Terminal

STATUS: dict[str, Any] = {
    **OVERVIEW.plain(),
    "state": "training",
    "reason": "",
    "totals": {"env_steps": 600, "samples": 150, "restarts": 1},
    "share": 0.6,
    "budget": {"env_steps": 1000},
    "time": 1.0,
}
RUN_FILES = (".lock", "config.json", "metrics.jsonl", "status.json")


def living(tmp_path: Path, **changed: Any) -> Path:
    return write_run(
        tmp_path / "train_dir" / "a", config=flags(), status=STATUS | changed, metrics=reports(1.0, 2.0, 3.0)
    )


def shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> list[str]:
    assert cli.run("top", [*argv, f"--train_dir={tmp_path / 'train_dir'}"]) == 0
    return capsys.readouterr().out.splitlines()


def test_into_a_pipe_goes_the_panel_as_text_and_nothing_is_touched(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    directory = living(tmp_path, performance=STATUS["performance"] | {"cores": 2.5})  # of a quota
    with RunLock(directory / ".lock"):
        before = {name: (directory / name).stat().st_mtime_ns for name in RUN_FILES}
        lines = shown(capsys, tmp_path, "a")
        assert {name: (directory / name).stat().st_mtime_ns for name in RUN_FILES} == before
    assert lines[0].startswith("╭─ a · CartPole-v1 · training ─")
    assert {len(line) for line in lines[:-1]} == {72}
    text = "\n".join(lines)
    assert "60% of 1000 env steps, 25 min left" in text
    words = "475.31", "all 2 cores are full, 61% of it environment", "of 2.5 cores busy"
    for said in (*words, "1.3 GiB of memory", "! 12:00:01 actor_1"):
        assert said in text
    assert lines[-1].startswith("training; last heard of ")


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("training", "", "crashed: it ended without a word, last heard of "),
        ("finished", "the mean return has reached 475.00", "finished: the mean return has reached 475.00; ended "),
        ("failed", "a\x1b[2Jb", "failed: 'a\\x1b[2Jb'; ended "),
    ],
)
def test_a_run_that_is_over_is_shown_with_a_clear_line(tmp_path: Path, capsys, state, reason, expected) -> None:
    living(tmp_path, state=state, reason=reason)
    assert shown(capsys, tmp_path)[-1].startswith(expected)  # the last active run, if none is named


def test_a_run_of_an_older_version_is_shown_by_its_metrics(tmp_path: Path, capsys) -> None:
    status = {"state": "finished", "totals": {"env_steps": 300}, "performance": {"roles": 1}}
    write_run(tmp_path / "train_dir" / "a", config=flags(), status=status, metrics=reports(1.0, 2.0, 3.25))
    text = "\n".join(shown(capsys, tmp_path, "a"))
    assert "3.25" in text
    assert "300 env steps" in text


def test_steps_and_share_are_of_the_same_moment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    living(tmp_path, totals={"env_steps": 200}, share=0.2)  # the records know of 300
    text = "\n".join(shown(capsys, tmp_path, "a"))
    assert "20% of 1000 env steps" in text
    assert "200 env steps" in text


@pytest.mark.parametrize("junk", [None, [], "x", {"a": []}, [[]], [{"reward/mean": "1"}], 10**400, -1, True])
def test_whatever_stands_in_a_status_it_is_shown(tmp_path: Path, capsys, junk: Any) -> None:
    directory = living(tmp_path)
    for name in STATUS:
        (directory / "status.json").write_text(json.dumps(STATUS | {name: junk}))
        assert len(shown(capsys, tmp_path, "a")) > 5


def test_what_is_added_to_the_metrics_is_read_once(tmp_path: Path) -> None:
    directory = living(tmp_path)
    watched = ObservedRun(directory)
    assert len(watched.look().trace) == 3
    more = [{"elapsed_seconds": 5 + i, "policy": 0, "env_steps": 900 + i, "reward/mean": 7.0 + i} for i in range(2)]
    with open(directory / "metrics.jsonl", "a") as file:
        file.write(json.dumps(more[0]) + "\n" + json.dumps(more[1])[:20])
        file.flush()
        assert watched.look().trace.last == 7.0
        file.write(json.dumps(more[1])[20:] + "\n")
    assert watched.look().trace.last == 8.0
    (directory / "metrics.jsonl").write_text(json.dumps({"policy": 0, "elapsed_seconds": 0, "reward/mean": 1.0}) + "\n")
    assert len(watched.look().trace) == 1  # another run in its place


def test_on_a_terminal_it_stays_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = living(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    looks: list[float] = []

    def ends_meanwhile(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            (directory / "status.json").write_text(json.dumps(STATUS | {"state": "finished", "reason": "enough"}))

    monkeypatch.setattr("appo.algorithms.tools.top.time.sleep", ends_meanwhile)
    with Terminal() as terminal, RunLock(directory / ".lock"):
        assert cli.run("top", [str(directory), "--interval_seconds=0.5"]) == 0
        lines = terminal.lines()
    assert looks == [0.5, 0.5]
    assert lines[0].startswith("╭─ a · CartPole-v1 · finished ─")
    assert lines[-1].startswith("finished: enough; ended ")


def test_a_run_that_goes_meanwhile_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = living(tmp_path / "x"), living(tmp_path / "y")
    second = second.rename(tmp_path / "b")
    monkeypatch.setenv("TERM", "xterm")
    looks: list[float] = []

    def ends_meanwhile(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            second.rename(tmp_path / "elsewhere")
        if len(looks) == 2:
            (first / "status.json").write_text(json.dumps(STATUS | {"state": "finished", "reason": "enough"}))
            monkeypatch.setattr("appo.algorithms.tools.top.BETWEEN_RUNS_SECONDS", 0.0)

    monkeypatch.setattr("appo.algorithms.tools.top.time.sleep", ends_meanwhile)
    with Terminal() as terminal, RunLock(first / ".lock"), RunLock(second / ".lock"):
        assert cli.run("top", [str(first), str(second)]) == 0
        lines = terminal.lines()
    assert len(looks) >= 2
    last = "".join(lines[-3:]).replace(" ", "")  # the terminal breaks a long path
    assert "a:finished:enough;ended" in last
    assert last.endswith("isgone")


@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (20, 5), (12, 2), (59, 30), (100, 8)])
def test_on_a_small_terminal_nothing_wraps_and_what_matters_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, rows: int
) -> None:
    directory = living(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    seen: list[list[str]] = []

    def look(seconds: float) -> None:
        terminal.read()
        seen.append(list(terminal.screen.display))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("appo.algorithms.tools.top.time.sleep", look)
    with Terminal(columns, rows) as terminal, RunLock(directory / ".lock"):
        assert cli.run("top", [str(directory)]) == 0
    assert seen[0] == seen[1], "a frame takes the place of the one before, however small the terminal"
    lines = [line.rstrip() for line in seen[1] if line.strip()]
    assert len(lines) < rows
    text = "\n".join(lines)
    assert "60%" in text
    for needed, words in (
        (4, "return 475.3"),
        (4, "600 env steps"),
        (10, "of the limit"),
        (10, "all 2 cores are full"),
    ):
        assert words in text or rows < needed + 1 or columns < 20
    assert all(len(line) < columns for line in lines)


def test_ctrl_c_leaves_the_terminal_and_the_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = living(tmp_path)
    monkeypatch.setenv("TERM", "xterm")

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("appo.algorithms.tools.top.time.sleep", interrupted)
    with Terminal() as terminal, RunLock(directory / ".lock"):
        assert cli.run("top", [str(directory)]) == 0
        assert terminal.lines()[-1].startswith("training; last heard of ")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["b"], "no run b, neither in train_dir nor as a path; did you mean"),
        (["bb", "b"], "no run b, neither in train_dir nor as a path; did you mean"),
        (["--train_dir=nowhere"], "there is no run in nowhere: --train_dir names the folder of all runs"),
        ([f"--train_dir={'x' * 300}"], f"cannot list {'x' * 77}...: File name too long"),
        (["b", f"--train_dir={'x' * 300}"], f"no run b, neither in {'x' * 77}... nor as a path"),
        (["--onec"], "unknown flag --onec; did you mean --once?"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv, expected) -> None:
    write_run(tmp_path / "train_dir" / "bb", config=flags(), status=STATUS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        cli.run("top", argv)
    assert expected in str(caught.value)
    assert os.listdir() == ["train_dir"]
