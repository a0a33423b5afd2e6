from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from appo.algorithms.population import matchmaking
from appo.algorithms.population.matchmaking import SelfPlayMatchmaker
from appo.algorithms.runtime.messages import MatchResults, Message, OpponentsReleased, OpponentTable
from appo.envs.spec import EpisodeStats, StepRow
from tests.unit.runtime.groups import PairEnv, Played, ready, requests

ENVS = 64
BEGIN = np.ones(2 * ENVS, np.bool_)


def table(number: int = 1, **versions: float) -> OpponentTable:
    """A pool: p2=0.5 means that the version of 20 env steps plays in place 2, and is drawn every other time."""
    places = tuple(int(name[1:]) for name in versions)
    return OpponentTable(0, number, places, tuple(10 * p for p in places), tuple(versions.values()))


def matchmaker_of(past_share: float = 1.0, agents: int = 2, envs: int = ENVS) -> SelfPlayMatchmaker:
    return SelfPlayMatchmaker(4, agents, envs, past_share, np.random.default_rng(0))


def drawn(matchmaker: SelfPlayMatchmaker, first: np.ndarray = BEGIN) -> np.ndarray:
    policy = np.zeros(len(first), np.int32)
    matchmaker.draw(policy, first, 0, None)
    return policy.reshape(-1, matchmaker.num_agents)


def step_of(*rewards: float, ended: Iterable[int] = ()) -> StepRow:
    """A step of as many rows; those in `ended` end with it."""
    flags = np.zeros((3, len(rewards)), np.bool_)
    flags[1, list(ended)] = True
    frames = np.ones(len(rewards), np.int32)
    return StepRow({}, flags[0], np.array(rewards, np.float32), flags[1], flags[2], frames)


def done(messages: Iterable[Message]) -> tuple[list[tuple[int, float]], int]:
    """(version, difference) of all games, and steps of past versions."""
    found = [m for m in messages if isinstance(m, MatchResults)]
    results = [pair for m in found for pair in zip(m.version.tolist(), m.difference.tolist(), strict=True)]
    return results, sum(m.past_steps for m in found)


def test_without_a_past_the_learner_plays_everybody() -> None:
    matchmaker = matchmaker_of()
    assert not drawn(matchmaker).any()
    matchmaker.take_table(table())
    assert not drawn(matchmaker).any()
    assert matchmaker.present == (0,)


def test_both_seats_and_all_versions_are_drawn_as_often_as_they_should_be() -> None:
    matchmaker = matchmaker_of(past_share=0.75)
    matchmaker.take_table(table(p1=0.2, p3=0.8))
    count: Counter[tuple[int, ...]] = Counter()
    for _ in range(400):
        count.update(map(tuple, drawn(matchmaker).tolist()))
    total = 400 * ENVS
    assert set(count) == {(0, 0), (0, 1), (1, 0), (0, 3), (3, 0)}
    assert count[0, 0] / total == pytest.approx(0.25, abs=0.02)
    assert (count[0, 1] + count[0, 3]) / total == pytest.approx(0.375, abs=0.02)
    assert (count[0, 1] + count[1, 0]) / total == pytest.approx(0.15, abs=0.05)  # drawn for 64 games at a time


def test_a_group_has_few_opponents_at_a_time() -> None:
    matchmaker = matchmaker_of()
    matchmaker.take_table(table(p1=0.5, p2=0.25, p3=0.25))
    for _ in range(10):
        (opponent,) = set(drawn(matchmaker).max(axis=1).tolist())
        assert matchmaker.present == (0, opponent)


def test_sides_are_every_other_agent() -> None:
    matchmaker = matchmaker_of(agents=4, envs=32)
    matchmaker.take_table(table(p2=1.0))
    assert set(map(tuple, drawn(matchmaker).tolist())) == {(0, 2, 0, 2), (2, 0, 2, 0)}


def test_a_game_is_played_to_its_end_by_who_began_it() -> None:
    matchmaker = matchmaker_of(envs=2)
    matchmaker.take_table(table(p1=1.0))
    before = policy = drawn(matchmaker, np.ones(4, np.bool_)).reshape(-1)
    matchmaker.take_table(table(2, p2=1.0))
    matchmaker.draw(policy, np.array([True, False, False, True]), 0, None)  # late, or dead for now
    assert policy.tolist() == before.tolist()
    matchmaker.draw(policy, np.array([True, True, False, True]), 0, None)
    assert sorted(policy[:2]) == [0, 2]
    assert sorted(policy[2:]) == [0, 1]


def test_a_place_is_left_when_its_last_game_has_ended() -> None:
    matchmaker, policy = matchmaker_of(envs=2), np.zeros(4, np.int32)
    assert list(matchmaker.answer(5)) == []
    matchmaker.take_table(table(1, p1=1.0))
    assert list(matchmaker.answer(5)) == [OpponentsReleased(5, 1)]
    matchmaker.draw(policy, np.ones(4, np.bool_), 0, None)
    matchmaker.take_table(table(2, p2=1.0))
    matchmaker.take_table(table(3, p2=0.5, p3=0.5))
    assert list(matchmaker.answer(5)) == []
    matchmaker.draw(policy, np.array([True, True, False, False]), 0, None)
    assert list(matchmaker.answer(5)) == []
    matchmaker.draw(policy, np.array([False, False, True, True]), 0, None)
    assert list(matchmaker.answer(5)) == [OpponentsReleased(5, 3)]
    assert list(matchmaker.answer(5)) == []


def test_the_result_of_a_game_is_what_the_learner_got_more() -> None:
    matchmaker, every, policy = matchmaker_of(envs=2), np.ones(4, np.bool_), np.zeros(4, np.int32)
    matchmaker.take_table(table(p3=1.0))
    matchmaker.draw(policy, every, 0, None)
    is_past = policy == 3
    matchmaker.record(step_of(*np.where(is_past, 1.0, 5.0)), every, policy)
    matchmaker.record(step_of(*np.where(is_past, 0.5, 1.0), ended=(0, 1)), every, policy)
    matchmaker.draw(policy, np.array([True, True, False, False]), 0, None)
    assert done(matchmaker.report(now=True)) == ([(30, 4.5)], 4)
    assert done(matchmaker.report(now=True)) == ([], 0)


def test_a_game_that_was_broken_off_has_no_result() -> None:
    matchmaker, every, policy = matchmaker_of(envs=1), np.ones(2, np.bool_), np.zeros(2, np.int32)
    matchmaker.take_table(table(p1=1.0))
    matchmaker.draw(policy, every, 0, None)
    matchmaker.record(step_of(1.0, 2.0, ended=(0,)), every, policy)
    matchmaker.draw(policy, every, 0, None)  # the environment has been made again
    assert done(matchmaker.report(now=True)) == ([], 1)


def test_who_never_came_does_not_count() -> None:
    matchmaker, policy = matchmaker_of(agents=4, envs=1), np.zeros(4, np.int32)
    matchmaker.take_table(table(p1=1.0))
    matchmaker.draw(policy, np.ones(4, np.bool_), 0, None)
    rewards = np.where(policy == 1, 1.0, 3.0)
    rewards[3] = 9.0
    matchmaker.record(step_of(*rewards, ended=(0, 1, 2)), np.array([True, True, True, False]), policy)
    matchmaker.draw(policy, np.ones(4, np.bool_), 0, None)
    assert done(matchmaker.report(now=True))[0] == [(10, 2.0)]


def test_games_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots go to the learner alone, requests to all who play, and every step belongs to one side."""
    monkeypatch.setattr(matchmaking, "REPORT_SECONDS", 0.0)
    played = Played(envs=PairEnv(6, length=3), slots=9, num_policies=4, num_past=3, past_share=1.0)
    played.group.matchmaker.take_table(table(p1=0.5, p2=0.5))
    played.begin()
    heard = [message for _ in range(9) for message in played.trajectory()]
    assert {message.policy for message in ready(heard)} == {0}
    assert {message.policy for message in requests(heard)} == {0, 1, 2}
    assert [m for m in heard if isinstance(m, OpponentsReleased)] == [OpponentsReleased(0, 1)]
    policy = played.trajectories.policy_id[:, :4].reshape(36, 6, 2)
    assert (policy.min(axis=2) == 0).all()
    assert (policy.max(axis=2) > 0).all()
    valid = played.trajectories.valid.reshape(36, 6, 2)
    results, past_steps = done(heard)
    assert past_steps == np.count_nonzero(valid & (policy > 0)) == 6 * 27
    assert len(results) == 6 * 9  # of four steps each, the last of which only resets: the last reset is the 36th step
    assert {version for version, _ in results} <= {10, 20}
    assert {difference for _, difference in results} == {0.0}


def test_games_that_began_with_random_steps_have_no_result() -> None:
    envs = PairEnv(3, length=3)
    envs.cut[2:4] = True  # of the second game
    played = Played(envs=envs, slots=3, num_policies=4, num_past=3, past_share=1.0)
    played.group.matchmaker.take_table(table(p1=1.0))
    played.begin()
    heard = played.steps(8)  # two games of every environment
    assert done([*heard, *played.group.end()]) == ([(10, 0.0)] * (2 + 3), 2 * 3 * 3)


class RandomGames(PairEnv):
    """Games that end one by one, by chance; who has them counts steps, ends and rewards of either side."""

    def __init__(self, num_envs: int, seed: int) -> None:
        super().__init__(num_envs, length=1)
        self.random, self.over = np.random.default_rng(seed), np.zeros(num_envs, np.bool_)
        self.ended = 0

    def step(self, action: np.ndarray, row: StepRow) -> Sequence[EpisodeStats]:
        """Reset games that are over; end others by chance."""
        begins, self.over = self.over, ~self.over & (self.random.random(len(self.over)) < 0.3)
        row.first[:] = np.repeat(begins, 2)
        row.terminated[:], row.truncated[:] = np.repeat(self.over, 2), False
        row.obs["obs"][:], row.reward[:] = 0, self.random.random(self.num_rows)
        row.num_frames[:] = 1
        self.ended += int(np.count_nonzero(self.over))
        return ()


@pytest.mark.parametrize("seed", range(12))
def test_whenever_a_run_ends_its_books_have_every_game_and_every_step_that_was_handed_over(seed: int) -> None:
    """Every game has an opponent, and all steps of slots are the learner's, the past's, or were never taken."""
    envs, slots = RandomGames(5, seed), 40
    played = Played(envs=envs, slots=slots, num_policies=4, num_past=3, past_share=1.0)
    played.group.matchmaker.take_table(table(p1=0.4, p2=0.6))
    played.begin()
    heard: list[Message] = []
    steps = int(np.random.default_rng(100 + seed).integers(1, 120))
    for _ in range(steps):
        heard += played.step()
    whole = np.arange(slots) < steps // played.group.rollout
    heard += played.group.end()
    results, past_steps = done(heard)
    assert len(results) == envs.ended
    t, rollout = played.trajectories, played.group.rollout
    policy, valid = t.policy_id[whole, :rollout], t.valid[whole]
    assert past_steps == np.count_nonzero(valid & (policy > 0))
    learned = np.count_nonzero(valid & (policy == 0))
    assert past_steps + learned == played.group.totals["collected"]
    # By opponent: an episode of every version ends in one row of its side.
    done_by = Counter(version for version, _ in results)
    taken = np.arange(slots * rollout) < steps
    policy, valid = (x.reshape(-1, 5, 2)[taken] for x in (t.policy_id[:, :rollout], t.valid))
    over = t.terminated.reshape(-1, 5, 2)[taken] & valid
    assert done_by == Counter((10 * policy[over & (policy > 0)]).tolist())
