"""Runs of synchronous PPO: whose steps are trained on, how often, and that learning sees what acting saw."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import command_line, record, run_command, train

Train = Callable[..., "subprocess.CompletedProcess[str]"]
ROLLOUT, ENVS, ACTORS = 8, 4, 2
EPOCHS, MINIBATCHES, MINIBATCH = 3, 16, 4  # a minibatch is half a trajectory
SMALL: dict[str, Any] = {
    "algo": "PPO",
    "env": "toy/Counter-v0",
    "rollout": ROLLOUT,
    "batch_size": MINIBATCH,
    "num_batches_per_iteration": MINIBATCHES,
    "ppo_epochs": EPOCHS,
    "encoder_mlp_layers": 16,
    "use_rnn": False,
    "num_workers": ACTORS,
    "num_envs_per_worker": ENVS,
    "worker_num_splits": 1,
    "train_for_env_steps": 600,
}


@pytest.mark.parametrize(
    ("inference", "policies", "rnn"),
    [
        pytest.param("central", 1, False, marks=pytest.mark.slow),
        ("local", 1, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("local", 1, False), ("serial", 1, False), ("local", 2, False))
        ),
    ],
)
@pytest.mark.slow
def test_an_iteration_is_acted_by_the_newest_weights(tmp_path: Path, inference: str, policies: int, rnn: bool) -> None:
    recurrent = {"use_rnn": True, "hidden_size": 8, "recurrence": MINIBATCH}
    flags = SMALL | (recurrent if rnn else {})
    run = record(tmp_path / "run", **flags, inference=inference, num_policies=policies)
    collected = sum(totals["collected"] for totals in run.workers.values())
    assert sum(t["samples"] + t["discarded"] + t["in_flight"] for t in run.learners.values()) == collected
    for policy, totals in run.learners.items():
        state = run.state(policy)
        assert totals["env_steps"] == totals["samples"] >= SMALL["train_for_env_steps"]
        assert totals["updates"] == EPOCHS * MINIBATCHES * totals["batches"] > 0
        # Of four steps none may be valid: they are resets, another policy's, or before an actor's first.
        assert 0.8 * totals["updates"] < state["adam_steps"] <= state["updates"] == totals["updates"]
        assert state["version"] == 1 + totals["batches"]
        statistics = run.statistics(policy)  # count first: each step once, however many epochs there are
        assert statistics[0] == totals["samples"]
    lags = run.reported("train/policy_lag_max")
    assert lags
    assert max(lags) <= (0 if policies == 1 else 1)


@pytest.mark.parametrize("rnn", [pytest.param(False, marks=pytest.mark.slow), True])
def test_learning_sees_what_acting_saw(tmp_path: Path, rnn: bool) -> None:
    flags = SMALL | ({"use_rnn": True, "hidden_size": 8, "recurrence": MINIBATCH} if rnn else {})
    run = record(tmp_path / "run", **flags | {"learning_rate": 0.0}, inference="local", verify_reproduction=True)
    errors, steps = (run.reported(f"train/reproduction_{name}") for name in ("error", "steps"))
    assert max(errors) < 1e-4
    assert max(steps) >= SMALL["train_for_env_steps"]
    assert run.reported("train/skipped")[-1] == 0.0  # also where a minibatch has no valid step
    assert 0.0 < run.reported("train/ratio_max")[-1] <= 1.001


@pytest.mark.slow
def test_several_policies_are_told_how_old_a_batch_may_be(tmp_path: Path) -> None:
    run = run_command(tmp_path / "run", **SMALL, num_policies=2, inference="local")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("what it trains on may be an iteration old") == 1


def test_nothing_waits_for_a_synchronous_learner(tmp_path: Path, train_here: Train) -> None:
    run = train_here(*command_line(tmp_path / "run", **SMALL, num_minibatches_to_accumulate=4))
    assert run.returncode == 2
    assert "--num_minibatches_to_accumulate=4: --algo=PPO is synchronous, nothing waits" in run.stderr


# --- batches that stream


STREAM: dict[str, Any] = SMALL | {
    "batch_size": 256,  # four rounds of eight environments
    "microbatch_size": 32,
    "num_batches_per_iteration": 1,
    "ppo_epochs": 1,
    "normalize_advantages": "off",
    "train_for_env_steps": 1000,
}


@pytest.mark.parametrize(
    ("inference", "policies"),
    [
        ("local", 1),
        ("serial", 1),
        pytest.param("central", 1, marks=pytest.mark.slow),
        pytest.param("local", 2, marks=pytest.mark.slow),
    ],
)
def test_a_batch_streams_through_one_slot_of_every_group(tmp_path: Path, inference: str, policies: int) -> None:
    run = record(tmp_path / "run", **STREAM, inference=inference, num_policies=policies)
    collected = sum(totals["collected"] for totals in run.workers.values())
    assert sum(t["samples"] + t["discarded"] + t["in_flight"] for t in run.learners.values()) == collected
    for policy, totals in run.learners.items():
        state = run.state(policy)
        assert totals["updates"] == totals["batches"] == state["adam_steps"] == state["version"] - 1 > 0
        assert totals["env_steps"] == totals["samples"] == state["used"] >= STREAM["train_for_env_steps"]
        assert run.statistics(policy)[0] == totals["samples"]
        assert totals["released"] + totals["held"] == totals["trajectories"]
    assert max(run.reported("train/policy_lag_max")) <= (0 if policies == 1 else 1)
    if policies == 1:
        assert not any(totals["discarded"] for totals in run.learners.values())


def test_in_lockstep_a_stream_repeats_itself_and_learns_what_whole_batches_teach(tmp_path: Path) -> None:
    flags = STREAM | {"inference": "serial", "lockstep": True, "adam_eps": 1e-3}
    once, again = (record(tmp_path / name, **flags) for name in ("once", "again"))
    whole = record(tmp_path / "whole", **flags | {"microbatch_size": 0, "shuffle_minibatches": False})
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert once.checkpoint()[name] == again.checkpoint()[name]
    assert once.state()["updates"] == whole.state()["updates"] == once.learners[0]["batches"] > 2
    assert once.learners[0]["samples"] == whole.learners[0]["samples"]
    expected = whole.weights()
    for name, found in once.weights().items():
        assert abs(found - expected[name]).max() < 1e-5


@pytest.mark.slow
def test_a_learner_that_is_killed_while_it_accumulates_loses_what_is_staged(tmp_path: Path) -> None:
    flags = STREAM | {"inference": "local", "train_for_env_steps": 2000}
    run = train(tmp_path / "run", **flags, failpoints="learner.batch:kill9@44")  # the fourth part of the sixth batch
    totals = run.totals
    assert totals["restarts"] == 1  # its successor needs fewer parts
    assert totals["actors_collected"] - totals["samples"] == totals["in_flight"] + totals["discarded"]
    assert totals["discarded"] > 0
    assert totals["samples"] >= 2000
    before = run.state()["updates"]
    resumed = train(tmp_path / "run", **flags | {"train_for_env_steps": 3000})
    assert resumed.state()["env_steps"] >= 3000
    assert resumed.state()["updates"] > before


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"microbatch_size": 256}, "--microbatch_size=256 must be smaller than --batch_size=256 and divide it"),
        ({"microbatch_size": 48}, "--microbatch_size=48 must be smaller than --batch_size=256 and divide it"),
        ({"normalize_advantages": "batch"}, "give --normalize_advantages=running or off"),
        (
            {"use_rnn": True, "batch_size": 4, "num_batches_per_iteration": 16, "microbatch_size": 0},
            "--batch_size=4 is no",
        ),
        ({"num_policies": 2, "with_pbt": True, "pbt_optimize_batch_size": True}, "--algo=PPO has no batch size that"),
    ],
)
def test_what_cannot_stream_is_refused_before_anything_starts(
    tmp_path: Path, train_here: Train, flags: dict[str, Any], line: str
) -> None:
    run = train_here(*command_line(tmp_path / "run", **STREAM | flags))
    assert run.returncode == 2
    assert line in run.stderr
    assert run.stderr.count("\n") == 1
    assert "slots each" not in run.stdout
