"""An environment that is slow on one rank, as on a machine that other programs use."""

import os
import time
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv

SECONDS = 0.05


class SlowOnRank1(CartPoleEnv):  # type: ignore[misc]
    def step(self, action: int) -> Any:
        if os.environ.get("RANK") == "1":
            time.sleep(SECONDS)
        return super().step(action)
