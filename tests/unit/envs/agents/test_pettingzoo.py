"""PettingZoo's environments: found by name, told apart, and agents that differ in what they see and do."""

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.algorithms.appo.algorithm import APPO
from appo.algorithms.run.algorithms import find_preset
from appo.envs.agents.common_spaces import AGENT_ID, CommonSpaces
from appo.envs.agents.multi_agent import MultiAgentLoop
from appo.envs.agents.pettingzoo import ParallelAgents, find
from appo.envs.config import EnvConfig
from appo.envs.make import check_name, make_group, make_single
from appo.envs.spec import MASK_KEY, TEAM_RETURN, ActionPart
from appo.utils.errors import EnvironmentFailure, SpaceMismatch, UsageError
from tests.unit.envs.rollouts import collect

pytest.importorskip("pettingzoo")

CROWDS = "tests.unit.envs.crowds"
SIZES = "appo.envs.toys.zoo:Sizes"


@pytest.mark.parametrize(
    "name", ["sisl/pursuit-v5", "sisl.pursuit_v5", "pettingzoo/sisl/pursuit_v5", "pettingzoo.sisl.pursuit_v5"]
)
def test_pettingzoos_own_names(name: str) -> None:
    check_name(EnvConfig(name))
    assert find_preset(name, "cpu", APPO())
    assert find(name, registered=False) is not None


def test_rock_paper_scissors() -> None:
    """An environment whose agents are stepped one after the other, converted by PettingZoo itself."""
    pytest.importorskip("pygame")
    group = make_group(EnvConfig("classic.rps_v2", env_kwargs={"max_cycles": 3}), 1)
    assert (group.spec.num_agents, group.spec.action.parts) == (2, (ActionPart("categorical", 3),))
    rollout = collect(group, 5, [0], lambda obs: np.array([[1], [2]], np.int32))
    assert rollout.reward[:, 1].tolist() == [1, 1, 1, 0, 1]  # scissors cut paper
    assert rollout.reward[:, 0].tolist() == [-1, -1, -1, 0, -1]
    assert rollout.obs["obs"][1:4].argmax(axis=2).tolist() == [[2, 1]] * 3  # what the other one has shown
    assert rollout.done[:, 0].tolist() == [False, False, True, False, False]
    assert [one.stats for _, one in rollout.episodes] == [{TEAM_RETURN: 0.0}]
    group.close()


def test_pursuit_is_played_and_repeats_itself() -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("scipy")
    kwargs = {"n_pursuers": 3, "n_evaders": 2, "max_cycles": 4, "x_size": 8, "y_size": 8}
    group = make_group(EnvConfig("sisl/pursuit-v5", env_kwargs=kwargs), 2)
    assert isinstance(group, MultiAgentLoop)
    assert group.spec.num_agents == 3
    assert group.spec.observations["obs"].shape == (7, 7, 3)
    assert group.spec.action.parts == (ActionPart("categorical", 5),)
    once, again = (collect(group, 11, [1, 2], lambda obs: np.ones((6, 1), np.int32)) for _ in range(2))
    np.testing.assert_array_equal(once.obs["obs"], again.obs["obs"])
    assert once.truncated[3].all()
    assert once.first[5].all()
    assert [(t, one.stats.keys()) for t, one in once.episodes] == [(t, {TEAM_RETURN}) for t in (3, 3, 8, 8)]
    teams = [one.stats[TEAM_RETURN] for _, one in once.episodes]
    assert teams[:2] == pytest.approx([once.reward[:4, :3].sum(), once.reward[:4, 3:].sum()], rel=1e-5)
    group.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sisl/pursuit-v4", "PettingZoo has no environment sisl/pursuit-v4; did you mean sisl/pursuit-v5?"),
        ("pettingzoo/mpe/spread-v3", "PettingZoo has no environment mpe/spread-v3"),
        (
            "classic/chess-v6",
            r"classic/chess-v6: its agents take turns \(no is_parallelizable in its metadata\)|needs a",
        ),
        (f"{CROWDS}:Turns", f"{CROWDS}:Turns: its agents take turns"),
        (f"{CROWDS}:UNIT", "is a Box, not a class or function"),
        (
            "tests.unit.envs.agents.test_pettingzoo:Nothing",
            "must be derived from .* or pettingzoo.ParallelEnv or AECEnv",
        ),
    ],
)
def test_names_that_cannot_be_played(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_single(EnvConfig(name))


class Nothing:
    pass


def test_without_pettingzoo_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.envs.agents.pettingzoo.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'sisl/pursuit-v5 needs the package pettingzoo: pip install "appo\[multi'):
        check_name(EnvConfig("sisl/pursuit-v5"))
    monkeypatch.undo()
    monkeypatch.delattr(importlib.import_module("pettingzoo"), "parallel_registry")
    with pytest.raises(UsageError, match=r"sisl/pursuit-v5 needs pettingzoo 1.27 or newer, this is \d"):
        check_name(EnvConfig("sisl/pursuit-v5"))


@pytest.mark.parametrize("name", ["ParallelShifts", "parallel_env", "parallel_to_aec_env", "aec_env_with_one_buffer"])
def test_classes_and_functions_of_ones_own(name: str) -> None:
    group = make_group(EnvConfig(f"{CROWDS}:{name}"), 2)
    assert isinstance(group, MultiAgentLoop)
    assert group.spec.num_agents == 3


def test_ids_of_ones_own() -> None:
    pettingzoo = importlib.import_module("pettingzoo")
    pettingzoo.register("parallel", "mine/shifts_v0", entry_point=f"{CROWDS}:ParallelShifts")
    try:
        assert make_group(EnvConfig(f"{CROWDS}:mine/shifts_v0"), 1).spec.num_agents == 3
    finally:
        del pettingzoo.parallel_registry["mine/shifts-v0"]


def test_flags_of_one_agent_are_refused_and_a_horizon_is_kept() -> None:
    for flag in ("env_frameskip", "env_framestack"):
        with pytest.raises(UsageError, match=f"--{flag}=2: .* has several agents and would have to do that itself"):
            make_single(EnvConfig(f"{CROWDS}:ParallelShifts", **{flag: 2}))  # type: ignore[arg-type]
    group = make_group(EnvConfig(f"{CROWDS}:ParallelShifts", horizon=2), 1)
    rollout = collect(group, 3, [0], lambda obs: np.zeros((3, 1), np.int32))
    assert rollout.done[1].any()
    assert rollout.first[3].all()


# --- an environment that breaks the rules


class Broken:
    """A parallel environment, made of what it is to return."""

    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, step: Any, agents: list[str] | None = None) -> None:
        self.possible_agents = self.agents = ["a", "b"] if agents is None else agents
        self.said, self.left = step, []  # type: ignore[var-annotated]

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(0.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        self.agents = self.left
        return self.said


SEEN = {"a": np.ones(1, np.float32)}


def test_agents_that_vanish_are_truncated_where_they_show_what_they_saw() -> None:
    env = ParallelAgents(Broken((SEEN, {"a": 1}, {}, {}, {})), "broken")
    env.reset()
    shown, rewards, terminated, truncated, infos = env.step([0, 0])
    assert [shown[0].tolist(), shown[1]] == [[1.0], None]
    assert rewards == [1, 0.0]
    assert terminated == [False, True]
    assert truncated[0]
    assert infos == [{"is_active": False}] * 2


def test_nobody_is_revived_where_the_dead_stay_on_the_list() -> None:
    broken = Broken((SEEN, {"a": 1}, {"a": True}, {}, {}))
    broken.left = ["a", "b"]
    env = ParallelAgents(broken, "broken")
    env.reset()
    assert env.step([0, 0])[2:] == ([True, False], [False, False], [{"is_active": False}, {}])
    broken.said = ({}, {"a": 9, "b": 2}, {}, {"b": True}, {})
    _, rewards, terminated, truncated, infos = env.step([0, 0])
    assert (rewards, terminated) == ([0.0, 2], [False, False])
    assert truncated == [True, True]  # nobody is left
    assert infos == [{"is_active": False}] * 2


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("name", ["Returning", "returning_in_turns"])
@pytest.mark.parametrize(
    ("away", "first_of_b"),
    [
        (0, [True, False, False, True, False, False, False, True]),  # never off the list
        (1, [True, False, False, True, False, False, False, True]),
        (2, [True, False, False, True, True, False, False, True]),
        (3, [True, False, False, True, True, True, False, True]),
        (9, [True, False, False, True, True, True, True, True]),  # stays away
    ],
)
def test_an_agent_that_comes_back_is_asked_again(name: str, away: int, first_of_b: list[bool], truncates: bool) -> None:
    kwargs = {"away": away, "truncates": truncates}
    group = make_group(EnvConfig(f"{CROWDS}:{name}", env_kwargs=kwargs), 2)
    rollout = collect(group, 7, [0, 1], lambda obs: np.zeros((4, 1), np.int32))
    assert group.rebuilds == 0
    played = [not first for first in first_of_b[1:]]
    ends_of_b = [False, True, False, False, False, played[5], False]
    for a, b in ((0, 1), (2, 3)):
        assert rollout.first[:, a].tolist() == [True] + [False] * 6 + [True]
        assert rollout.first[:, b].tolist() == first_of_b
        assert rollout.reward[:, a].tolist() == [1, 2, 3, 4, 5, 6, 0]
        assert rollout.reward[:, b].tolist() == [step * plays for step, plays in enumerate(played, 1)]
        ends = rollout.truncated if truncates else rollout.terminated
        assert ends[:, a].tolist() == [False] * 5 + [True, False]
        assert ends[:, b].tolist() == ends_of_b
        assert (rollout.done == ends).all()
        shown = [0.0, 0.1, 0.2, *[0.1 * t * (not first) for t, first in zip((3, 4, 5), first_of_b[4:], strict=False)]]
        assert rollout.obs["obs"][:6, b, 0] == pytest.approx(shown)
    teams = [one.stats[TEAM_RETURN] for _, one in rollout.episodes]
    assert teams == [21 + sum(step * plays for step, plays in enumerate(played, 1))] * 2
    group.close()


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        (
            {"truncates": True, "shows_end": False},
            "env 0, agent b shows nothing at its truncated end, which is valued by what it shows",
        ),
        ({"stranger": True}, "agent zed is in agents, not in possible_agents"),
    ],
)
def test_agents_that_show_nothing_or_are_unknown_are_named(kwargs: dict[str, Any], text: str) -> None:
    group = make_group(EnvConfig(f"{CROWDS}:Returning", env_kwargs=kwargs), 1)
    with pytest.raises(SpaceMismatch) as raised:
        collect(group, 7, [0], lambda obs: np.zeros((2, 1), np.int32))
    assert str(raised.value) == f"{CROWDS}:Returning: {text}"


def test_agents_that_terminate_need_not_show_anything() -> None:
    group = make_group(EnvConfig(f"{CROWDS}:Returning", env_kwargs={"shows_end": False}), 1)
    assert collect(group, 7, [0], lambda obs: np.zeros((2, 1), np.int32)).terminated[1].tolist() == [False, True]


def test_an_agent_that_plays_and_shows_nothing_is_named() -> None:
    broken = Broken(({}, {"a": 1}, {}, {}, {}))
    broken.left = ["a", "b"]
    group = MultiAgentLoop([lambda: ParallelAgents(broken, "broken")], name="broken")
    with pytest.raises(SpaceMismatch, match=r"^broken: env 0, agent a shows nothing although it plays on$"):
        collect(group, 1, [0], lambda obs: np.zeros((2, 1), np.int32))


@pytest.mark.parametrize("said", [({}, {}, {}, {}), ([], [], [], [], []), None])
def test_steps_that_are_none_of_pettingzoos(said: Any) -> None:
    env = ParallelAgents(Broken(said), "broken")
    env.reset()
    with pytest.raises(SpaceMismatch, match="broken: step must return 5 dicts by agent"):
        env.step([0, 0])


def test_environments_without_agents() -> None:
    with pytest.raises(UsageError, match="broken has no possible_agents"):
        ParallelAgents(Broken(None, []), "broken")
    broken = Broken(None)
    env = ParallelAgents(broken, "broken")
    broken.agents = []
    with pytest.raises(SpaceMismatch, match="broken: reset must begin with at least one agent"):
        env.reset()


# --- agents that differ


def random_choice(masks: bool) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    rng = np.random.default_rng(0)

    def choose(obs: dict[str, np.ndarray]) -> np.ndarray:
        allowed = obs[MASK_KEY] > 0 if masks else np.ones((len(obs["obs"]), 4), bool)
        return np.array([[rng.choice(np.flatnonzero(row))] for row in allowed], np.int32)

    return choose


def test_agents_of_different_sizes_are_padded_and_masked() -> None:
    group = make_group(EnvConfig(SIZES, env_kwargs={"num_steps": 5}), 2, decorrelate_steps=9)
    assert group.spec.action.parts == (ActionPart("categorical", 4),)
    assert (group.spec.action_mask, group.spec.mask_in_info) == (4, True)
    rollout = collect(group, 40, [1, 2], random_choice(masks=True))
    assert group.rebuilds == 0
    acted = ~rollout.first[1:]
    for row in range(6):
        size = 2 + row % 3
        steps = np.flatnonzero(acted[:, row])
        assert (rollout.obs[MASK_KEY][steps, row] == (np.arange(4) < size)).all()
        assert (rollout.obs["obs"][:, row, size:] == 0).all()
        right = rollout.obs["obs"][steps, row].argmax(axis=1)
        assert (rollout.reward[steps, row] == (rollout.action[steps, row, 0] == right)).all()
    with pytest.raises(EnvironmentFailure, match="has no choice"):
        collect(group, 40, [1, 2], random_choice(masks=False))


BOX2, BOX3 = (spaces.Box(-1.0, 1.0, (n,), np.float32) for n in (2, 3))
IMAGE = spaces.Box(0, 255, (4, 4, 3), np.uint8)


@pytest.mark.parametrize(("low", "high", "dtype"), [(-1e9, 0, np.float32), (0, 1, np.int8)])
def test_masks_forbid_the_choices_that_an_agent_lacks(low: float, high: int, dtype: Any) -> None:
    """Masks of 0 and 1, and masks that are added to logits."""
    own = [
        spaces.Dict({"observation": BOX2, MASK_KEY: spaces.Box(dtype(low), dtype(high), (size,), dtype)})
        for size in (3, 2)
    ]
    both = common(own[0], own[1], (spaces.Discrete(3), spaces.Discrete(2)))
    shown = both.observation(1, {"observation": np.zeros(2, np.float32), MASK_KEY: np.full(2, high, dtype)})
    assert shown[MASK_KEY].tolist() == [high, high, dtype(low)]
    assert both.observation_space[MASK_KEY].contains(shown[MASK_KEY].astype(dtype))


def common(
    first: Any, second: Any, actions: tuple[Any, Any] = (spaces.Discrete(2), spaces.Discrete(2))
) -> CommonSpaces:
    return CommonSpaces("duo", ["a", "b"], [first, second], actions)


@pytest.mark.parametrize(
    ("first", "second", "shown", "padded"),
    [
        (BOX2, BOX3, np.array([0.5, 0.25], np.float32), [0.5, 0.25, 0.0]),
        (spaces.MultiBinary(1), spaces.MultiBinary(2), np.ones(1, np.int8), [1, 0]),
        (spaces.Discrete(2, start=3), spaces.Discrete(4, start=3), np.int64(4), 4),
        (BOX2, spaces.Box(0.0, 9.0, (2,), np.float32), np.array([0.5, 0.25], np.float32), [0.5, 0.25]),
    ],
)
def test_what_has_room_for_both(first: Any, second: Any, shown: Any, padded: Any) -> None:
    joined = common(first, second)
    observation = joined.observation(0, shown)
    assert np.asarray(observation).tolist() == padded
    assert joined.observation_space.contains(observation)
    assert joined.observation_space.contains(second.sample())
    inside = common(spaces.Dict({"x": first, "y": IMAGE}), spaces.Dict({"x": second, "y": IMAGE}))
    both = inside.observation(0, {"x": shown, "y": np.zeros((4, 4, 3), np.uint8)})
    assert inside.observation_space.contains(both)
    assert np.asarray(both["x"]).tolist() == padded


def test_what_is_of_another_shape_is_left_to_be_refused() -> None:
    wrong = np.zeros(1, np.float32)
    assert common(BOX2, BOX3).observation(0, wrong) is wrong
    assert common(spaces.Dict({"x": BOX2}), spaces.Dict({"x": BOX3})).observation(0, wrong) is wrong


def test_actions_of_the_common_space_are_those_of_each_agent() -> None:
    choices = common(BOX2, BOX2, (spaces.Discrete(2, start=5), spaces.Discrete(3)))
    assert [choices.action(0, 1), choices.action(1, 2)] == [6, 2]
    assert [choices.mask(0, None).tolist(), choices.mask(1, None).tolist()] == [[1, 1, 0], [1, 1, 1]]
    assert choices.mask(0, np.array([0, 1], np.int8)).tolist() == [0, 1, 0]
    assert choices.mask(0, np.ones(3)).tolist() == [1, 1, 1]  # of another size: refused where it is written
    moves = common(BOX2, BOX2, (BOX2, spaces.Box(0.0, 9.0, (2,), np.float32)))
    assert moves.action(1, np.array([-1.0, 5.0], np.float32)).tolist() == [0.0, 5.0]
    assert moves.masks is None


def test_numbers_of_agents_with_other_bounds_are_mapped_to_each_ones() -> None:
    unbounded = [
        spaces.Box(np.array([low, -np.inf], "f"), np.array([high, 9], "f")) for low, high in ((10, 30), (0, 1))
    ]
    joined = CommonSpaces("duo", ["a", "b"], [BOX2, BOX2], unbounded, scaled=True)
    assert (joined.action_space.low.tolist(), joined.action_space.high.tolist()) == ([-1, -np.inf], [1, 9])
    taken = [joined.action(agent, np.array([0.5, -7.0], np.float32)) for agent in range(2)]
    assert [one.tolist() for one in taken] == [[25, -7], [0.75, -7]]
    assert all(one in space for one, space in zip(taken, unbounded, strict=True))
    assert CommonSpaces("duo", ["a", "b"], [BOX2, BOX2], [unbounded[0]] * 2, scaled=True).action_space == unbounded[0]


@pytest.mark.parametrize(("scaling", "stored"), [("auto", [0.5, 0.0]), ("off", [25.0, 0.5])])
def test_bounds_of_their_own_reach_the_environment(scaling: str, stored: list[float]) -> None:
    group = make_group(EnvConfig(f"{CROWDS}:Bounds", action_scaling=scaling), 1)
    rollout = collect(group, 4, [0], lambda obs: np.array(stored, np.float32)[:, None])
    assert rollout.reward.tolist() == [[1.0, 1.0]] * 4


# --- who is who


DO = (spaces.Discrete(2), spaces.Discrete(2))
THREE = "3 agents of each environment are rows in this order"
DIFFER = "their spaces differ, shorter observations end in zeros"


def with_ids(first: Any, second: Any, actions: tuple[Any, Any] = DO) -> CommonSpaces:
    return CommonSpaces("duo", ["a", "b"], [first, second], actions, ids=True)


def test_agents_of_unlike_kinds_see_who_they_are() -> None:
    joined = with_ids(BOX2, BOX3)
    assert joined.observation_space == spaces.Dict({"obs": BOX3, AGENT_ID: spaces.Discrete(2)})
    for agent, space in enumerate((BOX2, BOX3)):
        shown = joined.observation(agent, space.sample())
        assert shown in joined.observation_space
        assert shown[AGENT_ID] == agent
    nested = with_ids(spaces.Dict({"x": BOX2}), spaces.Dict({"x": BOX3}))
    seen = nested.observation(1, {"x": np.ones(3, np.float32)})
    assert seen in nested.observation_space
    assert (seen[AGENT_ID], seen["x"].tolist()) == (1, [1.0] * 3)
    wrong = np.zeros(1, np.float32)
    assert nested.observation(1, wrong) is wrong
    assert with_ids(BOX2, BOX2, (spaces.Discrete(2), spaces.Discrete(3))).has_ids  # what they may do differs


@pytest.mark.parametrize(
    "joined",
    [
        with_ids(BOX2, BOX2),
        common(BOX2, BOX3),
        with_ids(*(spaces.Dict({"x": box, AGENT_ID: spaces.Discrete(9)}) for box in (BOX2, BOX3))),
    ],
    ids=["alike", "off", "have one"],
)
def test_nobody_else_does(joined: CommonSpaces) -> None:
    assert not joined.has_ids
    shown = {"x": np.ones(3, np.float32), AGENT_ID: 7}
    assert joined.observation(1, shown) == shown


@pytest.mark.parametrize(
    ("env", "agent_id", "said"),
    [
        (SIZES, "auto", f"{THREE}: small, middle, large; {DIFFER}, agent_id says which one (--agent_id=off: not)"),
        (SIZES, "off", f"{THREE}: small, middle, large; {DIFFER}, no agent_id is added"),
        (f"{CROWDS}:ParallelShifts", "auto", f"{THREE}: a, b, c"),
        ("toy/Shifts-v0", "auto", "3 agents of each environment are rows, as in its lists"),
        ("toy/Counter-v0", "auto", ""),
    ],
)  # fmt: skip
def test_who_is_which_row(env: str, agent_id: str, said: str) -> None:
    group = make_group(EnvConfig(env, agent_id=agent_id), 2)
    assert group.spec.agents == said
    assert (AGENT_ID in group.spec.observations) == (env == SIZES and agent_id == "auto")


def test_ids_reach_the_rows() -> None:
    group = make_group(EnvConfig(SIZES), 2)
    rollout = collect(group, 12, [1, 2], random_choice(masks=True))
    acted = ~rollout.first[1:]
    for row in range(6):
        assert (rollout.obs[AGENT_ID][:-1][acted[:, row], row] == np.eye(3)[row % 3]).all()


def test_many_agents_are_named_in_part() -> None:
    many = ParallelAgents(Broken(None, [f"a{i}" for i in range(20)]), "broken")
    assert many.rows_said.endswith("order: a0, a1, a2, a3, a4, a5, a6, ..., a19")


@pytest.mark.parametrize(
    ("first", "second", "actions", "text"),
    [
        (BOX2, spaces.Discrete(2), None, "observation space .* a .* and b .*: their kinds or types differ"),
        (BOX2, spaces.Box(-1.0, 1.0, (2,), np.float64), None, "their kinds or types differ"),
        (IMAGE, spaces.Box(0, 255, (8, 8, 3), np.uint8), None, "only vectors can be filled up with zeros, an image"),
        (spaces.Dict({"x": BOX2}), spaces.Dict({"y": BOX2}), None, "their keys differ"),
        (spaces.Discrete(2), spaces.Discrete(3, start=1), None, "their first choices differ"),
        (spaces.MultiDiscrete([2]), spaces.MultiDiscrete([3]), None, "spaces of kind MultiDiscrete must be equal"),
        (BOX2, BOX2, (BOX2, BOX3), "action space .*: only vectors|action space .* nothing else can"),
        (BOX2, BOX2, (BOX2, spaces.Discrete(2)), "action space .*: choices .* that an agent lacks can be masked"),
    ],
)
def test_what_has_no_room_is_refused_with_the_reason(first: Any, second: Any, actions: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text) as raised:
        common(first, second, actions or (spaces.Discrete(2), spaces.Discrete(2)))
    assert "\n" not in str(raised.value)


def test_random_numbers_are_those_of_the_environment() -> None:
    env = make_single(EnvConfig(SIZES))
    assert isinstance(env, gymnasium.Env)
    env.reset(seed=3)
    state = env.unwrapped.np_random.bit_generator.state
    first = env.step([0, 0, 0])[0]
    env.reset(seed=4)
    env.unwrapped.np_random.bit_generator.state = state
    assert [o["obs"].tolist() for o in env.step([0, 0, 0])[0]] == [o["obs"].tolist() for o in first]
