import numpy as np

from appo.algorithms.runtime.messages import EpisodesDone
from appo.algorithms.runtime.sampling import episodes as module
from appo.algorithms.runtime.sampling.episodes import Episodes
from appo.envs.spec import EpisodeStats, StepRow


def row(
    reward: list[float], terminated: list[int] | None = None, truncated: list[int] | None = None, frames: int = 1
) -> StepRow:
    flags = [np.isin(np.arange(len(reward)), ended or []) for ended in (terminated, truncated)]
    return StepRow(
        {}, np.zeros(len(reward), bool), np.array(reward, np.float32), *flags, np.full(len(reward), frames, np.int32)
    )


def as_lists(done: list[EpisodesDone]) -> list[tuple[list[object], ...]]:
    return [(d.policy.tolist(), d.episode_return.tolist(), d.length.tolist(), list(d.stats)) for d in done]


def test_each_episode_is_reported_once_with_its_return_and_its_frames() -> None:
    episodes = Episodes(3)
    policy, valid = np.array([0, 1, 0], np.int32), np.ones(3, bool)
    episodes.record(row([1.0, 10.0, 100.0], frames=4), valid, policy, ())
    episodes.record(row([2.0, 20.0, 200.0], terminated=[1], frames=4), valid, policy, ())
    # the reset step of row 1 is no step of any episode
    episodes.record(
        row([4.0, 0.0, 400.0], terminated=[0], truncated=[2], frames=4), np.array([True, False, True]), policy, ()
    )
    episodes.record(row([0.0, 30.0, 0.0], terminated=[1], frames=3), np.array([False, True, False]), policy, ())
    assert episodes.count == 4
    assert as_lists(list(episodes.flush(now=True))) == [([1, 0, 0, 1], [30.0, 7.0, 700.0, 30.0], [8, 12, 12, 3], [])]
    assert list(episodes.flush(now=True)) == []


def test_returns_are_summed_in_double_precision() -> None:
    episodes = Episodes(1)
    policy, valid = np.zeros(1, np.int32), np.ones(1, bool)
    episodes.record(row([2.0**24]), valid, policy, ())
    episodes.record(row([1.0]), valid, policy, ())
    episodes.record(row([1.0], terminated=[0]), valid, policy, ())
    (done,) = episodes.flush(now=True)
    assert done.episode_return.tolist() == [2.0**24 + 2]


def test_statistics_of_the_environment_belong_to_the_policy_of_their_row() -> None:
    episodes = Episodes(2)
    stats = [EpisodeStats(1, {"true_reward": 2.5}), EpisodeStats(0, {"true_reward": 3.0})]
    episodes.record(row([0.0, 0.0], terminated=[0, 1]), np.ones(2, bool), np.array([7, 8], np.int32), stats)
    assert as_lists(list(episodes.flush(now=True))) == [
        ([7, 8], [0.0, 0.0], [1, 1], [(8, {"true_reward": 2.5}), (7, {"true_reward": 3.0})])
    ]


def test_reports_are_held_back_for_a_moment(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    episodes = Episodes(1)
    policy, valid = np.zeros(1, np.int32), np.ones(1, bool)
    assert list(episodes.flush()) == []
    episodes.record(row([1.0], terminated=[0]), valid, policy, ())
    now = 100.0 + 0.9 * module.FLUSH_SECONDS
    assert list(episodes.flush()) == []
    episodes.record(row([2.0], truncated=[0]), valid, policy, ())
    now = 100.0 + 1.1 * module.FLUSH_SECONDS
    assert as_lists(list(episodes.flush())) == [([0, 0], [1.0, 2.0], [1, 1], [])]
    episodes.record(row([3.0], truncated=[0]), valid, policy, ())
    assert list(episodes.flush()) == []  # the clock starts anew with every report
    assert as_lists(list(episodes.flush(now=True))) == [([0], [3.0], [1], [])]
