"""How vectors go on after an end: the declaration, the proof in infos, and contradictions between both."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from appo.envs.spec import Array, BoolArray, FloatArray
from appo.utils.errors import UsageError

FINAL_KEYS = ("final_obs", "final_observation")
"""Keys of infos with the last observations of rows reset in the same step; the second is gymnasium's before 1.0."""

FIRST_ENDS = 8
"""Ends of rows that look like ends in another mode, without a single other end: chance explains no more."""

LAST_INFO = "final_info"


class Contradiction(UsageError):
    """An end of a vector contradicts the mode.

    Attributes:
        proves_same_step: whether only a reset in the same step, with the final observation in infos, explains the end.
    """

    def __init__(self, text: str, *, proves_same_step: bool) -> None:
        super().__init__(text)
        self.proves_same_step = proves_same_step


def final_obs_in(infos: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the final observations in infos, in any form, and the mask of their rows; (None, False) without any."""
    found = ((infos[key], infos.get(f"_{key}", True)) for key in FINAL_KEYS if infos.get(key) is not None)
    return next(found, (None, False))


def gathered(env: VectorEnv[Any, Any, Any], infos: dict[str, Any]) -> dict[str, Any]:
    """Return infos in which `final_info` is a dict of arrays, not a dict for every row as before gymnasium 1.0."""
    listed = infos.get(LAST_INFO)
    if not isinstance(listed, np.ndarray | list | tuple):
        return infos
    last: dict[str, Any] = {}
    for row, info in enumerate(listed):
        last = env._add_info(last, info, row) if info else last
    return {**infos, LAST_INFO: last}


def keep_last_observations(env: VectorEnv[Any, Any, Any]) -> None:
    """Let the environments of a SyncVectorEnv with SAME_STEP return copies of last observations.

    gymnasium puts the last observation itself into infos and then resets the environment, which may have a single
    buffer for all observations. The environments of an AsyncVectorEnv are in processes of gymnasium.
    """
    if isinstance(env.unwrapped, SyncVectorEnv):
        for one in env.unwrapped.envs:
            one.step = partial(_copied_at_end, one.step)  # type: ignore[method-assign]


def _copied_at_end(step: Callable[[Any], Any], action: Any) -> Any:
    observation, reward, terminated, truncated, info = step(action)
    if terminated or truncated:
        observation = deepcopy(observation)
    return observation, reward, terminated, truncated, info


class Ends:
    """Compares the ends of episodes with the mode of a vector.

    Args:
        name: name of the environment in messages.
        mode: mode in which the group reads the vector's steps.
        is_declared: whether the vector declares the mode.
        is_trusted: whether ends are only counted.
    """

    def __init__(self, name: str, mode: AutoresetMode, *, is_declared: bool, is_trusted: bool = False) -> None:
        self.count = 0
        self._name, self._mode, self.is_declared, self.is_trusted = name, mode, is_declared, is_trusted
        self._firsts: Mapping[str, Array] = {}
        self._shown: Mapping[str, Array] = {}  # in the last step, until ends have proved the mode
        self._stays: BoolArray = np.zeros(1, np.bool_)  # rows that show what they showed a step before
        self._had_final: Array = np.zeros(1, np.bool_)  # of the rows that ended in the step before
        self._odd: BoolArray | None = None  # rows whose next step tells whether their end was one of another mode
        self._num_odd = 0
        self._is_believed = mode is not AutoresetMode.SAME_STEP and (is_declared or mode is AutoresetMode.DISABLED)

    def begin(self, obs: Mapping[str, Array]) -> None:
        """Note the first observations [R, *]."""
        self._firsts, self._odd = {key: array.copy() for key, array in obs.items()}, None
        self._shown = self._firsts

    def require_nothing(self, ended: BoolArray, reward: FloatArray, ends: BoolArray) -> None:
        """Refuse rewards [R] and ends [R] of NEXT_STEP in the step after an end, of the rows `ended` [R]."""
        odd = ended & ((np.abs(reward) > 0) | ends)
        for row in np.flatnonzero(odd).tolist():
            text = f"env {row} got a reward, or ended, in the step after an end, which must only reset it"
            self._refuse(text, same_step=bool(self._had_final[row]))

    def compare(
        self, shown: Mapping[str, Array], ended: BoolArray, final: Mapping[str, Array], given: BoolArray
    ) -> None:
        """Compare observations of rows that `ended` with the final observations of infos, present for `given` rows."""
        self.count += int(np.count_nonzero(ended))
        is_same = self._mode is AutoresetMode.SAME_STEP
        if self.is_trusted or (is_same and self._is_believed):
            return
        self._had_final = given
        differs = given & ~_equal(shown, final) if np.count_nonzero(given) else given
        if not is_same and np.count_nonzero(differs):
            text = "infos hold another final_obs than what is shown at an end, so that it resets in the same step"
            self._refuse(text, same_step=True)
        if not self._is_believed:
            is_first = self._is_first(shown)
            self._odd = ended & (~differs & ~is_first if is_same else is_first)
            self._is_believed = bool((ended & ~self._odd).any())

    def look(self, shown: Mapping[str, Array]) -> None:
        """Look at the observations in the step after `compare`."""
        odd, self._odd = self._odd, None
        if self._is_believed:
            return
        is_same, stayed = self._mode is AutoresetMode.SAME_STEP, self._stays
        if not is_same:
            self._stays = _equal(shown, self._shown)
            self._shown = {key: array.copy() for key, array in shown.items()}
        if odd is None:
            return
        found = odd & (self._is_first(shown) == is_same)
        self._is_believed = bool((odd & ~found).any())
        # A step may show again what it showed before, as a bandit's does: an end then looks like a beginning.
        self._num_odd += int((found & ~stayed).sum())
        if self._num_odd >= FIRST_ENDS and not self._is_believed:
            late = "of the episode that ends: the next one begins a step later"
            self._refuse(
                f"what it shows at an end is {late if is_same else 'the first observation of the next episode'}"
            )

    def _is_first(self, shown: Mapping[str, Array]) -> BoolArray:
        """Return for every row whether the observation equals a first observation of any row."""
        rows = len(next(iter(shown.values())))
        found = np.zeros(rows, np.bool_)
        for row in range(rows):
            found |= _equal(shown, {key: array[row : row + 1] for key, array in self._firsts.items()})
        return found

    def _refuse(self, what: str, *, same_step: bool = False) -> NoReturn:
        said = f"its metadata['autoreset_mode'] is {self._mode.value}"
        if not self.is_declared:
            said = f"it has no metadata['autoreset_mode'], for which {self._mode.value} was assumed"
        text = f"{self._name}: {what}, and {said}: it must declare what it does (docs/own_env.md)"
        raise Contradiction(text, proves_same_step=same_step)


def _equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> BoolArray:
    """Return for every row of observations [R, *] whether all keys in both dicts are equal."""
    rows = [(one[key] == other[key]).all(axis=tuple(range(1, one[key].ndim))) for key in one if key in other]
    equal: BoolArray = np.logical_and.reduce(rows)
    return equal
