"""Episodes of several agents are put together."""

import numpy as np
import pytest

from appo.algorithms.playing.episodes import EpisodeRecorder, agent_means, team_mean
from appo.envs.spec import TEAM_RETURN, EpisodeStats, StepRow


def step(rewards: list[float], done: list[bool], num_frames: int = 1) -> StepRow:
    count = len(rewards)
    no = np.zeros(count, np.bool_)
    frames = np.full(count, num_frames, np.int32)
    return StepRow({}, no, np.array(rewards, np.float32), np.array(done), no.copy(), frames)


def valid(*rows: bool) -> np.ndarray:
    return np.array(rows)


def test_the_episode_of_one_agent_ends_with_its_own() -> None:
    recorder = EpisodeRecorder(1)
    assert recorder.add(step([2.0], [False], 4), valid(True), ()) == 4
    assert not recorder.over
    assert recorder.add(step([3.0], [True], 3), valid(True), [EpisodeStats(0, {"x": 1.0})]) == 3
    assert recorder.over
    assert recorder.episode() == (5.0, 7, {"x": 1.0}, ())
    assert recorder.add(step([0.0], [False]), valid(False), ()) == 0


def test_that_of_several_ends_with_the_last_and_counts_those_who_came() -> None:
    recorder = EpisodeRecorder(3)
    recorder.add(step([1.0, 2.0, 0.0], [False, True, False]), valid(True, True, False), [EpisodeStats(1, {"x": 1.0})])
    assert not recorder.over
    ends = [EpisodeStats(0, {"x": 3.0, TEAM_RETURN: 7.0})]
    assert recorder.add(step([4.0, 0.0, 0.0], [True, False, False], 2), valid(True, False, False), ends) == 2
    assert recorder.over
    first = recorder.episode()
    assert first == (3.5, 3, {"x": 2.0, TEAM_RETURN: 7.0}, (5.0, 2.0, None))
    recorder.add(step([1.0, 1.0, 1.0], [True] * 3), valid(True, True, True), [EpisodeStats(0, {TEAM_RETURN: 3.0})])
    assert agent_means([first, recorder.episode()]) == [3.0, 1.5, 1.0]
    assert team_mean([first]) == 7.0
    assert agent_means([first]) == [5.0, 2.0, None]
    assert agent_means([]) == []


@pytest.mark.parametrize("num_agents", [1, 2])
def test_frames_of_steps_that_nobody_takes_are_none(num_agents: int) -> None:
    assert (
        EpisodeRecorder(num_agents).add(
            step([0.0] * num_agents, [False] * num_agents), valid(*[False] * num_agents), ()
        )
        == 0
    )
