"""What several modules of integration tests share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_SECONDS

ROOT = Path(__file__).parents[2]
TRAIN_ALL = (
    "import json, sys; from appo.algorithms.cli import run; [run('train', argv) for argv in json.loads(sys.argv[1])]"
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained CartPole run, the newest, and short runs of other kinds."""
    train_dir = tmp_path_factory.mktemp("runs")
    common = ["--inference=serial", "--seed=1", f"--train_dir={train_dir}", "--no_tensorboard"]
    small = ["--train_for_env_steps=600", "--batch_size=256", "--rollout=16", "--num_envs_per_worker=8"]
    same_step = ["--env_kwargs", "autoreset_mode=SameStep"]
    flags = {
        "counter": ["--env=toy/Counter-v0", "--use_rnn=False", *small],
        "same_step": ["--env=toy/Counter-v0", "--use_rnn=False", *small, *same_step],
        "windowed": ["--env=tests.integration.enjoying:Windowed", "--use_rnn=False", *small],
        "shifts": ["--env=toy/Shifts-v0", "--use_rnn=False", *small],
        "memory": ["--env=toy/Memory-v0", "--hidden_size=16", *small],
        "cartpole": ["--env=CartPole-v1", "--train_for_env_steps=30000"],
    }
    argvs = [[*common, f"--experiment={name}", *words] for name, words in flags.items()]
    process = subprocess.run(  # one process for all: torch takes longer to import than most of these runs
        [sys.executable, "-c", TRAIN_ALL, json.dumps(argvs)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return train_dir
