"""--batch_mode=complete_episodes: every slot holds one episode, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms.run.config import Config, check
from appo.algorithms.run.placement import plan_workers, topology_of
from appo.envs.toys.toy import counter_length, counter_step
from appo.utils.errors import UsageError
from tests.integration.runs import SerialRun
from tests.unit.runtime.groups import Played, episodes, ready

FLAGS: dict[str, Any] = {
    "env": "toy/Counter-v0",
    "batch_mode": "complete_episodes",
    "env_vectorization": "python",
    "horizon": 10,
    "rollout": 16,
    "num_envs_per_worker": 2,
    "worker_num_splits": 2,
}


def test_a_slot_holds_one_episode() -> None:
    played = Played(rows=1, rollout=12, slots=9, whole_episodes=True).begin()
    heard = [played.trajectory() for _ in range(8)]
    t = played.trajectories
    env = int(t.obs["obs"][0, 0, 0, 0])
    for episode in range(8):
        length = counter_length(env, episode)
        assert t.valid[episode, :, 0].tolist() == [True] * length + [False] * (12 - length)
        assert t.first[episode, :, 0].tolist() == [True] + [False] * length + [True] * (12 - length)
        shown = t.obs["obs"][episode, : length + 1, 0, :3].tolist()
        assert shown == [[env, episode, step] for step in range(length + 1)]
        assert t.obs["obs"][episode, 12, 0, :3].tolist() == [env, episode + 1, 0]
        last = counter_step(env, episode, length - 1, int(t.action[episode, length - 1, 0, 0]))
        assert (bool(t.terminated[episode, length - 1, 0]), bool(t.truncated[episode, length - 1, 0])) == last[1:]
        assert t.terminated[episode].sum() + t.truncated[episode].sum() == 1
        assert len(ready(heard[episode])) == 1
    lengths = [counter_length(env, episode) for episode in range(8)]
    said = episodes([*played.said, *played.group.episodes.flush(now=True)])
    assert [length for _, _, length in said] == lengths
    assert played.group.totals["collected"] == sum(lengths)
    assert played.group.totals["reset_rows"] == 8 * 12 - sum(lengths)


@pytest.mark.parametrize("use_rnn", [False, True])
def test_learning_reproduces_what_acting_recorded(tmp_path: Path, use_rnn: bool) -> None:
    run = SerialRun(
        tmp_path / "run",
        **FLAGS,
        num_groups=2,
        rows=1,
        slots=8,
        use_rnn=use_rnn,
        encoder_mlp_layers=16,
        hidden_size=16,
        batch_size=64,
        train_for_env_steps=300,
        learning_rate=0,
        verify_reproduction=True,
    )
    for _ in run.turns():
        pass
    learner = run.worker("learner")
    t = run.blueprint.trajectories(run.arena)
    assert learner.totals["samples"] >= 300
    errors = [
        m.metrics["train/reproduction_error"]
        for m in run.reports
        if "train/reproduction_error" in getattr(m, "metrics", {})
    ]
    assert errors
    assert max(errors) < 1e-5
    ends = (t.terminated | t.truncated).sum(axis=1)[:, 0]
    assert (ends[t.sequence > 0] == 1).all()
    assert np.array_equal(t.first[:, 0, 0], np.ones(len(t.first), np.bool_))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"horizon": 16}, "needs a --rollout above --horizon, after which an env is reset; got --horizon=16 and"),
        ({"horizon": None}, "got --horizon=none and --rollout=16"),
        ({"soft_horizon": True}, "needs a --rollout above --horizon"),
        ({"num_envs_per_worker": 4}, "needs a group per env, as many .*: 4 and 2"),
        ({"num_envs_per_worker": 0, "worker_num_splits": 0}, "as --worker_num_splits: 0 and 0"),
        ({"env_vectorization": "auto"}, "needs --env_vectorization=python"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    check(Config.from_flat({**FLAGS, "experiment": "a"}))
    with pytest.raises(UsageError, match=message):
        check(Config.from_flat({**FLAGS, "experiment": "a", **changed}))


def test_agents_that_end_at_different_times_have_no_whole_episode() -> None:
    config = Config.from_flat({**FLAGS, "experiment": "a", "num_workers": 1, "batch_size": 64})
    sampling = plan_workers(config, 1, "local")
    assert topology_of(config, sampling, 1).rows == 1
    with pytest.raises(UsageError, match="is for environments of one agent"):
        topology_of(config, sampling, 2)
