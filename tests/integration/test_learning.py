"""What needs a memory is learned with one, and only with one."""

from pathlib import Path

import pytest

from tests.integration.runs import record

MEMORY: dict[str, object] = {
    "env": "toy/Memory-v0",
    "inference": "serial",
    "encoder_mlp_layers": 32,
    "hidden_size": 32,
    "rollout": 16,
    "batch_size": 512,
    "ppo_epochs": 2,
    "learning_rate": 0.003,
    "num_envs_per_worker": 32,
}
GOAL = 0.9
# What forgets earns 0 on average: the mean of 100 episodes of +1 and -1 is beyond this in one of 10^9 windows.
LUCK = 0.6


@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
def test_a_memory_task_is_solved_with_a_memory(tmp_path: Path, rnn_type: str) -> None:
    run = record(
        tmp_path / "run", **MEMORY, use_rnn=True, rnn_type=rnn_type, train_until_return=GOAL, train_for_env_steps=60_000
    )
    assert run.reached_return >= GOAL


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["local", "central"])
@pytest.mark.parametrize("rnn_type", ["gru", "lstm"])
def test_a_memory_task_is_solved_in_segments_shorter_than_its_delay(
    tmp_path: Path, rnn_type: str, inference: str
) -> None:
    """Gradients reach back 8 steps, the state as far as it must."""
    flags = MEMORY | {"inference": inference, "num_workers": 2, "num_envs_per_worker": 16, "recurrence": 8}
    run = record(
        tmp_path / "run", **flags, use_rnn=True, rnn_type=rnn_type, train_until_return=GOAL, train_for_env_steps=200_000
    )
    assert run.reached_return >= GOAL


@pytest.mark.slow
def test_a_memory_task_is_not_solved_without_a_memory(tmp_path: Path) -> None:
    run = record(
        tmp_path / "run",
        **MEMORY,
        use_rnn=False,
        train_until_return=GOAL,
        train_for_env_steps=60_000,
        experiment_summaries_interval=0.5,
    )
    assert run.reason.startswith("every policy has learned from")
    means = run.series("reward/mean")
    assert len(means) >= 2
    assert max(means) <= LUCK


@pytest.mark.slow
@pytest.mark.parametrize(
    "env_flags", [{"env": "toy/Corridor-v0", "goal": 0.99}, {"env": "toy/Target-v0", "goal": -7.0}]
)
def test_toys_are_learned(tmp_path: Path, env_flags: dict[str, object]) -> None:
    flags = MEMORY | {"env": env_flags["env"], "use_rnn": False}
    run = record(tmp_path / "run", **flags, train_until_return=env_flags["goal"], train_for_env_steps=300_000)
    assert run.reached_return >= env_flags["goal"]


MAZE: dict[str, object] = {
    "env": "toy/Memory-v0",
    "env_kwargs": "delay=18",
    "algo": "APEX",
    "batch_replay": True,
    "inference": "serial",
    "num_envs_per_worker": 16,
    "encoder_mlp_layers": 32,
    "hidden_size": 32,
    "normalize_input": False,
    "rollout": 40,
    "burn_in": 20,
    "batch_size": 640,
    "n_steps": 5,
    "learning_rate": 0.002,
    "learning_starts": 2000,
    "replay_capacity": 50_000,
    "replay_ratio": 4,
    "target_update_interval": 100,
    "max_weight_sync_delay": 0,
    "train_for_env_steps": 300_000,
    "stats_avg": 200,
}
"""A T-maze of 20 steps: what is shown in the first is asked for in the last."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_maze_is_solved_from_replayed_trajectories(tmp_path: Path) -> None:
    run = record(tmp_path / "run", **MAZE, use_rnn=True, rnn_type="gru", train_until_return=0.95)
    assert run.reached_return >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_maze_is_not_solved_from_replayed_trajectories_without_a_memory(tmp_path: Path) -> None:
    run = record(tmp_path / "run", **MAZE, use_rnn=False, train_until_return=0.95, experiment_summaries_interval=0.5)
    assert run.reason.startswith("every policy has learned from")
    assert max(run.series("reward/mean")) <= LUCK
