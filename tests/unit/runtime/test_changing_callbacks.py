"""Callbacks that change what is learned from and what is written, and that keep something of an episode."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.callbacks import Callbacks, Episode, GroupHooks, Hooks, Step, Trajectory
from appo.algorithms.runtime.config import LoggingConfig
from appo.algorithms.runtime.messages import EpisodesDone, LearnerReport
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.utils.metrics import read_metrics
from appo.utils.tensorboard.writer import EventWriter
from tests.unit.runtime.groups import PairEnv, Played
from tests.unit.utils.test_metrics import events


class Halves(Callbacks):
    """Halves rewards, and takes the first step of each trajectory out."""

    def __init__(self) -> None:
        super().__init__({})
        self.seen: list[Trajectory] = []

    def on_postprocess_trajectory(self, trajectory: Trajectory) -> None:
        trajectory.rewards[:] /= 2
        trajectory.valid[0] = False

    def on_trajectory_end(self, trajectory: Trajectory) -> None:
        self.seen.append(trajectory)


class Memory(Callbacks):
    """Forgets the beginnings of episodes, which nobody may."""

    def on_postprocess_trajectory(self, trajectory: Trajectory) -> None:
        trajectory.first[:] = False


def told(hooks: Hooks, **flags: Any) -> Played:
    played = Played(rollout=4, slots=3, envs=PairEnv(1, 6), **flags)
    played.group.hooks = GroupHooks(hooks, played.trajectories, 0, 2)
    return played.begin()


def test_what_is_changed_in_a_trajectory_is_what_learners_get() -> None:
    halves = Halves()
    hooks = Hooks([halves, Memory({})])
    played = told(hooks)
    played.trajectory()
    t = played.trajectories
    assert t.reward[0].tolist() == [[0.5, 0.5]] * 4
    assert t.valid[0].tolist() == [[False, False]] + [[True, True]] * 3
    assert t.first[0, 0].all()
    assert hooks.off == 1  # first cannot be written to
    (seen,) = halves.seen
    assert (seen.rewards == t.reward[0]).all()
    assert not seen.rewards.flags.writeable
    assert played.group.totals["collected"] == 8  # the step that was taken out was taken
    assert (t.obs["obs"][0, 4] == played.trajectories.obs["obs"][1, 0]).all()


class Keeps(Callbacks):
    """Counts the steps of an episode in the episode itself."""

    def __init__(self) -> None:
        super().__init__({})
        self.rows: list[list[int | None]] = []

    def on_episode_start(self, episode: Episode) -> None:
        assert episode.data == {}
        episode.data["steps"] = 0

    def on_episode_step(self, step: Step) -> None:
        for episode in step.episodes:
            if episode is not None:
                episode.data["steps"] += 1
        self.rows.append([None if one is None else one.data["steps"] for one in step.episodes])

    def on_episode_end(self, episode: Episode) -> Mapping[str, float]:
        return {"kept": episode.data["steps"], "length": episode.length}


class Steps(Callbacks):
    """Is told of steps alone, so that nobody keeps episodes for it."""

    def __init__(self) -> None:
        super().__init__({})
        self.episodes: list[Sequence[Episode | None]] = []

    def on_episode_step(self, step: Step) -> None:
        self.episodes.append(step.episodes)


def test_an_episode_keeps_what_is_put_into_it() -> None:
    keeps = Keeps()
    played = told(Hooks([keeps]))
    played.steps(9)
    assert keeps.rows == [[n, n] for n in (1, 2, 3, 4, 5, 6, None, 1, 2)]
    (done,) = (m for m in [*played.said, *played.group.episodes.flush(now=True)] if isinstance(m, EpisodesDone))
    assert [stats for _, stats in done.stats] == [{"kept": 6.0, "length": 6.0}] * 2
    steps = Steps()
    told(Hooks([steps])).steps(3)
    assert steps.episodes == [(), (), ()]


class Results(Callbacks):
    """Changes records, and writes pictures beside them."""

    def __init__(self) -> None:
        super().__init__({})
        self.raw: list[tuple[list[float], list[int]]] = []
        self.values: list[Mapping[str, Sequence[float]]] = []

    def on_episodes(self, episodes: EpisodesDone) -> None:
        self.raw.append((episodes.episode_return.tolist(), episodes.length.tolist()))

    def on_summaries(
        self, policy: int, values: Mapping[str, Sequence[float]], env_steps: int, writer: EventWriter | None
    ) -> None:
        self.values.append(values)
        if writer is not None:
            writer.add_histogram("mine/returns", values["reward"], env_steps)
            writer.add_image("mine/picture", np.full((2, 3, 3), 7, np.uint8), env_steps)

    def on_train_result(self, policy: int, figures: dict[str, float]) -> None:
        figures["reward/mean"] = 100.0
        figures["mine/policy"] = policy
        figures["mine/text"] = "no number"  # type: ignore[assignment]
        figures["env_steps"] = -1.0
        del figures["len/mean"]


@pytest.mark.parametrize("tensorboard", [True, False])
def test_records_are_as_callbacks_leave_them_and_single_values_are_told(tmp_path: Path, tensorboard: bool) -> None:
    results = Results()
    hooks = Hooks([results])
    flags = LoggingConfig(tensorboard=tensorboard)
    monitor = Monitor(tmp_path, flags, [{}], Budget(10**6), hooks=hooks)
    done = EpisodesDone(np.zeros(2, np.int32), np.array([3.0, 5.0]), np.array([7, 9]), ())
    monitor.handle(done)
    monitor.handle(LearnerReport(0, 1, {"env_steps": 16, "samples": 16, "discarded": 0, "updates": 1}, {}))
    monitor.close()
    assert hooks.off == 0
    assert results.raw == [([3.0, 5.0], [7, 9])]
    assert results.values == [{"reward": [3.0, 5.0], "len": [7.0, 9.0]}]
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["reward/mean"], record["reward/min"], record["env_steps"]) == (100.0, 3.0, 16)
    assert record["mine/policy"] == 0
    assert "len/mean" not in record
    assert "mine/text" not in record
    if tensorboard:
        values = {value.tag: value for event in events(tmp_path / ".summary/p0") for value in event.summary.value}
        assert values["mine/returns"].histo.num == 2
        assert values["mine/picture"].image.width == 3
        assert values["reward/mean"].simple_value == 100.0
