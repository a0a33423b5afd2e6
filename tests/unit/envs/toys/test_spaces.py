from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from appo.envs.spaces import children, flat_action_spaces
from appo.envs.toys.spaces import ACTIONS, NUM_QUESTIONS, OBSERVATIONS, Spaces, spaces_vector
from appo.envs.toys.toy import register_toys

MASKABLE = ("discrete", "multi_discrete", "tuple", "dict")


def leaves(space: Any, value: Any) -> list[np.ndarray]:
    parts = children(space)
    if parts is None:
        return [np.asarray(value)]
    return [leaf for key, part in parts for leaf in leaves(part, value[key])]


def question_in(observation: str, shown: Any) -> int:
    """The question that is shown, by comparison with all of them."""
    space, say = OBSERVATIONS[observation]
    same = [all(map(np.array_equal, leaves(space, shown), leaves(space, say(q)))) for q in range(NUM_QUESTIONS)]
    assert sum(same) == 1
    return same.index(True)


def masks_in(env: Spaces, mask: str, observation: Any, said: dict[str, Any]) -> tuple[Any, list[np.ndarray]]:
    """What is shown, and the mask of every choice."""
    if mask == "observation":
        ends = np.cumsum(env._sizes)[:-1]
        return observation["obs"], np.split(observation["action_mask"], ends)
    masks = said["action_mask"]
    return observation, list(masks) if isinstance(masks, tuple) else [masks]


@pytest.mark.parametrize(("observation", "action"), list(product(OBSERVATIONS, ACTIONS)))
def test_whoever_answers_right_gets_the_best_return(observation: str, action: str) -> None:
    env = Spaces(observation, action, num_steps=20)
    shown, _ = env.reset(seed=1)
    total, asked, truncated = 0.0, set(), False
    while not truncated:
        assert env.observation_space.contains(shown)
        question = question_in(observation, shown)
        asked.add(question)
        shown, reward, terminated, truncated, said = env.step(adapted(action, question))
        assert (reward, terminated, said) == (1.0, False, {})
        total += reward
    assert total == env.optimal_return == 20.0
    assert asked == set(range(NUM_QUESTIONS))


def adapted(action: str, question: int) -> Any:
    """The right answer, of the types that the space wants."""
    space, say = ACTIONS[action]
    answer = say(question)
    return answer.astype(space.dtype) if isinstance(answer, np.ndarray) else answer


@pytest.mark.parametrize(
    ("observation", "action"), [(name, "discrete") for name in OBSERVATIONS] + [("vector", a) for a in ACTIONS]
)
def test_the_toy_obeys_gymnasium(observation: str, action: str) -> None:
    check_env(Spaces(observation, action), skip_render_check=True)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_wrong_answer_is_worth_less(action: str) -> None:
    env = Spaces(action=action)
    for question, other in product(range(NUM_QUESTIONS), repeat=2):
        env.reset(seed=0)
        env._question = question
        reward = env.step(adapted(action, other))[1]
        assert reward == 1.0 if question == other else reward < 1.0


@pytest.mark.parametrize("observation", ["dict", "tuple", "image_and_vector"])
def test_no_part_of_an_observation_says_all(observation: str) -> None:
    space, say = OBSERVATIONS[observation]
    for index in range(len(leaves(space, say(0)))):
        assert len({leaves(space, say(q))[index].tobytes() for q in range(NUM_QUESTIONS)}) < NUM_QUESTIONS


@pytest.mark.parametrize(("action", "mask"), list(product(MASKABLE, ("observation", "info"))))
def test_masks_change_allow_what_is_right_and_end_with_nothing(action: str, mask: str) -> None:
    env = Spaces(action=action, mask=mask, num_steps=40)
    observation, said = env.reset(seed=2)
    seen, truncated = [], False
    while not truncated:
        shown, masks = masks_in(env, mask, observation, said)
        assert all(m.dtype == np.int8 and m.any() for m in masks)
        seen.append(np.concatenate(masks))
        observation, reward, _, truncated, said = env.step(adapted(action, question_in("vector", shown)))
        assert reward == 1.0  # so the right answer was allowed
    _, masks = masks_in(env, mask, observation, said)
    assert not np.concatenate(masks).any()
    allowed = np.mean(seen, 0)
    assert (allowed > 0.2).all()
    assert (allowed < 1.0).all()  # nothing is always allowed, so whoever ignores the masks is caught


@pytest.mark.parametrize(("action", "mask"), list(product(MASKABLE, ("observation", "info"))))
def test_a_forbidden_choice_raises(action: str, mask: str) -> None:
    env = Spaces(action=action, mask=mask)
    env.action_space.seed(0)
    forbidden = 0
    for seed in range(40):
        observation, said = env.reset(seed=seed)
        _, masks = masks_in(env, mask, observation, said)
        chosen = env.action_space.sample()
        if all(m[c] for m, c in zip(masks, choices(env, chosen), strict=True)):
            env.step(chosen)
            continue
        forbidden += 1
        with pytest.raises(ValueError, match="is forbidden; allowed are"):
            env.step(chosen)
    assert 5 < forbidden < 40


def choices(env: Spaces, action: Any) -> list[int]:
    """Choices counted from 0."""
    found: list[int] = []
    for leaf, value in zip(flat_action_spaces(env.action_space), leaves(env.action_space, action), strict=True):
        if hasattr(leaf, "start"):
            found += np.ravel(value - leaf.start).tolist()
    return found


def test_without_a_mask_everything_is_allowed_and_nothing_said() -> None:
    env = Spaces()
    env.action_space.seed(0)
    assert env.reset(seed=0)[1] == {}
    assert all(env.step(env.action_space.sample())[4] == {} for _ in range(100))


@pytest.mark.parametrize("action", ["multi_binary", "box"])
@pytest.mark.parametrize("mask", ["observation", "info"])
def test_what_is_no_choice_cannot_be_masked(action: str, mask: str) -> None:
    with pytest.raises(ValueError, match="there is no choice to mask in"):
        Spaces(action=action, mask=mask)


def test_a_mask_joins_the_keys_of_a_dict() -> None:
    assert list(Spaces("image_and_vector", mask="observation").observation_space) == ["action_mask", "low", "obs"]
    assert list(Spaces("tuple", mask="observation").observation_space) == ["action_mask", "obs"]
    env = Spaces("dict", mask="observation")
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    assert set(observation) == {"action_mask", "low", "inner"}


@pytest.mark.parametrize("wrong", [7, -2, 1.5, np.array([1, 1])])
def test_what_is_no_action_raises(wrong: object) -> None:
    env = Spaces()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="is none of Discrete"):
        env.step(wrong)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_vector_is_that_of_gymnasium(mode: AutoresetMode) -> None:
    register_toys()
    env = gymnasium.make_vec("toy/Spaces-v0", 3, autoreset_mode=mode.value, action="tuple", mask="info", num_steps=2)
    assert env.metadata["autoreset_mode"] is mode
    assert env.single_action_space == ACTIONS["tuple"].space
    single = Spaces("vector", "tuple", "info", num_steps=2)
    assert env.reset(seed=4)[0][1].tolist() == single.reset(seed=5)[0].tolist()
    assert spaces_vector(2).metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
