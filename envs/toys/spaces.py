"""A small task in every observation and action space, with and without masks, and with a known best return."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from appo.envs.masks import choices_in
from appo.envs.spaces import Space, children, choices_of
from appo.envs.spec import MASK_KEY, SINGLE_KEY, Array, BoolArray

NUM_QUESTIONS = 4


class Language(NamedTuple):
    """A space, and the way to say a question (or an answer) from 0 to 3 in the space."""

    space: Space
    say: Callable[[int], Any]


def _bits(question: int) -> Array:
    return np.array([question // 2, question % 2], np.int8)


def _image(question: int) -> Array:
    """White in one quarter [H,W,C]; height and width differ to catch code that swaps both."""
    image = np.zeros((36, 40, 3), np.uint8)
    top, left = 18 * (question // 2), 20 * (question % 2)
    image[top : top + 18, left : left + 20] = 255
    return image


def _real(value: float) -> Array:
    return np.array([value], np.float32)


UNIT = spaces.Box(-1.0, 1.0, (1,), np.float32)

OBSERVATIONS = {
    "vector": Language(spaces.Box(0.0, 1.0, (NUM_QUESTIONS,), np.float32), lambda q: np.eye(4, dtype=np.float32)[q]),
    "image_hwc": Language(spaces.Box(0, 255, (36, 40, 3), np.uint8), _image),
    "image_chw": Language(spaces.Box(0, 255, (3, 36, 40), np.uint8), lambda q: _image(q).transpose(2, 0, 1)),
    "discrete": Language(spaces.Discrete(NUM_QUESTIONS, start=3), lambda q: np.int64(q + 3)),
    "multi_discrete": Language(spaces.MultiDiscrete([2, 3]), lambda q: _bits(q).astype(np.int64)),
    "multi_binary": Language(spaces.MultiBinary(2), _bits),
    "dict": Language(
        spaces.Dict(
            {"low": spaces.Discrete(2), "inner": spaces.Dict({"high": UNIT, "nothing": spaces.MultiBinary(1)})}
        ),
        lambda q: {"low": q % 2, "inner": {"high": _real(q // 2 - 0.5), "nothing": np.zeros(1, np.int8)}},
    ),
    "tuple": Language(
        spaces.Tuple([spaces.Discrete(2), spaces.Tuple([UNIT])]), lambda q: (q % 2, (_real(q // 2 - 0.5),))
    ),
    "image_and_vector": Language(
        spaces.Dict({SINGLE_KEY: spaces.Box(0, 255, (36, 40, 3), np.uint8), "low": UNIT}),
        lambda q: {SINGLE_KEY: _image(q // 2), "low": _real(q % 2 - 0.5)},
    ),
}
"""What is shown. A question said in several parts is in none of them alone."""

ACTIONS = {
    "discrete": Language(spaces.Discrete(NUM_QUESTIONS, start=-1), lambda q: q - 1),
    "multi_discrete": Language(spaces.MultiDiscrete([4, 3], start=[0, 5]), lambda q: np.array([q, q % 3 + 5])),
    "multi_binary": Language(spaces.MultiBinary(2), _bits),
    "box": Language(spaces.Box(-1.0, 1.0, (2,), np.float32), lambda q: np.subtract(_bits(q), 0.5)),
    "tuple": Language(
        spaces.Tuple([spaces.Discrete(4), spaces.Tuple([spaces.MultiDiscrete([2, 3]), UNIT]), spaces.MultiBinary(2)]),
        lambda q: (q, (np.array([q // 2, q % 2]), _real(q / 4)), _bits(q)),
    ),
    "dict": Language(
        spaces.Dict({"pick": spaces.Discrete(4), "go": spaces.Dict({"by": UNIT, "press": spaces.MultiBinary(2)})}),
        lambda q: {"pick": q, "go": {"by": _real(0.5 - q / 4), "press": _bits(q)}},
    ),
}
"""How the answer must be given."""


class Spaces(gymnasium.Env[Any, Any]):
    """Asks a question per step in an observation space, and takes the answer in an action space.

    The questions are drawn evenly and independently. A step is worth the mean over the leaves of the action space: of
    choices and bits the share that is right, of numbers 1 minus the mean squared distance. So the best return is 1 per
    step. Episodes are cut off after `num_steps`.

    A mask forbids about half of the wrong choices, drawn anew in every step; a forbidden choice raises a `ValueError`.
    The mask of the last observation forbids everything.

    Args:
        observation: name in `OBSERVATIONS`.
        action: name in `ACTIONS`.
        mask: place of the mask: "observation" (the key "action_mask"), "info", or "" for no mask.
        num_steps: length of an episode.

    Raises:
        ValueError: there is a mask but no choice.
    """

    def __init__(
        self, observation: str = "vector", action: str = "discrete", mask: str = "", num_steps: int = 8
    ) -> None:
        shown, answer = OBSERVATIONS[observation], ACTIONS[action]
        self._say, self._answer, self._mask_in = shown.say, answer.say, mask
        self.num_steps = num_steps
        self.action_space = answer.space
        self._sizes = [size for size, _ in choices_of(answer.space)]
        if mask and not self._sizes:
            raise ValueError(f"there is no choice to mask in {answer.space}")
        self.observation_space = shown.space
        if mask == "observation":
            allowed = spaces.Box(0, 1, (sum(self._sizes),), np.int8)
            self.observation_space = spaces.Dict(_as_dict(shown.space) | {MASK_KEY: allowed})
        self._question = self._step = 0
        self._allowed: list[BoolArray] = []

    @property
    def optimal_return(self) -> float:
        """Return the reward of an episode in which every question is answered right."""
        return float(self.num_steps)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Ask the first question."""
        super().reset(seed=seed)
        self._step = 0
        return self._ask()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Value the answer and ask the next question.

        Raises:
            ValueError: the action is none of the action space, or makes a forbidden choice.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is none of {self.action_space}")
        for allowed, choice in zip(self._allowed, _choices(self.action_space, action), strict=True):
            if self._mask_in and not allowed[choice]:
                raise ValueError(f"choice {choice} of {action!r} is forbidden; allowed are {np.flatnonzero(allowed)}")
        reward = float(np.mean(_scores(self.action_space, action, self._answer(self._question))))
        self._step += 1
        observation, said = self._ask()
        return observation, reward, False, self._step == self.num_steps, said

    def _ask(self) -> tuple[Any, dict[str, Any]]:
        """Draw a question and what is forbidden; say both."""
        self._question = int(self.np_random.integers(NUM_QUESTIONS))
        self._allowed = [self.np_random.random(size) < 0.5 for size in self._sizes]
        right = _choices(self.action_space, self._answer(self._question))
        for allowed, choice in zip(self._allowed, right, strict=True):
            allowed[choice] = True
            np.logical_and(allowed, self._step < self.num_steps, out=allowed)
        shown = self._say(self._question)
        if self._mask_in == "observation":
            return _as_dict(shown) | {MASK_KEY: np.concatenate(self._allowed).astype(np.int8)}, {}
        if self._mask_in == "info":  # several choices: a tuple of masks, as gymnasium's `sample` takes it
            masks = tuple(allowed.astype(np.int8) for allowed in self._allowed)
            return shown, {MASK_KEY: masks if len(masks) > 1 else masks[0]}
        return shown, {}


def spaces_vector(num_envs: int = 1, autoreset_mode: str = "NextStep", **kwargs: Any) -> SyncVectorEnv:
    """`Spaces` as a vector, in any autoreset mode."""
    return SyncVectorEnv([lambda: Spaces(**kwargs)] * num_envs, autoreset_mode=AutoresetMode(autoreset_mode))


def _as_dict(shown: Any) -> dict[str, Any]:
    """A space or an observation to which a mask can be added."""
    return dict(shown.items()) if isinstance(shown, spaces.Dict | dict) else {SINGLE_KEY: shown}


def _choices(space: Space, action: Any) -> list[int]:
    """Return the choices of an action, each counted from 0, in the order of a mask."""
    return [choice - start for choice, (_, start) in zip(choices_in(space, action), choices_of(space), strict=True)]


def _scores(space: Space, action: Any, answer: Any) -> list[float]:
    """Return the worth of the leaves of an action."""
    parts = children(space)
    if parts is not None:
        return [score for key, part in parts for score in _scores(part, action[key], answer[key])]
    if isinstance(space, spaces.Box):
        return [1.0 - float(np.mean(np.square(action - answer)))]
    return [float(np.mean(np.equal(action, answer)))]
