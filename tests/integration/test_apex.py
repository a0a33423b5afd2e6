"""Whole runs of Ape-X: what was inserted and used, the same twice, and a run that goes on."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from algorithms import cli
from tests.spikes.training import totals_of
from utils.metrics import read_metrics

FLAGS = (
    "--env=CartPole-v1",
    "--experiment=run",
    "--algo=APEX",
    "--auto_tune=False",
    "--tensorboard=False",
    "--inference=serial",
    "--num_workers=1",
    "--num_envs_per_worker=4",
    "--rollout=8",
    "--batch_size=32",
    "--encoder_mlp_layers=16",
    "--use_rnn=False",
    "--learning_starts=200",
    "--replay_capacity=2000",
    "--replay_ratio=4",
    "--target_update_interval=10",
    "--seed=3",
)


def train(folder: Path, *flags: str) -> Path:
    """Train to a good end with main in this process; the folder of the run."""
    assert cli.run_command(lambda: cli.run("train", [f"--train_dir={folder}", *flags])) == 0
    return folder / "run"


def newest(run: Path) -> Path:
    return max(path for path in (run / "checkpoint_p0").iterdir() if path.name.startswith("ckpt_"))


def test_every_step_is_inserted_once_and_used_as_often_as_asked(tmp_path: Path) -> None:
    run = train(tmp_path, *FLAGS, "--train_for_env_steps=1500")
    totals, state = totals_of(run), json.loads((newest(run) / "state.json").read_text())
    assert totals["samples"] == totals["env_steps"] == state["env_steps"] >= 1500
    assert totals["discarded"] == 0
    assert totals["used"] == 32 * totals["updates"]
    # Uses are due for what is inserted after the slot (32 steps at most) with which 200 steps are there; when the
    # budget ends, those of the last slot need not be made, nor those that fill no batch.
    most = 4 * (totals["samples"] - 200)
    assert most - 4 * (32 + 32) - 32 <= totals["used"] <= most
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert {"reward/mean", "reward_exploring/mean", "train/td_error", "replay/mean_priority"} <= set(last)
    saved = load_file(newest(run) / "optimizer.safetensors")
    weights = load_file(newest(run) / "model.safetensors")
    assert {f"target.{name}" for name in weights} <= set(saved)

    again = train(tmp_path / "again", *FLAGS, "--train_for_env_steps=1500")
    assert newest(again).name == newest(run).name
    for name, array in load_file(newest(again) / "model.safetensors").items():
        assert np.array_equal(array, weights[name])

    train(tmp_path, *FLAGS, "--train_for_env_steps=2500")
    later = json.loads((newest(run) / "state.json").read_text())
    assert later["env_steps"] >= 2500
    assert later["updates"] > state["updates"]
