"""A source that repeats steps, in processes: counted once as samples, every time as used, whatever is killed."""

import json
import random
from pathlib import Path

import pytest

from appo.utils.metrics import read_metrics
from tests.chaos.invariants import LASTING, find_falling, find_unaccounted, tolerance
from tests.chaos.runs import TrainingRun, kill
from tests.spikes.replay import USES
from tests.spikes.training import totals_of, train

ENV = "toy/Zero-v0"
FLAGS = (
    "--algo=tests.spikes.replay:Replaying",
    "--ppo_epochs=1",
    "--save_every_sec=1",
    "--no_tensorboard",
)
HERE = ("--inference=serial", "--num_workers=1")
GONE_SECONDS = 10.0
END_SECONDS = 600.0  # of hundreds of thousands of steps, however many others want the cores


def train_under_kills(folder: Path, env_steps: int, kills: int) -> Path:
    """Train, with so many kills of workers on the way; return the run's folder."""
    words = (*FLAGS, "--inference=local", f"--train_for_env_steps={env_steps}")
    drawn, before = random.Random(1), 0
    with TrainingRun(folder, *words, env=ENV) as run:
        for _ in range(kills):
            run.wait_for_env_steps(before + 1)
            before = run.env_steps()
            workers = [pid for pid, role in run.roles().items() if role.startswith(("learner", "actor"))]
            kill(drawn.choice(workers))
        ended = run.wait(END_SECONDS)
        run.seconds_until_gone(GONE_SECONDS)
        assert run.left_behind() == []
    assert ended.exit_code == 0, ended.stderr
    return run.directory


def check_counts(directory: Path, env_steps: int) -> dict[str, int]:
    """Every step is a sample once, and used at most `USES` times; return the counts."""
    records, totals = read_metrics(directory / "metrics.jsonl"), totals_of(directory)
    assert find_falling(records, LASTING) == []
    assert totals["samples"] >= env_steps
    assert totals["samples"] < totals["used"] <= USES * totals["samples"]
    assert records[-1]["train/replay_ratio"] == pytest.approx(totals["used"] / totals["samples"], rel=0.05)
    return totals


@pytest.mark.parametrize(
    ("env_steps", "kills"),
    [
        pytest.param(10_000, 1, marks=pytest.mark.slow),
        pytest.param(30_000, 3, marks=pytest.mark.slow),
        pytest.param(400_000, 20, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_steps_are_samples_once_and_used_several_times(tmp_path: Path, env_steps: int, kills: int) -> None:
    totals = check_counts(train_under_kills(tmp_path, env_steps, kills), env_steps)
    assert totals["restarts"] >= 1
    assert find_unaccounted({}, totals, slack=tolerance(kills)) == []
    print(f"{kills} kills: {totals}")


def test_a_resumed_run_stays_with_its_algorithm_and_its_counts(tmp_path: Path) -> None:
    first = check_counts(train(tmp_path, *FLAGS, *HERE, "--train_for_env_steps=3000", env=ENV), 3_000)
    directory = train(tmp_path, "--train_for_env_steps=6000", env=ENV)
    second = check_counts(directory, 6_000)
    assert second["samples"] >= 6_000 > first["samples"]
    assert second["used"] > first["used"]
    assert json.loads((directory / "config.json").read_text())["algo"] == "tests.spikes.replay:Replaying"
