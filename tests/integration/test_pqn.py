"""Runs of PQN: exact counts, resuming, the newest weights, greedy play, and returns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.enjoying import enjoyed
from tests.integration.runs import record
from tests.integration.test_own_algorithms import train

EPOCHS, MINIBATCHES, MINIBATCH, ROLLOUT = 3, 8, 8, 16
ITERATION = MINIBATCHES * MINIBATCH
SMALL: dict[str, Any] = {
    "algo": "PQN",
    "env": "CartPole-v1",
    "rollout": ROLLOUT,
    "batch_size": MINIBATCH,
    "num_batches_per_iteration": MINIBATCHES,
    "ppo_epochs": EPOCHS,
    "epsilon_decay": 1.0,
    "encoder_mlp_layers": 16,
    "hidden_size": 8,
    "num_envs_per_worker": 4,
    "worker_num_splits": 1,
    "env_vectorization": "python",
    "device": "cpu",
}


def test_it_trains_goes_on_and_plays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    budget, before = 4 * ITERATION, 0
    flags = SMALL | {"inference": "serial", "use_rnn": True, "recurrence": MINIBATCH, "auto_tune": False}
    for goal in (budget, 2 * budget):
        run = train(tmp_path / "run", **flags, train_for_env_steps=goal)
        totals = run.totals
        assert goal <= totals["samples"] == totals["used"] < goal + ITERATION
        assert totals["updates"] - before == EPOCHS * MINIBATCHES * totals["batches"] > 0
        assert set(run.series("train/policy_lag_max")) <= {0, None}
        # The last iteration began before the end of the budget, and at most two iterations before.
        assert 0 < float(run.weights()["exploration"]) < 2 * ITERATION / goal
        before = totals["updates"]
    capfd.readouterr()
    assert enjoyed(capfd, tmp_path, "--experiment=run", "--max_num_episodes=2", "--seed=1")["num_episodes"] == 2


@pytest.mark.slow
def test_in_lockstep_two_runs_are_the_same(tmp_path: Path) -> None:
    lockstep = {"lockstep": True, "inference": "local", "num_workers": 2, "seed": 3, "train_for_env_steps": 1500}
    one, other = (record(tmp_path / name, **SMALL | {"use_rnn": False} | lockstep) for name in ("one", "other"))
    assert all(np.array_equal(weight, other.weights()[name]) for name, weight in one.weights().items())


@pytest.mark.slow
def test_cart_pole_is_learned(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run", algo="PQN", env="CartPole-v1", inference="serial", num_envs_per_worker=8, seed=1,
        train_until_return=450, train_for_env_steps=100_000,
    )  # fmt: skip
    assert run.reached_return >= 450
