"""The observers of a run in main: monitor, displays, trackers, evaluator, and the user's callbacks."""

import importlib.util
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from appo.algorithms.run.config import ACTION_FLAGS, FLAGS_BY_PART, Config
from appo.algorithms.run.directory.page import unusual
from appo.algorithms.run.folder import begun_at
from appo.algorithms.run.trust import NoKey, make_key
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.callbacks import Callbacks, Hooks
from appo.algorithms.runtime.config import RunConfig
from appo.algorithms.runtime.monitor.console import Title, aim_of, console_for
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.performance import Machine
from appo.algorithms.runtime.monitor.trackers import TRACKERS, asked_trackers
from appo.algorithms.runtime.monitor.tracking import Tracker
from appo.algorithms.runtime.processes.beside import RestartedCommand
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.envs.config import EnvConfig
from appo.utils.errors import UsageError
from appo.utils.values import flag_hint, from_plain, nearest, shown

log = logging.getLogger(__name__)
ALWAYS_FIRST = ("env", "seed", "learning_rate")
"""Flags that TensorBoard's table shows first, together with unusual ones."""
EVALUATION = "eval_"
EVALUATION_FLAGS = tuple(name for name in FLAGS_BY_PART["logging"] if name.startswith(EVALUATION))
"""Flags of `appo evaluate`, which has them without the prefix."""
OF_TRAINING = (
    "reward_scale", "reward_clip", "episodic_life", "no_done_at_end", "soft_horizon", "max_env_rebuilds",
    "force_envs_single_thread", "decorrelate_envs_on_one_worker",
)  # fmt: skip
"""Flags of the environment that change training alone."""


def make_monitor(
    config: Config,
    callbacks: Sequence[Callbacks],
    resumed: Sequence[Mapping[str, Any]],
    budget: Budget,
    machine: Machine,
) -> Monitor:
    """Make the monitor, which receives all reports, with its displays and callbacks.

    `callbacks` come besides callbacks named by flags; `resumed` has the plain state of every policy's checkpoint.
    """
    flags, directory = config.logging, config.run.run_directory
    hooks = Hooks.make(flags.callbacks, config.to_flat(), None, callbacks) if flags.callbacks or callbacks else None
    monitor = Monitor(directory, flags, resumed, budget, machine, config.frozen, hooks)
    monitor.console = console_for(
        flags, Title(directory, config.env.env or config.run.algo, aim_of(budget.plain()), config.algorithm.panel)
    )
    return monitor


def say_output(monitor: Monitor, config: Config) -> None:
    """Log the counts of written and dropped steps of a dataset, if the run writes one."""
    if found := monitor.output:
        written = f"{found['episodes']} episodes, {found['steps']} steps, in {found['parts']} parts"
        dropped = f"{found['dropped_steps']} steps of episodes without beginning, end or room are left out"
        log.info("%s: %s; %s", config.output.output, written, dropped)


def check_observers(config: Config) -> None:
    """Refuse a tracker that is not installed, and videos and evaluations that cannot be made (UsageError)."""
    evaluated_env(config, config.logging.eval_flags, config.logging.eval_env_kwargs, "--eval_flags")
    for name in asked_trackers(config.logging.track, config.logging.with_wandb):
        if name not in TRACKERS:
            raise UsageError(f"--track={shown(name)} is not one of {', '.join(TRACKERS)}{nearest(name, TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            flag = f"--track={name}" if name in config.logging.track else "--with_wandb"
            raise UsageError(f'{flag} needs the package {name}: pip install "appo[{name}]"')
    if config.logging.eval_video_every_min:
        if not config.logging.eval_every_sec:
            raise UsageError("--eval_video_every_min films evaluations: it needs --eval_every_sec")
        if importlib.util.find_spec("imageio_ffmpeg") is None:
            raise UsageError('--eval_video_every_min needs the package imageio-ffmpeg: pip install "appo[video]"')


def start_tracking(monitor: Monitor, config: Config, seed: int, janitor: Janitor) -> None:
    """Write the flags of a run to TensorBoard, and start the trackers that flags name."""
    flags = config.to_flat() | {"seed": seed}
    shown = ("seed", *(name for part in ("env", "learning", "model") for name in config.table.by_part[part]))
    first = {*ALWAYS_FIRST, *unusual(flags, config.by_kind, shown)} & set(shown)
    for writer in monitor.writers:
        writer.describe({name: flags[name] for name in shown}, first)
    for name in asked_trackers(config.logging.track, config.logging.with_wandb):
        settings = TRACKERS[name].settings(flags, begun_at(config.run.run_directory))
        tracker = monitor.beside[name] = Tracker(name, settings, config.run.folder.log(name), janitor)
        monitor.trackers.append(tracker)


def evaluate_beside(config: Config, janitor: Janitor) -> AbstractContextManager[RestartedCommand | None]:
    """Return the process that plays the newest checkpoints while entered; None without `--eval_every_sec`."""
    if not config.logging.eval_every_sec:
        return nullcontext()
    return RestartedCommand(evaluation_words(config), config.run.folder.log("evaluator"), janitor)


def evaluation_words(config: Config) -> tuple[str, ...]:
    """Return the command that evaluates as the flags of training say."""
    values = ((name, json.dumps(getattr(config.logging, name))) for name in EVALUATION_FLAGS)
    given = (f"--{name.removeprefix(EVALUATION)}={value}" for name, value in values)
    return ("evaluate", str(config.run.run_directory.absolute()), *given, *trust_words())


def evaluated_env(
    config: Config, flags: Mapping[str, object], env_kwargs: Mapping[str, object], given: str
) -> EnvConfig:
    """Return the flags of a run's environment, changed by flags of the environment and arguments for evaluations.

    Raises:
        UsageError: a flag is none of the environment, or has no effect in an evaluation. `given` names its source.
    """
    table = config.table.by_part["env"]
    named = {name.replace("-", "_"): value for name, value in flags.items()}
    for name in named:
        if name not in table:
            hint = flag_hint(name, table, dashes="")
            why = f"an evaluation plays, which only flags of the environment change{hint}"
        elif name in OF_TRAINING:
            why = "an evaluation plays whole games in one environment and reports unscaled returns, whatever its value"
        elif name in ACTION_FLAGS:
            why = "the network was trained with another meaning of its actions"
        else:
            continue
        raise UsageError(f"{given} {shown(name)}: {why}")
    changed: dict[str, Any] = {name: from_plain(table[name], value) for name, value in named.items()}
    env = replace(config.env, **changed)
    return replace(env, env_kwargs={**env.env_kwargs, **env_kwargs})


def trust_words() -> tuple[str, ...]:
    """Return the flag `--trust` for commands of this run if the user has no key, and the run therefore no mark.

    The run's folder is not consulted, because another process may have written there.
    """
    try:
        make_key()
    except NoKey:
        return ("--trust",)
    return ()


def with_saves_to_evaluate(config: Config) -> RunConfig:
    """Return the flags of saving, with a checkpoint for each evaluation."""
    run, seconds = config.run, config.logging.eval_every_sec
    return replace(run, save_every_sec=min(run.save_every_sec, math.ceil(seconds))) if seconds else run
