"""Which console a run gets, and that none of them can harm it."""

import json
import logging
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.messages import LearnerReport, WorkerReport
from appo.algorithms.runtime.monitor import console
from appo.algorithms.runtime.monitor.console import (
    JsonReports,
    LivePanel,
    PlainLines,
    Title,
    aim_of,
    console_for,
    obstacle,
)
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.overview import Overview
from appo.utils.logging import JsonLines, configure
from tests.unit.runtime.monitor.test_monitor import episodes
from tests.unit.runtime.terminals import Terminal

TITLE = Title(Path("train_dir/a"), "CartPole-v1", "1k env steps", {})


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def monitor_of(directory: Path, shown_by: Any = None) -> Monitor:
    monitor = Monitor(directory, LoggingConfig(tensorboard=False), [{}], Budget(1000))
    monitor.console = shown_by or monitor.console
    return monitor


def config(log_format: str) -> LoggingConfig:
    return LoggingConfig(log_format=log_format)


def test_a_pipe_gets_plain_lines_and_is_told_so_only_if_it_asked_for_a_panel(caplog, capsys) -> None:
    assert type(console_for(config("auto"), TITLE)) is PlainLines
    assert caplog.messages == []
    assert type(console_for(config("panel"), TITLE)) is PlainLines
    assert caplog.messages == ["--log_format=panel: stdout is no terminal; plain lines instead"]
    assert type(console_for(config("json"), TITLE)) is JsonReports


def test_a_terminal_gets_a_panel_unless_it_is_not_wanted() -> None:
    with Terminal():
        assert type(console_for(config("auto"), TITLE)) is LivePanel
        assert type(console_for(config("panel"), TITLE)) is LivePanel
        assert type(console_for(config("plain"), TITLE)) is PlainLines
        assert type(console_for(config("json"), TITLE)) is JsonReports


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"TERM": "dumb"}, "TERM=dumb is a terminal without a cursor to move"),
        ({}, "TERM= is a terminal without a cursor to move"),
        ({"TERM": "xterm"}, None),
        ({"TERM": "xterm", "NO_COLOR": "1"}, None),
    ],
)
def test_what_keeps_a_panel_from_a_terminal(environment: dict[str, str], reason: str | None) -> None:
    with Terminal():
        assert obstacle(sys.stdout, environment) == reason


def test_a_terminal_of_another_encoding_gets_plain_lines() -> None:
    with Terminal() as terminal, open(terminal.slave, "w", encoding="latin-1", closefd=False) as stream:
        assert obstacle(stream, {"TERM": "xterm"}) == "the terminal's encoding is latin-1, not UTF-8"


def test_rich_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "find_spec", lambda name: None)
    with Terminal():
        assert obstacle(sys.stdout, {"TERM": "xterm"}) == "rich is not installed (pip install rich)"


def test_the_panel_is_drawn_once_a_second_and_stays_at_the_end(tmp_path: Path) -> None:
    with Terminal(columns=80) as terminal:
        monitor = monitor_of(tmp_path, console_for(LoggingConfig(), TITLE._replace(run=tmp_path / "CartPole-v1_7")))
        monitor.handle(episodes((0, 1.0, 10), (0, 4.0, 30)))
        frames = 0
        for tenth in range(31):
            monitor.console.tick(monitor.started + tenth / 10, monitor.overview)
            frames += terminal.read().count(b"CartPole-v1_7")
        monitor.close()
        print("finished")
        lines = terminal.lines()
    assert 1 <= frames <= 4  # fewer where drawing is slow
    assert lines[0].startswith("╭─ CartPole-v1_7 · CartPole-v1 · training ─")
    assert [line for line in lines if "2.50" in line]
    assert lines[-2].startswith("╰─")
    assert lines[-1] == "finished"
    assert len(lines) < 24


def test_a_terminal_that_becomes_too_small_gets_lines_until_it_is_large_again(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    with Terminal() as terminal:
        monitor = monitor_of(tmp_path, console_for(LoggingConfig(), TITLE))
        monitor.console.tick(1e9, monitor.overview)
        drawn = len(terminal.lines())
        assert drawn > 2
        terminal.resize(59, 24)
        monitor.console.tick(2e9, monitor.overview)
        assert terminal.read().decode() == f"\r\x1b[{2 * drawn}A\x1b[J"  # each of its lines has become two
        assert len(caplog.messages) == 1
        terminal.resize(100, 24)
        monitor.console.tick(3e9, monitor.overview)
        assert "╭─" in terminal.read().decode()
        assert len(caplog.messages) == 1
        monitor.close()


def test_a_mistake_in_drawing_turns_the_panel_off(tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("appo.algorithms.runtime.monitor.panel.draw", broken)
    caplog.set_level(logging.INFO)
    with Terminal() as terminal:
        stdout = sys.stdout
        monitor = monitor_of(tmp_path, console_for(LoggingConfig(), TITLE))
        monitor.console.tick(1e9, monitor.overview)
        assert caplog.messages == ["the panel is turned off: ZeroDivisionError: oh"]
        assert sys.stdout is stdout
        monitor.console.tick(2e9, monitor.overview)
        assert caplog.messages[1].startswith("env steps 0 at")
        assert terminal.read() == b""
        monitor.close()


def test_a_terminal_that_is_closed_turns_the_panel_off(tmp_path: Path, caplog) -> None:
    with Terminal() as terminal:
        monitor = monitor_of(tmp_path, console_for(LoggingConfig(), TITLE))
        monitor.console.tick(1e9, monitor.overview)
        terminal.hang_up()
        monitor.console.tick(2e9, monitor.overview)
        assert caplog.messages == ["the panel is turned off: OSError: [Errno 5] Input/output error"]
        monitor.console.tick(3e9, monitor.overview)
        monitor.close()


def test_json_lines_always_have_the_same_names(tmp_path: Path, capsys) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure("main", None, as_json=True)
        monitor = monitor_of(tmp_path, console_for(config("json"), TITLE))
        monitor.console.tick(monitor.started, monitor.overview)
        monitor.console.tick(monitor.started + 100.0, monitor.overview)
        monitor.handle(LearnerReport(0, 3, {"env_steps": 400, "samples": 100, "discarded": 0, "updates": 2}, {}))
        monitor.handle(WorkerReport("actor_0", {"collected": 110, "rebuilds": 2}))
        monitor.handle(episodes((0, 1.5, 10)))
        logging.getLogger("a").warning("two\nlines")
        monitor.console.tick(monitor.started + 200.0, monitor.overview)
        monitor.close()
    finally:
        root.handlers[:], root.level = before, level
    first, said, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [first.pop("event"), said.pop("event"), second.pop("event")] == ["report", "log", "report"]
    assert all(part.pop("time") > 0 for part in (first, said, second))
    assert said == {"level": "warning", "message": "two\nlines"}
    assert list(first) == list(second) == [field.name for field in fields(Overview) if field.name != "line"]
    assert (second["env_steps"], second["env_rebuilds"], second["share"]) == (400, 2, 0.4)
    assert second["policies"][0]["reward/mean"] == 1.5
    assert second["warnings"][-1].endswith(" two lines")


def test_json_says_what_a_formatter_says() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "%d%%", (5,), None)
    assert json.loads(JsonLines().format(record)) == {
        "event": "log", "time": record.created, "level": "info", "message": "5%"
    }  # fmt: skip


def test_an_overview_adds_up_and_says_what_memory_the_processes_take(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path)
    found = monitor.overview(monitor.started + 2.0)
    assert found.memory_bytes is None or found.memory_bytes > 1 << 20
    assert (found.elapsed_seconds, found.share, found.performance) == (2.0, 0.0, None)
    monitor.close()


@pytest.mark.parametrize(
    ("budget", "env_steps", "collected", "seconds", "expected"),
    [
        (Budget(1000), 250, 0, 5.0, 0.25),
        (Budget(1000, samples=100), 250, 0, 5.0, 0.5),
        (Budget(1000, seconds=10.0), 250, 0, 6.0, 0.6),
        (Budget(1000, seconds=0.0), 250, 0, 6.0, 1.0),
        (Budget(1000, collected=50), 0, 45, 6.0, 0.9),
        (Budget(1000), 2500, 0, 5.0, 1.0),
        (Budget(10**10, samples=2**62, seconds=1e10), 2500, 0, 5.0, None),
    ],
)
def test_the_share_is_that_of_the_nearest_limit(
    tmp_path: Path, budget: Budget, env_steps: int, collected: int, seconds: float, expected: float | None
) -> None:
    monitor = Monitor(tmp_path, LoggingConfig(tensorboard=False), [{}, {}], budget)
    for policy, more in ((0, 0), (1, 100)):  # the slowest policy counts
        totals = {"env_steps": env_steps + more, "samples": (env_steps + more) // 5, "discarded": 0, "updates": 0}
        monitor.handle(LearnerReport(policy, 1, totals, {}))
    assert budget.share(monitor.policies, collected, seconds) == expected
    monitor.close()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"env_steps": 10_000_000_000, "samples": 2**62, "seconds": 1e10, "episode_return": None}, "10G env steps"),
        ({"env_steps": 10_000_000_000, "samples": 2**62, "seconds": 600.0, "episode_return": None}, "10 min"),
        ({"env_steps": 10**6, "samples": 2**62, "seconds": 1e10, "episode_return": 475.0},
         "1M env steps or a mean return of 475"),
        ({"episode_return": -2.5}, "a mean return of -2.5"),
        ({"env_steps": 5 * 10**5, "samples": 10**6, "seconds": math.inf}, "500k env steps or 1M samples"),
        ({}, "an endless run"),
    ],
)  # fmt: skip
def test_the_aim_in_words(budget: dict[str, Any], expected: str) -> None:
    assert aim_of(budget) == expected
