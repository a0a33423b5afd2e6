"""The same algorithm learns wherever its workers live."""

import re
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.run.tuning import measure
from appo.utils.system.machine import available_cores
from tests.integration.runs import Run, record, train

TWO_WORKERS_TWO_EPOCHS = {"inference": "central", "policy_workers_per_policy": 2, "ppo_epochs": 2}
SMALL_GRU = {"use_rnn": True, "hidden_size": 16, "recurrence": 8, "rollout": 16, "batch_size": 128}


ACTING = {"framework", "inference", "copying"}
LEARNING = {"framework", "training", "copying", "waiting"}
PHASES = {
    "serial": {"main": {"env", "training"} | ACTING},
    "local": {"main": {"framework", "waiting"}, "actor": {"env"} | ACTING, "learner": LEARNING},
    "central": {
        "main": {"framework", "waiting"},
        "actor": {"framework", "env", "waiting"},
        "policy_worker": ACTING | {"waiting"},
        "learner": LEARNING,
    },
}


def check_its_time_is_accounted_for(run: Run) -> None:
    """Every role reports its phases, which add up to its time, and main writes what that means."""
    performance = run.status["performance"]
    expected = PHASES[run.config["inference"]]
    assert set(performance["roles"]) == set(expected)
    for role, times in performance["roles"].items():
        assert set(times["shares"]) - {"reset", "waiting", "waiting_for_slots"} == expected[role] - {"waiting"}
        assert "waiting" not in expected[role] or "waiting" in times["shares"]
        assert sum(times["shares"].values()) == pytest.approx(1, abs=0.02)
        assert run.series(f"perf/{role}/framework")
    assert performance["limit_samples_per_second"] > 0
    assert performance["bottleneck"]
    assert set(performance["cpu_us"]) - {"reset"} == {"framework", "env", "inference", "training", "copying"}
    assert run.series("perf/limit_ratio")[-1] > 0


def check_it_learned(run: Run, goal: float) -> None:
    assert run.status["state"] == "finished"
    assert run.reached_return >= goal
    assert run.series("perf/episodes")[-1] >= run.config["stats_avg"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"inference": "serial"}, id="serial", marks=pytest.mark.slow),
        pytest.param({"inference": "local"}, id="local"),
        pytest.param({"inference": "central"}, id="central", marks=pytest.mark.slow),
        pytest.param(TWO_WORKERS_TWO_EPOCHS, id="central-2-workers-2-epochs", marks=pytest.mark.slow),
    ],
)
def test_cartpole_is_learned(tmp_path: Path, flags: dict[str, object]) -> None:
    run = record(tmp_path / "run", env="CartPole-v1", train_until_return=150, train_for_env_steps=150_000, **flags)
    check_it_learned(run, 150)
    assert run.reason == run.status["reason"]
    check_its_time_is_accounted_for(run)
    if flags is TWO_WORKERS_TWO_EPOCHS:
        assert run.totals["updates"] == 2 * 4 * run.totals["batches"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"inference": "serial"}, id="serial"),
        pytest.param({"inference": "local"}, id="local"),
        pytest.param({"inference": "central"}, id="central"),
        pytest.param(TWO_WORKERS_TWO_EPOCHS, id="central-2-workers-2-epochs"),
        pytest.param({}, id="auto"),
    ],
)
def test_cartpole_is_solved_by_the_command(tmp_path: Path, flags: dict[str, object]) -> None:
    run = train(
        tmp_path / "run",
        env="CartPole-v1",
        train_until_return=475,
        train_for_env_steps=500_000,
        deadline_seconds=380,
        **flags,
    )
    check_it_learned(run, 475)


def test_what_the_first_start_measured_serves_later_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if available_cores() == 1:
        pytest.skip("on one core nothing is measured")
    monkeypatch.setattr(measure, "BUDGET_SECONDS", 60.0)  # a busy machine must not change what is tested here
    monkeypatch.setattr("appo.utils.system.usage.OtherPrograms.share", lambda programs: 0.0)
    flags: dict[str, object] = {"env": "toy/Zero-v0", "encoder_mlp_layers": "8", "use_rnn": False}
    with caplog.at_level("INFO"):
        first = record(tmp_path / "run", train_for_env_steps=1000, **flags)
        unit = r"\S+ (?:us|ms|s)"
        costs = rf"env {unit}, act {unit}, learn {unit}/sample"
        measured = rf"auto-tuned in \d+\.\d s: {costs} -> (local|central), \d+ actors? x "
        assert re.search(measured, caplog.text)
        second = record(tmp_path / "run", train_for_env_steps=3000, num_workers=3, **flags)
    assert "auto-tuned by what an earlier start has measured: " in caplog.text
    assert second.config["measured"] == first.config["measured"]
    assert len(second.workers) == 3


def test_what_was_measured_on_a_busy_machine_is_said_and_serves_no_later_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if available_cores() == 1:
        pytest.skip("on one core nothing is measured")
    monkeypatch.setattr(measure, "BUDGET_SECONDS", 60.0)
    monkeypatch.setattr("appo.utils.system.usage.OtherPrograms.share", lambda programs: 0.4)
    flags: dict[str, object] = {"env": "toy/Zero-v0", "encoder_mlp_layers": "8", "use_rnn": False}
    with caplog.at_level("INFO"):
        first = record(tmp_path / "run", train_for_env_steps=1000, **flags)
    assert "tuned while other programs took 40% of the cores: nothing is kept for the next start" in caplog.text
    assert "measured" not in first.config


@pytest.mark.parametrize(
    "inference",
    ["serial", pytest.param("local", marks=pytest.mark.slow), pytest.param("central", marks=pytest.mark.slow)],
)
def test_two_policies_both_learn(tmp_path: Path, inference: str) -> None:
    """A policy that does not learn gets about 20. That both are trained in every placement, the counting tests see."""
    run = record(
        tmp_path / "run",
        env="CartPole-v1",
        inference=inference,
        num_policies=2,
        train_until_return=45,
        train_for_env_steps=100_000,
    )
    check_it_learned(run, 45)
    assert len(run.status["return_mean"]) == 2
    for policy in range(2):
        totals = run.learners[policy]
        assert totals["updates"] == run.state(policy)["adam_steps"] == 16 * totals["batches"] > 0
        assert run.series("perf/episodes", policy)[-1] >= 100
    mine, other = run.weights(0), run.weights(1)
    assert all(not np.array_equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"env": "CartPole-v1"}, id="mlp", marks=pytest.mark.slow),
        pytest.param({"env": "CartPole-v1", "num_policies": 2, "ppo_epochs": 2, **SMALL_GRU}, id="gru-2-policies"),
        pytest.param(
            {"env": "toy/Target-v0", "microbatch_size": 64, **SMALL_GRU},
            id="gru-continuous-microbatches",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_serial_runs_of_one_seed_are_identical(tmp_path: Path, flags: dict[str, object]) -> None:
    first, second, other = (
        record(tmp_path / name, inference="serial", train_for_env_steps=1500, **{"seed": seed, **flags})
        for name, seed in (("first", 5), ("second", 5), ("other", 6))
    )
    for policy in range(first.config["num_policies"]):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert first.checkpoint(policy)[name] == second.checkpoint(policy)[name]
        states = [run.state(policy) for run in (first, second)]
        for state in states:
            del state["progress"]["elapsed_seconds"]  # nothing else depends on the clock
        assert states[0] == states[1]
        assert first.checkpoint(policy)["model.safetensors"] != other.checkpoint(policy)["model.safetensors"]
        assert first.state(policy)["updates"] > 0
