"""Adapter of any gymnasium vector environment, whatever its autoreset mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from envs.conversion import ActionConverter, ObservationWriter, episode_stats, one_line, reraise, row_of_batched
from envs.masks import ActionMasks
from envs.spaces import frames_per_step, spec_of
from envs.spec import MASK_KEY, Array, BoolArray, EnvSpec, EpisodeStats, StepRow
from utils.errors import EnvironmentFailure, UsageError

AnyVectorEnv = VectorEnv[Any, Any, Any]

PROBE_ROUNDS = 4
"""Partial resets tried at start-up; after 2, 3, 4 and 5 steps, so that one chance coincidence hides nothing."""


class GymVector:
    """Steps a gymnasium vector environment as a group.

    NEXT_STEP is passed on as it is. SAME_STEP hands its final observations over separately. DISABLED is reset by us
    right after a done and then looks like SAME_STEP; its partial reset is tried out at construction.

    Args:
        make_vector: Makes the vector environment.
        name: The environment's name in messages.
        spec: What is known of the environment already; without it, it is reset to see whether its infos hold masks.
    """

    def __init__(self, make_vector: Callable[[], AnyVectorEnv], *, name: str, spec: EnvSpec | None = None):
        self.name = name
        self.current_env = -1  # rows of a vector are stepped together
        self._closed = False
        try:
            self._env = make_vector()
            self._mode = autoreset_mode(self._env, name)
        except BaseException as error:
            reraise(name, error)
        self.spec = spec or self._discover()
        self.num_rows = int(self._env.num_envs)
        self._actions = ActionConverter(self._env.single_action_space)
        self._observations = ObservationWriter(name, self._env.single_observation_space)
        self._masks = ActionMasks(name, self.spec) if self.spec.action_mask else None
        self._ended = np.zeros(self.num_rows, np.bool_)
        if self._mode is AutoresetMode.DISABLED:
            verify_partial_reset(self._env, self._observations)

    def reset(self, seeds: Sequence[int], obs: dict[str, Array]) -> None:
        """Start an episode in every row and write the first observations [R, *].

        Only gymnasium's own vectors are known to take one seed per env; others derive theirs from the first one.

        Raises:
            EnvironmentFailure: the environment raised, or an observation does not fit its space.
        """
        if len(seeds) != self.num_rows:
            raise ValueError(f"expected {self.num_rows} seeds, got {len(seeds)}")
        takes_list = isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        try:
            seed: Any = [int(seed) for seed in seeds] if takes_list else int(seeds[0])
            observation, infos = self._env.reset(seed=seed)
            self._observations.write_batch(obs, observation)
            self._ended = np.zeros(self.num_rows, np.bool_)
            self._write_masks(obs, infos)
        except BaseException as error:
            reraise(self.name, error)

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Step all rows with action [R, A]; write what came out into `row`.

        Raises:
            EnvironmentFailure: the environment raised, an observation does not fit its space, or a final observation
                is missing.
        """
        try:
            observation, reward, terminated, truncated, infos = self._env.step(self._actions.batch(action))
            self._write_outcome(row, reward, terminated, truncated)
            if "num_frames" in infos:
                np.copyto(row.num_frames, infos["num_frames"], casting="same_kind")
            if self.spec.same_step and self._ended.any():
                infos_of_obs = self._write_restarted(row, observation, infos)
            else:
                self._observations.write_batch(row.obs, observation)
                infos_of_obs = infos
            self._write_masks(row.obs, infos_of_obs)
            return self._episodes(infos) if self._ended.any() and infos else ()
        except BaseException as error:
            reraise(self.name, error)

    def close(self) -> None:
        """Close the vector; a failure to do so is reported as a warning."""
        if self._closed:
            return
        self._closed = True
        try:
            self._env.close()
        except (Exception, SystemExit) as error:  # what was learned must not be lost to an environment's clean-up
            warnings.warn(f"{self.name} raised {type(error).__name__} in close: {one_line(error)}", stacklevel=2)

    def _write_outcome(self, row: StepRow, reward: Any, terminated: Any, truncated: Any) -> None:
        """Write first, reward, terminated and truncated, and remember the rows that ended."""
        for key, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            if np.shape(value) != (self.num_rows,):
                raise EnvironmentFailure(
                    f"{self.name}: {key}: expected shape ({self.num_rows},), got {np.shape(value)}"
                )
        np.copyto(row.reward, reward, casting="same_kind")
        np.not_equal(terminated, 0, out=row.terminated)
        np.greater(np.not_equal(truncated, 0), row.terminated, out=row.truncated)  # both at once: terminated
        if self.spec.same_step:
            self._ended = row.terminated | row.truncated
            row.first[:] = self._ended
            if row.has_final is not None:
                row.has_final[:] = row.truncated
            return
        row.first[:] = self._ended
        if self._ended.any():  # the reset step belongs to no episode
            row.reward[self._ended] = 0.0
            row.terminated[self._ended] = row.truncated[self._ended] = False
        self._ended = row.terminated | row.truncated

    def _discover(self) -> EnvSpec:
        """The spec of the vector, which is reset where its infos could hold masks."""
        spaces = (self._env.single_observation_space, self._env.single_action_space)
        frames, same_step = frames_per_step(self._env), self._mode is not AutoresetMode.NEXT_STEP
        spec = spec_of(*spaces, frames_per_step=frames, same_step=same_step)
        if spec.action_mask or all(part.kind != "categorical" for part in spec.action.parts):
            return spec
        try:
            _, infos = self._env.reset()
        except BaseException as error:
            reraise(self.name, error)
        return spec_of(*spaces, frames_per_step=frames, same_step=same_step, mask_in_info=MASK_KEY in infos)

    def _write_masks(self, obs: dict[str, Array], infos: Mapping[str, Any]) -> None:
        """Take masks from infos if they come there, and check them; with NEXT_STEP an ended row needs no choice."""
        if self._masks is None:
            return
        if self._masks.in_info:
            self._masks.write_batch(obs, infos)
        nobody = np.zeros(self.num_rows, np.bool_)
        self._masks.check(obs, nobody if self.spec.same_step else self._ended)

    def _write_restarted(self, row: StepRow, observation: Any, infos: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write the final observations of the rows that ended and the first ones of their next episodes.

        Returns:
            The infos that belong to those first observations.
        """
        if self._mode is AutoresetMode.DISABLED:
            # before the reset: a vector may hand out one buffer again and again
            self._observations.write_batch(row.final_obs, observation, self._ended)
            observation, infos = self._env.reset(options={"reset_mask": self._ended.copy()})
        else:
            self._write_final(row, infos)
        self._observations.write_batch(row.obs, observation)
        return infos

    def _write_final(self, row: StepRow, infos: Mapping[str, Any]) -> None:
        """Take final observations from infos: an object array with a mask, or a dense batch without one (ale-py)."""
        final = infos.get("final_obs")
        if final is None:
            if row.truncated.any():  # the value of a terminated episode's last observation is 0 whatever it shows
                raise EnvironmentFailure(
                    f"{self.name}: an episode was truncated and infos hold no final_obs (SAME_STEP)"
                )
            return
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            self._observations.write_batch(row.final_obs, final, self._ended)
            return
        for index in np.flatnonzero(self._ended):
            if final[index] is not None:
                self._observations.write_row(row.final_obs, int(index), final[index])
            elif row.truncated[index]:
                raise EnvironmentFailure(f"{self.name}: final_obs of truncated env {index} is missing (SAME_STEP)")

    def _episodes(self, infos: Mapping[str, Any]) -> Sequence[EpisodeStats]:
        """Statistics of the rows that ended now; a SAME_STEP vector keeps them under `final_info`."""
        source = infos.get("final_info", infos)
        found = [episode_stats(int(row), row_of_batched(source, int(row))) for row in np.flatnonzero(self._ended)]
        return [stats for stats in found if stats is not None]


def autoreset_mode(env: AnyVectorEnv, name: str) -> AutoresetMode:
    """What the vector does after a done; NEXT_STEP, with a warning, if it does not say."""
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        warnings.warn(f"{name}: metadata['autoreset_mode'] is {mode!r}; assuming NEXT_STEP", stacklevel=3)
        return AutoresetMode.NEXT_STEP


def verify_partial_reset(env: AnyVectorEnv, observations: ObservationWriter) -> None:
    """Check that reset(options={"reset_mask": mask}) leaves the other rows where they are.

    A vector that ignores the mask would cut every running episode short whenever one ends, unnoticed.

    Raises:
        UsageError: rows outside the mask were reset.
        EnvironmentFailure: the environment raised.
    """
    name, num_rows = observations.name, env.num_envs
    before, after = observations.empty(num_rows), observations.empty(num_rows)
    env.action_space.seed(0)
    try:
        observation, _ = env.reset(seed=0)
        for num_steps in range(2, 2 + PROBE_ROUNDS):
            for _ in range(num_steps):
                observation = _step_and_restart(env)
            observations.write_batch(before, observation)
            mask = np.arange(num_rows) == num_steps % num_rows
            observation, _ = env.reset(options={"reset_mask": mask.copy()})
            observations.write_batch(after, observation)
            if not all(np.array_equal(before[key][~mask], after[key][~mask], equal_nan=True) for key in before):
                raise UsageError(
                    f"{name}: its autoreset is DISABLED and reset(options={{'reset_mask': ...}}) resets rows outside "
                    "the mask; use --env_vectorization=python or a vector env that honours the mask"
                )
    except BaseException as error:
        reraise(name, error)


def _step_and_restart(env: AnyVectorEnv) -> Any:
    """One random step; rows that end are reset, since stepping them again is forbidden."""
    observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
    ended: BoolArray = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
    if ended.any():
        observation, _ = env.reset(options={"reset_mask": ended})
    return observation
