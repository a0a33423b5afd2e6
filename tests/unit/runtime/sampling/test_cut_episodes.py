"""Episodes that decorrelation has begun before the first step: no figure is made of what is left of them."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.algorithms.runtime.callbacks import Callbacks, Episode, GroupHooks, Hooks
from appo.algorithms.runtime.messages import EpisodesDone
from appo.envs.agents.multi_agent import loop_over
from appo.envs.loop.env_set import OnFailure
from tests.unit.runtime.groups import Played, episodes

LENGTH, ENVS = 50, 6


class Fixed(gymnasium.Env[Any, Any]):
    """Episodes of exactly 50 steps, each of which is worth 1 and reports as much.

    Args:
        fails_at: the step of its life in which it raises; 0: none.
    """

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fails_at: int = 0) -> None:
        self.life, self.fails_at = 0, fails_at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count, self.life = self.count + 1, self.life + 1
        if self.life == self.fails_at:
            raise RuntimeError("once")
        over = self.count == LENGTH
        return np.zeros(1, np.float32), 1.0, over, False, {"true_reward": self.count} if over else {}


class Pair(Fixed):
    """Two agents whose episodes are those."""

    num_agents = 2

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset()
        return [observation] * 2, [info] * 2

    def step(self, action: Any) -> Any:
        observation, reward, over, cut, info = super().step(action)
        return [observation] * 2, [reward] * 2, [over] * 2, [cut] * 2, [info] * 2


class Noted(Callbacks):
    """Notes the lengths of the episodes that it is told of."""

    lengths: list[int]

    def on_episode_end(self, episode: Episode) -> None:
        self.lengths.append(episode.length)


def played(made: list[Any], decorrelate_steps: int = 40, **plan: Any) -> Played:
    loop = loop_over(made, name="Fixed", decorrelate_steps=decorrelate_steps, on_failure=OnFailure(max_rebuilds=3))
    return Played(envs=loop, rollout=10, slots=60, keep=True, untimed=True, **plan).begin()  # type: ignore[arg-type]


def stats_of(group: Played) -> list[dict[str, float]]:
    return [stats for done in group.said if isinstance(done, EpisodesDone) for _, stats in done.stats]


@pytest.mark.parametrize("kind", [Fixed, Pair])
def test_the_writer_of_a_dataset_sees_which_rows_begin_in_the_middle(kind: type[Fixed]) -> None:
    group = played([kind] * ENVS, start=3)
    t, told = group.trajectories, list[tuple[int, Any]]()

    class Tap:
        """Notes what it is told at the reset."""

        def begin(self, step: int, begun_before: Any) -> None:
            told.append((step, begun_before.copy()))

    group.group.tap = Tap()  # type: ignore[assignment]
    group.group.reset()
    ((step, begun_before),) = told
    assert step == group.group.step == 3
    np.testing.assert_array_equal(begun_before, group.envs.cut)
    assert begun_before.any()
    assert t.first[group.group.slot, 3].all()  # learners


@pytest.mark.parametrize("kind", [Fixed, Pair])
def test_every_episode_that_is_reported_is_whole(kind: type[Fixed]) -> None:
    group = played([kind] * ENVS)
    cut = group.envs.cut.copy()
    assert ENVS // 2 < cut.sum() // (2 if kind is Pair else 1) < ENVS + 1
    group.steps(51 * 4)
    found = episodes(group.said)
    assert {(episode_return, length) for _, episode_return, length in found} == {(50.0, 50)}
    # 204 steps hold four whole episodes, or the rest of one and three more.
    assert len(found) == group.group.episodes.count == 4 * len(cut) - cut.sum()
    assert {stats["true_reward"] for stats in stats_of(group) if "true_reward" in stats} == {50.0}
    assert {stats["team_return"] for stats in stats_of(group) if "team_return" in stats} <= {100.0}


def test_env_steps_and_samples_are_counted_as_before() -> None:
    group = played([Fixed] * ENVS)
    group.steps(100)
    t = group.trajectories
    valid = sum(int(t.valid[slot].sum()) for slot in range(10))
    assert group.group.totals["collected"] == valid
    assert valid + group.group.totals["reset_rows"] == 100 * ENVS
    assert group.group.totals["reset_rows"] >= ENVS


def test_without_random_steps_the_first_episodes_are_whole_too() -> None:
    group = played([Fixed] * ENVS, decorrelate_steps=0)
    group.steps(60)
    assert episodes(group.said) == [(0, 50.0, 50)] * ENVS


def test_an_environment_made_again_begins_a_whole_episode() -> None:
    lives = iter([5] * ENVS + [0] * ENVS)
    group = played([lambda: Fixed(next(lives))] * ENVS, decorrelate_steps=4)
    group.steps(60)
    assert group.envs.rebuilds == ENVS
    assert episodes(group.said) == [(0, 50.0, 50)] * ENVS


def test_callbacks_are_told_of_whole_episodes_alone() -> None:
    note = Noted({})
    note.lengths = []
    group = played([Fixed] * ENVS)
    group.group.hooks = GroupHooks(Hooks([note]), group.trajectories, 0, 1)
    group.steps(204)
    assert set(note.lengths) == {50}
    assert len(note.lengths) == len(episodes(group.said))


def test_a_soft_horizon_ends_what_began_in_the_middle_without_a_report() -> None:
    group = played([Fixed] * ENVS, soft_horizon=30)
    cut = group.envs.cut.copy()
    group.steps(30)
    assert episodes(group.said) == [(0, 30.0, 30)] * int(ENVS - cut.sum())
    group.steps(30)
    assert len(episodes(group.said)) >= ENVS  # what follows a logical end is reported
