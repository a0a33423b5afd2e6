"""A source that repeats steps, in processes: counted once as samples, every time as used, whatever is killed."""

import json
import random
from pathlib import Path

import pytest

from algorithms.tools.selftest.invariants import find_falling, find_unaccounted, tolerance
from tests.chaos.runs import TrainingRun, kill
from tests.spikes.replay import USES
from utils.metrics import read_metrics

FLAGS = ("--algo=tests.spikes.replay:Replaying", "--inference=local", "--ppo_epochs=1", "--save_every_sec=1")
GONE_SECONDS = 10.0


def totals_of(run: TrainingRun) -> dict[str, int]:
    totals: dict[str, int] = json.loads((run.directory / "status.json").read_text())["totals"]
    return totals


def train(folder: Path, env_steps: int, kills: int) -> TrainingRun:
    """Train, with so many kills of workers on the way."""
    words = (*FLAGS, f"--train_for_env_steps={env_steps}", "--no_tensorboard")
    drawn, before = random.Random(1), 0
    with TrainingRun(folder, *words, env="toy/Zero-v0") as run:
        for _ in range(kills):
            run.wait_for_env_steps(before + 1)
            before = run.env_steps()
            workers = [pid for pid, role in run.roles().items() if role.startswith(("learner", "actor"))]
            kill(drawn.choice(workers))
        ended = run.wait(120.0)
        run.seconds_until_gone(GONE_SECONDS)
        assert run.left_behind() == []
    assert ended.exit_code == 0, ended.stderr
    return run


@pytest.mark.parametrize(
    ("env_steps", "kills"),
    [
        (10_000, 0),
        (30_000, 3),
        pytest.param(400_000, 20, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_steps_are_samples_once_and_used_several_times(tmp_path: Path, env_steps: int, kills: int) -> None:
    run = train(tmp_path, env_steps, kills)
    records, totals = read_metrics(run.directory / "metrics.jsonl"), totals_of(run)
    assert find_falling(records) == []
    assert find_unaccounted({}, totals, slack=tolerance(kills)) == []
    assert totals["samples"] >= env_steps
    assert totals["samples"] < totals["used"] <= USES * totals["samples"]
    assert records[-1]["train/replay_ratio"] == pytest.approx(totals["used"] / totals["samples"], rel=0.05)


def test_a_resumed_run_stays_with_its_algorithm_and_its_counts(tmp_path: Path) -> None:
    first = totals_of(train(tmp_path, 6_000, 0))
    second = totals_of(train(tmp_path, 12_000, 0))
    assert second["samples"] >= 12_000 > first["samples"]
    assert second["used"] > first["used"]
    saved = json.loads((tmp_path / "train_dir" / "run" / "config.json").read_text())
    assert saved["algo"] == "tests.spikes.replay:Replaying"
