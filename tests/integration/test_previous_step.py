"""What the last action and reward are worth to a policy without a memory."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo import Result, train

STEPS = 10


class Arms(gymnasium.Env[Any, Any]):
    """Two arms, one of which pays 1 for a whole episode; nothing that is shown says which."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.pays = self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.pays, self.steps = int(self.np_random.integers(2)), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(1, np.float32), float(action == self.pays), self.steps == STEPS, False, {}


def trained(directory: Path, shown: str, env_steps: int) -> Result:
    return train(
        env=f"{__name__}:Arms",
        observe_previous=shown,
        use_rnn=False,
        inference="serial",
        num_workers=1,
        num_envs_per_worker=16,
        train_for_env_steps=env_steps,
        train_until_return=9.0,
        gamma=0.0,
        exploration_loss_coeff=0.1,
        train_dir=directory,
        tensorboard=False,
        seed=1,
    )


@pytest.mark.slow
def test_who_sees_both_stays_with_what_pays(tmp_path: Path) -> None:
    """At best the first arm is a guess and all others are right: 9.5 of 10; at random it is 5."""
    assert trained(tmp_path / "both", "both", 100_000).reason.startswith("the mean return has reached 9.")
    blind = trained(tmp_path / "none", "none", 10_000).report.episode_return
    assert blind is not None
    assert blind < 6.5
