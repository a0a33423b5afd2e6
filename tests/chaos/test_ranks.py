"""Ranks of several learners are killed and stopped: the others go on, and who comes back takes over their state."""

import os
import re
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from appo.utils.run_folder import RunFolder
from tests.chaos.runs import SMALL, TrainingRun, checkpoint_steps
from tests.integration.runs import Run
from tests.patience import patient

FLAGS = ("--num_learners=2", "--num_workers=1", "--log_format=plain", "--save_best_after=-1", "--normalize_returns")
COMES_SECONDS = 120.0
SMALL_SAC = (
    "--algo=SAC", "--num_envs_per_worker=2", "--batch_size=16", "--learning_starts=4000", "--replay_capacity=10000",
    "--encoder_mlp_layers=16", "--report_interval_seconds=0.2", "--seed=1", "--no_plot",
)  # fmt: skip


def numbered(text: str, rank: int, word: str) -> list[str]:
    """What the log says of a rank that is `gone` or `there`."""
    return re.findall(rf"rank {rank} \(pid \d+ on \S+\) is {word}", text)


def pid_of(run: TrainingRun, rank: int) -> int:
    """The main process of a rank, as its folder says."""
    folder = RunFolder(run.directory if not rank else RunFolder(run.directory).rank(rank))
    return int(str(folder.read_status()["pid"]))


def assert_equal_counts(run: TrainingRun) -> None:
    first, second = Run(run.directory), Run(RunFolder(run.directory).rank(1))
    for name in ("env_steps", "samples", "used", "updates"):
        assert first.totals[name] == second.totals[name], name
    assert first.state()["env_steps"] == first.totals["env_steps"]


def assert_one_run(run: TrainingRun) -> None:
    """Both ranks have counted and learned the same.

    The series of a rank 0 that was started again begins anew with the steps of its checkpoint, until the group forms.
    """
    assert_equal_counts(run)
    first = Run(run.directory)
    falls = [low for high, low in pairwise(first.series("env_steps")) if low < high]
    begins = map(int, re.findall(r"resuming policy 0 at env step (\d+)", run.stdout + run.stderr))
    assert not Counter(falls) - Counter(begins)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_rank_is_killed_again_and_again(tmp_path: Path) -> None:
    """No checkpoint is read: there is none before the end."""
    with TrainingRun(tmp_path, *FLAGS, "--save_every_sec=100000") as run:
        run.wait_until(lambda: "learn together" in run.stdout, "group", COMES_SECONDS)
        for kills in range(1, 4):
            before = run.env_steps()
            os.kill(pid_of(run, 1), signal.SIGKILL)
            run.wait_until(lambda kills=kills: len(numbered(run.stdout + run.stderr, 1, "gone")) >= kills, "loss")
            run.wait_until(
                lambda kills=kills: len(numbered(run.stdout + run.stderr, 1, "there")) >= kills, "return", COMES_SECONDS
            )
            assert run.env_steps() >= before
            assert checkpoint_steps(run.directory) == []
        run.wait_for_env_steps(run.env_steps() + 500)
        run.process.send_signal(signal.SIGTERM)
        ended = run.wait()
        assert ended.exit_code == 143
        assert len(re.findall(r"rank 1 is started again, with pid \d+", ended.stdout + ended.stderr)) == 3
        assert "saved run" not in ended.stdout  # rank 0 has never begun anew
        run.seconds_until_gone(30.0)
        first = Run(run.directory)
        assert first.state()["env_steps"] == first.totals["env_steps"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_rank_comes_back_to_an_environment_without_a_preset(tmp_path: Path) -> None:
    """The rank reads flags that rank 0 has completed since the first start of both."""
    with TrainingRun(tmp_path, *FLAGS, env="gymnasium.envs.classic_control:CartPoleEnv") as run:
        run.wait_until(lambda: "learn together" in run.stdout, "group", COMES_SECONDS)
        assert "no preset for gymnasium.envs.classic_control:CartPoleEnv" in run.stdout
        os.kill(pid_of(run, 1), signal.SIGKILL)
        run.wait_until(lambda: numbered(run.stdout + run.stderr, 1, "there"), "return", COMES_SECONDS)
        run.wait_for_env_steps(run.env_steps() + 500)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait().exit_code == 143
        run.seconds_until_gone(30.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stopped_rank_is_left_out_and_comes_back(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *FLAGS) as run:
        run.wait_until(lambda: "learn together" in run.stdout, "group", COMES_SECONDS)
        stopped = pid_of(run, 1)
        with_all = [pid for pid in run.roles() if os.getpgid(pid) == stopped] or [stopped]
        for pid in with_all:
            os.kill(pid, signal.SIGSTOP)
        run.wait_until(lambda: numbered(run.stdout + run.stderr, 1, "gone"), "loss", patient(10.0))
        run.wait_for_env_steps(run.env_steps() + 500)
        for pid in with_all:
            os.kill(pid, signal.SIGCONT)
        run.wait_until(lambda: numbered(run.stdout + run.stderr, 1, "there"), "return")
        run.wait_for_env_steps(run.env_steps() + 500)
        run.process.send_signal(signal.SIGINT)
        assert run.wait().exit_code == 130
        run.seconds_until_gone(30.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rank_0_is_killed_and_takes_over_what_the_others_have_learned(tmp_path: Path) -> None:
    budget = 60_000
    with TrainingRun(tmp_path, *FLAGS, "--save_every_sec=1", f"--train_for_env_steps={budget}") as run:
        run.wait_until(lambda: checkpoint_steps(run.directory), "checkpoint")
        os.kill(pid_of(run, 0), signal.SIGKILL)
        run.wait_until(lambda: "goes on from the state of rank 1" in run.stdout, "return", COMES_SECONDS)
        ended = run.wait(600.0)
        assert ended.exit_code == 0, ended.stderr
        assert re.search(r"rank 0 \(pid \d+\) ended with SIGKILL; starting it again", ended.stderr)
        assert_one_run(run)
        run.seconds_until_gone(30.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("algo", ["APPO", "SAC"])
def test_rank_0_is_killed_near_the_end_and_nothing_is_lost(tmp_path: Path, algo: str) -> None:
    """Without a checkpoint, only rank 1 has what was learned. SAC fills a replay before its first batch."""
    flags = [*FLAGS[:3], "--save_every_sec=100000", "--train_for_env_steps=12000"]
    small, env = (SMALL_SAC, "Pendulum-v1") if algo == "SAC" else (SMALL, "CartPole-v1")
    with TrainingRun(tmp_path, *flags, env=env, small=small) as run:
        run.wait_until(lambda: "learn together" in run.stdout, "group", COMES_SECONDS)
        run.wait_for_env_steps(9000 if algo == "SAC" else 6000)
        os.kill(pid_of(run, 0), signal.SIGKILL)
        ended = run.wait(600.0)
        assert ended.exit_code == 0, ended.stderr
        assert "goes on from the state of rank 1" in ended.stdout
        assert_equal_counts(run)
        assert Run(run.directory).totals["env_steps"] < 12000 + 1000  # the steps of rank 1 count once
        run.seconds_until_gone(30.0)


@pytest.mark.slow
def test_a_wrong_network_interface_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with TrainingRun(tmp_path, *FLAGS) as run:
        ended = run.wait(COMES_SECONDS)
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert re.match(r"error: rank 0: GLOO_SOCKET_IFNAME=eth77: .*Unable to find address for: eth77; there are lo", line)
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_slow_rank_costs_its_share_and_not_the_step(tmp_path: Path) -> None:
    """Rank 1 needs two seconds for a batch of its own; the others make updates without waiting for it."""
    with TrainingRun(tmp_path, *FLAGS, "--train_for_env_steps=4000", env="tests.chaos.slow_rank:SlowOnRank1") as run:
        ended = run.wait(COMES_SECONDS)
        assert ended.exit_code == 0, ended.stderr
        assert_one_run(run)
        first, second = Run(run.directory), Run(RunFolder(run.directory).rank(1))
        assert second.totals["actors_collected"] < first.totals["actors_collected"] / 2
        assert not numbered(ended.stdout + ended.stderr, 1, "gone")
        assert first.totals["updates"] > 2 * second.totals["actors_trajectories"]
        run.seconds_until_gone(30.0)
