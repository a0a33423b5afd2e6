"""Playing a trained policy: the environment, the model and the order of things are those of training."""

import contextlib
import json
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from algorithms.appo.build import new_model
from algorithms.appo.config import Config, EvaluationConfig
from algorithms.appo.placement import choose_device
from algorithms.appo.runs import newest_run, saved_flags
from algorithms.models.actor_critic import ActorCritic
from algorithms.ops.distributions import ActionDistribution
from algorithms.runtime.arena import Array
from algorithms.runtime.checkpointing import decode
from algorithms.runtime.flat_module import FlatModule
from envs.make import is_vector_only, make_group
from envs.spec import MASK_KEY, EnvSpec, GroupEnv, StepRow
from utils import checkpoint, cpu
from utils.errors import CheckpointError, UsageError
from utils.values import shown


class Episode(NamedTuple):
    """One played episode."""

    episode_return: float  # undiscounted sum of the rewards as the environment gave them
    length: int  # env steps
    stats: dict[str, float]  # what the environment reported of it


class Run(NamedTuple):
    """What is played."""

    directory: Path
    config: Config
    files: dict[str, bytes]  # of the newest checkpoint that verifies


def enjoy(config: EvaluationConfig) -> int:
    """Play a trained policy and print its episodes; the exit code.

    Raises:
        UsageError: there is no such run, or the environment cannot be played as asked.
        CheckpointError: the policy has no checkpoint that can be used.
        EnvironmentFailure: the environment raised.
    """
    run = find_run(config)
    cpu.limit_threads(1)  # a batch of one row gains nothing from more
    seed = config.seed if config.seed is not None else secrets.randbits(32)
    with contextlib.redirect_stdout(sys.stderr) if config.json else contextlib.nullcontext():
        envs = make_envs(run.config, config)
        try:
            player, env_steps = load_player(run, envs.spec, config, seed)
            if not config.json:
                _say(f"{run.directory}: policy {config.policy_index} at {env_steps} env steps, seed {seed}")
                _say("episode        return     length")
            episodes = []
            for episode in play(envs, player, config, seed):
                episodes.append(episode)
                if not config.json:
                    _say(f"{len(episodes):7}  {episode.episode_return:12.3f}  {episode.length:9}")
        finally:
            envs.close()
    _say(_as_json(episodes, env_steps, seed) if config.json else _summary(episodes))
    return 0


def find_run(config: EvaluationConfig) -> Run:
    """The run that the flags name, with its flags and the newest usable checkpoint of the policy.

    Raises:
        UsageError: there is no such run or policy.
        CheckpointError: there is no checkpoint, or none of them verifies.
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
    loaded = checkpoint.load(directory / f"checkpoint_p{config.policy_index}")
    if loaded is None:
        raise CheckpointError(f"run {directory.name} has no checkpoint of policy {config.policy_index} yet")
    for _, reason in loaded.found.damaged:
        sys.stderr.write(f"warning: damaged checkpoint skipped: {reason}\n")
    return Run(directory, saved, loaded.files)


def make_envs(saved: Config, config: EvaluationConfig) -> GroupEnv:
    """One environment behind the adapters of training; in a window where one is wanted and possible."""
    env = saved.env
    if config.render_action_repeat is not None:
        env = replace(env, env_frameskip=config.render_action_repeat)
    if config.no_render or config.json or is_vector_only(env):
        return make_group(env, 1)
    # No native vector opens a window; our loop over single environments shows what those show.
    return make_group(replace(env, env_vectorization="python"), 1, render_mode="human")


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
        self.model, self.spec, self.device = flat.module, spec, flat.flat.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.rnn_state = torch.zeros(spec.num_agents, self.model.rnn_state_size, device=self.device)
        # [A] per action value: take the most probable one instead of a sample.
        kinds = [part.kind for part in spec.action.parts for _ in range(part.num_values)]
        fixed = [config.deterministic or (k == "gaussian" and not config.continuous_actions_sample) for k in kinds]
        self.take_mode = torch.tensor(fixed, device=self.device)

    @torch.inference_mode()
    def act(self, obs: dict[str, Array], first: Array) -> Array:
        """Actions [R, A] for observations [R, *] of rows that start an episode where `first` [R] says so."""
        tensors = {key: torch.from_numpy(value).to(self.device) for key, value in obs.items()}
        starts = torch.from_numpy(first).to(self.device)
        logits, _, self.rnn_state = self.model.act(tensors, starts, self.rnn_state)
        mask = tensors[MASK_KEY].flatten(1) > 0 if self.spec.action_mask else None
        distribution = ActionDistribution(self.spec.action.parts, logits, mask)
        action = torch.where(self.take_mode, distribution.mode(), distribution.sample(self.generator))
        return action.cpu().numpy()


def play(envs: GroupEnv, player: Player, config: EvaluationConfig, seed: int) -> Iterator[Episode]:
    """Yield episodes as they end, up to the limits of the flags. The same seed gives the same episodes."""
    spec, rows = envs.spec, envs.num_rows
    obs = {key: np.zeros((rows, *o.shape), o.dtype) for key, o in spec.observations.items()}
    final = {key: np.zeros_like(value) for key, value in obs.items()} if spec.same_step else {}
    flags = [np.zeros(rows, np.bool_) for _ in range(4)]
    num_frames = np.full(rows, spec.frames_per_step, np.int32)
    row = StepRow(obs, flags[0], np.zeros(rows, np.float32), flags[1], flags[2], num_frames, final, flags[3])
    row.first[:] = True
    envs.reset([int(s) >> 1 for s in np.random.SeedSequence(seed).generate_state(1)], row.obs)
    returns, lengths = np.zeros(rows), np.zeros(rows, np.int64)
    num_episodes = frames = 0
    clock = _Clock(0.0 if config.no_render else config.fps)
    while not config.max_num_frames or frames < config.max_num_frames:
        stats = {one.row: one.stats for one in envs.step(player.act(row.obs, row.first), row)}
        valid = np.ones(rows, np.bool_) if spec.same_step else ~row.first  # the reset step belongs to no episode
        frames += int(num_frames[0]) * bool(valid.any())
        returns += row.reward
        lengths += valid * num_frames
        for index in (row.terminated | row.truncated).nonzero()[0].tolist():
            yield Episode(float(returns[index]), int(lengths[index]), stats.get(index, {}))
            returns[index] = lengths[index] = 0
            num_episodes += 1
            if num_episodes == config.max_num_episodes:
                return
        clock.wait()


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


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the console is this command's interface


def _summary(episodes: list[Episode]) -> str:
    if not episodes:
        return "no episode ended before --max_num_frames"
    returns = [episode.episode_return for episode in episodes]
    return (
        f"{len(episodes)} episodes: return {statistics.fmean(returns):.3f} +- {statistics.pstdev(returns):.3f} "
        f"(mean +- standard deviation), median {statistics.median(returns):.3f}"
    )


def _as_json(episodes: list[Episode], env_steps: int, seed: int) -> str:
    returns = [episode.episode_return for episode in episodes]
    listed = [
        {"return": e.episode_return, "length": e.length, **({"stats": e.stats} if e.stats else {})} for e in episodes
    ]
    figures = {
        "mean": statistics.fmean(returns) if returns else None,
        "std": statistics.pstdev(returns) if returns else None,
        "median": statistics.median(returns) if returns else None,
    }
    result = {"env_steps": env_steps, "seed": seed, "num_episodes": len(episodes), **figures, "episodes": listed}
    return json.dumps(result)
