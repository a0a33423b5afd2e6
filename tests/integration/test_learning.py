"""What needs a memory is learned with one, and only with one."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from appo.algorithms.playing.policy import load_policy
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


@pytest.mark.parametrize("rnn_type", [pytest.param("gru", marks=pytest.mark.slow), "lstm"])
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*assuming NEXT_STEP")
@pytest.mark.parametrize("final", ["final_obs", "final_observation"])
def test_a_vector_that_does_not_say_that_it_resets_in_the_same_step_is_bootstrapped_rightly(
    tmp_path: Path, final: str
) -> None:
    """A pays 0 and B pays 1 for ever, but it is cut off after 4 steps."""
    flags: dict[str, object] = {
        "env": "tests.unit.envs.test_vector:Endless",
        "env_kwargs": json.dumps({"final": final}),
    }
    small = {name: MEMORY[name] for name in ("inference", "encoder_mlp_layers", "hidden_size", "num_envs_per_worker")}
    run = record(
        tmp_path / "run", **flags, **small, use_rnn=False, rollout=16, batch_size=512, ppo_epochs=4, seed=1,
        learning_rate=0.003, gamma=0.9, train_for_env_steps=60_000,
    )  # fmt: skip
    policy = load_policy(run.directory, trust=True)
    values = [policy.compute_action(np.array(shown, np.float32)).value for shown in ((1, 0), (0, 1))]
    assert values == pytest.approx([9.0, 10.0], abs=0.3)


@pytest.mark.slow
def test_frames_of_an_environment_with_one_buffer_are_learned_from(tmp_path: Path) -> None:
    """Paid is the choice of the bit before the one that is shown: 16 at best, 8 by chance or by the newest frame."""
    small = {name: MEMORY[name] for name in ("inference", "encoder_mlp_layers", "hidden_size", "num_envs_per_worker")}
    run = record(
        tmp_path / "run", **small, env=f"{__name__}:Delay", env_framestack=2, use_rnn=False, rollout=16, batch_size=512,
        ppo_epochs=2, learning_rate=0.003, seed=1, train_until_return=15.0, train_for_env_steps=200_000,
    )  # fmt: skip
    assert run.reached_return >= 15.0


class Delay(gymnasium.Env[Any, Any]):
    """Shows a bit, in one buffer again and again, and pays for the choice of the bit before it."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = gymnasium.spaces.Box(0, 1, (2,)), gymnasium.spaces.Discrete(2)
        self.buffer, self.steps, self.bits = np.zeros(2, np.float32), 0, (0, 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.bits = 0, (0, 0)
        return self._shown(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, self.steps = float(action == self.bits[0]), self.steps + 1
        return self._shown(), reward, False, self.steps == 16, {}

    def _shown(self) -> Any:
        self.bits = (self.bits[1], int(self.np_random.integers(2)))
        self.buffer[:] = (self.bits[1], 1 - self.bits[1])
        return self.buffer
