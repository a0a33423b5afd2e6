"""What environments say in infos: every number that our books trust is checked, with its key in the message."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from appo.envs.agents.multi_agent import loop_over
from appo.envs.infos import InfoReader
from appo.envs.spec import EpisodeStats, GroupEnv
from appo.envs.vectors.gym_vector import GymVector
from appo.envs.wrappers.making import RepeatAction
from appo.utils.errors import EnvironmentFailure, NotFinite, SpaceMismatch
from tests.unit.envs.rollouts import collect

FRAMES = "expected the whole number of frames behind a step, from 1 to 2147483647"
NUMBERS = "statistics in info must be numbers"

REFUSED = [
    ("num_frames", -5, f"{FRAMES}, got -5"),
    ("num_frames", 0, f"{FRAMES}, got 0"),
    ("num_frames", 10**12, f"{FRAMES}, got 1000000000000"),
    ("num_frames", 2**31, f"{FRAMES}, got 2147483648"),
    ("num_frames", 1.5, f"{FRAMES}, got 1.5"),
    ("num_frames", float("nan"), f"{FRAMES}, got nan"),
    ("num_frames", float("inf"), f"{FRAMES}, got inf"),
    ("num_frames", None, f"{FRAMES}, got None"),
    ("num_frames", [3], f"{FRAMES}, got [3]"),
    ("num_frames", np.array([3]), f"{FRAMES}, got array([3])"),
    ("num_frames", "3", f"{FRAMES}, got '3'"),
    ("num_frames", True, f"{FRAMES}, got True"),
    ("num_frames", {}, f"{FRAMES}, got {{}}"),
    ("true_reward", None, f"{NUMBERS}, got None"),
    ("true_reward", [1.0], f"{NUMBERS}, got [1.0]"),
    ("true_reward", "high", f"{NUMBERS}, got 'high'"),
    ("true_objective", "high", f"{NUMBERS}, got 'high'"),
    ("true_objective", 1j, f"{NUMBERS}, got 1j"),
    ("episode_extra_stats", None, "expected a dict of numbers, got None"),
    ("episode_extra_stats", [1], "expected a dict of numbers, got [1]"),
    ("episode_extra_stats", {1: 2}, "expected names as its keys, got 1"),
    ("episode_extra_stats", {"kills": None}, f"{NUMBERS}, got None for kills"),
    ("episode_extra_stats", {"kills": [1, 2]}, f"{NUMBERS}, got [1, 2] for kills"),
    ("episode_extra_stats", {"kills": {"a": 1}}, f"{NUMBERS}, got {{'a': 1}} for kills"),
    ("is_active", None, "expected True or False, got None"),
    ("is_active", "False", "expected True or False, got 'False'"),
    ("is_active", [False], "expected True or False, got [False]"),
    ("is_active", 2, "expected True or False, got 2"),
]
TAKEN = [
    ("num_frames", 4, 4),
    ("num_frames", np.int64(4), 4),
    ("num_frames", 4.0, 4),
    ("num_frames", np.array(4), 4),
    ("num_frames", 2**31 - 1, 2**31 - 1),
    ("true_reward", np.float32(0.5), 0.5),
    ("true_reward", False, 0.0),
    ("true_objective", -3, -3.0),
    ("episode_extra_stats", {"a": np.int64(3), "b": True, "c": np.array(2.0)}, {"a": 3.0, "b": 1.0, "c": 2.0}),
    ("episode_extra_stats", {}, {}),
    ("is_active", np.bool_(False), False),
    ("is_active", 1, True),
]


@pytest.mark.parametrize(("key", "value", "words"), REFUSED)
def test_what_a_key_cannot_mean_is_refused_with_its_name(key: str, value: object, words: str) -> None:
    with pytest.raises(SpaceMismatch) as caught:
        InfoReader("Env")({key: value}, key)
    assert str(caught.value) == f"Env: info key {key}: {words}"


@pytest.mark.parametrize(("key", "value", "expected"), TAKEN)
def test_what_a_key_can_mean_is_taken(key: str, value: object, expected: object) -> None:
    read = InfoReader("Env")
    found = read({key: value}, key)
    assert (found, type(found)) == (expected, type(expected))
    assert read.found == {key}
    assert read({}, key) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -np.inf])
def test_statistics_that_are_not_finite_are_passing_failures(number: float) -> None:
    read = InfoReader("Env")
    for info, words in (
        ({"true_reward": number}, "true_reward"),
        ({"episode_extra_stats": {"a": 1, "b": number}}, "episode_extra_stats: b"),
    ):
        with pytest.raises(NotFinite) as caught:
            read.stats(0, info)
        assert str(caught.value) == f"Env: info key {words} is not finite: {float(number)}"


@pytest.mark.parametrize("word", ["true_reward", "true_objective"])
def test_both_words_for_the_objective_mean_the_same(word: str) -> None:
    assert InfoReader("Env").stats(1, {word: 2}) == EpisodeStats(1, {"true_reward": 2.0})
    both = {"true_reward": 2, "true_objective": 2.0, "episode_extra_stats": {"a": 1}}
    assert InfoReader("Env").stats(1, both) == EpisodeStats(1, {"a": 1.0, "true_reward": 2.0})
    with pytest.raises(SpaceMismatch) as caught:
        InfoReader("Env").stats(1, {**both, word: 3})
    said = " and ".join(f"{name} {3 if name == word else 2}" for name in ("true_reward", "true_objective"))
    assert str(caught.value) == f"Env: info keys {said} mean the same and differ: leave one of them out"


class Says(gymnasium.Env[Any, Any]):
    """Says something in its second step, which is the last one of an episode."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        over = self.count == 2
        return np.zeros(1, np.float32), 1.0, over, False, self.info if over else {}


class Both(Says):
    """Two agents, of whom the second says it."""

    num_agents = 2

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset()
        return [observation] * 2, [info] * 2

    def step(self, action: Any) -> Any:
        observation, reward, over, cut, info = super().step(action)
        return [observation] * 2, [reward] * 2, [over] * 2, [cut] * 2, [{}, info]


def group_of(kind: str, info: dict[str, Any]) -> GroupEnv:
    if kind in ("python", "agents"):
        return loop_over([partial(Says if kind == "python" else Both, info)], name="Says")
    return GymVector(lambda: SyncVectorEnv([partial(Says, info)], autoreset_mode=AutoresetMode(kind)), name="Says")


def played(group: GroupEnv) -> Any:
    return collect(group, 5, [0], lambda obs: np.zeros((group.num_rows, 1), np.int32))


@pytest.mark.parametrize("kind", ["python", "agents", *(mode.value for mode in AutoresetMode)])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, value, _ in REFUSED if key != "is_active"])
def test_all_that_step_environments_go_through_the_door(key: str, value: object, kind: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"^Says: info key {key}") as caught:
        played(group_of(kind, {key: value}))
    assert caught.value.lasting


@pytest.mark.parametrize("kind", ["python", "agents", *(mode.value for mode in AutoresetMode)])
def test_all_that_step_environments_know_what_was_said(kind: str) -> None:
    group = group_of(kind, {"num_frames": 3, "true_objective": 7.0, "episode_extra_stats": {"kills": 2}})
    rollout = played(group)
    stats = {"kills": 2.0, "true_reward": 7.0, **({"team_return": 4.0} if kind == "agents" else {})}
    assert rollout.episodes[0][1].stats == stats
    assert rollout.num_frames[:2, -1].tolist() == [1, 3]
    assert group.said - {"is_active"} == {"num_frames", "true_objective", "episode_extra_stats"}


class Dense(VectorEnv):
    """A vector of three rows that all end in every step, with infos of its own making."""

    def __init__(self, infos: dict[str, Any]) -> None:
        self.num_envs, self.metadata, self.infos = 3, {"autoreset_mode": AutoresetMode.SAME_STEP}, infos
        self.single_observation_space, self.single_action_space = Says.observation_space, Says.action_space
        self.observation_space = batch_space(self.single_observation_space, 3)
        self.action_space = batch_space(self.single_action_space, 3)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((3, 1), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return np.zeros((3, 1), np.float32), np.zeros(3), np.ones(3, bool), np.zeros(3, bool), self.infos


@pytest.mark.parametrize(
    ("infos", "words"),
    [
        ({"num_frames": np.array([1, -5, 1])}, f"num_frames: {FRAMES}, got -5"),
        ({"num_frames": np.array([1, 10**12, 1])}, f"num_frames: {FRAMES}, got 1000000000000"),
        ({"num_frames": np.array([1, 2])}, "num_frames: expected 3 entries, one per row, got array([1, 2])"),
        ({"num_frames": torch.tensor(4)}, "num_frames: expected 3 entries, one per row, got array(4)"),
        ({"num_frames": 4}, "num_frames: expected 3 entries, one per row, got 4"),
        ({"num_frames": np.ones((3, 1), int)}, f"num_frames: {FRAMES}, got array([1])"),
        ({"true_reward": [1.0, 2.0]}, "true_reward: expected 3 entries, one per row, got 2"),
        ({"true_objective": np.array([1.0, None, 2.0], object)}, f"true_objective: {NUMBERS}, got None"),
        ({"episode_extra_stats": {"kills": np.zeros(2)}},
         "episode_extra_stats: kills: expected 3 entries, one per row, got array([0., 0.])"),
    ],
)  # fmt: skip
def test_arrays_of_a_vector_are_checked_entry_by_entry(infos: dict[str, Any], words: str) -> None:
    with pytest.raises(SpaceMismatch) as caught:
        collect(GymVector(lambda: Dense(infos), name="Dense"), 2, [0, 1, 2], lambda obs: np.zeros((3, 1), np.int32))
    assert str(caught.value) == f"Dense: info key {words}"


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_of_any_package_are_read(array: Any) -> None:
    infos = {
        "num_frames": array([1, 2, 3]),
        "true_reward": array([1.0, 2.0, 4.0]),
        "episode_extra_stats": {"kills": array([5, 6, 7])},
        "final_obs": array([[0.0]] * 3),
    }
    group = GymVector(lambda: Dense(infos), name="Dense")
    rollout = collect(group, 2, [0, 1, 2], lambda obs: np.zeros((3, 1), np.int32))
    assert rollout.num_frames.tolist() == [[1, 2, 3]] * 2
    expected = [{"kills": 5, "true_reward": 1}, {"kills": 6, "true_reward": 2}, {"kills": 7, "true_reward": 4}]
    assert [stats.stats for _, stats in rollout.episodes] == expected * 2


def test_frames_that_are_repeated_are_checked_before_they_are_added() -> None:
    env = RepeatAction(Says({"num_frames": -5}), 2)
    env.reset()
    with pytest.raises(SpaceMismatch, match=r"^Says: info key num_frames: expected"):
        env.step(0)


class Ending(VectorEnv):
    """Ends in every step and says so as gymnasium did before 1.0: infos of last steps are a list of dicts."""

    def __init__(self, mode: AutoresetMode, info: dict[str, Any], begun: dict[str, Any]) -> None:
        self.num_envs, self.metadata = 2, {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.action_space = batch_space(self.single_action_space, 2)
        self.info, self.begun, self.is_played = info, begun, False

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((2, 1), np.float32), self.begun if self.is_played else {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        infos = {"final_info": [self.info] * 2, "final_observation": [np.ones(1, np.float32)] * 2}
        shown = np.zeros if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP else np.ones
        return shown((2, 1), np.float32), np.ones(2), np.zeros(2, bool), np.ones(2, bool), infos


@pytest.mark.parametrize("key", ["true_reward", "true_objective"])
def test_infos_of_last_steps_in_a_list_are_read(key: str) -> None:
    env = Ending(AutoresetMode.SAME_STEP, {key: 4.0, "num_frames": 3}, {})
    rollout = collect(GymVector(lambda: env, name="Ending"), 1, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
    assert [stats for _, stats in rollout.episodes] == [
        EpisodeStats(0, {"true_reward": 4.0}),
        EpisodeStats(1, {"true_reward": 4.0}),
    ]
    assert rollout.num_frames.tolist() == [[3, 3]]


@pytest.mark.parametrize(
    ("info", "words"),
    [({"num_frames": -5}, f"{FRAMES}, got -5"), ({"true_reward": "high"}, f"{NUMBERS}, got 'high'")],
)
def test_infos_of_last_steps_in_a_list_are_checked(info: dict[str, Any], words: str) -> None:
    group = GymVector(lambda: Ending(AutoresetMode.SAME_STEP, info, {}), name="Ending")
    with pytest.raises(SpaceMismatch, match=f"^Ending: info key .*{words}"):
        collect(group, 1, [0, 1], lambda obs: np.zeros((2, 1), np.int32))


def test_a_mask_that_only_a_reset_of_ours_brings_is_refused() -> None:
    env = Ending(AutoresetMode.DISABLED, {}, {"action_mask": np.ones((2, 2))})
    group = GymVector(lambda: env, name="Ending")
    env.is_played = True
    with pytest.raises(SpaceMismatch, match=r"^Ending: info key action_mask: "):
        collect(group, 1, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
