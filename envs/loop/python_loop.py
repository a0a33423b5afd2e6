"""Our own loop over single environments: NEXT_STEP, writing in place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from appo.envs.conversion import ActionConverter, ObservationWriter, one_line, require_info
from appo.envs.finite import FiniteCheck
from appo.envs.infos import FRAMES_KEY, InfoReader
from appo.envs.journal import NOBODY
from appo.envs.loop.env_set import RAISE, Begun, EnvSet, OnFailure, SingleEnv
from appo.envs.masks import ActionMasks, random_action, why_unmasked
from appo.envs.outcome import FLAGS, LARGEST, LEAST, NUMBERS, reward_of, truth_of
from appo.envs.spaces import AS_THEY_ARE, ActionForm
from appo.envs.spec import MASK_KEY, SINGLE_KEY, Array, EnvSpec, EpisodeStats, StepRow, row_name
from appo.envs.wrappers.normalization import own_normalization
from appo.utils.errors import EnvironmentFailure, SpaceMismatch
from appo.utils.tracebacks import comes_from_own_code


class PythonLoop:
    """Steps `num_rows` single environments one after the other.

    The step after the end of an episode only resets the environment (NEXT_STEP): the observation of a done step is the
    true final observation, so bootstrapping through a truncation needs nothing else.

    An environment that fails is closed and made again, without effect on the others. The failed step never happened:
    the step looks like a reset and is invalid. The step before shows its own true next observation, from which
    learning bootstraps as at a time limit.

    Attributes:
        cut: [R] episodes that had begun before the first observation, at the last reset.
        said: keys of infos with a meaning for the runtime that were found.

    Args:
        env_fns: factory of each environment; all environments must have equal spaces.
        name: name of the environment in messages.
        seed: entropy of the random walk below; `reset` gives the seeds of the environments.
        decorrelate_steps: before the first observation env i takes a random number of random steps in
            [0, decorrelate_steps); episodes of one group then do not end together.
        spec: known spec; None: a reset shows whether infos contain masks.
        form: units in which policies act, without a known spec.
        on_failure: rules for an environment that fails; by default a failure is raised.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], SingleEnv]],
        *,
        name: str,
        seed: int | Sequence[int] = 0,
        decorrelate_steps: int = 0,
        spec: EnvSpec | None = None,
        form: ActionForm = AS_THEY_ARE,
        on_failure: OnFailure = RAISE,
    ):
        self.name, self._envs = name, EnvSet(env_fns, name, on_failure)
        self._inside = self._envs.journal.inside if self._envs.journal else [NOBODY]
        self.spec = self._envs.spec(spec, form)
        if spec is None:
            self.spec = replace(self.spec, notes=self.spec.notes + own_normalization(self._envs[0]))
        self.num_rows = len(self._envs) * self.spec.num_agents
        self._actions = ActionConverter(self._envs[0].action_space, self.spec.action)
        spaces = (self._envs[0].observation_space, self._envs[0].action_space)
        self._observations = ObservationWriter(name, *spaces)
        self._masks = ActionMasks(name, self.spec, *spaces) if self.spec.action_mask else None
        self.infos = InfoReader(name, why_unmasked(self.spec))
        self.said = self.infos.found
        self._finite = FiniteCheck(name, self.spec)
        self.cut = np.zeros(self.num_rows, np.bool_)
        self._counts_frames = False  # once an info says how many frames a step took, all of them are written
        self._ended = [False] * self.num_rows
        self._num_steps, self._decorrelate_steps = 0, decorrelate_steps
        self._random = np.random.default_rng(seed)

    @property
    def rebuilds(self) -> int:
        """Number of environments made again."""
        return self._envs.rebuilds

    def reset(self, seeds: Sequence[int | None], obs: dict[str, Array]) -> None:
        """Start an episode in every environment and write the first observations [R, *].

        A seed of None keeps the environment's own random numbers going.

        Raises:
            EnvironmentFailure: an environment raised or returned numbers that are not finite, and is not made again, or
                returned values that do not fit its spaces.
        """
        if len(seeds) != len(self._envs):
            raise ValueError(f"expected {len(self._envs)} seeds, got {len(seeds)}")
        self._ended = [False] * self.num_rows
        failed: dict[int, EnvironmentFailure] = {}
        for index, seed in enumerate(seeds):
            self._inside[0] = index
            try:
                self._show(index, obs, self._walk(index, self._envs.begin(index, None if seed is None else int(seed))))
            except BaseException as error:
                failed[index] = self._envs.forgive(index, error, self._num_steps)
        for index, failure in failed.items():
            self._replace(index, failure, obs)
        self._inside[0] = NOBODY

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Step or reset every environment with action [R, A]; write the results into `row`.

        Raises:
            EnvironmentFailure: as `reset`.
        """
        ended, write, obs, reward = self._ended, self._observations.write_row, row.obs, row.reward
        reads_all = self.spec.mask_in_info or row.lives is not None
        shape, types = self._observations.plain_shape, self._observations.plain_types
        plain, inside, least, largest = obs.get(SINGLE_KEY), self._inside, LEAST, LARGEST
        self._prepare(action, row)
        episodes: list[EpisodeStats] | None = None
        failed: dict[int, EnvironmentFailure] = {}
        actions = self._actions.rows(action)
        for index, step in enumerate(self._envs.step_functions):
            inside[0] = index
            try:
                if ended[index]:
                    row.first[index], reward[index], ended[index] = True, 0.0, False
                    observation, info = self._envs.begin(index, None)
                else:
                    observation, paid, terminated, truncated, info = step(actions[index])
                    is_number = type(paid) is float or type(paid) in NUMBERS
                    if not (is_number and least <= paid <= largest):
                        paid = reward_of(self.name, row_name(index, 1), paid, self._envs[index])
                    reward[index] = paid
                    may_end = terminated is not False or truncated is not False  # most steps return False twice
                    if may_end and self._end(index, row, terminated, truncated):
                        require_info(self.name, "step", info)
                        stats = self.infos.stats(index, info)
                        episodes = [*(episodes or []), stats] if stats else episodes
                # A call would cost a third of what is left of a step beside the environment's own.
                if type(observation) is np.ndarray and observation.dtype.char in types and observation.shape == shape:
                    plain[index] = observation  # type: ignore[index]
                else:
                    write(obs, index, observation)
                if info or reads_all:
                    self._read(info, row, index)
            except BaseException as error:
                failed[index] = self._envs.forgive(index, _explained(self.name, error), self._num_steps)
        odd = self._finite(obs, reward) if self._masks is None else self._odd(row, ended)
        if failed or odd:
            self._replace_failed(failed, odd, row)
            episodes = [one for one in episodes or () if not row.first[one.row]]
        inside[0] = NOBODY
        return episodes or ()

    def shape_rewards(self, row: int, shaping: Mapping[str, Any]) -> None:
        """Set the coefficients of a row's reward."""
        self._envs.shape_rewards(*divmod(row, self.spec.num_agents), shaping)

    def close(self) -> None:
        """Close every environment; a failure to close is reported as a warning."""
        self._envs.close()

    def _end(self, index: int, row: StepRow, terminated: Any, truncated: Any) -> bool:
        """Write the ends of a step; return whether the episode ended."""
        if type(terminated) not in FLAGS or type(truncated) not in FLAGS:
            terminated, truncated = self._ends(terminated, truncated)
        if not (terminated or truncated):
            return False
        # Both at once: the episode is over, there is nothing to bootstrap from.
        row.terminated[index], row.truncated[index] = bool(terminated), not terminated
        self._ended[index] = True
        return True

    def _odd(self, row: StepRow, ended: Sequence[bool]) -> Mapping[int, EnvironmentFailure]:
        """Return the failures in the results of a step, by row; masks of rows that `ended` may leave no choice."""
        odd = self._finite(row.obs, row.reward)
        return {**self._masks.stuck(row.obs, np.array(ended)), **odd} if self._masks else odd

    def _replace_failed(
        self, failed: dict[int, EnvironmentFailure], odd: Mapping[int, EnvironmentFailure], row: StepRow
    ) -> list[int]:
        """Make environments again that failed; the step becomes the begin of an episode. Return their indices."""
        for at, failure in sorted(odd.items(), key=lambda one: one[0] // self.spec.num_agents):
            if (index := at // self.spec.num_agents) not in failed:  # what is odd beside a failure was never written
                failed[index] = self._envs.forgive(index, failure, self._num_steps)
        replaced = list(failed)
        for index in replaced:
            self._replace(index, failed.pop(index), row.obs)  # an error left here would hold the environment
            rows = self._rows(index)
            row.first[rows], row.reward[rows] = True, 0.0
            row.terminated[rows] = row.truncated[rows] = self._ended[index] = False
        return replaced

    def _replace(self, index: int, failure: EnvironmentFailure, obs: dict[str, Array]) -> None:
        """Make an environment again until an episode begins, and write the first observation, or give up (raise)."""
        self._inside[0], left = index, failure
        self.cut[self._rows(index)] = False
        while True:
            try:
                self._show(index, obs, self._envs.begin_anew(index, left))
            except BaseException as error:
                left = self._envs.forgive(index, error, self._num_steps)
            else:
                return

    def _show(self, index: int, obs: dict[str, Array], begun: Begun) -> None:
        """Write the first observation of an episode."""
        observation, info = begun
        self._observations.write_row(obs, index, observation)
        if self._masks:
            if self.spec.mask_in_info:
                self._masks.write_row(obs, index, info)
            self._masks.require(obs, index)
        self._finite.require(obs, index)

    def _rows(self, index: int) -> slice:
        return slice(index * self.spec.num_agents, (index + 1) * self.spec.num_agents)

    def _prepare(self, action: Array, row: StepRow) -> None:
        """Record the actions, and write the values of most steps."""
        self._num_steps += 1
        if self._envs.journal is not None:
            self._envs.journal.add(action.reshape(len(self._envs), -1))
        for flag in (row.first, row.terminated, row.truncated):
            flag.fill(False)
        if self._counts_frames:
            row.num_frames.fill(self.spec.frames_per_step)

    def _read(self, info: dict[str, Any], row: StepRow, index: int) -> None:
        """Copy frames and masks from info into the slot."""
        require_info(self.name, "step", info)
        if row.lives is not None and not row.first[index]:
            self.infos.write_lives(info, row.lives[index : index + 1])
        if self._counts_frames or FRAMES_KEY in info:
            self._read_frames(info, row, index)
        if MASK_KEY in info:
            self.infos.refuse_masks(info)
        if self.spec.mask_in_info and self._masks:
            if self._ended[index] and info.get(MASK_KEY) is None:
                row.obs[MASK_KEY][index] = 1
            else:
                self._masks.write_row(row.obs, index, info)

    def _read_frames(self, info: Mapping[str, Any], row: StepRow, at: int) -> None:
        if (self._counts_frames or FRAMES_KEY in info) and not row.first[at]:
            self._counts_frames = True
            row.num_frames[at] = self.infos.frames(info, self.spec.frames_per_step)

    def _walk(self, index: int, begun: Begun) -> Begun:
        """Take random steps from a first observation; no action is taken that a mask forbids."""
        observation, info = begun
        self.cut[index] = False
        for _ in range(int(self._random.integers(self._decorrelate_steps)) if self._decorrelate_steps else 0):
            self._envs.alive()
            mask = self._masks.choices(observation, info) if self._masks else None
            action = random_action(self.spec.action, mask, self._random)
            if self._envs.journal is not None:
                self._envs.journal.walk(index, action[0])
            step = self._envs.step_functions[index]
            observation, _, terminated, truncated, info = step(self._actions.rows(action)[0])
            self.cut[index] = not any(self._ends(terminated, truncated))
            if not self.cut[index]:
                observation, info = self._envs.begin(index, None)
        return observation, info

    def _ends(self, terminated: Any, truncated: Any) -> tuple[bool, bool]:
        """Return the ends of a step as truths (SpaceMismatch)."""
        return truth_of(self.name, "terminated", terminated), truth_of(self.name, "truncated", truncated)


def _explained(name: str, error: BaseException) -> BaseException:
    """Return a line about the form of a step, if the error comes from unpacking a step and not from inside the env."""
    own_line = error.__traceback__ is not None and error.__traceback__.tb_next is None
    own_line |= "values to unpack (expected 5" in str(error) and not comes_from_own_code(error)  # in a wrapper
    if not (own_line and isinstance(error, TypeError | ValueError)):
        return error
    mismatch = SpaceMismatch(
        f"{name}: step must return (observation, reward, terminated, truncated, info), as gymnasium's environments do:"
        f" {one_line(error)}"
    )
    mismatch.__cause__ = error
    return mismatch
