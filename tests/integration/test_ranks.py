"""Several learners of one policy: started by the flag or by torchrun, with counts, budget and folder of one run."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms.run.config import parse_train
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from tests.integration.runs import ROOT, SMALL, Run, SerialRun, command_line, train
from tests.patience import HANG_SECONDS

FLAGS: dict[str, Any] = {**SMALL, "num_learners": 2, "train_for_env_steps": 3000, "save_best_after": -1}
PPO = {"algo": "PPO", "num_batches_per_iteration": 2, "ppo_epochs": 2}
APEX = {"algo": "APEX", "learning_starts": 128, "replay_capacity": 2000}
SAC = {"algo": "SAC", "env": "Pendulum-v1", "learning_starts": 128, "updates_per_step": 0.1}


def assert_one_run(directory: Path, env_steps: int = 3000, before: int = 0) -> Run:
    """The folder is that of one run of two ranks, which have counted and learned the same since `before`."""
    run, other = Run(directory), Run(directory / "logs" / "rank_1")
    for name in ("env_steps", "samples", "used", "updates"):
        assert run.totals[name] == other.totals[name], name
    played = run.totals["actors_collected"] + other.totals["actors_collected"]
    assert env_steps <= run.totals["env_steps"] <= before + played
    assert run.status["state"] == other.status["state"] == "finished"
    state = run.state()
    assert (state["env_steps"], state["updates"]) == (run.totals["env_steps"], run.totals["updates"])
    assert run.config["batch_size"] == 64
    assert not list(other.directory.glob("checkpoint_p*"))
    assert all(np.isfinite(array).all() for array in run.weights().values())
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [{}, {"inference": "local"}, PPO, APEX, SAC], ids=["APPO", "local", "PPO", "APEX", "SAC"]
)
def test_learners_of_the_flag_train_together(tmp_path: Path, flags: dict[str, object]) -> None:
    command = train(tmp_path / "run", **FLAGS | flags)
    run = assert_one_run(tmp_path / "run")
    assert run.status["reason"] == f"every policy has learned from {run.totals['env_steps']} env steps"
    (command_again,) = [x for x in (run.directory / "README.md").read_text().splitlines() if " --num_learners=2" in x]
    again = parse_train([*shlex.split(command_again)[2:], f"--train_dir={tmp_path / 'again'}"])
    assert again.learning.batch_size == run.config["batch_size"]  # of all learners together
    assert not list(run.directory.rglob("logs/rank_1/README.md"))
    assert "pid" in command.stdout if flags.get("inference") != "local" else True


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_as_many_learners(tmp_path: Path) -> None:
    train(tmp_path / "run", **FLAGS)
    before = assert_one_run(tmp_path / "run").state()
    train(tmp_path / "run", train_for_env_steps=6000)
    run = assert_one_run(tmp_path / "run", 6000, before["env_steps"])
    assert run.state()["updates"] > before["updates"]
    assert run.series("env_steps") == sorted(run.series("env_steps"))


def torchrun(directory: Path, words: Sequence[str], **flags: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.run(
        [*launcher, str(ROOT / "train_appo.py"), *command_line(directory, **flags), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.mark.slow
def test_torchrun_starts_the_same(tmp_path: Path) -> None:
    flags = {name: value for name, value in FLAGS.items() if name != "num_learners"}
    done = torchrun(tmp_path / "run", [], **flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert assert_one_run(tmp_path / "run").config["num_learners"] == 2


@pytest.mark.slow
def test_ranks_with_other_flags_are_refused_in_one_line(tmp_path: Path) -> None:
    """The shell gives the second rank another learning rate, as a stale file on one machine would."""
    flags = {name: value for name, value in FLAGS.items() if name != "num_learners"}
    words = [str(ROOT / "train_appo.py"), *command_line(tmp_path / "run", **flags)]
    script = 'exec "$0" "$@" --learning_rate=0.00$((RANK + 1))'
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    done = subprocess.run(
        [*launcher, "sh", "-c", script, sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rank 1 (pid ")
    assert "has --learning_rate=0.002, rank 0 (pid " in line
    assert line.endswith("has 0.001: all need the same")


def test_a_single_learner_has_no_ranks(tmp_path: Path) -> None:
    worker = SerialRun(tmp_path / "run", **{name: value for name, value in SMALL.items() if name != "inference"})
    learner = worker.worker("learner")
    assert type(learner) is LearnerWorker
    assert learner.learner.ranks is None
    assert learner.learner.statistics.ranks is None


@pytest.mark.slow
def test_a_single_learner_loads_no_group(tmp_path: Path) -> None:
    words = command_line(tmp_path / "run", **SMALL, train_for_env_steps=200)
    program = (
        "import json, sys; from appo.algorithms.cli import run; run('train', sys.argv[1:]);"
        " import torch.distributed as d; names = [n for n in sys.modules if '.rank' in n and n.startswith('appo')];"
        " print(json.dumps([d.is_initialized(), sorted(names)]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    initialized, names = json.loads(done.stdout.splitlines()[-1])
    assert not initialized
    assert not [name for name in names if "learning" in name]
