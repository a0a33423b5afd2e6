"""Linear schedules: the budget that they follow, over starts too, and the lines about them."""

import logging
from pathlib import Path
from typing import Any

import pytest

from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.run.schedules import log_schedules
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.config import RunConfig, SamplingConfig
from appo.utils.errors import UsageError
from appo.utils.run_folder import write_json_atomic

LONG = 10**10


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("budget", "env_steps", "seconds", "progress"),
    [
        (Budget(1000), 250, 900.0, 0.25),
        (Budget(1000), 1300, 0.0, 1.0),
        (Budget(LONG, seconds=80.0), 10**9, 20.0, 0.25),
        (Budget(LONG, seconds=80.0), 0, 90.0, 1.0),
        (Budget(1000, seconds=80.0), 250, 60.0, 0.75),  # the time is nearer to its end
        (Budget(1000, seconds=80.0), 750, 20.0, 0.75),  # the steps are
        (Budget(LONG), 10**9, 1e6, 0.0),  # nothing to anneal over
        (Budget(LONG, seconds=80.0, earlier_seconds=20.0), 0, 30.0, 0.5),
        (Budget(1000, seconds=0.0), 250, 5.0, 0.25),
        (Budget(1000, seconds=80.0, by_clock=False), 250, 60.0, 0.25),
    ],
)
def test_the_budget_that_is_nearer_to_its_end_decides(
    budget: Budget, env_steps: int, seconds: float, progress: float
) -> None:
    assert budget.progress(env_steps, seconds) == progress


def test_time_goes_on_over_starts_with_larger_budgets() -> None:
    run = RunConfig(train_for_seconds=60.0)
    first = Budget.of(run, SamplingConfig(), 1).after([{}, {}])
    assert first.progress(0, 60.0) == 1.0
    state = {"env_steps": 500, "progress": {"elapsed_seconds": 60.0}}
    second = Budget.of(RunConfig(train_for_seconds=180.0), SamplingConfig(), 1).after([state, {}])
    assert [second.progress(500, seconds) for seconds in (0.0, 60.0, 180.0)] == [0.25, 0.5, 1.0]
    assert second.plain() == Budget.of(RunConfig(train_for_seconds=180.0), SamplingConfig(), 1).plain()


def flags(*words: str, env: str = "HalfCheetah-v5") -> Config:
    return parse_train([f"--env={env}", "--experiment=run", *words])


def started(*words: str) -> None:
    config = flags(*words)
    config.run.run_directory.mkdir(parents=True, exist_ok=True)
    write_json_atomic(config.run.run_directory / "config.json", config.to_flat())


def test_a_time_of_the_user_replaces_the_env_steps_of_a_preset() -> None:
    def budget(*words: str) -> tuple[int, float]:
        run = flags(*words).run
        return run.train_for_env_steps, run.train_for_seconds

    assert budget() == (10_000_000, 1e10)
    assert budget("--train_until_return=3000") == (10_000_000, 1e10)
    assert budget("--train_for_seconds=60") == (LONG, 60.0)
    assert budget("--train_for_env_steps=500") == (500, 1e10)
    assert budget("--train_for_env_steps=500", "--train_for_seconds=60") == (500, 60.0)
    assert budget("--train_for_seconds=20000000000") == (10_000_000, 2e10)
    started()  # with the env steps of the preset
    assert budget() == (10_000_000, 1e10)
    assert budget("--train_for_seconds=60") == (LONG, 60.0)
    started("--train_for_env_steps=500")
    assert budget("--train_for_seconds=60") == (500, 60.0)  # both of the user


def logged(caplog: pytest.LogCaptureFixture, config: Config, *resumed: dict[str, Any]) -> list[tuple[int, str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        log_schedules(config.learning, Budget.of(config.run, config.sampling, 1).after(resumed), resumed)
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_a_resumed_schedule_logs_where_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    linear = ("--lr_schedule=linear", "--learning_rate=0.002", "--ppo_clip_schedule=linear", "--ppo_clip_ratio=0.2")
    state = {"env_steps": 250, "progress": {"elapsed_seconds": 30.0}}
    config = flags(*linear, "--train_for_env_steps=1000", "--train_for_seconds=270", env="toy/Counter-v0")
    assert logged(caplog, config, {}) == []
    line = "linear schedules go on at 25.0% of --train_for_env_steps=1000: learning_rate 0.0015, ppo_clip_ratio 0.15"
    assert logged(caplog, config, state) == [(logging.INFO, line)]
    config = flags(*linear, "--train_for_seconds=30", env="toy/Counter-v0")
    line = "linear schedules go on at 50.0% of 30 s of training and --train_for_seconds=30: learning_rate 0.001,"
    assert logged(caplog, config, state) == [(logging.INFO, f"{line} ppo_clip_ratio 0.1")]
    assert logged(caplog, flags("--train_for_seconds=30", env="toy/Counter-v0"), state) == []  # all are constant
    config = flags("--algo=APEX", "--priority_beta_final=1", "--train_for_env_steps=1000", env="toy/Counter-v0")
    line = "linear schedules go on at 25.0% of --train_for_env_steps=1000: priority_beta 0.55"
    assert logged(caplog, config, state) == [(logging.INFO, line)]


def test_a_schedule_without_a_budget_stays_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = flags("--exploration_loss_schedule=linear", "--exploration_loss_coeff=0.01", env="toy/Counter-v0")
    line = "linear schedules need --train_for_env_steps or --train_for_seconds; without a budget"
    for resumed in ({}, {"env_steps": 10}):
        assert logged(caplog, config, resumed) == [(logging.WARNING, f"{line} exploration_loss_coeff stays 0.01")]
    config = flags("--algo=APEX", "--priority_beta_final=1", env="toy/Counter-v0")
    assert logged(caplog, config, {}) == [(logging.WARNING, f"{line} priority_beta stays 0.4")]
    config = flags("--algo=APEX", "--priority_beta_final=1", "--train_for_env_steps=1000", env="toy/Counter-v0")
    assert logged(caplog, config, {}) == []
    config = flags("--algo=PQN", "--lr_schedule=constant", env="toy/Counter-v0")
    line = "--epsilon_decay needs --train_for_env_steps or --train_for_seconds; without, two iterations explore"
    assert logged(caplog, config, {}) == [(logging.WARNING, line)]
    assert logged(caplog, flags("--algo=PQN", "--epsilon_decay=0", env="toy/Counter-v0"), {}) == []


def test_a_run_that_repeats_follows_no_clock() -> None:
    words = ("--lockstep", "--device=cpu", "--lr_schedule=linear")
    with pytest.raises(UsageError) as caught:
        flags(*words, "--train_for_seconds=60", env="toy/Counter-v0")
    assert str(caught.value) == (
        "--lockstep and --deterministic_resume repeat no clock: learning_rate can change over --train_for_env_steps,"
        " not over --train_for_seconds"
    )
    words = ("--lockstep", "--device=cpu", "--algo=APEX", "--priority_beta_final=1", "--train_for_seconds=60")
    with pytest.raises(UsageError, match="repeat no clock: priority_beta can change over"):
        flags(*words, env="toy/Counter-v0")
    flags(*words, "--prioritized_replay=False", env="toy/Counter-v0")
    with pytest.raises(UsageError, match="repeat no clock: epsilon_decay can change"):
        flags("--algo=PQN", "--lockstep", "--device=cpu", "--train_for_seconds=60", env="toy/Counter-v0")
    both = flags(*words, "--train_for_seconds=60", "--train_for_env_steps=1000", env="toy/Counter-v0")
    assert Budget.of(both.run, both.sampling, 1).progress(250, 50.0) == 0.25
    assert flags("--lockstep", "--device=cpu", "--train_for_seconds=60", env="toy/Counter-v0").repeatable
