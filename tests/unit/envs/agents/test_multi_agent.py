import importlib
import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.envs.agents import pettingzoo
from appo.envs.agents.multi_agent import MultiAgentLoop, Roster, loop_over
from appo.envs.config import EnvConfig
from appo.envs.loop.env_set import OnFailure
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import make_group
from appo.envs.spaces import find_out_agents, num_agents_of
from appo.envs.spec import MASK_KEY, TEAM_RETURN, step_row
from appo.envs.toys.agents import Pair, RockPaperScissors, Shifts, shift_of, shift_reward
from appo.envs.toys.toy import Counter
from appo.utils.errors import EnvironmentFailure, SpaceMismatch, UsageError
from tests.unit.envs.rollouts import Rollout, collect

AGENTS = 3
IDLE = {"is_active": False}


def by_row(obs: dict[str, np.ndarray]) -> np.ndarray:
    """An action that differs between rows and steps and follows from the observation."""
    return ((obs["obs"][:, 0] + obs["obs"][:, 2] + obs["obs"][:, 3]) % 4).astype(np.int32)[:, None]


def zero(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.zeros((len(obs["obs"]), 1), np.int32)


def parallel_shifts() -> Any:
    pytest.importorskip("pettingzoo")
    return pettingzoo.as_gymnasium(importlib.import_module("tests.unit.envs.crowds").ParallelShifts(), "shifts")


FORMS: dict[str, Callable[[], Any]] = {"lists": Shifts, "pettingzoo": parallel_shifts}


def shifts(num_envs: int, form: str = "lists", **arguments: Any) -> PythonLoop:
    return loop_over([FORMS[form]] * num_envs, name="shifts", **arguments)


@pytest.mark.parametrize("form", FORMS)
def test_agents_come_and_go_to_the_letter(form: str) -> None:
    """Every row of 40 steps is what the plan says, and what nobody acts in is marked so and shows nothing."""
    rollout = collect(shifts(2, form), 40, [10, 11], by_row)
    acted = 0
    for row in range(2 * AGENTS):
        env_id, agent, t, episode = 10 + row // AGENTS, row % AGENTS, 0, 0
        while t < 40:
            shift, length = shift_of(agent, episode), max(shift_of(a, episode).end for a in range(AGENTS))
            for step in range(min(length + 1, 40 - t)):
                here, showing = shift.begin <= step < shift.end, shift.begin <= step <= shift.end
                action = int(rollout.action[t - 1, row, 0]) if here and step > shift.begin else None
                shown = rollout.obs["obs"][t, row].tolist()
                if not showing:
                    assert shown == [0] * 5
                elif step > shift.begin:
                    assert shown == [env_id, episode, step, agent, rollout.action[t - 1, row, 0]]
                else:
                    assert shown == [env_id, episode, step, agent, 0]
                assert action is None or shown[4] == action
                # What came before was no step of this agent: it is absent, or begins here.
                assert rollout.first[t, row] == (not shift.begin < step <= shift.end)
                reward = shift_reward(agent, step, int(rollout.action[t, row, 0])) if here else 0.0
                assert rollout.reward[t, row] == np.float32(reward)
                ends = here and step + 1 == shift.end
                assert rollout.terminated[t, row] == (ends and not shift.truncates)
                assert rollout.truncated[t, row] == (ends and shift.truncates)
                acted += here
                t += 1
            episode += 1
    assert acted == int((~rollout.first[1:]).sum())
    assert rollout.terminated.any()
    assert rollout.truncated.any()


def test_both_forms_are_the_same() -> None:
    lists, zoos = (collect(shifts(3, form, decorrelate_steps=8, seed=5), 60, [1, 2, 3], by_row) for form in FORMS)
    for name in ("first", "action", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(lists, name), getattr(zoos, name))
    np.testing.assert_array_equal(lists.obs["obs"], zoos.obs["obs"])
    assert lists.episodes == zoos.episodes


@pytest.mark.parametrize("form", FORMS)
def test_statistics_of_agents_and_of_the_team(form: str) -> None:
    rollout = collect(shifts(2, form), 40, [10, 11], by_row)
    own = [(t, one) for t, one in rollout.episodes if "true_reward" in one.stats]
    assert [(t, one.row) for t, one in own] == [tuple(pair) for pair in np.argwhere(rollout.done)]
    for t, (row, stats) in own:
        length = int(stats["length"])
        assert stats["true_reward"] == pytest.approx(rollout.reward[t - length + 1 : t + 1, row].sum())
    teams = [(t, one.row // AGENTS, one.stats[TEAM_RETURN]) for t, one in rollout.episodes if TEAM_RETURN in one.stats]
    for env in range(2):
        rows, begin = slice(env * AGENTS, (env + 1) * AGENTS), 0
        ends = [t for t, of, _ in teams if of == env]
        assert [t for t in ends if t < 39] == [t for t in range(39) if rollout.first[t + 2, rows].all()]
        for t, of, value in teams:
            if of == env:
                assert value == pytest.approx(rollout.reward[begin : t + 1, rows].sum())
                begin = t + 1


def test_a_walk_at_the_start_is_seeded_and_leaves_nobody_behind() -> None:
    def starts(seed: int) -> np.ndarray:
        obs = {"obs": np.zeros((16 * AGENTS, 5), np.float32)}
        shifts(16, decorrelate_steps=12, seed=seed).reset(range(16), obs)
        return obs["obs"]

    np.testing.assert_array_equal(starts(1), starts(1))
    assert not np.array_equal(starts(1), starts(2))
    for env, agents in enumerate(starts(1).reshape(16, AGENTS, 5)):
        playing = agents[agents.any(axis=1)]
        episode, step = playing[0, 1:3].tolist()
        assert (playing[:, 0] == env).all()
        expected = [a for a in range(AGENTS) if shift_of(a, episode).begin <= step < shift_of(a, episode).end]
        assert playing[:, 3].tolist() == expected


def test_a_pair_is_paid_for_being_right_together() -> None:
    def answers(obs: dict[str, np.ndarray], wrong: int) -> np.ndarray:
        question, agent = obs["obs"][:, :3].argmax(axis=1), obs["obs"][:, 3:].argmax(axis=1)
        return ((question + (agent < wrong)) % 3).astype(np.int32)[:, None]

    for wrong, reward in ((0, 1.0), (1, 0.25), (2, 0.0)):  # as many agents err
        rollout = collect(make_group(EnvConfig("toy/Pair-v0"), 2), 17, [1, 2], lambda obs, n=wrong: answers(obs, n))
        acted = ~rollout.first[1:]
        assert acted.sum() == 16 * 4
        assert (rollout.reward[acted] == reward).all()
        assert [one.stats for _, one in rollout.episodes] == [{TEAM_RETURN: 16 * reward}] * 4


def test_the_loop_follows_from_what_is_made() -> None:
    assert type(make_group(EnvConfig("toy/Counter-v0", env_vectorization="python"), 2)) is PythonLoop
    group = make_group(EnvConfig("toy/Shifts-v0", env_kwargs={"num_agents": 5}), 2)
    assert isinstance(group, MultiAgentLoop)
    assert (group.spec.num_agents, group.num_rows) == (5, 10)
    assert num_agents_of(Counter()) == 0
    one = Pair()
    one.is_multiagent = False  # type: ignore[attr-defined]
    assert num_agents_of(one) == 0
    one.is_multiagent, one.num_agents = True, "two"  # type: ignore[attr-defined, assignment]
    with pytest.raises(UsageError, match=r"Pair.num_agents must be the number of its agents, got 'two'"):
        num_agents_of(one)


# --- agents that pause, and flags for all at once


class Scripted(gymnasium.Env[Any, Any]):
    """Says what a script says: an entry per step, each with an entry per agent.

    Args:
        script: per step (rewards, terminated, truncated, infos); observations tell step and agent.
        infos: of the reset.
    """

    def __init__(self, script: list[tuple[Any, Any, Any, Any]], infos: Any) -> None:
        self.num_agents, self.is_multiagent = 2, True
        self.observation_space, self.action_space = spaces.Box(0.0, 100.0, (1,), np.float32), spaces.Discrete(3)
        self.script, self.infos, self.at, self.taken = script, infos, 0, []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.at = 0
        return self.shown(), self.infos

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        self.at += 1
        return self.shown(), *self.script[self.at - 1]

    def shown(self) -> list[np.ndarray]:
        return [np.array([10 * self.at + agent], np.float32) for agent in range(2)]


def scripted(script: list[tuple[Any, ...]], infos: Any = ({}, {}), steps: int | None = None) -> Rollout:
    loop = loop_over([lambda: Scripted(script, infos)], name="scripted")
    return collect(loop, steps or len(script), [0], zero)


NO = [False, False]


def test_an_agent_that_pauses_is_cut_off_and_begins_anew() -> None:
    going = ([1.0, 2.0], NO, NO, [{}, {}])
    rollout = scripted([going, ([1.0, 2.0], NO, NO, [{}, IDLE]), ([1.0, 9.0], NO, NO, [{}, IDLE]), going, going])
    assert rollout.first[:, 1].tolist() == [True, False, False, True, True, False]
    assert rollout.truncated[:, 1].tolist() == [False, True, False, False, False]
    assert rollout.reward[:, 1].tolist() == [2, 2, 0, 0, 2]  # what is given to whoever is absent counts for nobody
    assert rollout.obs["obs"][:, 1, 0].tolist() == [1, 11, 21, 0, 41, 51]  # the last one before the pause is shown
    assert not rollout.done[:, 0].any()
    assert rollout.first[1:, 0].tolist() == [False] * 5


@pytest.mark.parametrize("reward", [None, "none", 1e39, float("nan"), [1.0, 2.0]])
def test_whatever_an_absent_agent_is_paid_is_ignored(reward: Any) -> None:
    end = ([1.0, 2.0], NO, [True, True], [{}, IDLE])
    script = [([1.0, reward], NO, NO, [{}, IDLE]), ([1.0, reward], NO, NO, [{}, {}]), end]
    rollout = scripted(script, infos=({}, IDLE))
    assert rollout.reward.tolist() == [[1, 0], [1, 0], [1, 2]]
    assert rollout.episodes[0][1].stats == {TEAM_RETURN: 5.0}
    loop = loop_over([lambda: Scripted(script[:1] * 12, ({}, IDLE))], name="scripted", decorrelate_steps=9)
    collect(loop, 3, [0], zero)
    assert loop.cut.tolist() == [True, True]  # random steps were taken, too


def test_a_pause_of_all_is_no_end() -> None:
    going = ([1.0, 1.0], NO, NO, [{}, {}])
    rollout = scripted([([0, 0], NO, NO, [IDLE, IDLE]), going, going], infos=[IDLE, IDLE])
    assert rollout.first[:, 0].tolist() == [True, True, True, False]
    assert rollout.obs["obs"][:, 0, 0].tolist() == [0, 0, 20, 30]


def test_flags_and_infos_may_be_said_once_for_all() -> None:
    end = ([1.0, 2.0], [True, False], True, {"num_frames": 4})
    rollout = scripted([end], infos={}, steps=3)
    assert rollout.terminated[0].tolist() == [True, False]
    assert rollout.truncated[0].tolist() == [False, True]
    assert rollout.num_frames[0].tolist() == [4, 4]
    assert rollout.first[:, 0].tolist() == [True, False, True, False]
    assert [one.stats for _, one in rollout.episodes] == [{TEAM_RETURN: 3.0}, {TEAM_RETURN: 3.0}]


def test_an_agent_that_comes_back_after_its_end_is_in_the_game() -> None:
    """Some environments begin the next episode of an agent by themselves."""
    going = ([1.0, 1.0], NO, NO, [{}, {}])
    rollout = scripted([([1.0, 1.0], [True, False], NO, [{}, {}]), going, ([1, 1], [False, True], NO, [{}, {}]), going])
    assert rollout.terminated[:, 0].tolist() == [True, False, False, False]
    assert rollout.first[:, 0].tolist() == [True, False, True, False, False]
    assert rollout.first[:, 1].tolist() == [True, False, False, False, True]


def test_agents_are_out_for_good_when_all_are() -> None:
    roster = Roster(2)
    roster.begin([{}, IDLE])
    assert (roster.playing, roster.over) == ([True, False], False)
    roster.note(0, True, {})
    roster.note(1, False, IDLE)
    assert not roster.over  # the other one has not come yet
    roster.note(0, False, IDLE)
    roster.note(1, True, IDLE)
    assert roster.over


@pytest.mark.parametrize(
    ("script", "infos", "text"),
    [
        ([([1.0], NO, NO, [{}, {}])], ({}, {}), "rewards: expected a list of 2, one per agent, got 1"),
        ([(["a", "b"], NO, NO, [{}, {}])], ({}, {}), "env 0, agent 0: a step comes with a number as reward, not"),
        ([([1.0, 1.0], NO, {"a": True}, [{}, {}])], ({}, {}), "truncated: expected a list of 2, .* got dict"),
        ([], ({},), "infos: expected a list of 2, one per agent, got 1"),
        ([], None, "reset must return .* with a dict as info"),
        ([], [{}, None], "reset must return .* with a dict as info"),
        ([([1.0, 1.0], [True, True], NO, [{}, None])], ({}, {}), "step must return .* with a dict as info"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(script: list[Any], infos: Any, text: str) -> None:
    with pytest.raises(SpaceMismatch, match=text):
        scripted(script, infos, steps=1)


def test_an_environment_of_one_agent_that_says_it_has_several_is_refused() -> None:
    env = Counter()
    env.num_agents = 2  # type: ignore[attr-defined]
    with pytest.raises(SpaceMismatch, match="observations: expected a list of 2, one per agent, got 4"):
        collect(loop_over([lambda: env], name="counter"), 1, [0], zero)


class Masked(Scripted):
    """Each agent may choose only its own number; who has ended may choose nothing, or nothing is said of it."""

    def __init__(self, where: str) -> None:
        going, last = ([1.0, 1.0], NO, NO, [{}, {}]), ([1.0, 1.0], [True, True], NO, [{}, {}])
        super().__init__([going, ([1.0, 1.0], [False, True], NO, [{}, {}]), ([1.0, 0.0], NO, NO, [{}, IDLE]), last], [])
        self.where = where
        if where == "observation":
            allowed = spaces.MultiBinary(3)
            self.observation_space = spaces.Dict({"obs": self.observation_space, MASK_KEY: allowed})  # type: ignore

    def mask(self, agent: int) -> np.ndarray:
        return (np.arange(3) == agent + 1) & (self.at < (2 if agent else 4))

    def reset(self, **arguments: Any) -> tuple[Any, Any]:
        shown, _ = super().reset(**arguments)
        return shown, self.infos_of([{}, {}])

    def step(self, action: Any) -> Any:
        assert [a for i, a in enumerate(action) if self.mask(i).any()] == [
            i + 1 for i in range(2) if self.mask(i).any()
        ]
        *said, infos = super().step(action)
        return *said, self.infos_of(infos)

    def shown(self) -> list[Any]:
        both = super().shown()
        if self.where == "info":
            return both
        return [{"obs": o, MASK_KEY: self.mask(i).astype(np.int8)} for i, o in enumerate(both)]

    def infos_of(self, infos: Any) -> list[dict[str, Any]]:
        listed = [{**info, MASK_KEY: self.mask(i)} for i, info in enumerate(infos)]
        return [
            one if self.where == "info" and one[MASK_KEY].any() else i for one, i in zip(listed, infos, strict=True)
        ]


@pytest.mark.parametrize("where", ["observation", "info"])
def test_masks_of_agents_that_come_and_go(where: str) -> None:
    loop = loop_over([lambda: Masked(where)] * 2, name="masked", decorrelate_steps=7)
    assert (loop.spec.action_mask, loop.spec.mask_in_info) == (3, where == "info")
    rollout = collect(loop, 30, [0, 1], lambda obs: obs[MASK_KEY].argmax(axis=1).astype(np.int32)[:, None])
    assert rollout.obs[MASK_KEY].any(axis=2).all()  # somebody is asked for an action even where nobody takes it
    acted = ~rollout.first[1:]
    assert (rollout.action[acted] == np.broadcast_to(np.arange(4) % 2 + 1, acted.shape)[acted][:, None]).all()
    assert acted.any(axis=0).all()


class CutWithMasks(gymnasium.Env[Any, Any]):
    """Two agents with a single allowed choice, cut off after two steps; the last mask may say nothing."""

    is_multiagent, num_agents = True, 2
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)

    def __init__(self, last: Any) -> None:
        self.last = last

    def reset(self, **_: Any) -> Any:
        self.at = 0
        return [np.zeros(2, np.float32)] * 2, [{MASK_KEY: np.array([1, 0, 0])}] * 2

    def step(self, action: Any) -> Any:
        self.at += 1
        mask = np.array([1, 0, 0]) if self.at < 2 else self.last
        infos = [{}, {}] if mask is None else [{MASK_KEY: mask}] * 2
        return [np.zeros(2, np.float32)] * 2, [1.0] * 2, NO, [self.at == 2] * 2, infos


@pytest.mark.parametrize(
    ("last", "stored"), [([0, 1, 0], [0, 1, 0]), (None, [1, 1, 1]), ([0, 0, 0], [1, 1, 1])], ids=str
)
def test_a_truncated_end_is_valued_by_its_own_mask(last: Any, stored: list[int]) -> None:
    loop = loop_over([lambda: CutWithMasks(None if last is None else np.array(last))], name="cut")
    rollout = collect(loop, 2, [0], zero)
    assert rollout.truncated.tolist() == [[False] * 2, [True] * 2]
    assert rollout.obs[MASK_KEY].tolist() == [[[1, 0, 0]] * 2] * 2 + [[stored] * 2]


# --- failures


class Failing(Shifts):
    """Its second life works; the first raises, or returns NaN, in the third step."""

    made = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.life = how, Failing.made
        Failing.made += 1

    def step(self, action: Any) -> Any:
        said = super().step(action)
        if self._step == 3 and self.life == 0:
            if self.how == "raise":
                raise RuntimeError("out of cheese")
            said[1][0] = float("nan")
        return said


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failure_costs_one_step_of_its_environment(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "made", 0)
    loop = loop_over([lambda: Failing(how), Shifts], name="failing", on_failure=OnFailure(max_rebuilds=1))
    rollout = collect(loop, 12, [10, 11], by_row)
    alone = collect(shifts(1), 12, [11], by_row)
    np.testing.assert_array_equal(rollout.obs["obs"][:, AGENTS:], alone.obs["obs"])
    assert loop.rebuilds == 1
    assert rollout.first[3, :AGENTS].all()
    assert not rollout.done[2, :AGENTS].any()
    assert rollout.reward[2, :AGENTS].tolist() == [0] * AGENTS
    assert rollout.obs["obs"][3, :AGENTS, 1].tolist() == [0] * AGENTS  # episode 0 of a new life
    assert rollout.obs["obs"][3, 0, 0] not in (10, 11)
    assert all(one.row >= AGENTS for t, one in rollout.episodes if t == 2)


def test_who_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "made", 0)
    loop = loop_over([Shifts, lambda: Failing("nan")], name="failing")
    with pytest.raises(EnvironmentFailure, match="failing: env 1, agent 0: reward is not finite: nan"):
        collect(loop, 12, [10, 11], by_row)


def test_time_limits_cut_everybody_off() -> None:
    env = gymnasium.wrappers.TimeLimit(Shifts(), 2)
    rollout = collect(loop_over([lambda: env], name="limited"), 3, [1], by_row)
    for agent in range(AGENTS):
        shift = shift_of(agent, 0)
        playing = shift.begin <= 1 < shift.end
        assert rollout.done[1, agent] == playing
    assert rollout.first[3].all()


def test_rock_paper_scissors() -> None:
    game = RockPaperScissors(num_rounds=2)
    for first, second in itertools.product(range(3), repeat=2):
        shown, _ = game.reset()
        assert not np.any(shown)
        shown, rewards, terminated, truncated, _ = game.step([first, second])
        assert [int(one.argmax()) for one in shown] == [second, first]  # each sees what the other one chose
        winner = {(1, 0): 1.0, (2, 1): 1.0, (0, 2): 1.0}  # paper beats rock, scissors paper, rock scissors
        expected = winner.get((first, second), 0.0) - winner.get((second, first), 0.0)
        assert rewards == [expected, -expected]
        assert (terminated, truncated) == ([False] * 2, [False] * 2)
        assert game.step([first, second])[2] == [True] * 2


def test_who_ended_during_the_random_steps_counts_for_the_end_of_the_environment() -> None:
    """Else an environment whose others end later would wait for ever."""
    loop = loop_over([Shifts] * 32, name="shifts", decorrelate_steps=128, seed=(1, 2))
    row = step_row(loop.spec, loop.num_rows)
    loop.reset(list(range(32)), row.obs)
    played = np.zeros(32, np.bool_)
    for step in range(300):
        loop.step(np.zeros((loop.num_rows, 1), loop.spec.action.dtype), row)
        if step > 200:
            played |= (~row.first).reshape(32, -1).any(axis=1)
    assert played.all()


# --- an attribute that others have too


class Opponents(gymnasium.Env[Any, Any]):
    """One agent beside opponents, counted in `num_agents`, or several agents that do not declare themselves."""

    action_space = spaces.Discrete(2)

    def __init__(self, count: int, shows: str, in_lists: bool, infos: bool = False) -> None:
        self.num_agents, self.in_lists, self.infos = count, in_lists, infos
        box = spaces.Box(-1.0, 1.0, (count,), np.float32)
        made = {"box": box, "tuple": spaces.Tuple([box] * count), "choice": spaces.Discrete(3)}
        self.observation_space = made.get(shows, spaces.Dict({"x": box}))
        self.resets = 0

    def _shown(self) -> Any:
        one = self.observation_space.sample()
        return [self.observation_space.sample() for _ in range(self.num_agents)] if self.in_lists else one

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets += 1
        return self._shown(), [{}] * self.num_agents if self.infos else {}

    def step(self, action: Any) -> Any:
        return self._shown(), [1.0] * self.num_agents if self.in_lists else 1.0, False, True, {}


@pytest.mark.parametrize("shows", ["box", "tuple", "choice", "dict"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("in_lists", "infos"), [(False, False), (True, False), (True, True)])
def test_a_reset_tells_agents_from_opponents(shows: str, count: int, in_lists: bool, infos: bool) -> None:
    kwargs = {"count": count, "shows": shows, "in_lists": in_lists, "infos": infos}
    group = make_group(EnvConfig("tests.unit.envs.agents.test_multi_agent:Opponents", env_kwargs=kwargs), 2)
    assert group.spec.num_agents == (count if in_lists else 1)
    rollout = collect(group, 4, [0, 1], lambda obs: np.zeros((group.num_rows, 1), np.int32))
    assert rollout.reward.tolist() == [[1.0] * group.num_rows, [0.0] * group.num_rows] * 2
    assert group.rebuilds == 0


def test_flags_of_one_agent_are_for_one_beside_opponents() -> None:
    kwargs = {"count": 4, "shows": "box", "in_lists": False}
    config = EnvConfig("tests.unit.envs.agents.test_multi_agent:Opponents", env_kwargs=kwargs, env_framestack=3)
    assert make_group(config, 1).spec.observations["obs"].shape == (12,)


def test_an_environment_that_declares_itself_is_not_reset_to_find_out() -> None:
    for env in (Opponents(2, "box", in_lists=True), Opponents(1, "box", in_lists=False)):
        env.is_multiagent = env.num_agents > 1  # type: ignore[attr-defined]
        find_out_agents(env)
        assert env.resets == 0
