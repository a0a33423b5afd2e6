"""Whole runs of SAC: exact counts, the same twice, a run that goes on, one that learns."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from appo import load_policy
from appo.algorithms import cli
from appo.utils.metrics import read_metrics
from tests.spikes.training import totals_of

SMALL = (
    "--env=Pendulum-v1",
    "--experiment=run",
    "--algo=SAC",
    "--auto_tune=False",
    "--tensorboard=False",
    "--inference=serial",
    "--batch_size=16",
    "--rollout=1",
    "--encoder_mlp_layers=8",
    "--learning_starts=50",
    "--replay_capacity=1000",
    "--seed=3",
)


def train(folder: Path, *flags: str) -> Path:
    """Train to a good end with main in this process; the folder of the run."""
    assert cli.run_command(lambda: cli.run("train", [f"--train_dir={folder}", *flags])) == 0
    return folder / "run"


def newest(run: Path) -> Path:
    return max(path for path in (run / "checkpoint_p0").iterdir() if path.name.startswith("ckpt_"))


def files_of(run: Path) -> list[bytes]:
    return [(newest(run) / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def test_every_step_after_the_start_has_its_update_and_a_run_goes_on(tmp_path: Path) -> None:
    run = train(tmp_path, *SMALL, "--n_steps=3", "--train_for_env_steps=200")
    totals = totals_of(run)
    assert totals["samples"] == totals["env_steps"] == 200
    assert totals["updates"] == 200 - 50  # the last step owes one, too
    assert totals["used"] == 16 * totals["updates"]
    again = train(tmp_path / "again", *SMALL, "--n_steps=3", "--train_for_env_steps=200")
    assert files_of(again) == files_of(run)
    saved = load_file(newest(run) / "optimizer.safetensors")
    critics = {name for name in saved if name.startswith("networks.critics.")}
    assert {name.replace("critics", "targets") for name in critics} <= saved.keys()
    assert {"networks.entropy_weight.log", "critics.adam_steps", "entropy_weight.adam_steps"} <= saved.keys()
    assert int(saved["critics.adam_steps"][0]) == totals["updates"]

    train(tmp_path, *SMALL, "--n_steps=3", "--train_for_env_steps=260")
    assert totals_of(run)["updates"] == totals["updates"] + 60  # the replay has been saved: nothing fills again
    assert load_policy(run).compute_action(np.zeros(3, np.float32)).value is None


@pytest.mark.slow
def test_updates_per_step_hold_with_processes_and_in_lockstep_runs_are_the_same(tmp_path: Path) -> None:
    flags = [flag for flag in SMALL if not flag.startswith("--inference")]
    flags += ["--inference=local", "--device=cpu", "--updates_per_step=0.5", "--train_for_env_steps=400"]
    flags += ["--num_replay_shards=0"]  # batches that wait in a shard when the budget ends are not counted
    totals = totals_of(train(tmp_path, *flags))
    assert totals["used"] == 16 * totals["updates"]
    assert abs(totals["updates"] - (totals["samples"] - 50) / 2) <= 2
    lockstep = (*flags, "--lockstep", "--num_workers=2", "--save_replay=False")
    one, other = (train(tmp_path / name, *lockstep) for name in ("one", "other"))
    assert files_of(one) == files_of(other)


@pytest.mark.slow
def test_pendulum_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The preset alone; random actions return -1,200, the best policies about -150."""
    run = train(tmp_path, "--env=Pendulum-v1", "--experiment=run", "--algo=SAC", "--seed=1", "--device=cpu")
    status = json.loads((run / "status.json").read_text())["totals"]
    assert status["env_steps"] >= 20_000
    capsys.readouterr()
    flags = [f"--train_dir={tmp_path}", "--experiment=run", "--json", "--no_render", "--seed=3", "--deterministic"]
    assert cli.run("enjoy", [*flags, "--max_num_episodes=20"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] > -250


@pytest.mark.slow
def test_datasets_are_mixed_in_or_stand_alone(tmp_path: Path) -> None:
    words = ["--env=Pendulum-v1", "--steps=600", "--seed=1", "--num_envs=2", "-o", str(tmp_path / "d")]
    assert cli.run("record", words) == 0
    mixed = train(tmp_path / "mixed", *SMALL, f"--input=sampler:0.5,{tmp_path / 'd'}:0.5", "--train_for_env_steps=120")
    assert read_metrics(mixed / "metrics.jsonl")[-1]["input/share"] == 0.5
    assert totals_of(mixed)["used"] == 16 * totals_of(mixed)["updates"]
    alone = train(tmp_path / "alone", *SMALL[1:], f"--input={tmp_path / 'd'}", "--train_for_env_steps=160")
    assert totals_of(alone)["updates"] == 10
