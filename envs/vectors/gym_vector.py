"""Adapter of gymnasium's vector environments, for all autoreset modes."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from appo.envs.conversion import ActionConverter, ObservationWriter, close_env, require_info, reraise
from appo.envs.finite import FiniteCheck
from appo.envs.infos import FRAMES_KEY, InfoReader
from appo.envs.loop.env_set import RAISE, OnFailure
from appo.envs.masks import BY_METHOD, ActionMasks, random_action, why_unmasked
from appo.envs.outcome import truths_of, write_rewards
from appo.envs.spaces import AS_THEY_ARE, ActionForm, frames_per_step, layers, require_spec, spec_of
from appo.envs.spec import MASK_KEY, Array, BoolArray, EnvSpec, EpisodeStats, GroupEnv, StepRow, step_row
from appo.envs.vectors.autoreset import (
    FIRST_ENDS,
    LAST_INFO,
    Contradiction,
    Ends,
    final_obs_in,
    gathered,
    keep_last_observations,
)
from appo.envs.vectors.recorder import VectorRecorder
from appo.envs.wrappers.masks_of_method import VectorMasksOfMethod
from appo.envs.wrappers.normalization import own_normalization
from appo.utils.errors import EnvironmentFailure, UsageError

AnyVectorEnv = VectorEnv[Any, Any, Any]
DECLARED_STEPS, UNDECLARED_STEPS, SETTLING_SECONDS = 64, 500, 5.0
"""Bounds of the random steps at the start that look at ends: in steps and in time."""

PROBE_ROUNDS = 4
"""Partial resets tried at start-up; after 2, 3, 4 and 5 steps, so that a chance coincidence hides nothing."""


class GymVector:
    """Steps a gymnasium vector environment as a group.

    NEXT_STEP is passed on unchanged. SAME_STEP hands final observations over separately. The group resets a DISABLED
    vector right after a done as SAME_STEP does; the constructor tries a partial reset.

    Args:
        make_vector: function that makes the vector environment.
        name: name of the environment in messages.
        spec: known spec; None: a reset shows whether infos contain masks.
        form: units in which policies act, without a known spec.
        on_failure: record of the steps before a failure; a failure of a vector is always raised.
    """

    def __init__(
        self,
        make_vector: Callable[[], AnyVectorEnv],
        *,
        name: str,
        spec: EnvSpec | None = None,
        form: ActionForm = AS_THEY_ARE,
        on_failure: OnFailure = RAISE,
    ):
        self.name, self._closed = name, False
        self.rebuilds = 0  # rows of a vector are stepped together, and fail together
        self._recorder = VectorRecorder(name, on_failure)
        with self._recorder.making():
            self._env = make_vector()
            self._mode, is_declared = autoreset_mode(self._env, name, spec)
            if self._mode is AutoresetMode.SAME_STEP:
                keep_last_observations(self._env)
        self.single_spaces = (self._env.single_observation_space, self._env.single_action_space)
        if spec is not None:
            require_spec(name, spec, *self.single_spaces)
        self.spec = spec or replace(self._discover(form), notes=own_normalization(self._env))
        self.num_rows = int(self._env.num_envs)
        self._actions = ActionConverter(self._env.single_action_space, self.spec.action)
        self._observations = ObservationWriter(name, *self.single_spaces)
        self._masks = ActionMasks(name, self.spec, *self.single_spaces) if self.spec.action_mask else None
        self.infos = InfoReader(name, why_unmasked(self.spec))
        self.said = self.infos.found
        self.cut = np.zeros(self.num_rows, np.bool_)
        self._finite = FiniteCheck(name, self.spec)
        trusted = type(self._env.unwrapped).__module__.startswith("gymnasium.")  # its vectors do what they declare
        self.ends = Ends(name, self._mode, is_declared=is_declared, is_trusted=trusted)
        self._final_obs = self._observations.empty(self.num_rows)
        self._ended, self._num_ended = np.zeros(self.num_rows, np.bool_), 0  # in the step before
        self._counts_frames = False  # once infos say how many frames a step took, all of them are written
        if self._mode is AutoresetMode.DISABLED:
            verify_partial_reset(self)

    def reset(self, seeds: Sequence[int], obs: dict[str, Array]) -> None:
        """Start an episode in every row and write the first observations [R, *].

        Only gymnasium's own vectors certainly take a seed per env; others derive all seeds from the first.

        Raises:
            EnvironmentFailure: the environment raised, or an observation does not fit the space.
        """
        if len(seeds) != self.num_rows:
            raise ValueError(f"expected {self.num_rows} seeds, got {len(seeds)}")
        takes_list = isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        with self._recorder.resetting(seeds):
            seed: Any = [int(seed) for seed in seeds] if takes_list else int(seeds[0])
            observation, infos = self._env.reset(seed=seed)
            require_info(self.name, "reset", infos)
            self._observations.write_batch(obs, observation)
            self.ends.begin(obs)
            self._ended, self._num_ended = np.zeros(self.num_rows, np.bool_), 0
            self._write_masks(obs, infos, ~self._ended)
            self._check_masks(obs)
            self._require_finite(obs, np.zeros(self.num_rows, np.float32))

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Step all rows with action [R, A]; write the results into `row`.

        Raises:
            EnvironmentFailure: the environment raised, an observation does not fit the space, or a final observation
                is missing.
        """
        with self._recorder.stepping(action):
            observation, reward, terminated, truncated, infos = self._env.step(self._actions.batch(action))
            if type(infos) is not dict:
                require_info(self.name, "step", infos)
            infos = gathered(self._env, infos) if infos else infos
            ends = self._write_outcome(row, reward, terminated, truncated)
            if row.lives is not None:
                self.infos.write_lives(infos, row.lives, ~row.first)
            if infos or self._counts_frames:
                self._write_frames(row, infos)
            # Before a reset of ours: a vector may hand out one info again and again. SAME_STEP has a `final_info`.
            episodes = self.infos.batch_of_stats(infos.get("final_info", infos), self._ended) if ends and infos else ()
            if infos or self._masks is not None:
                self._write_masks(row.obs, infos, ~self._ended)
            if self.spec.same_step and ends:
                self._write_restarted(row, observation, infos)
            else:
                self._observations.write_batch(row.obs, observation)
                if not self.ends.is_trusted:
                    self.ends.look(row.obs)
                if ends:
                    self._verify(row.obs, infos)
            self._check_masks(row.obs)
            self._require_finite(row.obs, row.reward)
            if row.has_final is not None and row.has_final.any():
                self._require_finite(row.final_obs, row.reward, row.has_final)
            return episodes

    def _require_finite(self, obs: dict[str, Array], reward: Array, rows: BoolArray | None = None) -> None:
        """Raise the first `NotFinite` among observations [R, *] and rewards [R], or only among `rows` [R] of them."""
        for index, failure in self._finite(obs, reward).items():
            if rows is None or rows[index]:
                raise failure

    def close(self) -> None:
        """Close the vector; a failure to do so is reported as a warning."""
        if self._closed:
            return
        self._closed = True
        self._recorder.closes()
        close_env(self._env, self.name, stacklevel=3)

    def _write_outcome(self, row: StepRow, reward: Any, terminated: Any, truncated: Any) -> int:
        """Write first, reward, terminated and truncated; return how many rows ended."""
        write_rewards(self.name, reward, row.reward)
        row.terminated[:] = truths_of(self.name, "terminated", terminated, self.num_rows)
        # Both at once: terminated.
        np.greater(truths_of(self.name, "truncated", truncated, self.num_rows), row.terminated, out=row.truncated)
        if not self.spec.same_step:
            row.first[:] = self._ended
            if self._num_ended:
                if not self.ends.is_trusted:
                    self.ends.require_nothing(self._ended, row.reward, row.terminated | row.truncated)
                row.reward[self._ended] = 0.0  # of a trusted vector: the reset step belongs to no episode
                row.terminated[self._ended] = row.truncated[self._ended] = False
        self._ended = row.terminated | row.truncated
        if self.spec.same_step:
            row.first[:] = self._ended
            if row.has_final is not None:
                row.has_final[:] = row.truncated
        self._num_ended = int(np.count_nonzero(self._ended))
        return self._num_ended

    def _write_frames(self, row: StepRow, infos: Mapping[str, Any]) -> None:
        """Write the frames behind every step; a SAME_STEP vector reports the frames of a last step in `final_info`."""
        final = infos.get("final_info", {}) if self.spec.same_step else {}
        if FRAMES_KEY in infos or FRAMES_KEY in final:
            self._counts_frames = True
        if not self._counts_frames:
            return
        row.num_frames.fill(self.spec.frames_per_step)
        last = self._ended & (self.spec.same_step and "final_info" in infos)
        for source, rows in ((infos, ~last & (self.spec.same_step | ~row.first)), (final, last)):
            if FRAMES_KEY in source:
                self.infos.batch_of_frames(source, rows, row.num_frames)

    def _discover(self, form: ActionForm) -> EnvSpec:
        """Return the spec; a vector whose infos could contain masks is reset."""
        frames, same_step = frames_per_step(self._env), self._mode is not AutoresetMode.NEXT_STEP
        describe = partial(spec_of, *self.single_spaces, frames_per_step=frames, same_step=same_step, form=form)
        spec = describe()
        if spec.action_mask or all(part.kind != "categorical" for part in spec.action.parts):
            return spec
        try:
            _, infos = self._env.reset()
        except BaseException as error:
            reraise(self.name, error)
        if MASK_KEY not in (infos or {}):
            return spec
        masked = describe(mask_in_info=True)
        by_method = any(isinstance(layer, VectorMasksOfMethod) for layer in layers(self._env))
        return replace(masked, mask_source=BY_METHOD) if by_method else masked

    def _write_masks(self, obs: dict[str, Array], infos: Mapping[str, Any], rows: BoolArray) -> None:
        """Copy the masks of some rows [R] from infos if masks come there; refuse masks that have no place in memory."""
        if infos:
            self.infos.refuse_masks(infos)
        if self._masks is not None and self._masks.in_info:
            self._masks.write_batch(obs, infos, np.flatnonzero(rows))

    def _check_masks(self, obs: dict[str, Array]) -> None:
        """Raise for masks that leave no choice; with NEXT_STEP an ended row needs none."""
        if self._masks is not None:
            ended = np.zeros(self.num_rows, np.bool_) if self.spec.same_step else self._ended
            for failure in self._masks.stuck(obs, ended).values():
                raise failure

    def _write_restarted(self, row: StepRow, observation: Any, infos: Mapping[str, Any]) -> None:
        """Write final and first observations of the rows that ended, and the masks of both."""
        if self._mode is AutoresetMode.DISABLED:
            # before the reset: a vector may hand out one buffer again and again
            self._observations.write_batch(row.final_obs, observation, self._ended)
            self._verify(row.final_obs, infos)
            observation, infos = self._env.reset(options={"reset_mask": self._ended.copy()})
            require_info(self.name, "reset", infos)
            self._observations.write_batch(row.obs, observation)
            self._write_masks(row.obs, infos, self._ended)
            return
        self._observations.write_batch(row.obs, observation)
        self.ends.look(row.obs)
        lacks = np.flatnonzero(row.truncated & ~self._compare(row.obs, row.final_obs, infos))
        if len(lacks):  # the value of a terminated episode's last observation is 0 whatever it shows
            raise EnvironmentFailure(
                f"{self.name}: an episode was truncated and infos hold no final_obs (SAME_STEP)"
                if final_obs_in(infos)[0] is None
                else f"{self.name}: final_obs of truncated env {lacks[0]} is missing (SAME_STEP)"
            )
        self._write_final_masks(row.final_obs, infos.get(LAST_INFO) or {})
        self._write_masks(row.obs, infos, self._ended)

    def _write_final_masks(self, final_obs: dict[str, Array], infos: Mapping[str, Any]) -> None:
        """Write the masks of final observations: the policy values the best allowed choice."""
        if self._masks is not None:
            self._masks.write_final(final_obs, infos, self._ended)

    def _verify(self, shown: dict[str, Array], infos: Mapping[str, Any]) -> None:
        """Count ended rows, compare what the rows show with the final observations in infos, and write the masks."""
        if self.ends.is_trusted:
            self.ends.count += self._num_ended
        else:
            self._compare(shown, self._final_obs, infos)
        self._write_final_masks(shown, infos)

    def _compare(self, shown: dict[str, Array], out: dict[str, Array], infos: Mapping[str, Any]) -> BoolArray:
        """Compare the observations of ended rows with the final observations in infos; return the rows [R] with one.

        Final observations are an object array, or a dense batch (ale-py), with a mask or without.
        """
        final, mask = final_obs_in(infos) if infos else (None, False)
        given: BoolArray = self._ended & np.asarray(mask, np.bool_)
        if isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object):
            given &= np.array([one is not None for one in final])
            for index in np.flatnonzero(given):
                self._observations.write_row(out, int(index), final[index])
        elif final is not None:
            self._observations.write_batch(out, final, given)
        self.ends.compare(shown, self._ended, out, given)
        return given

    def settle_mode(self) -> None:
        """Step at random until ends have proved how the vector goes on; a missing declaration follows from the proof.

        Raises:
            Contradiction: the vector contradicts the declaration, or resets in a way that is no basis for learning.
            EnvironmentFailure: the environment raised.
        """
        is_declared, until = self.ends.is_declared, time.monotonic() + SETTLING_SECONDS
        try:
            random_steps(
                self,
                DECLARED_STEPS if is_declared else UNDECLARED_STEPS,
                np.random.default_rng(0),
                lambda: self.ends.count >= 2 * FIRST_ENDS or time.monotonic() > until,
            )
        except Contradiction as error:
            if is_declared or not error.proves_same_step:
                raise
            self._mode = AutoresetMode.SAME_STEP
            self.ends = Ends(self.name, self._mode, is_declared=False)
        if not is_declared:
            why = "by final_obs in its infos" if self._mode is AutoresetMode.SAME_STEP else "without any other sign"
            said = f"has no metadata['autoreset_mode']; {why}, it is taken as {self._mode.value} (docs/own_env.md)"
            same_step, notes = self._mode is AutoresetMode.SAME_STEP, (f"{self.name} {said}",)
            self.spec = replace(self.spec, same_step=same_step, notes=self.spec.notes + notes)


def autoreset_mode(env: AnyVectorEnv, name: str, known: EnvSpec | None = None) -> tuple[AutoresetMode, bool]:
    """Return the mode after a done, and whether the vector declares the mode.

    Without a declaration the known spec decides; else NEXT_STEP, with a warning.
    """
    said = (env.metadata or {}).get("autoreset_mode")
    with suppress(ValueError):
        return AutoresetMode(said), True
    if known is not None:
        return (AutoresetMode.SAME_STEP if known.same_step else AutoresetMode.NEXT_STEP), False
    warnings.warn(f"{name}: metadata['autoreset_mode'] is {said!r}; assuming NEXT_STEP", stacklevel=3)
    return AutoresetMode.NEXT_STEP, False


def verify_partial_reset(group: GymVector) -> None:
    """Check that reset(options={"reset_mask": mask}) leaves rows outside the mask unchanged.

    A vector that ignores the mask would cut every running episode short whenever one ends, unnoticed.

    Raises:
        UsageError: rows outside the mask were reset.
        EnvironmentFailure: the environment raised.
    """
    rows, random = np.arange(group.num_rows), np.random.default_rng(0)
    after = group._observations.empty(group.num_rows)
    for num_steps in range(2, 2 + PROBE_ROUNDS):
        obs = random_steps(group, num_steps, random)
        mask = rows == num_steps % group.num_rows
        try:
            observation, _ = group._env.reset(options={"reset_mask": mask.copy()})
            group._observations.write_batch(after, observation)
        except BaseException as error:
            reraise(group.name, error)
        if not all(np.array_equal(obs[key][~mask], after[key][~mask]) for key in after):
            raise UsageError(
                f"{group.name}: its autoreset is DISABLED and reset(options={{'reset_mask': ...}}) resets rows outside "
                "the mask; use --env_vectorization=python or a vector env that honours the mask"
            )


def random_steps(
    group: GroupEnv, num_steps: int, random: np.random.Generator, enough: Callable[[], bool] = lambda: False
) -> dict[str, Array]:
    """Return the observations after random steps from a reset, taken as an actor takes steps; fewer when `enough`."""
    num_rows, spec = group.num_rows, group.spec
    row = step_row(spec, num_rows)
    obs: dict[str, Any] = row.obs
    group.reset(range(num_rows // spec.num_agents), obs)
    for _ in range(num_steps):
        if enough():
            break
        masks = obs[MASK_KEY].reshape(num_rows, -1) > 0 if spec.action_mask else [None] * num_rows
        group.step(np.concatenate([random_action(spec.action, mask, random) for mask in masks]), row)
    return obs
