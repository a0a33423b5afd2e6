"""Grids and seeds: which runs they are, and that they are trained, also after an interruption."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appo.algorithms import cli
from appo.algorithms.tools.launch import jobs_of
from appo.utils.command_line import own_command
from appo.utils.errors import UsageError
from tests.patience import HANG_SECONDS

SMALL = (
    "--env=toy/Counter-v0",
    "--inference=serial",
    "--use_rnn=False",
    "--encoder_mlp_layers=16",
    "--rollout=8",
    "--batch_size=64",
    "--num_envs_per_worker=8",
    "--no_tensorboard",
)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_combinations_seed_by_seed() -> None:
    grid = ["--grid", "learning_rate=1e-4,1e-3", "encoder_mlp_layers=[[8,8],[16]]", "use_rnn=false"]
    jobs = jobs_of(*cli.parse("launch", ["--name=a", "--seeds=1,2", *grid, "--", "--env=CartPole-v1"]))
    assert [job.name for job in jobs] == [
        f"learning_rate-{rate}_encoder_mlp_layers-{layers}_use_rnn-False_seed-{seed}"
        for seed in (1, 2)
        for rate in ("1e-4", "1e-3")
        for layers in ("8-8", "16")
    ]
    assert jobs[0].words == (
        "train", "--env=CartPole-v1", "--learning_rate=1e-4", "--encoder_mlp_layers=8,8", "--use_rnn=False", "--seed=1",
        f"--experiment={jobs[0].name}", "--experiments_root=a", "--train_dir=./train_dir", "--restart_behavior=resume",
    )  # fmt: skip


def test_a_config_file_names_the_algorithm_of_the_grid() -> None:
    Path("sac.yaml").write_text("algo: SAC\nenv: Pendulum-v1\n")
    jobs = jobs_of(*cli.parse("launch", ["--name=a", "--grid", "target_rate=0.01,0.02", "--", "--config=sac.yaml"]))
    assert [job.words[2] for job in jobs] == ["--target_rate=0.01", "--target_rate=0.02"]


def test_the_best_algorithm_has_flags_of_its_own_in_the_grid() -> None:
    words = ["--env=CartPole-v1", "--algo=auto", "--preset=sample_efficient"]  # PPO, where the minutes' is APPO
    jobs = jobs_of(*cli.parse("launch", ["--name=a", "--grid", "normalize_advantages=batch,off", "--", *words]))
    assert len(jobs) == 2


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ('wandb_tags=[[],["a","b c"]]', ["--wandb_tags=", '--wandb_tags=["a", "b c"]']),
        ('wandb_group=["","x y"]', ["--wandb_group=", "--wandb_group=x y"]),
        (f'wandb_group=["{"x" * 100}"]', [f"--wandb_group={'x' * 100}"]),
        ('env_kwargs={"sizes": [3, 4], "text": "a"}', ['--env_kwargs={"sizes": [3, 4], "text": "a"}']),
    ],
)
def test_values_given_as_json_stay_what_they_are(grid: str, words: list[str]) -> None:
    jobs = jobs_of(*cli.parse("launch", ["--name=a", "--grid", grid, "--", "--env=CartPole-v1"]))
    assert [job.words[2] for job in jobs] == words


def test_a_dry_run_prints_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--name=a", "--grid", 'env_kwargs=[{"x": 1}]', "--dry_run", "--", "--env=CartPole-v1"]
    assert cli.run("launch", words) == 0
    assert "'--env_kwargs={\"x\": 1}'" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--env=CartPole-v1"], "needs a --name"),
        (["--name=../a"], "is no name for a folder"),
        (["--name=a", "--grid", "gama=1"], "--grid: unknown flag gama; did you mean gamma"),
        (["--name=a", "--grid", "gamma=2"], "--gamma must be at most 1"),
        (["--name=a", "--grid", "gamma=[]"], "--grid: gamma needs at least one value"),
        (["--name=a", "--grid", "gamma=0.9", "--", "--gamma=0.8"], "gamma is in the grid and behind it"),
        (["--name=a", "--grid", "seed=2"], "seed is decided by appo launch"),
        (["--name=a", "--", "--experiment=b"], "experiment is decided by appo launch"),
        (["--name=a", "--", "--lerning_rate=1"], "did you mean --learning_rate"),
        (["--name=a", "--grid", "encoder_custom=a:b,a-b"], "have the same name"),
    ],
)
def test_mistakes_start_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    env = ["--env=CartPole-v1"] if "--" in words else ["--", "--env=CartPole-v1"]
    with pytest.raises(UsageError, match=message):
        cli.run("launch", [*words, *env])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_runs_are_trained_two_at_a_time_and_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--name=a", "--seeds=1,2", "--parallel=2", "--grid", "gamma=0.9,0.99"]
    assert cli.run("launch", [*words, "--", *SMALL, "--train_for_env_steps=500"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("started   ") == printed.count("ended     ") == 4
    head, *table = [line.split() for line in printed.splitlines()[-3:]]
    assert head == ["gamma", "runs", "last", "return"]
    assert {tuple(row[:2]) for row in table} == {("0.9", "2"), ("0.99", "2")}
    assert float(table[0][2]) >= float(table[1][2])
    assert sorted(path.name for path in Path("train_dir/a/logs").iterdir()) == sorted(
        f"gamma-{gamma}_seed-{seed}.log" for gamma in (0.9, 0.99) for seed in (1, 2)
    )
    assert cli.run("launch", [*words, "--", *SMALL, "--train_for_env_steps=1000"]) == 0
    for status in Path("train_dir/a").glob("*/status.json"):
        assert json.loads(status.read_text())["totals"]["env_steps"] >= 1000
    assert cli.run("launch", ["--name=a", "--", *SMALL, "--env_kwargs", "no_such_argument=1"]) == 1
    assert "1 of 1 runs failed: seed-1" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_lets_every_run_save(tmp_path: Path) -> None:
    words = ["launch", "--name=a", "--seeds=1,2", "--parallel=2", "--", *SMALL]
    process = subprocess.Popen(own_command(words), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + HANG_SECONDS
    statuses = [tmp_path / f"train_dir/a/seed-{seed}/status.json" for seed in (1, 2)]
    while time.monotonic() < deadline and not all(_trains(status) for status in statuses):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(HANG_SECONDS) == 130
    for status in statuses:
        assert json.loads(status.read_text())["state"] == "interrupted"
        assert list(status.parent.glob("checkpoint_p0/ckpt_*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launch_that_is_ended_takes_its_runs_with_it(tmp_path: Path, number: signal.Signals) -> None:
    marker, temporary = f"TMPDIR={tmp_path}/tmp", tmp_path / "tmp"
    temporary.mkdir()
    words = ("launch", "--name=a", "--", "--env=toy/Corridor-v0", "--inference=central", "--num_workers=2")
    process = subprocess.Popen(
        own_command(words),
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until(lambda: _trains(tmp_path / "train_dir/a/seed-1/status.json"))
        assert len(_processes_with(marker)) > 3
        process.send_signal(number)
        assert process.wait(HANG_SECONDS) == (143 if number == signal.SIGTERM else -number)
        _wait_until(lambda: not _processes_with(marker))
    finally:
        for pid in _processes_with(marker):
            os.kill(pid, signal.SIGKILL)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _processes_with(text: str) -> list[int]:
    """Return living processes in whose environment a text stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _trains(status: Path) -> bool:
    return status.exists() and json.loads(status.read_text())["state"] == "training"
