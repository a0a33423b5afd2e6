"""Environments for machines of a cluster; two are so slow on the head that only the machines count."""

import os
import time
from typing import Any

import gymnasium
import numpy as np

STEP_SECONDS = 0.005
HEAD_SECONDS = 0.1


def is_on_head() -> bool:
    return "RAY_RAYLET_PID" not in os.environ


class Sleeping(gymnasium.Env[np.ndarray, int]):
    """Sleeps in every step; observations are random numbers, which do not compress.

    Args:
        nbytes: bytes of an observation.
        seconds: duration of a step.
    """

    def __init__(self, nbytes: int, seconds: float) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (nbytes // 4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.seconds, self._steps = seconds, 0
        self._observation = np.zeros(nbytes // 4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        self._observation = self.np_random.random(self._observation.size, np.float32)
        return self._observation, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self.seconds)
        self._steps += 1
        return np.roll(self._observation, self._steps), float(action), self._steps >= 200, False, {}


class SlowOnHead(gymnasium.Wrapper):
    """Adds a sleep to every step on the head."""

    def step(self, action: Any) -> Any:
        if is_on_head():
            time.sleep(HEAD_SECONDS)
        return super().step(action)


def small() -> gymnasium.Env:
    """Make an environment with observations of 1 kB."""
    return Sleeping(1000, STEP_SECONDS)


def large() -> gymnasium.Env:
    """Make an environment with observations of 30 kB."""
    return Sleeping(30_000, STEP_SECONDS)


def small_there() -> gymnasium.Env:
    """Make `small`, slow on the head."""
    return SlowOnHead(small())


def pong_there() -> gymnasium.Env:
    """Make Pong with the usual frames, 4 x 84 x 84, slow on the head."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=0)
    return SlowOnHead(gymnasium.wrappers.FrameStackObservation(env, 4))
