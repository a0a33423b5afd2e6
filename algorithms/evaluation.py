"""Playing a trained policy: the environment, the model and the order of things are those of training."""

import bisect
import contextlib
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from algorithms.appo.build import new_model
from algorithms.appo.config import Config
from algorithms.appo.runs import newest_run, saved_flags
from algorithms.evaluation_config import EvaluationConfig
from algorithms.models.actor_critic import ActorCritic
from algorithms.ops.distributions import ActionDistribution
from algorithms.population.past import FOLDER
from algorithms.runtime.arena import Array
from algorithms.runtime.best import load_best
from algorithms.runtime.callbacks import Hooks, find_callbacks
from algorithms.runtime.checkpointing import decode
from algorithms.runtime.flat_module import FlatModule
from algorithms.runtime.telling import ToldEnvs
from algorithms.tally import Episode, Tally, agent_means, team_mean
from algorithms.video import Recorder, VideoFile
from envs.config import EnvConfig
from envs.make import is_vector_only, make_group
from envs.spec import MASK_KEY, EnvSpec, GroupEnv, StepRow
from utils import checkpoint, cpu
from utils.command_line import say
from utils.devices import choose_device
from utils.errors import CannotBeDrawn, CheckpointError, UsageError
from utils.values import json_text, shown

Look = Callable[[bool], None]


class Run(NamedTuple):
    """What is played."""

    directory: Path
    config: Config
    checkpoint: Path
    files: dict[str, bytes]  # of the checkpoint, verified


class Result(NamedTuple):
    """What came of playing."""

    run: Run
    env_steps: int  # that the policy has learned from
    seed: int
    episodes: list[Episode]
    video: VideoFile | None


FOLDERS = {"latest": "", "best": "best", "best_evaluated": "best_evaluated", "milestone": "milestones", "past": FOLDER}
"""Where checkpoints of a kind are, inside those of their policy."""

EVALUATED_METRIC = "eval/mean"
"""What the best by evaluation has most of."""

MISSING = {
    "latest": "checkpoint of policy {} yet",
    "best": "best checkpoint of policy {} yet: one is kept after --save_best_after env steps of training",
    "best_evaluated": "evaluated checkpoint of policy {} yet: --eval_every_sec or appo evaluate keeps one",
    "past": "past version of policy {} yet: --self_play keeps some",
    "milestone": "milestone of policy {} yet: one is kept every --save_milestones_sec seconds of training",
}


def enjoy(config: EvaluationConfig) -> int:
    """Play a trained policy and print its episodes; the exit code.

    Raises:
        UsageError: there is no such run, or the environment cannot be played as asked.
        CheckpointError: the policy has no checkpoint that can be used.
        EnvironmentFailure: the environment raised.
        ResourceError: the video cannot be written.
    """
    run = find_run(config)
    for name in config.callbacks:
        find_callbacks(name)
    cpu.limit_threads(1)  # a batch of one row gains nothing from more
    seed = config.seed if config.seed is not None else secrets.randbits(32)
    with contextlib.redirect_stdout(sys.stderr) if config.json else contextlib.nullcontext():
        result = play_run(run, config, seed)
    say(_as_json(result) if config.json else _summary(result))
    return 0


def play_run(run: Run, config: EvaluationConfig, seed: int) -> Result:
    """Play and film as the flags say; without --json every episode is printed when it ends.

    Raises:
        UsageError, EnvironmentFailure, ResourceError: as `enjoy`.
    """
    with contextlib.ExitStack() as stack:
        envs, video, look = _stage(run.config, config)
        if video is not None:
            stack.enter_context(video)  # finished after the environments are closed
        if config.callbacks:
            envs = ToldEnvs(envs, config.policy_index, Hooks.make(config.callbacks, run.config.to_flat(), 0))
        stack.callback(envs.close)
        player, env_steps = load_player(run, envs.spec, config, seed)
        result = Result(run, env_steps, seed, [], video)
        if not config.json:
            which = f"{config.load_checkpoint_kind} checkpoint of policy {config.policy_index}"
            say(f"{run.directory}: {which} at {env_steps} env steps, seed {seed}")
            say("episode        return     length")
        for number, episode in enumerate(play(envs, player, config, seed, look), start=1):
            result.episodes.append(episode)
            if not config.json:
                say(f"{number:7}  {episode.episode_return:12.3f}  {episode.length:9}")
    return result


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


def _load_checkpoint(directory: Path, config: EvaluationConfig, best_metric: str) -> checkpoint.Loaded:
    """The newest checkpoint of the kind that the flags name, the best, or the milestone that they name."""
    kind = config.load_checkpoint_kind
    parent = directory / f"checkpoint_p{config.policy_index}" / FOLDERS[kind]
    if kind == "best":
        loaded = load_best(parent, best_metric, decode)
    elif kind == "best_evaluated":
        loaded = load_best(parent, EVALUATED_METRIC, decode)
    elif config.milestone is not None:
        loaded = _load_milestone(parent, config.milestone)
    else:
        loaded = checkpoint.load(parent, check=decode)
    if loaded is None:
        raise CheckpointError(f"run {directory.name} has no {MISSING[kind].format(config.policy_index)}")
    return loaded


def _load_milestone(parent: Path, at_most: int) -> checkpoint.Loaded | None:
    """The newest milestone of at most so many env steps that verifies; None where there are none at all."""
    steps = sorted(step for step, _ in checkpoint.listed(parent))
    if steps and steps[0] > at_most:
        raise UsageError(f"--milestone={at_most}: the first milestone is at {steps[0]} env steps")
    damaged: list[checkpoint.Damaged] = []
    for step in reversed(steps[: bisect.bisect_right(steps, at_most)]):
        path = parent / checkpoint.checkpoint_name(step)
        try:
            files = checkpoint.contents(path)
            decode(files)
        except CheckpointError as error:
            damaged.append(checkpoint.Damaged(path, str(error)))
            continue
        return checkpoint.Loaded(checkpoint.Found(path, step, tuple(damaged)), files)
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
    device = choose_device(config.device)
    flat = new_model(run.config, spec, device)
    state, _ = decode(run.files, flat.table)
    flat.flat.copy_(torch.from_numpy(state.vectors[0]))
    flat.module.eval()
    return Player(flat, spec, config, seed), int(state.meta["env_steps"])


class Acts(Protocol):
    """Whoever plays."""

    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Actions [R, A] for observations [R, *] of rows that start an episode where `first` [R] says so."""
        ...


class Player:
    """Acts as a policy worker does, for the rows of one environment.

    Args:
        flat: the model with its weights.
        spec: of the environment.
        config: how actions are chosen.
        seed: of their sampling.
    """

    def __init__(self, flat: FlatModule, spec: EnvSpec, config: EvaluationConfig, seed: int) -> None:
        assert isinstance(flat.module, ActorCritic)
        self.flat, self.model, self.spec, self.device = flat, flat.module, spec, flat.flat.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.rnn_state = torch.zeros(spec.num_agents, self.model.rnn_state_size, device=self.device)
        # [A] per action value: take the most probable one instead of a sample.
        kinds = [part.kind for part in spec.action.parts for _ in range(part.num_values)]
        fixed = [config.deterministic or (k == "gaussian" and not config.continuous_actions_sample) for k in kinds]
        self.take_mode = torch.tensor(fixed, device=self.device)

    @torch.inference_mode()
    def act(self, obs: dict[str, Array], first: Array, *, deterministic: bool = False) -> Array:
        """Actions [R, A] for observations [R, *] of rows that start an episode where `first` [R] says so.

        With `deterministic` all are the most probable ones, whatever the flags say.
        """
        tensors = {key: torch.from_numpy(value).to(self.device) for key, value in obs.items()}
        starts = torch.from_numpy(first).to(self.device)
        logits, _, self.rnn_state = self.model.act(tensors, starts, self.rnn_state)
        mask = tensors[MASK_KEY].flatten(1) > 0 if MASK_KEY in tensors else None
        distribution = ActionDistribution(self.spec.action.parts, logits, mask)
        take_mode = self.take_mode | deterministic
        action = torch.where(take_mode, distribution.mode(), distribution.sample(self.generator))
        return action.cpu().numpy()


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


def _summary(result: Result) -> str:
    returns = [episode.episode_return for episode in result.episodes]
    text = "no episode ended before --max_num_frames"
    if returns:
        text = (
            f"{len(returns)} episodes: return {statistics.fmean(returns):.3f} +- {statistics.pstdev(returns):.3f} "
            f"(mean +- standard deviation), median {statistics.median(returns):.3f}"
        )
    if agents := agent_means(result.episodes):
        each = ", ".join("none" if mean is None else f"{mean:.3f}" for mean in agents)
        text += f"\nreturn of each agent: {each}; of all together {team_mean(result.episodes):.3f}"
    if result.video is None:
        return text
    video = result.video
    return f"{text}\nvideo: {video.path}, {video.pictures} pictures at {video.pictures_per_second:g} per second"


def _as_json(result: Result) -> str:
    returns = [episode.episode_return for episode in result.episodes]
    figures = {
        "env_steps": result.env_steps,
        "checkpoint": str(result.run.checkpoint),
        "seed": result.seed,
        "num_episodes": len(returns),
        "mean": statistics.fmean(returns) if returns else None,
        "std": statistics.pstdev(returns) if returns else None,
        "median": statistics.median(returns) if returns else None,
    }
    if agents := agent_means(result.episodes):
        figures |= {"agent_means": agents, "team_mean": team_mean(result.episodes)}
    if (video := result.video) is not None:
        figures["video"] = {"path": str(video.path), "pictures": video.pictures, "fps": video.pictures_per_second}
    return json_text(figures | {"episodes": [_plain(episode) for episode in result.episodes]})


def _plain(episode: Episode) -> dict[str, object]:
    plain: dict[str, object] = {"return": episode.episode_return, "length": episode.length}
    more: dict[str, object] = {"stats": episode.stats, "agent_returns": list(episode.agent_returns)}
    return plain | {name: value for name, value in more.items() if value}
