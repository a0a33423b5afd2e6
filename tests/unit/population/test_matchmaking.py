from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from appo.algorithms.population.matchmaking import PolicyMatchmaker
from appo.envs.spec import StepRow
from appo.utils.errors import UsageError
from tests.unit.runtime.groups import PairEnv, Played

HERE = "tests.unit.population.test_matchmaking"
SEEN: list[tuple[int, int]] = []


def by_env(agent: int, env: int, random: np.random.Generator) -> int:
    SEEN.append((agent, env))
    return (agent + env) % 3


def nobody(agent: int, env: int, random: np.random.Generator) -> int:
    return 3


def drawn(agent: int, env: int, random: np.random.Generator) -> np.int64:
    return random.integers(2)


def matchmaker_of(mapping: str = "", policies: int = 3, *, agents: int = 2, per_row: bool = True) -> PolicyMatchmaker:
    random = np.random.default_rng(0)
    return PolicyMatchmaker(policies, agents, per_row=per_row, mapping=mapping, random=random)


def test_a_function_of_the_user_chooses_where_an_episode_starts() -> None:
    SEEN.clear()
    matchmaker, policy = matchmaker_of(f"{HERE}:by_env"), np.full(4, 9, np.int32)
    matchmaker.draw(policy, np.array([True, True, True, True]), 10, None)
    assert policy.tolist() == [1, 2, 2, 0]  # (agent + env) % 3 of envs 10 and 11
    assert matchmaker.present == (0, 1, 2)
    matchmaker.draw(policy, np.array([False, False, True, False]), 20, None)
    assert policy.tolist() == [1, 2, 0, 0]
    assert SEEN == [(0, 10), (1, 10), (0, 11), (1, 11), (0, 21)]


def test_it_draws_with_the_random_numbers_of_the_group() -> None:
    policies = []
    for _ in range(2):
        policy = np.zeros(64, np.int32)
        matchmaker_of(f"{HERE}:drawn").draw(policy, np.ones(64, bool), 0, None)
        policies.append(policy.tolist())
    assert policies[0] == policies[1]
    assert set(policies[0]) == {0, 1}


def test_policies_with_short_episodes_play_as_many_steps_as_others() -> None:
    matchmaker, policy = matchmaker_of(agents=1), np.zeros(8, np.int32)
    lengths, left, steps = np.array([1, 5, 50]), np.zeros(8, int), np.zeros(3, int)
    for _ in range(2000):
        matchmaker.draw(policy, left == 0, 0, None)
        left = np.where(left == 0, lengths[policy], left) - 1
        matchmaker.record(cast(StepRow, None), np.ones(8, bool), policy)
        steps += np.bincount(policy, minlength=3)
    assert steps.sum() == 16_000
    assert steps.max() - steps.min() < 8 * lengths.max()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody", "returned 3, not a policy below 3"),
        ("missing", "has no attribute 'missing'"),
        ("HERE", "is a str, not a function"),
    ],
)
def test_a_function_that_chooses_nobody_is_an_error(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"--policy_mapping={HERE}:{name}.*{message}"):
        matchmaker_of(f"{HERE}:{name}").draw(np.zeros(2, np.int32), np.ones(2, bool), 0, None)


class Shaped(PairEnv):
    """Notes by which coefficients its rows are rewarded."""

    def __init__(self) -> None:
        super().__init__(num_envs=2, length=2)
        self.shaping: dict[int, Any] = {}
        self.calls = 0

    def shape_rewards(self, row: int, shaping: Mapping[str, Any]) -> None:
        self.shaping[row] = shaping["x"]
        self.calls += 1


def test_rows_are_rewarded_as_the_policy_that_plays_them() -> None:
    envs = Shaped()
    played = Played(envs=envs, slots=40, num_policies=3, reward_shaping=({"x": 0}, {"x": 1}, {"x": 2})).begin()
    group, t = played.group, played.trajectories
    for _ in range(60):
        played.step()
        assert envs.shaping == dict(enumerate(t.policy_id[group.slot, group.step].tolist()))
    assert 4 <= envs.calls < 4 * 60  # only where an episode starts


def test_new_coefficients_reach_episodes_that_are_being_played() -> None:
    envs = Shaped()
    played = Played(envs=envs, slots=4, num_policies=3).begin()
    group = played.group
    assert envs.shaping == {}  # the environment's own
    playing = played.trajectories.policy_id[group.slot, group.step].copy()
    policy = int(playing[0])
    group.matchmaker.shape(policy, {"x": 5}, group.envs)
    assert envs.shaping == {int(row): 5 for row in np.flatnonzero(playing == policy)}


def test_environments_without_coefficients_are_left_alone() -> None:
    matchmaker, policy = matchmaker_of(), np.zeros(4, np.int32)
    matchmaker.draw(policy, np.ones(4, bool), 0, PairEnv(2, 2))
    matchmaker.shape(0, {"x": 1}, PairEnv(2, 2))
