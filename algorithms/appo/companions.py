"""Who looks at a run while it is trained: an evaluation of its checkpoints, a tracker, TensorBoard's table of runs."""

import importlib.util
import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from algorithms.appo.config import FLAGS_BY_PART, Config
from algorithms.appo.run_page import unusual
from algorithms.appo.starting import begun_at
from algorithms.runtime.companion import Companion
from algorithms.runtime.config import RunConfig
from algorithms.runtime.janitor import Janitor
from algorithms.runtime.monitor import Monitor
from algorithms.runtime.tracking import Tracker, is_installed, wandb_settings
from utils.errors import UsageError

HYPERPARAMETERS = ("seed", *FLAGS_BY_PART["env"], *FLAGS_BY_PART["learning"], *FLAGS_BY_PART["model"])
"""Flags that TensorBoard's table of runs has."""
ALWAYS_FIRST = ("env", "seed", "learning_rate")
"""Those that it shows first, with what is not as it would be by default."""

EVALUATION = "eval_"
EVALUATION_FLAGS = tuple(name for name in FLAGS_BY_PART["logging"] if name.startswith(EVALUATION))
"""Those of `appo evaluate`, which knows them without what they begin with."""


def check_companions(config: Config) -> None:
    """Refuse a tracker that is not installed, and videos that nobody could make (UsageError)."""
    if config.logging.with_wandb and not is_installed():
        raise UsageError('--with_wandb needs the package wandb: pip install "appo[wandb]"')
    if config.logging.eval_video_every_min:
        if not config.logging.eval_every_sec:
            raise UsageError("--eval_video_every_min films evaluations: it needs --eval_every_sec")
        if importlib.util.find_spec("imageio_ffmpeg") is None:
            raise UsageError('--eval_video_every_min needs the package imageio-ffmpeg: pip install "appo[video]"')


def let_others_know(monitor: Monitor, config: Config, seed: int, janitor: Janitor) -> None:
    """Tell TensorBoard the flags of a run, and start the tracker if one is wanted."""
    flags = config.to_flat() | {"seed": seed}
    first = {*ALWAYS_FIRST, *unusual(flags, config.by_kind, HYPERPARAMETERS)}
    for writer in monitor.writers:
        writer.describe({name: flags[name] for name in HYPERPARAMETERS}, first)
    if config.logging.with_wandb:
        settings = wandb_settings(flags, begun_at(config.run.run_directory))
        monitor.tracker = Tracker(settings, _log_path(config, "wandb"), janitor)


def evaluation_of(config: Config, janitor: Janitor) -> AbstractContextManager[object]:
    """Who plays the newest checkpoints while this is entered."""
    if not config.logging.eval_every_sec:
        return nullcontext()
    return Companion(evaluation_words(config), _log_path(config, "evaluator"), janitor)


def evaluation_words(config: Config) -> tuple[str, ...]:
    """The command that evaluates as the flags of training say."""
    values = ((name, json.dumps(getattr(config.logging, name))) for name in EVALUATION_FLAGS)
    given = (f"--{name.removeprefix(EVALUATION)}={value}" for name, value in values)
    return ("evaluate", str(config.run.run_directory.absolute()), *given)


def saved_in_time(config: Config) -> RunConfig:
    """The flags of saving; whoever evaluates needs a checkpoint each time."""
    run, seconds = config.run, config.logging.eval_every_sec
    return replace(run, save_every_sec=min(run.save_every_sec, math.ceil(seconds))) if seconds else run


def _log_path(config: Config, name: str) -> Path:
    return (config.run.run_directory / "logs" / f"{name}.log").absolute()
