"""Playing a trained policy: the environment, the model and the order of things are those of training."""

import bisect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from algorithms.playing.config import EvaluationConfig
from algorithms.playing.episodes import Episode, Tally
from algorithms.playing.video import Recorder, VideoFile
from algorithms.run.config import Config
from algorithms.run.folder import newest_run, saved_flags
from algorithms.runtime.algorithm import Context
from algorithms.runtime.callbacks import EpisodeWatch, Hooks, Step
from algorithms.runtime.checkpointing import load_best
from algorithms.runtime.memory.arena import Array
from algorithms.runtime.memory.learner_state import decode
from algorithms.runtime.sampling.policy import Policy
from envs.config import EnvConfig
from envs.make import is_vector_only, make_group
from envs.spec import EnvSpec, EpisodeStats, GroupEnv, StepRow
from utils import checkpoint_files
from utils.errors import CannotBeDrawn, CheckpointError, UsageError
from utils.machine import choose_device
from utils.run_folder import RunFolder
from utils.values import shown

Look = Callable[[bool], None]


class Run(NamedTuple):
    """What is played."""

    directory: Path
    config: Config
    checkpoint: Path
    files: dict[str, bytes]  # of the checkpoint, verified


EVALUATED_METRIC = "eval/mean"
"""What the best by evaluation has most of."""

MISSING = {
    "latest": "checkpoint of policy {} yet",
    "best": "best checkpoint of policy {} yet: one is kept after --save_best_after env steps of training",
    "best_evaluated": "evaluated checkpoint of policy {} yet: --eval_every_sec or appo evaluate keeps one",
    "past": "past version of policy {} yet: --self_play keeps some",
    "milestone": "milestone of policy {} yet: one is kept every --save_milestones_sec seconds of training",
}


def find_run(config: EvaluationConfig) -> Run:
    """The run that the flags name, with its flags and the checkpoint they name.

    Raises:
        UsageError: there is no such run, policy or milestone.
        CheckpointError: there is no such checkpoint, or none of them verifies.
    """
    group = Path(config.train_dir, config.experiments_root)
    directory = group / config.experiment if config.experiment else newest_run(group, config.env)
    flags = saved_flags(directory)
    if not flags:
        raise UsageError(f"there is no run {shown(str(directory))}")
    saved = Config.from_flat(flags)
    if config.env and config.env != saved.env.env:
        raise UsageError(f"run {directory.name} is of {shown(saved.env.env)}, not of --env={shown(config.env)}")
    if config.policy_index >= saved.sampling.num_policies:
        raise UsageError(
            f"--policy_index={config.policy_index}: run {directory.name} has {saved.sampling.num_policies} policies, "
            "counted from 0"
        )
    loaded = _load_checkpoint(directory, config, saved.run.save_best_metric)
    for _, reason in loaded.found.damaged:
        sys.stderr.write(f"warning: damaged checkpoint skipped: {reason}\n")
    return Run(directory, saved, loaded.found.path, loaded.files)


def _load_checkpoint(directory: Path, config: EvaluationConfig, best_metric: str) -> checkpoint_files.Loaded:
    """The newest checkpoint of the kind that the flags name, the best, or the milestone that they name."""
    kind = config.load_checkpoint_kind
    parent = RunFolder(directory).checkpoints(config.policy_index, kind)
    if kind == "best":
        loaded = load_best(parent, best_metric, decode)
    elif kind == "best_evaluated":
        loaded = load_best(parent, EVALUATED_METRIC, decode)
    elif config.milestone is not None:
        loaded = _load_milestone(parent, config.milestone)
    else:
        loaded = checkpoint_files.load(parent, check=decode)
    if loaded is None:
        raise CheckpointError(f"run {directory.name} has no {MISSING[kind].format(config.policy_index)}")
    return loaded


def _load_milestone(parent: Path, at_most: int) -> checkpoint_files.Loaded | None:
    """The newest milestone of at most so many env steps that verifies; None where there are none at all."""
    steps = sorted(step for step, _ in checkpoint_files.listed(parent))
    if steps and steps[0] > at_most:
        raise UsageError(f"--milestone={at_most}: the first milestone is at {steps[0]} env steps")
    damaged: list[checkpoint_files.Damaged] = []
    for step in reversed(steps[: bisect.bisect_right(steps, at_most)]):
        path = parent / checkpoint_files.checkpoint_name(step)
        try:
            files = checkpoint_files.contents(path)
            decode(files)
        except CheckpointError as error:
            damaged.append(checkpoint_files.Damaged(path, str(error)))
            continue
        return checkpoint_files.Loaded(checkpoint_files.Found(path, step, tuple(damaged)), files)
    if damaged:
        reasons = "; ".join(reason for _, reason in damaged)
        raise CheckpointError(f"none of {len(damaged)} checkpoints can be used: {reasons}")
    return None


def make_envs(saved: Config, config: EvaluationConfig) -> GroupEnv:
    """One environment behind our own loop, so that a seed means the same episodes with a window, a video or neither.

    A native vector can be neither watched nor filmed; it plays what exists or can be made in no other way.
    """
    env = _played(saved, config)
    if is_vector_only(env):
        return make_group(env, 1)
    alone = replace(env, env_vectorization="python")
    if config.window:
        try:
            return make_group(alone, 1, render_mode="human")
        except CannotBeDrawn as error:
            sys.stderr.write(f"warning: no window: {error}\n")
    try:
        return make_group(alone, 1)
    except UsageError:  # an argument of --env_kwargs that only the vector knows
        return make_group(env, 1)


def _stage(saved: Config, config: EvaluationConfig) -> tuple[GroupEnv, VideoFile | None, Look | None]:
    """The environment, and for a video the file and what films it."""
    if not config.save_video:
        return make_envs(saved, config), None, None
    recorder = Recorder(_played(saved, config), Path(config.save_video), config.fps)
    return recorder.group, recorder.video, recorder.look


def _played(saved: Config, config: EvaluationConfig) -> EnvConfig:
    """The environment of training, but for what the flags change."""
    repeat = config.render_action_repeat
    return saved.env if repeat is None else replace(saved.env, env_frameskip=repeat)


def load_player(run: Run, spec: EnvSpec, config: EvaluationConfig, seed: int) -> tuple["Player", int]:
    """The policy of a checkpoint, and the env steps it has learned from.

    Raises:
        UsageError: the checkpoint belongs to another model than the run's flags describe.
    """
    context = Context(spec, run.config.learning, run.config.model, "fp32", choose_device(config.device))
    algorithm = run.config.algorithm
    flat = algorithm.make_model(context)
    state, _ = decode(run.files, flat.table)
    flat.flat.copy_(torch.from_numpy(state.weights))
    return Player(algorithm.make_policy(context, flat), spec, config, seed), int(state.meta["env_steps"])


class Acts(Protocol):
    """Whoever plays."""

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Actions [R, A] for observations [R, *] of rows that start an episode where `first` [R] says so."""
        ...


class Player:
    """Acts as a policy worker does, for the rows of one environment.

    Args:
        policy: with its weights.
        spec: of the environment.
        config: how actions are chosen.
        seed: of their sampling.
    """

    def __init__(self, policy: Policy, spec: EnvSpec, config: EvaluationConfig, seed: int) -> None:
        self.policy, self.spec, self.device = policy, spec, policy.flat.flat.device
        self.random = policy.random(seed, spec.num_agents)
        self.rnn_state = torch.zeros(spec.num_agents, policy.rnn_state_size, device=self.device)
        self.greedy: bool | torch.Tensor = config.deterministic
        if not config.deterministic and not config.continuous_actions_sample:
            kinds = [part.kind for part in spec.action.parts for _ in range(part.num_values)]
            self.greedy = torch.tensor([kind == "gaussian" for kind in kinds], device=self.device)

    @torch.inference_mode()
    def act(self, obs: dict[str, Array], first: Array, *, deterministic: bool = False) -> Array:
        """Actions [R, A] for observations [R, *] of rows that start an episode where `first` [R] says so.

        With `deterministic` all are the most probable ones, whatever the flags say.
        """
        tensors = {key: torch.from_numpy(value).to(self.device) for key, value in obs.items()}
        starts = torch.from_numpy(first).to(self.device)
        greedy = deterministic or self.greedy
        recorded, self.rnn_state = self.policy.act(tensors, starts, self.rnn_state, None, self.random, greedy=greedy)
        action: Array = recorded["action"].cpu().numpy()
        return action


def play(
    envs: GroupEnv, player: Acts, config: EvaluationConfig, seed: int, look: Look | None = None
) -> Iterator[Episode]:
    """Yield episodes as they end, up to the limits of the flags. The same seed gives the same episodes.

    `look` is called before every action and at the end of an episode, once each; it is told whether it is the end.
    """
    row = _first_row(envs, seed)
    tally = Tally(envs.spec.num_agents)
    num_episodes = frames = 0
    ended = False
    clock = _Clock(config.fps if config.window else 0.0)
    while _goes_on(config, num_episodes, frames):
        if look is not None:
            look(ended)
        stats = envs.step(player.act(row.obs, row.first), row)
        valid = np.ones_like(row.first) if envs.spec.same_step else ~row.first  # the reset step belongs to no episode
        frames += tally.add(row, valid, stats)
        if ended := tally.over:
            yield tally.episode()
            num_episodes += 1
        clock.wait()
    if look is not None:
        look(ended)


def _first_row(envs: GroupEnv, seed: int) -> StepRow:
    """What the environments show first, in the memory that every step is written into."""
    spec, rows = envs.spec, envs.num_rows
    obs = {key: np.zeros((rows, *o.shape), o.dtype) for key, o in spec.observations.items()}
    final = {key: np.zeros_like(value) for key, value in obs.items()} if spec.same_step else {}
    flags = [np.zeros(rows, np.bool_) for _ in range(4)]
    num_frames = np.full(rows, spec.frames_per_step, np.int32)
    row = StepRow(obs, flags[0], np.zeros(rows, np.float32), flags[1], flags[2], num_frames, final, flags[3])
    row.first[:] = True
    envs.reset([int(s) >> 1 for s in np.random.SeedSequence(seed).generate_state(1)], row.obs)
    return row


def _goes_on(config: EvaluationConfig, num_episodes: int, frames: int) -> bool:
    limits = ((config.episode_limit, num_episodes), (config.max_num_frames, frames))
    return all(not limit or count < limit for limit, count in limits)


class _Clock:
    """Lets at most so many frames pass per second; 0: as many as come."""

    def __init__(self, frames_per_second: float) -> None:
        self.interval = 1 / frames_per_second if frames_per_second else 0.0
        self.due = time.monotonic()

    def wait(self) -> None:
        """Wait until the next frame is due; time lost is not made up for by haste."""
        now = time.monotonic()
        self.due = max(self.due + self.interval, now)
        if self.interval:
            time.sleep(self.due - now)


class ToldEnvs:
    """Environments that are played outside of a run.

    Args:
        envs: those.
        policy: that plays them.
        hooks: are told.
    """

    def __init__(self, envs: GroupEnv, policy: int, hooks: Hooks) -> None:
        self.spec, self.num_rows = envs.spec, envs.num_rows
        self._envs, self._hooks, self._watch = envs, hooks, EpisodeWatch(hooks, envs.num_rows)
        self._policies = np.full(envs.num_rows, policy, np.int32)

    @property
    def rebuilds(self) -> int:
        """Environments made again so far."""
        return self._envs.rebuilds

    def reset(self, seeds: Sequence[int], obs: dict[str, Any]) -> None:
        """Write the first observations."""
        self._envs.reset(seeds, obs)

    def step(self, action: Array, row: StepRow) -> Sequence[EpisodeStats]:
        """Take a step, and tell of it."""
        before = {key: array.copy() for key, array in row.obs.items()}
        stats = self._envs.step(action, row)
        seen = Step(
            first_env=0,
            num_agents=self.spec.num_agents,
            observations=before,
            actions=action,
            rewards=row.reward,
            num_frames=row.num_frames,
            terminated=row.terminated,
            truncated=row.truncated,
            valid=np.ones_like(row.first) if self.spec.same_step else ~row.first,
            policies=self._policies,
        )
        return [*stats, *self._watch.see(seen, stats)]

    def close(self) -> None:
        """Close the environments; nothing more happens."""
        self._envs.close()
        self._hooks.tell("on_end")
