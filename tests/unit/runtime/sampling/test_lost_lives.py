"""A lost life ends an episode in learning, and nowhere else."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from appo.algorithms.run.config import Config, check
from appo.algorithms.runtime.sampling.episodes import LostLives
from appo.envs.config import EnvConfig
from appo.envs.make import make_group
from appo.envs.spec import EpisodeStats, StepRow, step_row
from appo.utils.errors import SpaceMismatch, UsageError
from tests.unit.runtime.groups import PairEnv, Played, episodes

HERE = __name__


class Cat(PairEnv):
    """A life is lost in every second step; the last of three lives ends the game, in step 5."""

    def step(self, action: np.ndarray, row: StepRow) -> Sequence[EpisodeStats]:
        super().step(action, row)
        assert row.lives is not None
        row.lives[:] = 3 - self.steps // 2
        return ()


def test_a_lost_life_is_stored_as_an_end_and_the_game_goes_on() -> None:
    played = Played(envs=Cat(1, 5), rollout=6, slots=4, episodic_life=True).begin()
    for _ in range(3):  # each is a game of 5 steps and the step that resets
        played.trajectory()
    assert episodes([*played.said, *played.group.episodes.flush(now=True)]) == [(0, 5.0, 5)] * 6
    t = played.trajectories
    assert t.terminated[:3, :, 0].tolist() == [[False, True, False, True, True, False]] * 3
    assert not t.truncated[:3].any()
    assert t.first[:3, :6, 0].tolist() == [[True, False, False, False, False, False]] * 3
    assert t.valid[:3, :, 0].tolist() == [[True] * 5 + [False]] * 3


def test_a_game_that_begins_with_fewer_lives_has_lost_none() -> None:
    lost = LostLives(1)
    row = SimpleNamespace(terminated=np.zeros(1, bool), truncated=np.zeros(1, bool))
    seen = []
    # A time limit ends the first game with 6 lives; the step that resets still shows them.
    steps = [(6, True, False), (6, True, True), (6, False, False), (4, True, False), (3, True, False)]
    for lives, valid, truncated in steps:
        lost.now[:], row.terminated[:], row.truncated[:] = lives, False, truncated
        lost.end(row, np.array([valid]))  # type: ignore[arg-type]
        seen.append(bool(row.terminated[0]))
    assert seen == [False, False, False, False, True]


class Lives(gymnasium.Env[Any, Any]):
    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def __init__(self, key: str = "lives") -> None:
        self.key, self.left = key, 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 3
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= int(action)
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {self.key: self.left}


def lives_shown(group: Any, actions: Sequence[int]) -> list[int]:
    row = Played(envs=PairEnv(1, 9)).group.steps[0][0].out
    row.obs = {"obs": np.zeros((2, 1), np.float32)}
    row.lives = np.zeros(2, np.int32)
    group.reset([0, 1], row.obs)
    shown = []
    for action in actions:
        group.step(np.array([[0], [action]], np.int32), row)
        shown.append(row.lives.tolist())
    group.close()
    return shown


@pytest.mark.parametrize("by", ["python", "native"])
def test_lives_are_read_from_infos_of_every_kind_of_group(by: str) -> None:
    name = "Lives" if by == "python" else "make_vector"
    group = make_group(EnvConfig(env=f"{HERE}:{name}"), 2)
    assert lives_shown(group, [1, 0, 1, 1]) == [[3, 2], [3, 2], [3, 1], [3, 0]]


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_a_vector_whose_games_end_together_shows_no_lives_in_its_resets(mode: str) -> None:
    make = f"{HERE}:make_vector" if mode == "NEXT_STEP" else f"{HERE}:make_same_step"
    group = make_group(EnvConfig(env=make), 1)
    played = step_row(group.spec, 1)
    played.lives = np.zeros(1, np.int32)
    group.reset([0], played.obs)
    ends = []
    for _ in range(8):
        group.step(np.ones((1, 1), np.int32), played)
        ends.append(bool(played.terminated[0]))
    group.close()
    assert sum(ends) == 2


def make_same_step(num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    return gymnasium.vector.SyncVectorEnv([Lives] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def make_vector(num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    return gymnasium.vector.SyncVectorEnv([Lives] * num_envs)


def test_what_has_no_lives_is_refused() -> None:
    group = make_group(EnvConfig(env=f"{HERE}:Lives", env_kwargs={"key": "hearts"}), 2)
    with pytest.raises(SpaceMismatch, match="Lives: --episodic_life needs lives in the info of every step"):
        lives_shown(group, [0])
    with pytest.raises(UsageError, match="--episodic_life does not go with --output: datasets hold whole games"):
        check(Config.from_flat({"env": "a", "experiment": "b", "episodic_life": True, "output": "d"}))
    with pytest.raises(UsageError, match="--no_done_at_end does not go with --output: datasets tell ends from cuts"):
        check(Config.from_flat({"env": "a", "experiment": "b", "no_done_at_end": True, "output": "d"}))
