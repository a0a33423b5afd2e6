"""Several agents, through all processes: toys whose best return is known, and what is counted of them."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.enjoying import enjoyed
from tests.integration.runs import record

SMALL: dict[str, Any] = {
    "num_workers": 2,
    "num_envs_per_worker": 8,
    "rollout": 16,
    "batch_size": 256,
    "num_batches_per_iteration": 1,
    "encoder_mlp_layers": 32,
    "use_rnn": False,
    "learning_rate": 0.005,
    "ppo_epochs": 2,
    "train_for_env_steps": 200_000,
}
BEST = 8.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "inference"), [("toy/Pair-v0", "local"), ("toy/Pair-v0", "central"), ("appo.envs.toys.zoo:Sizes", "local")]
)
def test_agents_reach_the_best_return(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], env: str, inference: str
) -> None:
    """Two agents that are paid only together, and three with other choices each, played by one policy."""
    if "zoo" in env:
        pytest.importorskip("pettingzoo")
    run = record(tmp_path / "run", env=env, inference=inference, **SMALL, train_until_return=7.5)
    assert run.reached_return >= 7.5
    assert run.series("stats/team_return/mean")[-1] == pytest.approx(len(agents_of(env)) * run.reached_return, rel=0.1)
    capfd.readouterr()
    played = enjoyed(capfd, tmp_path, "--experiment=run", "--deterministic", "--max_num_episodes=20", "--seed=1")
    assert {episode["return"] for episode in played["episodes"]} == {BEST}
    assert played["agent_means"] == [BEST] * len(agents_of(env))


@pytest.mark.slow
def test_agents_of_unlike_kinds_do_unlike_things_where_they_see_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an id, one policy for both is paid for half of what it does."""
    caplog.set_level("INFO")
    pytest.importorskip("pettingzoo")
    run = record(
        tmp_path / "run", env="tests.unit.envs.crowds:Unlike", inference="serial", **SMALL, train_until_return=7.5
    )
    assert run.reached_return >= 7.5
    said = [one.getMessage() for one in caplog.records if "rows in this order: few, many; " in one.getMessage()]
    assert len(said) == 1


def agents_of(env: str) -> range:
    return range(3 if "zoo" in env else 2)


def test_steps_of_absent_agents_are_no_samples(tmp_path: Path) -> None:
    """Three agents of 8 envs are 24 rows of an actor, of which about half take part; they are what is counted."""
    run = record(tmp_path / "run", env="toy/Shifts-v0", inference="local", **SMALL | {"train_for_env_steps": 2000})
    totals = run.totals
    assert totals["env_steps"] == totals["samples"] >= 2000
    assert totals["actors_collected"] - totals["samples"] == totals["in_flight"] + totals["discarded"]
    assert 0.3 < totals["samples"] / (totals["batches"] * 256) < 0.7
