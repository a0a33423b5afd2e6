"""Our own loop over single environments: NEXT_STEP, writing in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from envs.conversion import ActionConverter, ObservationWriter, episode_stats, one_line, reported_frames, reraise
from envs.masks import ActionMasks, flat_mask, random_action
from envs.spaces import frames_per_step, spec_of
from envs.spec import MASK_KEY, SINGLE_KEY, Array, EnvSpec, EpisodeStats, StepRow
from utils.errors import SpaceMismatch
from utils.timing import RESET, clock

SingleEnv = gymnasium.Env[Any, Any]


class PythonLoop:
    """Steps `num_rows` single environments one after the other.

    An environment whose episode ended is reset on the following step, in place of being stepped (NEXT_STEP): the
    observation of a done step is the true final one, so bootstrapping through a truncation needs nothing else.

    Args:
        env_fns: One factory per environment; all must make environments with the same spaces.
        name: The environment's name in messages.
        seed: Entropy of the random walk below; the environments' own seeds come with `reset`.
        decorrelate_steps: Before the first observation env i takes a random number of random steps in
            [0, decorrelate_steps), so that episodes of one group do not end together.
        spec: What is known of the environments already; without it one is reset to see whether its info holds masks.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], SingleEnv]],
        *,
        name: str,
        seed: int | Sequence[int] = 0,
        decorrelate_steps: int = 0,
        spec: EnvSpec | None = None,
    ):
        self.name = name
        self.current_env = 0
        self._envs: list[SingleEnv] = []
        self._closed = False
        self._build(env_fns)
        self.spec = spec or self._discover()
        self.num_rows = len(self._envs) * self.spec.num_agents
        self._actions = ActionConverter(self._envs[0].action_space)
        self._observations = ObservationWriter(name, self._envs[0].observation_space)
        self._masks = ActionMasks(name, self.spec) if self.spec.action_mask else None
        self._counts_frames = False  # once an info says how many frames a step took, all of them are written
        self._step_functions = [env.step for env in self._envs]
        self._ended = [False] * self.num_rows
        self._random = np.random.default_rng(seed)
        self._decorrelate_steps = decorrelate_steps

    def reset(self, seeds: Sequence[int], obs: dict[str, Array]) -> None:
        """Start an episode in every environment and write the first observations [R, *].

        Raises:
            EnvironmentFailure: an environment raised, or an observation does not fit its space.
        """
        if len(seeds) != len(self._envs):
            raise ValueError(f"expected {len(self._envs)} seeds, got {len(seeds)}")
        try:
            for index, seed in enumerate(seeds):
                self.current_env = index
                observation, info = self._walk(index, self._begin(index, int(seed)))
                self._observations.write_row(obs, index, observation)
                if self.spec.mask_in_info and self._masks:
                    self._masks.write_row(obs, index, info)
            self._ended = [False] * self.num_rows
            if self._masks:
                self._masks.check(obs, np.zeros(self.num_rows, np.bool_))
        except BaseException as error:
            reraise(self.name, error)

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Step or reset every environment with action [R, A]; write what came out into `row`.

        Raises:
            EnvironmentFailure: an environment raised, or an observation does not fit its space.
        """
        ended, write, obs, reward = self._ended, self._observations.write_row, row.obs, row.reward
        reads_all, shape, types = self.spec.mask_in_info, self._observations.plain_shape, self._observations.plain_types
        plain = obs.get(SINGLE_KEY)
        self._clear(row)
        episodes: list[EpisodeStats] | None = None
        try:
            actions = self._actions.rows(action)
            for index, step in enumerate(self._step_functions):
                self.current_env = index
                if ended[index]:
                    observation, info = self._begin(index, None)
                    row.first[index], reward[index], ended[index] = True, 0.0, False
                else:
                    observation, reward[index], terminated, truncated, info = step(actions[index])
                    if terminated or truncated:  # both at once: the episode is over, there is nothing to bootstrap from
                        row.terminated[index], row.truncated[index] = bool(terminated), not terminated
                        ended[index] = True
                        stats = episode_stats(index, info)
                        episodes = [*(episodes or []), stats] if stats else episodes
                # A call would cost a third of what is left of a step beside the environment's own.
                if type(observation) is np.ndarray and observation.dtype.char in types and observation.shape == shape:
                    plain[index] = observation  # type: ignore[index]
                else:
                    write(obs, index, observation)
                if info or reads_all:
                    self._read(info, row, index)
            if self._masks:
                self._masks.check(obs, np.array(ended))
        except BaseException as error:
            self._refuse_malformed(error)
            reraise(self.name, error)
        return episodes or ()

    def close(self) -> None:
        """Close every environment; one that fails to close is reported as a warning."""
        if self._closed:
            return
        self._closed = True
        for index, env in enumerate(self._envs):
            self.current_env = index
            try:
                env.close()
            except (Exception, SystemExit) as error:  # what was learned must not be lost to an environment's clean-up
                warnings.warn(f"{self.name} raised {type(error).__name__} in close: {one_line(error)}", stacklevel=2)

    def _build(self, env_fns: Sequence[Callable[[], SingleEnv]]) -> None:
        try:
            for index, env_fn in enumerate(env_fns):
                self.current_env = index
                self._envs.append(env_fn())
                spaces = (self._envs[-1].observation_space, self._envs[-1].action_space)
                if spaces != (self._envs[0].observation_space, self._envs[0].action_space):
                    raise SpaceMismatch(f"{self.name}: env {index} has other spaces than env 0")
        except BaseException as error:
            self.close()
            reraise(self.name, error)

    def _discover(self) -> EnvSpec:
        """The spec of the first environment, which is reset where its info could hold a mask."""
        env = self._envs[0]
        frames = frames_per_step(env)
        spec = spec_of(env.observation_space, env.action_space, frames_per_step=frames)
        if spec.action_mask or all(part.kind != "categorical" for part in spec.action.parts):
            return spec
        try:
            _, info = self._begin(0, None)
        except BaseException as error:
            reraise(self.name, error)
        in_info = MASK_KEY in info
        return spec_of(env.observation_space, env.action_space, frames_per_step=frames, mask_in_info=in_info)

    def _refuse_malformed(self, error: BaseException) -> None:
        """Say in one line what a step must be, if the error comes from taking one apart and not from inside the env."""
        own_line = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if own_line and isinstance(error, TypeError | ValueError):
            raise SpaceMismatch(
                f"{self.name}: step must return (observation, reward, terminated, truncated, info) with a number as "
                f"reward, as gymnasium's environments do: {one_line(error)}"
            ) from error

    def _clear(self, row: StepRow) -> None:
        """Write what is true of most steps."""
        for flag in (row.first, row.terminated, row.truncated):
            flag.fill(False)
        if self._counts_frames:
            row.num_frames.fill(self.spec.frames_per_step)

    def _read(self, info: dict[str, Any], row: StepRow, index: int) -> None:
        """Take from info what belongs into the slot."""
        if self._counts_frames or "num_frames" in info:
            self._counts_frames = True
            row.num_frames[index] = reported_frames(info, self.spec.frames_per_step)
        if self.spec.mask_in_info and self._masks:
            self._masks.write_row(row.obs, index, info)

    def _begin(self, index: int, seed: int | None) -> tuple[Any, dict[str, Any]]:
        """The first observation of a new episode and its info; None keeps the env's own random numbers going."""
        before = clock.enter(RESET)
        result = self._envs[index].reset(seed=seed)
        clock.enter(before)
        # an old-style reset returns the observation alone, which could unpack into two by accident
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpaceMismatch(f"{self.name}: reset must return (observation, info), as gymnasium's environments do")
        return result

    def _walk(self, index: int, begun: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """Take random steps from a first observation; no action is taken that a mask forbids."""
        observation, info = begun
        for _ in range(int(self._random.integers(self._decorrelate_steps)) if self._decorrelate_steps else 0):
            source = info if self.spec.mask_in_info else observation
            mask = flat_mask(source[MASK_KEY]) if self.spec.action_mask else None
            action = self._actions.rows(random_action(self.spec.action, mask, self._random))[0]
            observation, _, terminated, truncated, info = self._envs[index].step(action)
            if terminated or truncated:
                observation, info = self._begin(index, None)
        return observation, info
