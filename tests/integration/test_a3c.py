"""Runs of A3C: every gradient counts once and is of the weights that acted; what has no place is refused."""

from pathlib import Path
from typing import Any

import pytest

from appo.algorithms.run.config import parse_train
from appo.utils.errors import UsageError
from tests.integration.enjoying import enjoyed
from tests.integration.runs import record, run_command, train

ROLLOUT, ENVS, ACTORS, STEPS = 8, 3, 2, 1500
SMALL: dict[str, Any] = {
    "algo": "A3C",
    "device": "cpu",
    "env": "toy/Counter-v0",
    "rollout": ROLLOUT,
    "encoder_mlp_layers": 16,
    "hidden_size": 8,
    "use_rnn": False,
    "grads_per_step": 5,
    "num_workers": ACTORS,
    "num_envs_per_worker": ENVS,
    "normalize_returns": True,
    "train_for_env_steps": STEPS,
}
GRU = {"use_rnn": True, "recurrence": ROLLOUT // 2}
SPACES = {"env": "toy/Spaces-v0"}
SAME_STEP = {"env_kwargs": '{"autoreset_mode": "SameStep"}'}
MASKED = SPACES | {"env_kwargs": '{"action": "tuple", "mask": "info"}'}
IMAGES = SPACES | {"env_kwargs": '{"observation": "image_and_vector"}', "normalize_images": True}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="numbers", marks=pytest.mark.slow),
        pytest.param(GRU, id="gru", marks=pytest.mark.slow),
        pytest.param(SAME_STEP | {"use_rnn": True, "rnn_type": "lstm"}, id="same-step", marks=pytest.mark.slow),
        pytest.param(MASKED, id="masks"),
        pytest.param({"env": "toy/Shifts-v0", "optimizer": "adam"}, id="agents", marks=pytest.mark.slow),
        pytest.param(IMAGES, id="images", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_counts_once_and_is_of_the_weights_that_acted(tmp_path: Path, flags: dict[str, Any]) -> None:
    run = record(tmp_path / "run", **SMALL | flags)
    (totals,) = run.learners.values()
    state = run.state()
    assert STEPS <= totals["env_steps"] == totals["samples"] == totals["used"]
    assert totals["batches"] == totals["updates"] == state["updates"] == state["version"] - 1 > 30
    collected = sum(totals["collected"] for totals in run.workers.values())
    assert totals["samples"] + totals["discarded"] + totals["in_flight"] == collected
    assert totals["discarded"] == 0
    assert run.statistics()[-3] == totals["samples"]  # count of the returns
    assert max(run.reported("train/reproduction_error")) < 1e-4
    assert 0 <= max(run.reported("train/policy_lag_max")) < 100  # older ones are dropped
    assert min(run.reported("train/apply_ms")) > 0


@pytest.mark.slow
def test_a_run_goes_on_and_its_policy_plays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """RMSProp's vector is saved and read; the budget is that of both starts."""
    first = train(tmp_path / "run", **SMALL)
    before = first.totals
    assert first.state()["samples"] == before["samples"]
    second = train(tmp_path / "run", **SMALL | {"train_for_env_steps": 2 * STEPS})
    assert f"resuming policy 0 at env step {before['samples']} from " in second.stdout
    assert second.totals["samples"] >= 2 * STEPS
    assert second.totals["updates"] == second.state()["updates"] > before["updates"]
    refused = run_command(tmp_path / "run", **SMALL | {"optimizer": "adam"})
    assert refused.returncode == 2
    assert "run run cannot change optimizer rmsprop -> adam" in refused.stderr
    played = enjoyed(capfd, tmp_path, "--experiment=run", "--max_num_episodes=3", "--seed=1")
    assert len(played["episodes"]) == 3


def test_gradients_of_old_weights_are_dropped_and_counted(tmp_path: Path) -> None:
    run = record(tmp_path / "run", **SMALL | {"max_policy_lag": 1})
    (totals,) = run.learners.values()
    assert totals["discarded"] > 0
    collected = sum(totals["collected"] for totals in run.workers.values())
    assert totals["samples"] + totals["discarded"] + totals["in_flight"] == collected
    assert max(run.reported("train/policy_lag_max")) == 0


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--inference=central", "--inference=central: with --algo=A3C actors act themselves, which is local"),
        ("--inference=serial", "--inference=serial: with --algo=A3C actors act themselves, which is local"),
        ("--lockstep", "--lockstep: --algo=A3C takes what its actors compute as it comes, which no run repeats"),
        ("--worker_num_splits=2", "--worker_num_splits=2: with --algo=A3C an actor has one group"),
        ("--num_policies=2", "--num_policies=2: --algo=A3C is for one policy"),
        ("--recurrence=3", "--rollout=20 is not a multiple of --recurrence=3"),
        (
            "--verify_reproduction --learning_rate=0",
            "--verify_reproduction: --algo=A3C says train/reproduction_error of every gradient as it is",
        ),
    ],
)
def test_what_has_no_place_in_actors_is_refused(tmp_path: Path, flag: str, reason: str) -> None:
    words = [f"--train_dir={tmp_path}", "--algo=A3C", "--env=toy/Counter-v0", "--device=cpu", *flag.split()]
    with pytest.raises(UsageError) as refused:
        parse_train(words)
    assert str(refused.value) == reason


def test_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.run.config.choose_device", lambda asked: "cpu" if asked == "cpu" else "cuda")
    words = [f"--train_dir={tmp_path}", "--algo=A3C", "--env=toy/Counter-v0"]
    with pytest.raises(UsageError, match=r"^--algo=A3C computes in its actors, on the CPU only: add --device=cpu$"):
        parse_train([*words, "--device=cuda"])
    assert parse_train(words).run.device == "cpu"  # which nobody has to say


@pytest.mark.slow
def test_refusals_end_with_one_line(tmp_path: Path) -> None:
    run = run_command(tmp_path / "run", **SMALL | {"lockstep": True})
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    run = run_command(tmp_path / "run", **SMALL | {"use_spectral_norm": True})
    assert run.returncode == 2
    assert "error: --use_spectral_norm: with --algo=A3C no network makes the passes" in run.stderr
