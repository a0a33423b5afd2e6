"""A soft horizon ends episodes in the statistics, and nowhere else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.algorithms.run.config import Config, check
from appo.algorithms.run.tuning.network import probe
from appo.algorithms.runtime.callbacks import Callbacks, Episode, GroupHooks, Hooks
from appo.algorithms.runtime.messages import EpisodesDone
from appo.algorithms.runtime.sampling.episodes import SoftHorizon
from appo.envs.config import EnvConfig
from appo.envs.make import NEVER, make_group, make_single
from appo.envs.spec import StepRow
from appo.utils.errors import UsageError
from tests.integration.runs import SerialRun
from tests.unit.runtime.groups import PairEnv, Played, episodes


def test_an_episode_that_goes_on_is_reported_again_and_again() -> None:
    played = Played(envs=PairEnv(2, 10**6), rollout=4, slots=11, soft_horizon=5).begin()
    for _ in range(10):
        played.trajectory()
    said = episodes([*played.said, *played.group.episodes.flush(now=True)])
    assert said == [(0, 5.0, 5)] * (4 * 40 // 5)
    t = played.trajectories
    assert t.valid[:10].all()
    assert not (t.terminated[:10] | t.truncated[:10]).any()
    assert t.first[0, 0].all()
    assert not t.first[:10, 1:].any()
    assert played.group.episodes.count == 32


def test_an_episode_that_ends_by_itself_begins_to_count_anew() -> None:
    played = Played(envs=PairEnv(1, 7), rollout=8, slots=4, soft_horizon=5).begin()
    for _ in range(3):  # each is an episode of 7 steps and the step that resets
        played.trajectory()
    said = episodes([*played.said, *played.group.episodes.flush(now=True)])
    assert said == [(0, 5.0, 5), (0, 5.0, 5), (0, 2.0, 2), (0, 2.0, 2)] * 3
    assert played.trajectories.terminated[:3, 6].all()
    assert played.trajectories.terminated[:3].sum() == 6


def test_an_end_of_both_kinds_is_one() -> None:
    played = Played(envs=PairEnv(1, 5), rollout=6, slots=4, soft_horizon=5).begin()
    for _ in range(3):
        played.trajectory()
    assert episodes([*played.said, *played.group.episodes.flush(now=True)]) == [(0, 5.0, 5)] * 6


def row_of(terminated: bool) -> StepRow:
    empty = np.zeros(1, np.bool_)
    return StepRow({}, empty, np.zeros(1, np.float32), np.array([terminated]), empty, np.ones(1, np.int32))


def test_steps_that_a_failure_has_ended_do_not_count() -> None:
    horizon, ends = SoftHorizon(2, 1), []
    for valid in (True, False, True, True, True):
        horizon.count(row_of(terminated=False), np.array([valid]))
        ends.append(bool(horizon.ends[0]))
    assert ends == [False, False, False, True, False]


class Ends(Callbacks):
    def __init__(self) -> None:
        super().__init__({})
        self.told: list[tuple[str, int, bool]] = []

    def on_episode_start(self, episode: Episode) -> None:
        self.told.append(("start", episode.length, False))

    def on_episode_end(self, episode: Episode) -> None:
        self.told.append(("end", episode.length, episode.truncated))


def test_callbacks_are_told_of_it_as_of_a_time_limit() -> None:
    played, ends = Played(envs=PairEnv(1, 10**6), rollout=4, slots=4, soft_horizon=3), Ends()
    played.group.hooks = GroupHooks(Hooks([ends]), played.trajectories, 0, 2)
    played.begin().steps(7)
    both = [("start", 0, False)] * 2, [("end", 3, True)] * 2
    assert ends.told == [*both[0], *both[1], *both[0], *both[1], *both[0]]


class Endless(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_actors_make_environments_without_the_horizon_and_keep_it_themselves(tmp_path: Path) -> None:
    run = SerialRun(
        tmp_path / "run",
        env=f"{__name__}:Endless",
        horizon=6,
        soft_horizon=True,
        decorrelate_envs_on_one_worker=False,
        use_rnn=False,
        encoder_mlp_layers=16,
        rollout=8,
        batch_size=64,
        train_for_env_steps=512,
    )
    for _ in run.turns():
        pass
    done = [m for m in run.reports if isinstance(m, EpisodesDone)]
    assert sum(len(one.length) for one in done) >= 8 * (512 // 8 // 6)
    assert {float(r) for one in done for r in one.episode_return} == {6.0}
    t = run.blueprint.trajectories(run.arena)
    assert not t.truncated.any()
    assert not t.first[:, 1:].any()


def test_it_takes_the_place_of_the_time_limit_of_a_registration() -> None:
    single = EnvConfig(env="Pendulum-v1", horizon=1000, soft_horizon=True)
    assert make_single(single.as_trained).get_wrapper_attr("_max_episode_steps") == NEVER
    assert make_single(single).get_wrapper_attr("_max_episode_steps") == 1000
    assert make_single(EnvConfig(env="Pendulum-v1")).get_wrapper_attr("_max_episode_steps") == 200
    vector: Any = make_group(replace(single, env="CartPole-v1", env_vectorization="native").as_trained, 2)
    assert vector._env.unwrapped.max_episode_steps == NEVER
    vector.close()


def _same_step(num_envs: int) -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([Endless] * num_envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)


def test_the_spec_is_that_of_the_environments_that_actors_make() -> None:
    """A vector without an argument for a horizon: with one, its spec would be that of our own loop."""
    gymnasium.register("SameStep-v0", entry_point=Endless, vector_entry_point=_same_step)
    try:
        config = Config.from_flat({"env": "SameStep-v0", "experiment": "b", "horizon": 6, "soft_horizon": True})
        group = make_group(config.env.as_trained, 2, spec=(found := probe(config)).spec)
        assert found.spec.same_step
        assert group.spec.same_step
        group.close()
    finally:
        del gymnasium.registry["SameStep-v0"]


def test_it_needs_a_horizon_which_players_keep() -> None:
    with pytest.raises(UsageError, match="--soft_horizon needs --horizon"):
        check(Config.from_flat({"env": "a", "experiment": "b", "soft_horizon": True}))
    soft = EnvConfig(env="a", horizon=6, soft_horizon=True)
    assert (soft.horizon, soft.as_trained.horizon) == (6, None)
    assert EnvConfig(env="a", horizon=6).as_trained.horizon == 6
