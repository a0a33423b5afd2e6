"""Whoever is killed, versions go on joining the pool, and games are against versions that the run has had."""

import signal
from pathlib import Path

import pytest

from appo.utils import checkpoint_files
from tests.chaos.killer import kill
from tests.chaos.runs import TrainingRun, checkpoint_steps

FLAGS = (
    "--inference=central",
    "--self_play",
    "--self_play_period_env_steps=300",
    "--self_play_pool_size=2",
    "--self_play_past_share=0.8",
    "--use_rnn=True",
    "--hidden_size=8",
    "--save_every_sec=1",
    "--train_for_env_steps=10000000",
)
ENV = "toy/RockPaperScissors-v0"


def folder_of(run: TrainingRun) -> Path:
    return run.directory / "checkpoint_p0" / "past"


def versions(run: TrainingRun) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder_of(run).glob("ckpt_*"))


def wait_for_others(run: TrainingRun) -> None:
    """Until no version of now is left: every place has been left by all groups, and has got another one."""
    newest = max(versions(run), default=-1)
    run.wait_until(lambda: len(now := versions(run)) >= 2 and now[0] > newest, f"versions after {newest}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_versions_go_on_joining_whoever_dies(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *FLAGS, env=ENV) as run:
        wait_for_others(run)
        for role in ("actor_0", "policy_worker_1.0", "learner_0"):
            kill(run.pid_of(role))
            wait_for_others(run)
        run.wait_until(lambda: checkpoint_steps(run.directory), "a checkpoint")
        kill(run.process.pid, signal.SIGKILL)
        run.wait()
        run.seconds_until_gone(30)
    with TrainingRun(tmp_path, *FLAGS, env=ENV) as run:
        wait_for_others(run)
        run.interrupt()
        assert run.wait().exit_code == 130
    for path in folder_of(run).glob("ckpt_*"):
        checkpoint_files.verify(path)
    assert len(versions(run)) == 2
