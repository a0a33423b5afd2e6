"""Flags of playing a trained policy, and checks; without torch, so help is quick."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from appo.algorithms.run.folder import check_folders
from appo.algorithms.runtime.config import RunConfig
from appo.envs.config import EnvConfig
from appo.utils.errors import UsageError
from appo.utils.flags import flag, same_flag
from appo.utils.run_folder import CHECKPOINT_FOLDERS
from appo.utils.values import shown

VIDEO_SUFFIXES = (".mp4", ".gif")
DEFAULT_EPISODES = 10
CHECKPOINT_KINDS = tuple(CHECKPOINT_FOLDERS)


def headless() -> bool:
    """Return whether no display exists for a window."""
    return os.name == "posix" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@dataclass(frozen=True)
class EvaluationConfig:
    """Playing a trained policy."""

    env: str = flag("", "environment id; plays the newest run; empty = environment of the run --experiment")
    experiment: str = flag("", "name of the run in train_dir, or its folder; empty = the newest run of --env")
    experiments_root: str = flag("", "folder inside train_dir that groups several runs; empty = none")
    train_dir: str = flag("./train_dir", "folder of all runs")
    trust: bool = same_flag(RunConfig, "trust")
    policy_index: int = flag(0, "which policy of the run plays", minimum=0)
    load_checkpoint_kind: str = flag(
        "latest",
        "checkpoint to play: the newest, the best by training or by evaluation, a milestone, or the newest past version"
        " of --self_play",
        choices=CHECKPOINT_KINDS,
    )
    milestone: int | None = flag(
        None, "env steps of the milestone, the nearest at or below is taken; none = the newest", minimum=0
    )
    max_num_episodes: int | None = flag(
        None,
        f"stop after this many episodes; 0 = no limit, none = {DEFAULT_EPISODES}, or 1 for a video without limit of"
        " frames",
        minimum=0,
    )
    max_num_frames: int = flag(0, "stop after this many env steps (frames); 0 = no limit", minimum=0)
    deterministic: bool = flag(False, "take the most probable action instead of sampling one")
    epsilon: float = flag(
        0.0,
        "with --algo=APEX and PQN: probability of a random action, unless deterministic; 0 = the best one always",
        minimum=0,
        maximum=1,
    )
    continuous_actions_sample: bool = flag(True, "sample continuous actions; False = take their mean")
    seed: int | None = flag(
        None, "seed of the episodes and the sampling; none = a random one", minimum=0, maximum=2**63 - 1
    )
    no_render: bool = flag(headless(), "open no window; set by default where there is no display")
    save_video: str = flag(
        "",
        "make a video of the episodes, x.mp4 or x.gif, alone video.mp4, instead of opening a window; needs no display;"
        " empty = none",
        alone="video.mp4",
    )
    fps: float = flag(
        0,
        "agent steps shown per second; 0 = as fast as possible in a window, at the speed of the game in a video",
        minimum=0,
        maximum=1000,
    )
    render_action_repeat: int | None = flag(
        None, "env frames per action while playing; none = as in training", minimum=1
    )
    device: str = same_flag(RunConfig, "device", "where the network runs; gpu is accepted as cuda", default="cpu")
    callbacks: tuple[str, ...] = flag(
        (), "your classes, package.module:Class, called with episodes and steps as in training; empty = none"
    )
    json: bool = flag(False, "print one JSON object with the results instead of text; opens no window")

    @classmethod
    def of(cls, config: object, **own: Any) -> Self:
        """Return the flags of playing without a window: `own`, then the flags of a tool that have a name in common."""
        common = {one.name: getattr(config, one.name) for one in fields(cls) if hasattr(config, one.name)}
        return cls(**{**common, "no_render": True, **own})

    @property
    def window(self) -> bool:
        """Return whether to open a window."""
        return not (self.no_render or self.json or self.save_video)

    def played_env(self, env: EnvConfig) -> EnvConfig:
        """Return the environment of training, changed by these flags."""
        repeats = self.render_action_repeat
        return env if repeats is None else replace(env, env_frameskip=repeats)

    @property
    def episode_limit(self) -> int:
        """Return the number of episodes to play; 0: no limit."""
        if self.max_num_episodes is not None:
            return self.max_num_episodes
        if self.save_video:
            return 0 if self.max_num_frames else 1
        return DEFAULT_EPISODES


def check(config: EvaluationConfig) -> None:
    """Refuse names of folders that contain no runs, and flags that contradict each other (UsageError)."""
    check_folders(config.train_dir, config.experiments_root, "")
    if config.milestone is not None and config.load_checkpoint_kind != "milestone":
        raise UsageError(
            f"--milestone={config.milestone} needs --load_checkpoint_kind=milestone, not {config.load_checkpoint_kind}"
        )
    if config.save_video and Path(config.save_video).suffix.lower() not in VIDEO_SUFFIXES:
        raise UsageError(f"--save_video={shown(config.save_video)}: the name must end in {' or '.join(VIDEO_SUFFIXES)}")
    if config.save_video and not config.episode_limit and not config.max_num_frames:
        raise UsageError("--save_video with --max_num_episodes=0 needs --max_num_frames: the video would never end")
