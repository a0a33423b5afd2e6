import logging
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.run.directory import page
from appo.algorithms.run.directory.page import command_line, leave_page
from appo.utils.run_folder import CURVE_FILE, PAGE_FILE
from tests.patience import HANG_SECONDS
from tests.unit.run.test_summary import reports, write_run

STATUS: dict[str, Any] = {
    "state": "finished",
    "reason": "the mean return | has reached 31.50",
    "totals": {"env_steps": 300},
    "elapsed_seconds": 60.0,
    "performance": {"limit_ratio": 0.915},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    return parse_train(["--env=CartPole-v1", "--experiment=a", "--train_dir=runs", "--learning_rate=0.01"])


def ended(config: Config, **status: Any) -> Path:
    return write_run(
        config.run.run_directory,
        config=config.to_flat() | {"seed": 5},
        status=STATUS | status,
        metrics=reports(20.0, 35.25, 31.5),
    )


def test_the_page_says_what_was_trained_how_it_ended_and_how_to_repeat_it(config: Config) -> None:
    directory = ended(config, elapsed_seconds=3.0)
    leave_page(config, with_curve=True)
    text = (directory / PAGE_FILE).read_text()
    assert text.startswith(
        "# a\n\nAPPO on `CartPole-v1`; finished: the mean return \\| has reached 31.50.\n\n| | |\n|---|---|\n"
    )
    for line in (
        "| mean return, last episodes | 31.50 |",
        "| best mean return | 35.25 |",
        "| env steps | 300 |",
        "| env steps per second | 100 |",
        "| of the machine's limit | 92% |",
        "| seed | 5 |",
        "    appo train --env=CartPole-v1 --seed=5 --learning_rate=0.01",
        "    appo enjoy --experiment=a --train_dir=runs   # watch it; --json measures it",
    ):
        assert f"\n{line}\n" in text, line
    assert "learning curve" not in text


def test_a_run_of_a_class_of_the_program_says_how_to_go_on(config: Config) -> None:
    given = replace(config, env=replace(config.env, env="<program>:Mine"))
    directory = ended(given)
    leave_page(given, with_curve=False)
    text = (directory / PAGE_FILE).read_text()
    assert "to resume it give env=Mine again" in text
    assert "appo train" not in text


@pytest.mark.parametrize(
    "words",
    [
        ["--env=CartPole-v1"],
        ["--env=CartPole-v1", "--encoder_mlp_layers=16,8", "--no_normalize_returns", "--train_until_return=-1.5"],
        ["--env=CartPole-v1", '--env_kwargs={"config": {"lanes": 2}, "sizes": [3, 4], "maybe": null, "text": "10"}'],
        ["--env=CartPole-v1", f"--wandb_group={'x' * 100}", '--wandb_tags=["a b", "c,d"]'],
        ["--env=a.b:C d", "--env_kwargs", "size=3", "name=x y", "--horizon=none", "--seed=3", "--actor_worker_gpus="],
    ],
)
def test_the_command_gives_the_same_flags_again(config: Config, words: list[str]) -> None:
    flags = parse_train([*words, "--experiment=b"]).to_flat()
    again = shlex.split(command_line(flags, {}))
    assert again[:2] == ["appo", "train"]
    assert parse_train([*again[2:], "--experiment=b"]).to_flat() == flags


def test_a_finished_run_gets_its_curve_and_any_other_none(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PLOT_SECONDS", float(HANG_SECONDS))
    directory = ended(config)
    leave_page(config, with_curve=False)
    assert not (directory / CURVE_FILE).exists()
    leave_page(config, with_curve=True)
    assert (directory / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    assert f"\n![learning curve]({CURVE_FILE})\n" in (directory / PAGE_FILE).read_text()


def test_a_slow_drawing_is_given_up(config: Config, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(page, "own_command", lambda words: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(page, "PLOT_SECONDS", 0.2)
    caplog.set_level(logging.INFO)
    directory = ended(config)
    leave_page(config, with_curve=True)
    assert caplog.messages == ["no learning curve: drawing took longer than 0.2 s; appo plot does it at leisure"]
    assert (directory / PAGE_FILE).exists()


@pytest.mark.parametrize("missing", ["matplotlib", "a place to write to", "any status"])
def test_what_fails_costs_one_line(config: Config, monkeypatch: pytest.MonkeyPatch, caplog, missing: str) -> None:
    caplog.set_level(logging.INFO)
    directory = ended(config)
    if missing == "matplotlib":
        monkeypatch.setattr(page, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(page, "SHORTEST_RUN_SECONDS", 1e9)
    if missing == "a place to write to":
        (directory / PAGE_FILE).mkdir()
    if missing == "any status":
        (directory / "status.json").unlink()
        (directory / "config.json").unlink()
    leave_page(config, with_curve=True)
    assert len(caplog.messages) == 1
    expected = {
        "matplotlib": 'no learning curve is drawn: matplotlib is not installed (pip install "appo[plots]")',
        "a place to write to": f"{PAGE_FILE} is not written: IsADirectoryError: ",
        "any status": f"{PAGE_FILE} is not written: AssertionError: ",
    }
    assert caplog.messages[0].startswith(expected[missing])
