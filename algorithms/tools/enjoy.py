"""`appo enjoy` plays a trained policy in the environment of training."""

import contextlib
import secrets
import statistics
from pathlib import Path

from appo.algorithms.playing.config import EvaluationConfig
from appo.algorithms.playing.episodes import PlayedEpisode, agent_means, team_mean
from appo.algorithms.playing.player import load_player, play
from appo.algorithms.playing.saved_run import SavedRun, find_run
from appo.algorithms.playing.video import Recorder, VideoFile
from appo.algorithms.runtime.callbacks import HookedEnvs, Hooks, find_callbacks
from appo.envs.make import make_alone
from appo.envs.spec import GroupEnv
from appo.utils.command_line import apart, say
from appo.utils.system import machine
from appo.utils.values import json_text


def enjoy(config: EvaluationConfig) -> int:
    """Play a trained policy and print the episodes; return the exit code.

    Raises:
        UsageError: a run is missing, or the environment cannot be played with these flags.
        CheckpointError: the policy has no usable checkpoint.
        EnvironmentFailure: the environment raised.
        ResourceError: the video cannot be written.
    """
    machine.limit_threads(1)  # more threads do not help a batch of one row
    seed = config.seed if config.seed is not None else secrets.randbits(32)
    with apart(as_json=config.json):
        run = find_run(config)
        played = play_run(run, config, seed)
    say(_report(run, seed, *played, as_json=config.json))
    return 0


def play_run(run: SavedRun, config: EvaluationConfig, seed: int) -> tuple[int, list[PlayedEpisode], VideoFile | None]:
    """Play and film a policy; without `--json`, print every episode. Errors are those of `enjoy`.

    Returns:
        The env steps that the policy has learned from, the episodes, and the video.
    """
    env, episodes = config.played_env(run.config.env), list[PlayedEpisode]()
    with contextlib.ExitStack() as stack:
        recorder = Recorder(env, Path(config.save_video), config.fps) if config.save_video else None
        if recorder is not None:
            stack.enter_context(recorder.video)  # completed after the environments are closed
        envs: GroupEnv = make_alone(env, window=config.window) if recorder is None else recorder.group
        for name in config.callbacks:
            find_callbacks(name)
        if config.callbacks:
            envs = HookedEnvs(envs, config.policy_index, Hooks.make(config.callbacks, run.config.to_flat(), 0))
        stack.callback(envs.close)
        player, env_steps = load_player(run, envs.spec, config, seed)
        if not config.json:
            which = f"{config.load_checkpoint_kind} checkpoint of policy {config.policy_index}"
            say(f"{run.directory}: {which} at {env_steps} env steps, seed {seed}\nepisode        return     length")
        look = None if recorder is None else recorder.look
        for number, episode in enumerate(play(envs, player, config, seed, look), start=1):
            episodes.append(episode)
            if not config.json:
                say(f"{number:7}  {episode.episode_return:12.3f}  {episode.length:9}")
    return env_steps, episodes, None if recorder is None else recorder.video


def _report(
    run: SavedRun, seed: int, env_steps: int, episodes: list[PlayedEpisode], video: VideoFile | None, *, as_json: bool
) -> str:
    """Return the figures of all episodes as text, or as one JSON object."""
    returns, agents = [episode.episode_return for episode in episodes], agent_means(episodes)
    spread = statistics.fmean, statistics.pstdev, statistics.median
    mean, std, median = (of(returns) if returns else None for of in spread)
    if as_json:
        figures = {
            "env_steps": env_steps,
            "checkpoint": str(run.checkpoint),
            "seed": seed,
            "num_episodes": len(returns),
            "mean": mean,
            "std": std,
            "median": median,
        }
        if agents:
            figures |= {"agent_means": agents, "team_mean": team_mean(episodes)}
        if video is not None:
            figures["video"] = {"path": str(video.path), "pictures": video.pictures, "fps": video.pictures_per_second}
        return json_text(figures | {"episodes": [episode.as_plain() for episode in episodes]})
    lines = ["no episode ended before --max_num_frames"]
    if returns:
        mean_and_std = f"return {mean:.3f} +- {std:.3f} (mean +- standard deviation)"
        lines = [f"{len(returns)} episodes: {mean_and_std}, median {median:.3f}"]
    if agents:
        each = ", ".join("none" if mean is None else f"{mean:.3f}" for mean in agents)
        lines.append(f"return of each agent: {each}; of all together {team_mean(episodes):.3f}")
    if video is not None:
        lines.append(f"video: {video.path}, {video.pictures} pictures at {video.pictures_per_second:g} per second")
    return "\n".join(lines)
