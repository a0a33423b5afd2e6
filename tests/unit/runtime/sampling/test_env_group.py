from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from appo.algorithms.runtime.messages import ActionRequest, EpisodesDone, SlotReleased, TrajectoryReady
from appo.algorithms.runtime.sampling.env_group import EnvGroup
from appo.envs.config import EnvConfig
from appo.envs.loop.env_set import OnFailure
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import make_group
from appo.envs.toys.agents import shift_of, shift_reward
from appo.envs.toys.toy import counter_length, counter_step
from appo.utils.timing import clock
from tests.unit.envs.mortal import Mortals
from tests.unit.runtime.groups import PairEnv, Played, episodes, ready, requests


def test_nothing_is_said_before_the_beginning() -> None:
    played = Played()
    played.group.reset()
    assert (played.group.slot, played.group.waiting) == (-1, set())
    assert list(played.group.begin()) == [ActionRequest(0, 0, 0, 0, 0)]
    assert played.group.waiting == {0}


def test_a_step_is_followed_by_the_request_for_the_next() -> None:
    played = Played(generation=3).begin()
    assert played.said == [ActionRequest(0, 0, 0, 0, 3)]
    assert played.steps(3) == [ActionRequest(0, 0, 0, step, 3) for step in (1, 2, 3)]
    assert played.step() == [TrajectoryReady(0, 0, 1, 3), ActionRequest(0, 0, 1, 0, 3)]


@pytest.mark.parametrize("start", [1, 2, 3])
def test_steps_before_a_staggered_start_are_invalid(start: int) -> None:
    played = Played(start=start).begin()
    t = played.trajectories
    assert played.said == [ActionRequest(0, 0, 0, start, 0)]
    seeds = np.array(played.group.seeds[0]) % 2**16 + np.arange(3)
    assert np.array_equal(t.obs["obs"][0, start], [[seed, 0, 0, 0] for seed in seeds])
    heard = played.trajectory()
    assert len(requests(heard)) == 4 - start  # one of them for the next slot
    assert not t.valid[0, :start].any()
    assert t.first[0, : start + 1].all()
    assert t.valid[0, start:].all()  # no episode of this toy is shorter than 3 steps
    assert not t.first[0, start + 1 :].any()
    assert (t.policy_id[0, start:] == 0).all()
    assert played.group.totals["collected"] == 3 * (4 - start)
    assert played.group.totals["reset_rows"] == 3 * start
    assert played.group.step == 0  # only the first trajectory is short
    played.trajectory()
    assert played.group.totals["collected"] + played.group.totals["reset_rows"] == 2 * 12


@pytest.mark.parametrize("same_step", [False, True])
def test_row_t_becomes_row_0_of_the_next_slot(same_step: bool) -> None:
    played = Played(slots=30, same_step=same_step, num_policies=2).begin()
    for _ in range(30):
        played.trajectory()
    t = played.trajectories
    for earlier, later in pairwise(range(30)):
        assert np.array_equal(t.obs["obs"][earlier, 4], t.obs["obs"][later, 0])
        assert np.array_equal(t.first[earlier, 4], t.first[later, 0])
        assert np.array_equal(t.policy_id[earlier, 4], t.policy_id[later, 0])
    assert t.continues.tolist() == list(range(-1, 29))
    assert t.follows.tolist() == [0, *[1] * 29]
    assert t.first[:, 4].any()
    assert not t.first[:, 4].all()


def test_only_policies_that_acted_get_a_late_first_trajectory() -> None:
    played = Played(start=3, rows=1, num_policies=8).begin()
    t = played.trajectories
    (message,) = ready(played.trajectory())
    assert message.policy == t.policy_id[0, 3, 0] != 0
    assert t.owner[0] == 1 << message.policy


def test_a_slot_that_is_handed_over_is_left_alone() -> None:
    played = Played().begin()
    played.trajectory()
    before = {name: getattr(played.trajectories, name)[0].copy() for name in ("first", "reward", "valid", "action")}
    played.trajectory()
    assert all(np.array_equal(getattr(played.trajectories, name)[0], value) for name, value in before.items())


def test_every_step_of_the_environment_is_where_it_belongs() -> None:
    """NEXT_STEP: replay every row from the recorded actions."""
    played = Played(slots=20, rollout=5).begin()
    for _ in range(20):
        played.trajectory()
    t = played.trajectories
    first = np.concatenate([*t.first[:, :5], t.first[-1, 5:]])  # [101, R]
    obs = np.concatenate([*t.obs["obs"][:, :5], t.obs["obs"][-1, 5:]])
    action, reward = t.action.reshape(100, 3), t.reward.reshape(100, 3)
    terminated, truncated, valid = (a.reshape(100, 3) for a in (t.terminated, t.truncated, t.valid))
    assert np.array_equal(valid, ~first[1:])
    for row in range(3):
        env, episode, step = int(obs[0, row, 0]), 0, 0
        for i in range(100):
            assert obs[i, row, :3].tolist() == [env, episode, step]
            if not valid[i, row]:
                assert (reward[i, row], terminated[i, row], truncated[i, row]) == (0.0, False, False)
                episode, step = episode + 1, 0
                continue
            expected = counter_step(env, episode, step, int(action[i, row]))
            assert (reward[i, row], terminated[i, row], truncated[i, row]) == expected
            step += 1
    assert played.group.totals["collected"] == valid.sum()
    assert played.group.totals["reset_rows"] == (~valid).sum() > 0


def test_without_a_free_slot_nothing_is_requested() -> None:
    played = Played(slots=2).begin()
    first, second = played.trajectory(), played.trajectory()
    assert requests(first)[-1] == ActionRequest(0, 0, 1, 0, 0)
    assert requests(second) == [ActionRequest(0, 0, 1, step, 0) for step in (1, 2, 3)]
    assert played.group.slot == -1
    carried = played.trajectories.obs["obs"][1, 4].copy()
    assert played.release(ready(first)[0]) == [ActionRequest(0, 0, 0, 0, 0)]
    assert np.array_equal(played.trajectories.obs["obs"][0, 0], carried)
    assert played.release(ready(second)[0]) == []  # it is playing: nothing new to ask for
    third = played.trajectory()
    assert ready(third) == [TrajectoryReady(0, 0, 2, 0)]
    assert requests(third)[-1] == ActionRequest(0, 0, 1, 0, 0)


def test_ownership_moves_with_the_messages() -> None:
    played = Played().begin()
    t = played.trajectories
    assert t.owner.tolist() == [0, 0]
    (message,) = ready(played.trajectory())
    assert (t.owner.tolist(), t.sequence.tolist()) == ([1, 0], [1, 0])
    played.release(message)
    assert (t.owner.tolist(), t.sequence.tolist()) == ([0, 0], [1, 0])
    assert {name: played.group.totals[name] for name in ("trajectories", "sent", "released")} == {
        "trajectories": 1, "sent": 1, "released": 1
    }  # fmt: skip


def test_releasing_twice_is_harmless() -> None:
    played = Played(slots=2).begin()
    (message,) = ready(played.trajectory())
    played.trajectory()
    assert len(played.release(message)) == 1
    assert played.release(message) == []
    assert played.group.totals["released"] == 1
    assert list(played.group.free) == []
    assert played.trajectories.owner.tolist() == [0, 1]


def test_a_release_of_an_earlier_hand_over_is_dropped() -> None:
    played = Played(slots=1).begin()
    (old,) = ready(played.trajectory())
    played.release(old)
    (current,) = ready(played.trajectory())
    assert (old.sequence, current.sequence) == (1, 2)
    assert played.release(old) == []
    assert played.group.slot == -1
    assert played.trajectories.owner.tolist() == [1]
    assert played.release(current) == [ActionRequest(0, 0, 0, 0, 0)]


def test_a_slot_that_is_released_before_the_beginning_is_acted_once() -> None:
    """An actor that takes a dead one's place resets environments while the learner goes on giving slots back."""
    played = Played(slots=1).begin()
    (message,) = ready(played.trajectory())
    group = played.succeed(generation=1)
    group.reset()
    parked = clock.parked
    assert played.release(message) == []
    assert (group.slot, clock.parked) == (-1, parked)
    assert played.hear(group.begin()) == [ActionRequest(0, 0, 0, 0, 1)]
    assert (group.slot, list(group.free)) == (0, [])
    assert ready(played.trajectory()) == [TrajectoryReady(0, 0, 2, 1)]


def test_a_slot_is_free_when_the_last_policy_released_it() -> None:
    played = Played(slots=1, num_policies=3, rows=8).begin()
    messages = ready(played.trajectory())
    policies = [m.policy for m in messages]
    acting = np.unique(played.trajectories.policy_id[0, :4]).tolist()
    assert policies == acting
    assert len(policies) >= 2
    assert played.trajectories.owner[0] == sum(1 << p for p in policies)
    assert {m.sequence for m in messages} == {1}
    for message in messages[:-1]:
        assert played.release(message) == []
        assert played.release(message) == []
    absent = TrajectoryReady(7, 0, 1, 0)  # a policy that holds nothing
    assert played.release(absent) == []
    assert played.group.slot == -1
    assert len(played.release(messages[-1])) >= 1
    assert played.group.totals["sent"] == played.group.totals["released"] == len(policies)


def test_truncation_in_the_last_step_asks_for_final_values_before_the_hand_over() -> None:
    played = Played(rows=3, slots=60, same_step=True).begin()
    t, finals = played.trajectories, played.world.finals
    with_finals = 0
    for slot in range(60):
        heard = played.trajectory()
        asked = ActionRequest(0, 0, slot, 4, 0) in heard
        assert asked == t.truncated[slot, 3].any()
        with_finals += asked
        assert requests(heard)[-1].slot == slot + 1 or slot == 59
        if asked:
            rows = t.truncated[slot, 3]
            assert np.array_equal(finals.has_final[0], rows)
            last = t.obs["obs"][slot, 3, rows]
            assert np.array_equal(finals.final_obs["obs"][0, rows, 2], last[:, 2] + 1)  # the observation after the last
    assert 5 < with_finals < 60
    assert t.valid.all()


def test_a_truncation_elsewhere_needs_no_request_of_its_own() -> None:
    played = Played(rows=3, slots=40, same_step=True).begin()
    for slot in range(40):
        heard = played.trajectory()
        mine = [r.step for r in requests(played.said) if r.slot == slot]
        assert mine == [0, 1, 2, 3] + [4] * bool(played.trajectories.truncated[slot, 3].any())
        assert len(ready(heard)) == 1


def test_policies_are_redrawn_exactly_where_an_episode_starts() -> None:
    played = Played(slots=100, num_policies=4).begin()
    for _ in range(100):
        played.trajectory()
    t = played.trajectories
    first = np.concatenate([*t.first[:, :4], t.first[-1, 4:]])
    policy = np.concatenate([*t.policy_id[:, :4], t.policy_id[-1, 4:]])
    assert set(np.unique(policy)) == {0, 1, 2, 3}
    changed = policy[1:] != policy[:-1]
    assert not (changed & ~first[1:]).any()
    share = changed.sum() / first[1:].sum()  # a new draw differs in 3 of 4 cases
    assert 0.6 < share < 0.9


def test_a_step_waits_for_every_policy_present() -> None:
    played = Played(slots=100, num_policies=3).begin()
    for _ in range(100):
        played.trajectory()
    t = played.trajectories
    asked: dict[tuple[int, int], list[int]] = {}
    for request in requests(played.said):
        asked.setdefault((request.slot, request.step), []).append(request.policy)
    assert len(asked) == 400
    for (slot, step), policies in asked.items():
        assert policies == np.unique(t.policy_id[slot, step]).tolist()


def test_the_policy_that_acted_values_a_final_observation_even_when_it_left() -> None:
    played = Played(rows=1, slots=60, same_step=True, num_policies=3).begin()
    t, gone = played.trajectories, 0
    for slot in range(60):
        heard = [m for m in requests(played.trajectory()) if m.slot == slot]
        for step in range(1, 5):
            present, acted = int(t.policy_id[slot, step, 0]), int(t.policy_id[slot, step - 1, 0])
            cut = bool(t.truncated[slot, step - 1, 0])
            expected = {present, acted} if cut else {present} if step < 4 else set()
            assert {m.policy for m in heard if m.step == step} == expected
            gone += cut and present != acted
    assert gone > 5


@pytest.mark.parametrize("per_row", [True, False])
def test_agents_of_one_env_may_play_under_different_policies_or_not(per_row: bool) -> None:
    played = Played(envs=PairEnv(num_envs=2, length=2), slots=40, num_policies=3, per_row_policy=per_row).begin()
    for _ in range(40):
        played.trajectory()
    policy = played.trajectories.policy_id
    pairs = policy.reshape(-1, 2, 2)
    assert (pairs[..., 0] == pairs[..., 1]).all() != per_row
    assert (pairs[:, 0] != pairs[:, 1]).any()  # envs differ either way
    assert set(np.unique(policy)) == {0, 1, 2}


def shifts(num_envs: int, **plan: object) -> Played:
    return Played(envs=make_group(EnvConfig("toy/Shifts-v0"), num_envs), slots=30, **plan)


def test_agents_that_take_no_part_are_no_samples() -> None:
    """Every step of an agent is one of its shifts; what is scored are those shifts, and the team when all are over."""
    played = shifts(2).begin()
    for _ in range(30):
        played.trajectory()
    played.hear(played.group.episodes.flush(now=True))
    t = played.trajectories
    valid, first, action = t.valid.reshape(120, 6), t.first[:, :4].reshape(120, 6), t.action.reshape(120, 6)
    shown = t.obs["obs"][:, :4].reshape(120, 6, 5).astype(int)
    ended, teams, returns = [], [], defaultdict(float)
    for at, row in np.argwhere(valid).tolist():
        _, episode, step, agent, _ = shown[at, row].tolist()
        shift, game = shift_of(agent, episode), (row // 3, episode)
        assert (agent, first[at, row]) == (row % 3, step == shift.begin)
        assert shift.begin <= step < shift.end
        for key in (game, (*game, agent)):
            returns[key] += shift_reward(agent, step, action[at, row])
        if step + 1 == shift.end:
            ended.append((0, returns[(*game, agent)], shift.end - shift.begin))
        if agent == max(range(3), key=lambda a: (shift_of(a, episode).end, a)) and step + 1 == shift.end:
            teams.append(returns[game])
    assert played.group.totals["collected"] == valid.sum() > 300
    assert played.group.totals["reset_rows"] == (~valid).sum()
    assert episodes(played.said) == [pytest.approx(one) for one in ended]
    stats = [one for done in played.said if isinstance(done, EpisodesDone) for _, one in done.stats]
    assert [one["true_reward"] for one in stats if "length" in one] == pytest.approx([r for _, r, _ in ended])
    assert [one["team_return"] for one in stats if "team_return" in one] == pytest.approx(teams)


@pytest.mark.parametrize("per_row", [True, False])
def test_agents_that_come_late_play_under_the_policy_of_their_env(per_row: bool) -> None:
    played = shifts(2, num_policies=3, per_row_policy=per_row).begin()
    for _ in range(30):
        played.trajectory()
    t = played.trajectories
    valid, first, policy = t.valid.reshape(120, 6), t.first[:, :4].reshape(120, 6), t.policy_id[:, :4].reshape(120, 6)
    going_on = valid[1:] & ~first[1:]
    assert (policy[1:] == policy[:-1])[going_on].all()  # an episode is played by one policy
    by_env = policy.reshape(120, 2, 3)
    together = all(
        len(set(by_env[at, env][valid[at].reshape(2, 3)[env]].tolist())) <= 1 for at in range(120) for env in range(2)
    )
    assert together != per_row
    assert set(np.unique(policy)) == {0, 1, 2}


def expected_episodes(played: Played, steps: int) -> list[tuple[int, float, int]]:
    """Episodes that must have ended in the first `steps` rows of time, by time and row (NEXT_STEP, whole run)."""
    t = played.trajectories
    action, valid = (a.reshape(steps, -1) for a in (t.action, t.valid))
    ended = []
    for row in range(action.shape[1]):
        env, episode, step, total = int(t.obs["obs"][0, 0, row, 0]), 0, 0, 0.0
        for i in range(steps):
            if not valid[i, row]:
                episode, step, total = episode + 1, 0, 0.0
                continue
            total += counter_step(env, episode, step, int(action[i, row])).reward
            step += 1
            if step == counter_length(env, episode):
                ended.append((i, row, (0, total, step)))
    return [episode for _, _, episode in sorted(ended)]


def test_every_episode_is_counted_once_with_its_raw_return() -> None:
    played = Played(slots=30, reward_scale=0.5, reward_clip=0.25).begin()
    for _ in range(30):
        played.trajectory()
    played.hear(played.group.episodes.flush(now=True))
    found, expected = episodes(played.said), expected_episodes(played, 120)
    assert len(found) == len(expected) == played.group.episodes.count > 30
    assert found == [pytest.approx(e) for e in expected]
    scored = played.trajectories.reward[played.trajectories.valid]
    assert set(np.abs(scored[np.abs(scored) >= 0.25])) == {0.25}


@pytest.mark.parametrize(("scale", "clip"), [(1.0, 0.0), (0.5, 0.0), (1.0, 1.5), (-2.0, 3.0)])
def test_rewards_are_scaled_then_clipped(scale: float, clip: float) -> None:
    played = Played(slots=8, reward_scale=scale, reward_clip=clip).begin()
    raw = Played(slots=8).begin()
    for _ in range(8):
        played.trajectory()
        raw.trajectory()
    expected = raw.trajectories.reward * scale
    if clip:
        expected = expected.clip(-clip, clip)
        assert (np.abs(expected) == clip).any()
    assert np.array_equal(played.trajectories.reward, expected)


def test_episodes_are_scored_by_the_policy_that_played_them() -> None:
    played = Played(slots=50, num_policies=4).begin()
    for _ in range(50):
        played.trajectory()
    played.hear(played.group.episodes.flush(now=True))
    t = played.trajectories
    done = (t.terminated | t.truncated).reshape(200, 3)
    policy = t.policy_id[:, :4].reshape(200, 3)
    assert [e[0] for e in episodes(played.said)] == policy[done].tolist()


def test_an_episode_whose_environment_failed_is_not_reported_and_its_last_step_is_no_sample() -> None:
    mortals = Mortals({(0, "step", 3): ValueError("no")})
    played = Played(slots=3, envs=PythonLoop([Mortals({}), mortals], name="Mortal", on_failure=OnFailure(10))).begin()
    for _ in range(3):
        played.trajectory()
    played.hear(played.group.episodes.flush(now=True))
    assert episodes(played.said) == [(0, 15.0, 5), (0, 65.0, 5), (0, 15.0, 5)]
    valid = played.trajectories.valid.reshape(12, 2)
    assert np.flatnonzero(~valid[:, 0]).tolist() == [5, 11]
    assert np.flatnonzero(~valid[:, 1]).tolist() == [2, 8]
    played.group.note_counts()
    assert played.group.totals == {
        "collected": 20, "reset_rows": 4, "trajectories": 3, "sent": 3, "released": 0, "rebuilds": 1
    }  # fmt: skip
    successor = EnvGroup(
        played.group.plan, PairEnv(1, 9), played.trajectories, played.world.finals, np.random.SeedSequence(1)
    )
    successor.envs.rebuilds = 2
    successor.note_counts()
    assert successor.totals["rebuilds"] == 3


def test_sampling_only_keeps_its_slots() -> None:
    played = Played(slots=2, keep=True).begin()
    for _ in range(6):
        assert ready(played.trajectory()) == []
    assert [r.slot for r in requests(played.said) if r.step == 0] == [0, 1, 0, 1, 0, 1, 0]
    assert played.group.totals["trajectories"] == 6
    assert played.group.totals["sent"] == 0
    assert played.trajectories.owner.tolist() == [0, 0]


def test_groups_are_seeded_apart_and_repeatably() -> None:
    def seeds_of(entropy: int) -> list[int]:
        played = Played()
        args = (played.group.plan, played.group.envs, played.trajectories, played.world.finals)
        return EnvGroup(*args, np.random.SeedSequence(entropy)).seeds

    assert seeds_of(1) == seeds_of(1)
    assert len({*seeds_of(1), *seeds_of(2)}) == 6


def test_a_stale_release_message_of_an_unknown_sequence_is_dropped() -> None:
    played = Played().begin()
    played.trajectory()
    assert list(played.group.release(SlotReleased(0, 0, 99))) == []
    assert played.trajectories.owner.tolist() == [1, 0]
