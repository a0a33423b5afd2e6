from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from appo.algorithms.models.actor_critic import model_inputs
from appo.envs.agents.multi_agent import loop_over
from appo.envs.config import EnvConfig
from appo.envs.loop.env_set import OnFailure
from appo.envs.make import make_group
from appo.envs.masks import masks_said, random_action
from appo.envs.spaces import spec_of
from appo.envs.spec import GroupEnv, step_row
from appo.envs.vectors.gym_vector import GymVector
from appo.envs.wrappers.making import RepeatAction
from appo.envs.wrappers.masks_of_method import with_masks_of_method, with_masks_of_methods
from appo.utils.errors import EnvironmentFailure, NothingAllowed, SpaceMismatch, UsageError
from tests.unit.envs.mask_game import FORMS, SHOWN, STEPS, Game, Games
from tests.unit.envs.rollouts import collect

CASES = [
    *(("observation", form, "dict" if form in ("dict", "backwards") else "multi") for form in SHOWN),
    ("observation", "tuple", "tuple"),
    ("nested", "flat", "tuple"),
    ("nested", "backwards", "dict"),
    ("deep", "tuple", "multi"),
    *(("info", form, "multi") for form in ("flat", "bool", "list", "float", "tuple")),
    ("info", "tuple", "tuple"),
    ("info", "backwards", "dict"),
    ("info", "flat", "dict"),
    *(("method", form, "multi") for form in ("flat", "bool", "tuple")),
    ("method", "dict", "dict"),
]
SOURCES = {
    "observation": "observation key action_mask",
    "nested": "observation key observation.action_mask",
    "deep": "observation key 0.observation.action_mask",
    "info": "info key action_mask",
    "method": "the method action_masks() of the environment",
}
ENVS = 2


def group_of(kind: str, **arguments: str) -> GroupEnv:
    if kind in ("python", "agents"):
        make: Callable[[], Any] = partial(Game if kind == "python" else Games, **arguments)
        return loop_over([lambda: with_masks_of_method(make())] * ENVS, name="Game", decorrelate_steps=20)
    game: Any = partial(Game, **arguments)
    mode = AutoresetMode(kind)
    return GymVector(lambda: with_masks_of_methods(SyncVectorEnv([game] * ENVS, autoreset_mode=mode)), name="Game")


@pytest.mark.parametrize("kind", ["python", "agents", *(mode.value for mode in AutoresetMode)])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_form_is_stored_as_exactly_what_is_legal(case: tuple[str, str, str], kind: str) -> None:
    """Acting at random within the stored masks, which is what acting and learning read, earns all that there is."""
    where, form, action = case
    group = group_of(kind, where=where, form=form, action=action)
    random = np.random.default_rng(0)

    def legal(obs: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([random_action(group.spec.action, mask > 0, random) for mask in obs["action_mask"]])

    rollout = collect(group, 3 * STEPS + 2, list(range(ENVS)), legal)
    valid = np.ones_like(rollout.reward, bool) if group.spec.same_step else ~rollout.first[1:]
    assert (rollout.reward[valid] == 1.0).all()
    masks = rollout.obs["action_mask"][:-1][valid]
    assert (masks.sum(-1) == 2).all()
    assert group.spec.action_mask == 9
    assert masks_said(group.spec) == f"actions are masked by {SOURCES[where]}"
    assert not [key for key in model_inputs(group.spec) if "action_mask" in key]
    group.close()


class Falling(gymnasium.Env[Any, Any]):
    """Is truncated after three steps; a step allows the choice with the number of the step, the last step too."""

    observation_space, action_space = spaces.Box(0.0, 9.0, (1,), np.float32), spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._show()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        observation, info = self._show()
        return observation, 0.0, False, self.count == 3, info

    def _show(self) -> tuple[Any, dict[str, Any]]:
        return np.full(1, self.count, np.float32), {"action_mask": np.eye(4, dtype=np.int8)[self.count]}


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_final_observation_has_the_mask_of_the_last_step(mode: AutoresetMode) -> None:
    group = GymVector(lambda: SyncVectorEnv([Falling] * ENVS, autoreset_mode=mode), name="Falling")
    rollout = collect(group, 4, list(range(ENVS)), lambda obs: obs["action_mask"].argmax(-1)[:, None])
    assert rollout.obs["action_mask"].argmax(-1)[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert rollout.final_obs["action_mask"][2].tolist() == [[0, 0, 0, 1]] * ENVS
    group.close()


MULTI = spaces.MultiDiscrete([5, 4])
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
DOES_NOT_FIT = "observation key action_mask does not fit the action space MultiDiscrete([5 4])"


@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        ({"x": BOX, "action_mask": spaces.MultiBinary(8)}, MULTI,
         "observation key action_mask has 8 entries for 9 action choices"),
        ({"o": spaces.Dict({"x": BOX, "action_mask": spaces.MultiBinary(8)})}, MULTI,
         "observation key o.action_mask has 8 entries for 9 action choices"),
        ({"x": BOX, "action_mask": spaces.MultiBinary(3)}, BOX,
         "observation key action_mask has 3 entries for 0 action choices"),
        ({"x": BOX, "action_mask": spaces.Tuple((spaces.MultiBinary(4), spaces.MultiBinary(5)))}, MULTI,
         f"{DOES_NOT_FIT}: expected 5 + 4 entries, got 4 + 5"),
        ({"x": BOX, "action_mask": spaces.Dict({"a": spaces.MultiBinary(5), "b": spaces.MultiBinary(4)})}, MULTI,
         f"{DOES_NOT_FIT}: expected the keys of no dict, got a"),
        ({"x": BOX, "action_mask": spaces.Text(9)}, MULTI,
         "observation key action_mask must be an array of 0 and 1, or a Tuple or Dict of them like the action space"),
        ({"action_mask": spaces.MultiBinary(9), "o": spaces.Dict({"action_mask": spaces.MultiBinary(9)})}, MULTI,
         "unsupported observation space: two entries are both called action_mask"),
    ],
)  # fmt: skip
def test_a_mask_that_fits_no_choices_is_refused(observation: Any, action: spaces.Space, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_of(spaces.Dict(observation), action)
    assert str(caught.value) == words


class Says(gymnasium.Env[Any, Any]):
    """Shows, or puts into info, the masks that it is told, one after the other."""

    action_space = spaces.Discrete(3)

    def __init__(self, where: str, masks: list[Any]) -> None:
        self.where, self.masks = where, masks
        mask = {"action_mask": spaces.Box(-np.inf, np.inf, (3,))} if where == "observation" else {}
        self.observation_space = spaces.Dict({"x": BOX, **mask})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._show()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count = min(self.count + 1, len(self.masks) - 1)
        observation, info = self._show()
        return observation, 0.0, False, False, info

    def _show(self) -> tuple[Any, dict[str, Any]]:
        x, mask = {"x": np.zeros(3, np.float32)}, {"action_mask": self.masks[self.count]}
        return (x | mask, {}) if self.where == "observation" else (x, mask)


def steps_of(kind: str, where: str, masks: list[Any], num_steps: int = 2) -> None:
    make = partial(Says, where, masks)
    group: GroupEnv = (
        loop_over([make], name="Says")
        if kind == "python"
        else GymVector(lambda: SyncVectorEnv([make], autoreset_mode=AutoresetMode.NEXT_STEP), name="Says")
    )
    collect(group, num_steps, [0], lambda obs: np.zeros((1, 1), np.int32))


FINE = np.ones(3, np.float32)
ADDED = "a mask that is added to logits is given as `mask == 0`"


@pytest.mark.parametrize("kind", ["python", "vector"])
@pytest.mark.parametrize("where", ["observation", "info"])
@pytest.mark.parametrize("masks", [[FINE, None], [None]], ids=["later", "first"])
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([0.0, -np.inf, 0.0], f"expected entries 0 (not now) and 1 (allowed), got -inf; {ADDED}"),
        ([0.0, -1e8, 0.0], f"expected entries 0 (not now) and 1 (allowed), got -100000000.0; {ADDED}"),
        ([0.0, 0.3, 1.0], "expected entries 0 (not now) and 1 (allowed), got 0.30000001192092896"),
        ([1.0, np.nan, 1.0], "expected entries 0 (not now) and 1 (allowed), got nan"),
        ([1.0, 255.0, 1.0], "expected entries 0 (not now) and 1 (allowed), got 255.0"),
    ],
)  # fmt: skip
def test_other_entries_are_refused_and_never_inverted(
    odd: list[float], words: str, masks: list[Any], where: str, kind: str
) -> None:
    told = [np.array(odd, np.float32) if mask is None else mask for mask in masks]
    with pytest.raises(SpaceMismatch) as caught:
        steps_of(kind, where, told)
    assert str(caught.value) == f"Says: {where} key action_mask: {words}"


def test_an_action_is_repeated_as_long_as_a_mask_allows_it_wherever_that_stands() -> None:
    for where, form in (("nested", "tuple"), ("deep", "flat"), ("info", "dict")):
        env = RepeatAction(Game(where, form, "dict"), 4)
        env.reset(seed=0)
        for _ in range(4):
            a, b = env.unwrapped.pair  # type: ignore[attr-defined]
            *_, info = env.step({"a": a, "b": b})
            assert info["num_frames"] <= 2


def test_make_group_asks_the_method_also_of_envs_in_wrappers() -> None:
    config = EnvConfig(env="tests.unit.envs.mask_game:Game", env_kwargs={"where": "method"}, env_frameskip=2)
    group = make_group(config, 1)
    assert masks_said(group.spec) == "actions are masked by the method action_masks() of the environment"
    group.close()


def test_an_env_whose_mask_allows_nothing_is_made_again_and_one_that_goes_on_so_given_up() -> None:
    nothing = np.zeros(3, np.float32)
    made = []

    def make(masks: list[Any]) -> Says:
        made.append(1)
        return Says("info", masks if len(made) <= 1 else [FINE])

    loop = loop_over([lambda: make([FINE, nothing]), lambda: Says("info", [FINE])], name="Says",
                     on_failure=OnFailure(max_rebuilds=10))  # fmt: skip
    rollout = collect(loop, 6, [0, 1], lambda obs: np.zeros((2, 1), np.int32))
    assert loop.rebuilds == 1
    assert rollout.first[1:, 0].tolist() == [True, False, False, False, False, False]
    assert not rollout.first[1:, 1].any()
    hopeless = loop_over([lambda: Says("info", [FINE, nothing])], name="Says", on_failure=OnFailure(max_rebuilds=10))
    with pytest.raises(NothingAllowed) as caught:
        collect(hopeless, 20, [0], lambda obs: np.zeros((1, 1), np.int32))
    assert str(caught.value) == (
        "Says: info key action_mask: expected at least one allowed choice, got all zero in env 0"
    )
    assert not caught.value.lasting
    assert hopeless.rebuilds == 2
    with pytest.raises(EnvironmentFailure, match="all zero"):  # as a reward that is NaN does
        steps_of("vector", "info", [FINE, nothing])


def test_a_mask_in_the_info_of_an_env_without_choices_is_refused() -> None:
    class Numbers(Says):
        action_space = BOX  # type: ignore[assignment]

    group = loop_over([lambda: Numbers("info", [FINE])], name="Numbers")
    with pytest.raises(SpaceMismatch) as caught:
        collect(group, 1, [0], lambda obs: np.zeros((1, 3), np.float32))
    assert str(caught.value) == "Numbers: info key action_mask: a mask is for choices, and the actions have none"


def test_forms_and_spaces_of_the_game_agree() -> None:
    assert SHOWN.keys() <= FORMS.keys()


class Countdown(gymnasium.Env[Any, Any]):
    """Has a mask for every step but the last, as sb3-contrib reads masks before actions alone."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    left = 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.left = 3
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}

    def action_masks(self) -> Any:
        return {3: [1, 0], 2: [0, 1], 1: [1, 1]}[self.left]


def test_a_method_for_masks_may_fail_after_an_end() -> None:
    group = loop_over([lambda: with_masks_of_method(Countdown())], name="Countdown")
    rollout = collect(group, 7, [1], lambda obs: np.zeros((1, 1), np.int32))
    assert rollout.obs["action_mask"][:, 0].tolist() == [[1, 0], [0, 1], [1, 1], [1, 1]] * 2
    assert rollout.terminated[:, 0].tolist() == ([False, False, True, False] * 2)[:7]
    assert group.rebuilds == 0


def test_a_method_for_masks_that_fails_before_an_end_is_not_overlooked() -> None:
    group = loop_over([lambda: with_masks_of_method(Countdown())], name="Countdown")
    game = group._envs[0].unwrapped
    collect(group, 1, [1], lambda obs: np.zeros((1, 1), np.int32))
    game.left = 9
    with pytest.raises(EnvironmentFailure, match="KeyError"):
        group.step(np.zeros((1, 1), np.int32), step_row(group.spec, 1))
