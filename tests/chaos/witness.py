"""A learner that writes down what it trains on, and checks that it is whole.

`Clues` is the environment for it. Its observations say, too small for a network to see and exact in float32, whose they
are: which environment (by its seed), which episode and which step.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.appo.learner import APPOLearner
from appo.algorithms.runtime.learning.batches import Batch

TESTIMONY = "APPO_TEST_TESTIMONY"  # names the file
SCALE = 2.0**-44
SEEDS = 2**24  # integers below are exact in float32
EPISODE_STEPS = 8
BONUS = 10.0


class Clues(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Every step shows a sign, and the action that belongs to it is worth 1.

    When there is a file `gate` every episode is worth `BONUS` more: a goal beyond that cannot be reached before.
    """

    def __init__(self, gate: str) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.gate = Path(gate)
        self._seed = self._step = self._sign = 0
        self._episode = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode = seed % SEEDS, -1
        self._episode, self._step = self._episode + 1, 0
        return self._show(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        reward = float(action == (self._sign > 0))
        self._step += 1
        ended = self._step == EPISODE_STEPS
        if ended and self.gate.exists():
            reward += BONUS
        return self._show(), reward, ended, False, {}

    def _show(self) -> NDArray[np.float32]:
        self._sign = 2 * int(self.np_random.integers(2)) - 1
        return np.array([self._sign, *(n * SCALE for n in (self._seed, self._episode, self._step))], np.float32)


def traces(obs: NDArray[np.float32]) -> NDArray[np.int64]:
    """Environment, episode and step [..., 3] of observations [..., 4]."""
    return (obs[..., 1:].astype(np.float64) / SCALE).round().astype(np.int64)


def broken_steps(trace: NDArray[np.int64], first: NDArray[np.bool_], valid: NDArray[np.bool_]) -> int:
    """Steps after which something else follows than the next one of the same environment.

    Args:
        trace: [T+1, B, 3].
        first: [T+1, B].
        valid: [T, B].
    """
    (seed, episode, step), (next_seed, next_episode, next_step) = (
        np.moveaxis(t, -1, 0) for t in (trace[:-1], trace[1:])
    )
    goes_on = (next_episode == episode) & (next_step == step + 1)
    begins = (next_episode == episode + 1) & (next_step == 0)
    # Of a step that ends an episode the next observation is the last one; the step after it only resets.
    follows = (next_seed == seed) & np.where(valid, goes_on, begins)
    taken = valid | (first[1:] & ~first[:-1])  # what lies before a late start never was
    return int(np.count_nonzero(taken & ~follows))


def columns(trace: NDArray[np.int64], valid: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """The first valid step of every column: no other column has it."""
    rows = valid.argmax(axis=0)
    return [tuple(trace[row, column].tolist()) for column, row in enumerate(rows)]


class Witnessed(APPO):
    """APPO in every other respect."""

    def learner_class(self) -> type[APPOLearner]:
        file = os.open(os.environ[TESTIMONY], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

        class Witness(APPOLearner):
            def learn(self, batch: Batch, progress: float) -> Iterator[None]:
                obs, first, valid = (t.numpy() for t in (batch.obs["obs"], batch.first, batch.valid))
                trace = traces(obs)
                line = {
                    "pid": os.getpid(),
                    "version": self.version,
                    "samples": int(valid.sum()),
                    "broken": broken_steps(trace, first, valid),
                    "columns": columns(trace, valid),
                }
                os.write(file, json.dumps(line).encode() + b"\n")
                yield from super().learn(batch, progress)

        return Witness


ALGORITHM = f"{__name__}:{Witnessed.__name__}"
