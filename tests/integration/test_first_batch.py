"""A run whose environment is so slow that no batch fills, as a user meets it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT, command_line
from tests.patience import HANG_SECONDS

ENVIRONMENT = """
import time

import gymnasium
import numpy as np


class Slow(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(0.1)
        return np.zeros(2, np.float32), 1.0, False, False, {}
"""
FLAGS: dict[str, object] = {
    "env": "slow_environment:Slow", "inference": "serial", "num_workers": 1, "num_envs_per_worker": 2, "rollout": 32,
    "batch_size": 64, "worker_num_splits": 1, "num_batches_per_iteration": 1, "encoder_mlp_layers": 8, "device": "cpu",
    "use_rnn": False, "log_format": "plain",
}  # fmt: skip


def words(directory: Path, **flags: object) -> list[str]:
    (directory.parents[1] / "slow_environment.py").write_text(ENVIRONMENT)
    return [sys.executable, str(ROOT / "train_appo.py"), *command_line(directory, **FLAGS | flags)]


@pytest.mark.slow
def test_a_budget_that_is_over_with_nothing_trained_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "a"
    command = words(directory, train_for_seconds=0.5)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 7
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: 0.5 seconds are over, and nothing is trained: ")
    assert "0 rollouts of 32 steps are whole, and a batch takes 2 of those (64 steps)" in line
    status = json.loads((directory / "status.json").read_text())
    assert (status["state"], status["totals"]["samples"]) == ("failed", 0)
    assert "nothing is trained" in (directory / "README.md").read_text()


@pytest.mark.slow
def test_a_batch_that_does_not_fill_is_said_within_ten_seconds(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "a"
    command = words(directory, batch_size=1024)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = (re.match(r"nothing is trained after (\d+) s: ", line) for line in process.stdout)
        found = next(match for match in said if match)
        assert 8 <= int(found[1]) < 10
        numbers = (
            r"\d+ steps are collected, \d+ rollouts of 32 steps are whole, and a batch takes 32 of those \(1,024 st"
        )
        assert re.search(numbers, found.string)
    finally:
        process.terminate()
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 143
