"""Our own loop over single environments: NEXT_STEP, writing in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from envs.conversion import ActionConverter, ObservationWriter, episode_stats, one_line, reraise
from envs.spec import Array, EpisodeStats, StepRow, frames_per_step, spec_of
from utils.errors import EnvironmentFailure

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
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], SingleEnv]],
        *,
        name: str,
        seed: int | Sequence[int] = 0,
        decorrelate_steps: int = 0,
    ):
        self.name = name
        self.current_env = 0
        self._envs: list[SingleEnv] = []
        self._closed = False
        self._build(env_fns)
        observation_space, action_space = self._envs[0].observation_space, self._envs[0].action_space
        self.spec = spec_of(observation_space, action_space, frames_per_step=frames_per_step(self._envs[0]))
        self.num_rows = len(self._envs) * self.spec.num_agents
        self._actions = ActionConverter(action_space)
        self._observations = ObservationWriter(name, observation_space)
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
                observation = self._walk(index, self._begin(index, int(seed)), int(seed))
                self._observations.write_row(obs, index, observation)
        except BaseException as error:
            reraise(self.name, error)
        self._ended = [False] * self.num_rows

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Step or reset every environment with action [R, A]; write what came out into `row`.

        Raises:
            EnvironmentFailure: an environment raised, or an observation does not fit its space.
        """
        ended, write, obs, reward = self._ended, self._observations.write_row, row.obs, row.reward
        for flag in (row.first, row.terminated, row.truncated):
            flag.fill(False)
        episodes: list[EpisodeStats] | None = None
        try:
            actions = self._actions.rows(action)
            for index, step in enumerate(self._step_functions):
                self.current_env = index
                if ended[index]:
                    write(obs, index, self._begin(index, None))
                    row.first[index], reward[index], ended[index] = True, 0.0, False
                    continue
                observation, reward[index], terminated, truncated, info = step(actions[index])
                write(obs, index, observation)
                if terminated or truncated:  # both at once: the episode is over, there is nothing to bootstrap from
                    row.terminated[index], row.truncated[index] = bool(terminated), not terminated
                    ended[index] = True
                    stats = episode_stats(index, info)
                    episodes = [*(episodes or []), stats] if stats else episodes
        except BaseException as error:
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
                    raise EnvironmentFailure(f"{self.name}: env {index} has other spaces than env 0")
        except BaseException as error:
            self.close()
            reraise(self.name, error)

    def _begin(self, index: int, seed: int | None) -> Any:
        """The first observation of a new episode; None keeps the environment's own random numbers going."""
        result = self._envs[index].reset(seed=seed)
        # an old-style reset returns the observation alone, which could unpack into two by accident
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvironmentFailure(
                f"{self.name}: reset must return (observation, info), as gymnasium's environments do"
            )
        return result[0]

    def _walk(self, index: int, observation: Any, seed: int) -> Any:
        if not self._decorrelate_steps:
            return observation
        env = self._envs[index]
        env.action_space.seed(seed)
        for _ in range(int(self._random.integers(self._decorrelate_steps))):
            observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                observation = self._begin(index, None)
        return observation
