"""Playing a trained policy: the environment, the model and the order of things are those of training."""

import contextlib
import secrets
import statistics
import sys
from typing import NamedTuple

from algorithms.playing.config import EvaluationConfig
from algorithms.playing.episodes import Episode, agent_means, team_mean
from algorithms.playing.player import Run, ToldEnvs, _stage, find_run, load_player, play
from algorithms.playing.video import VideoFile
from algorithms.runtime.callbacks import Hooks, find_callbacks
from utils import machine
from utils.command_line import say
from utils.values import json_text


class Result(NamedTuple):
    """What came of playing."""

    run: Run
    env_steps: int  # that the policy has learned from
    seed: int
    episodes: list[Episode]
    video: VideoFile | None


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
    machine.limit_threads(1)  # a batch of one row gains nothing from more
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
