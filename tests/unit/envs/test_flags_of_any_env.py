"""Flags for every environment: ends that are none, actions that nobody clips, the last step as observation."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from appo.envs.config import EnvConfig
from appo.envs.loop.python_loop import PythonLoop
from appo.envs.make import make_group, make_single
from appo.envs.precision import watched
from appo.envs.spec import SINGLE_KEY
from appo.envs.wrappers.flags import NeverTerminates, unbounded
from appo.utils.errors import UsageError
from tests.unit.envs.rollouts import Rollout, collect

HERE = __name__
COUNTERS = {
    "python": {"env_vectorization": "python"},
    **{mode: {"env_kwargs": {"autoreset_mode": mode}} for mode in ("NextStep", "SameStep", "Disabled")},
}


def counted(kind: str, **flags: Any) -> Rollout:
    group = make_group(EnvConfig(env="toy/Counter-v0", **COUNTERS[kind], **flags), 3)

    def act(obs: dict[str, np.ndarray]) -> np.ndarray:
        return np.ones((3, 1), np.int32)

    return collect(group, 60, [4, 5, 6], act)


@pytest.mark.parametrize("kind", COUNTERS)
def test_what_terminates_is_truncated_and_nothing_else_differs(kind: str) -> None:
    plain, patient = counted(kind), counted(kind, no_done_at_end=True)
    assert plain.terminated.any()
    assert plain.truncated.any()
    assert not patient.terminated.any()
    assert (patient.truncated == plain.done).all()
    for name in ("first", "reward", "num_frames"):
        assert (getattr(patient, name) == getattr(plain, name)).all(), name
    assert (patient.obs["obs"] == plain.obs["obs"]).all()
    assert [stats for _, stats in patient.episodes] == [stats for _, stats in plain.episodes]
    if kind in ("SameStep", "Disabled"):
        assert (patient.has_final == plain.done).all()
        assert (patient.final_obs["obs"][plain.done][:, :2] == plain.obs["obs"][:-1][plain.done][:, :2]).all()


class Duo(gymnasium.Env[Any, Any]):
    """Two agents; the first terminates in the second step and shows nothing more, the second one shows itself."""

    is_multiagent, num_agents = True, 2
    observation_space = spaces.Box(0.0, 9.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.steps = 0
        return [np.zeros(1, np.float32)] * 2, [{}, {}]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.steps += 1
        ends = self.steps == 2
        shown = [None if ends else np.ones(1, np.float32), np.ones(1, np.float32)]
        return shown, [1.0, 1.0], [ends, ends], ends and self.steps > 9, {}


def test_an_agent_that_shows_nothing_at_its_end_has_terminated() -> None:
    env = NeverTerminates(Duo())
    env.reset()
    assert env.step([0, 0])[2:4] == ([False, False], [False, False])
    assert env.step([0, 0])[2:4] == ([True, False], [False, True])
    group = make_group(EnvConfig(env=f"{HERE}:Duo", no_done_at_end=True), 1)
    rollout = collect(group, 2, [1], lambda obs: np.zeros((2, 1), np.int32))
    assert rollout.terminated.tolist() == [[False, False], [True, False]]
    assert rollout.truncated.tolist() == [[False, False], [False, True]]


class Taking(gymnasium.Env[Any, Any]):
    """Keeps the actions that it is given; ends after three steps and pays 1, 2 and 3."""

    observation_space: Any = spaces.Box(0.0, 9.0, (2,), np.float32)
    action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32)
    taken: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        self.steps += 1
        return self._shown(), float(self.steps), self.steps == 3, False, {}

    def _shown(self) -> Any:
        return np.full(2, self.steps, np.float32)


class TakingVector(SyncVectorEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__([Taking] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("env", ["Taking", "TakingVector"])
@pytest.mark.parametrize("clips", [True, False])
def test_actions_reach_the_environment_as_they_were_sampled_unless_they_are_clipped(env: str, clips: bool) -> None:
    Taking.taken.clear()
    group = make_group(EnvConfig(env=f"{HERE}:{env}", clip_actions=clips), 2)
    sampled = np.array([[5.0, -0.25], [-3.0, 0.5]], np.float32)
    collect(group, 1, [1, 2], lambda obs: sampled)
    expected = sampled.clip(-1, 1) if clips else sampled
    assert np.array_equal(np.stack(Taking.taken), expected)
    assert (group.spec.action.low, group.spec.action.high) == (
        ((-1.0, -1.0), (1.0, 1.0)) if clips else ((-np.inf, -np.inf), (np.inf, np.inf))
    )


def test_choices_and_bits_inside_of_other_spaces_keep_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = spaces.Dict({"move": spaces.Box(0.0, 1.0, (1,), np.float32), "jump": spaces.Discrete(3)})
    monkeypatch.setattr(Taking, "action_space", spaces.Tuple([inner, spaces.MultiBinary(2)]))
    space: Any = make_single(EnvConfig(env=f"{HERE}:Taking", clip_actions=False)).action_space
    assert (space[0]["move"].low, space[0]["move"].high) == (-np.inf, np.inf)
    assert (space[0]["jump"], space[1]) == (spaces.Discrete(3), spaces.MultiBinary(2))


class Scaling(Taking):
    """Scales its action in place, as if nobody else held the array; counts frames by itself; shows float64."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    frames_per_step = 5

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        action *= 2.0
        return super().step(action)

    def _shown(self) -> Any:
        return np.full(2, 1e9 + self.steps % 3, np.float64)


@pytest.mark.parametrize("frames", [None, 3])
def test_an_environment_may_scale_its_action_in_place(frames: int | None) -> None:
    Scaling.taken.clear()
    group = make_group(EnvConfig(env=f"{HERE}:Scaling", env_frameskip=frames, observe_previous="action"), 1)
    rollout = collect(group, 1, [1], lambda obs: np.full((1, 2), 0.25, np.float32))
    assert np.array_equal(np.stack(Scaling.taken), np.full((frames or 1, 2), 0.5))
    assert rollout.obs["obs"][1, 0, -2:].tolist() == [0.25, 0.25]
    assert rollout.num_frames.tolist() == [[frames or 1]]


def test_an_attribute_of_an_environment_does_not_multiply_its_steps() -> None:
    group = make_group(EnvConfig(env=f"{HERE}:Scaling"), 1)
    assert collect(group, 2, [1], lambda obs: np.zeros((1, 2), np.float32)).num_frames.tolist() == [[1], [1]]


def test_numbers_that_float32_cannot_hold_are_found_beside_previous_steps() -> None:
    group = make_group(EnvConfig(env=f"{HERE}:Scaling", observe_previous="both"), 1)
    with watched(group) as precision:
        collect(group, 2, [1], lambda obs: np.zeros((1, 2), np.float32))
    assert any("as float32 cannot hold it" in line for line in precision.lines())


class Choosing(Taking):
    """The same, of four choices, the first of which is called 2; shows a Dict if it is asked to."""

    action_space = spaces.Discrete(4, start=2)


class Telling(Choosing):
    observation_space = spaces.Dict({"seen": Taking.observation_space})

    def _shown(self) -> Any:
        return {"seen": super()._shown()}


class Clashing(Telling):
    observation_space = spaces.Dict({"previous_step": Taking.observation_space})


FIRST, LAST = [1, 0, 0, 0], [0, 0, 0, 1]


@pytest.mark.parametrize("shown", ["action", "reward", "both"])
def test_the_last_step_is_shown_beside_the_observation(shown: str) -> None:
    group = make_group(EnvConfig(env=f"{HERE}:Telling", observe_previous=shown), 2)
    assert group.spec.observations.keys() == {"seen", "previous_step"}
    rollout = collect(group, 5, [1, 2], lambda obs: np.array([[0], [3]], np.int32))
    assert rollout.obs["seen"][:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1]
    for row, action in enumerate((FIRST, LAST)):
        steps = [([0] * 4, 0), (action, 1), (action, 2), (action, 3), ([0] * 4, 0), (action, 1)]
        expected = {
            "action": [taken for taken, _ in steps],
            "reward": [[reward] for _, reward in steps],
            "both": [[*taken, reward] for taken, reward in steps],
        }
        assert rollout.obs["previous_step"][:, row].tolist() == expected[shown]


def test_numbers_are_shown_as_the_environment_got_them_in_one_vector_with_what_it_shows() -> None:
    group = make_group(EnvConfig(env=f"{HERE}:Taking", observe_previous="both"), 1)
    assert {key: one.shape for key, one in group.spec.observations.items()} == {SINGLE_KEY: (5,)}
    rollout = collect(group, 1, [1], lambda obs: np.array([[0.25, 7.0]], np.float32))
    assert rollout.obs[SINGLE_KEY].tolist() == [[[0, 0, 0, 0, 0]], [[1, 1, 0.25, 1.0, 1.0]]]


def test_where_the_last_step_cannot_be_shown() -> None:
    with pytest.raises(UsageError, match=r"shows previous_step itself$"):
        make_single(EnvConfig(env=f"{HERE}:Clashing", observe_previous="reward"))
    with pytest.raises(UsageError, match=r"^--observe_previous=both: .*:Duo has several agents$"):
        make_group(EnvConfig(env=f"{HERE}:Duo", observe_previous="both"), 1)
    flags: dict[str, Any] = {"env": "toy/Counter-v0", "observe_previous": "both"}
    assert isinstance(make_group(EnvConfig(**flags), 1), PythonLoop)
    for env in ({**flags, "env_vectorization": "native"}, {**flags, "env": f"{HERE}:TakingVector"}):
        with pytest.raises(UsageError, match=r"takes no argument for --observe_previous=both$"):
            make_group(EnvConfig(**env), 1)


def test_keys_of_actions_without_bounds_keep_the_order_of_flat_masks() -> None:
    space = spaces.Dict([("move", spaces.Discrete(4)), ("build", spaces.Discrete(3)), ("aim", spaces.Box(-1, 1, (2,)))])
    free = unbounded(space)
    assert list(free) == list(space) == ["move", "build", "aim"]
    assert free["move"] == space["move"]
    assert np.isinf(free["aim"].high).all()
