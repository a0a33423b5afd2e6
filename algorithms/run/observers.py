"""The observers of a run in main: the monitor, the displays of it, and the callbacks of the user."""

import importlib.util
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from appo.algorithms.ops.intervals import welch_interval
from appo.algorithms.population.controller import Controller
from appo.algorithms.population.exploit_explore import ExploitExplore
from appo.algorithms.population.lineage import Lineage
from appo.algorithms.population.matchmaking import LEARNER
from appo.algorithms.population.past_versions import PastVersions
from appo.algorithms.population.self_play import Pool, SelfPlay
from appo.algorithms.run.config import FLAGS_BY_PART, Config
from appo.algorithms.run.folder import begun_at
from appo.algorithms.run.page import unusual
from appo.algorithms.run.trust import NoKey, make_key
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.callbacks import Callbacks, Hooks
from appo.algorithms.runtime.config import RunConfig
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import StateBlock, Table
from appo.algorithms.runtime.memory.weights import WeightRing
from appo.algorithms.runtime.messages import (
    PolicyTraits,
)
from appo.algorithms.runtime.monitor.console import Title, aim_of, console_for
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.performance import Machine
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from appo.algorithms.runtime.monitor.trackers import TRACKERS, asked_trackers, is_installed
from appo.algorithms.runtime.monitor.tracking import Tracker
from appo.algorithms.runtime.processes.beside import RestartedCommand
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.topology import Topology
from appo.utils.command_line import words_of
from appo.utils.errors import UsageError
from appo.utils.values import nearest, shown

log = logging.getLogger(__name__)


class Observers:
    """Makes the observers of a run as the flags ask.

    Args:
        config: all flags.
        callbacks: objects that are told of reports, besides those that flags name.
    """

    def __init__(self, config: Config, callbacks: Sequence[Callbacks] = ()) -> None:
        self.config, self.callbacks = config, callbacks

    def monitor(self, resumed: Sequence[Mapping[str, Any]], budget: Budget, machine: Machine) -> Monitor:
        """Make the monitor, which listens to all reports, and the displays of it."""
        flags, directory = self.config.logging, self.config.run.run_directory
        hooks = None
        if flags.callbacks or self.callbacks:
            hooks = Hooks.make(flags.callbacks, self.config.to_flat(), None, self.callbacks)
        monitor = Monitor(directory, flags, resumed, budget, machine, self.config.frozen, hooks)
        monitor.console = console_for(
            flags,
            Title(
                directory,
                self.config.env.env or self.config.run.algo,
                aim_of(budget.plain()),
                self.config.algorithm.panel,
            ),
        )
        return monitor

    def compare(self, monitor: Monitor) -> None:
        """Log how the policies compare that --per_policy has set apart, if nothing else has."""
        if self.config.population.per_policy and not self.config.population.with_pbt:
            for line in comparison(monitor.policies, self.config.differences):
                log.info("%s", line)


def say_output(monitor: Monitor, config: Config) -> None:
    """Log what has been written into a dataset, and what has not, if there is one."""
    if found := monitor.output:
        written = f"{found['episodes']} episodes, {found['steps']} steps, in {found['parts']} parts"
        dropped = f"{found['dropped_steps']} steps of episodes without beginning, end or room are left out"
        log.info("%s: %s; %s", config.output.output, written, dropped)


def make_controller(
    config: Config, exploit_explore: ExploitExplore, monitor: Monitor, traits: Sequence[PolicyTraits], actors: int
) -> Controller | None:
    """Make the controller of a run whose policies differ, or may come to; None for others."""
    if not (config.population.with_pbt or config.population.per_policy):
        return None
    learning = [policy for policy in range(len(traits)) if policy not in config.frozen]
    lineage = Lineage(config.run.run_directory, traits)
    return Controller(exploit_explore, monitor, lineage, traits, learning, actors)


def make_self_play(
    config: Config,
    topology: Topology,
    arena: Arena,
    table: Table,
    monitor: Monitor,
    resumed: Mapping[str, Any],
) -> SelfPlay | None:
    """Make the pool of a run with `--self_play`; None for others.

    Args:
        config: all flags.
        topology: of the run.
        arena: its memory.
        table: name and shape of every weight.
        monitor: told the figures.
        resumed: plain state of the learner's checkpoint; {}: there is none.
    """
    if not topology.num_past:
        return None
    rings = {place: WeightRing(arena, place) for place in range(topology.num_policies, topology.num_acting)}
    past = PastVersions(config.run.folder.checkpoints(LEARNER, "past"), table)
    env_steps = int(resumed["env_steps"]) if resumed else None
    return SelfPlay(config.population, topology, Pool(StateBlock(arena, LEARNER), rings, past), monitor, env_steps)


# Who looks at a run while it is trained: an evaluation of its checkpoints, a tracker, TensorBoard's table of runs.


ALWAYS_FIRST = ("env", "seed", "learning_rate")
"""Those that it shows first, with what is not as it would be by default."""

EVALUATION = "eval_"

EVALUATION_FLAGS = tuple(name for name in FLAGS_BY_PART["logging"] if name.startswith(EVALUATION))
"""Those of `appo evaluate`, which knows them without what they begin with."""


def check_observers(config: Config) -> None:
    """Refuse a tracker that is not installed, and videos that nobody could make (UsageError)."""
    for name in asked_trackers(config.logging.track, config.logging.with_wandb):
        if name not in TRACKERS:
            raise UsageError(f"--track={shown(name)} is not one of {', '.join(TRACKERS)}{nearest(name, TRACKERS)}")
        if not is_installed(name):
            flag = f"--track={name}" if name in config.logging.track else "--with_wandb"
            raise UsageError(f'{flag} needs the package {TRACKERS[name].package}: pip install "appo[{name}]"')
    if config.logging.eval_video_every_min:
        if not config.logging.eval_every_sec:
            raise UsageError("--eval_video_every_min films evaluations: it needs --eval_every_sec")
        if importlib.util.find_spec("imageio_ffmpeg") is None:
            raise UsageError('--eval_video_every_min needs the package imageio-ffmpeg: pip install "appo[video]"')


def start_tracking(monitor: Monitor, config: Config, seed: int, janitor: Janitor) -> None:
    """Tell TensorBoard the flags of a run, and start the trackers that are wanted."""
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
    return ("evaluate", str(config.run.run_directory.absolute()), *given, *trust_words(config))


def trust_words(config: Config) -> tuple[str, ...]:
    """Return the flag with which our commands play this run: where no mark can be written, main knows its origin.

    What stands in the folder of the run is not asked: another may have written it since.
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


# How the policies of one run compare at its end: those that `--per_policy` has set apart.


def comparison(policies: Sequence[PolicyProgress], given: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for every policy but the first: how its mean return differs from that of the first.

    The interval is that of the episodes played last; what another seed would have trained is not in it.

    Args:
        policies: of the run.
        given: in what they differ, by flag.
    """
    lines = []
    first = policies[0].episode_return.values()
    for policy, (progress, values) in enumerate(zip(policies, given, strict=True)):
        found = welch_interval(first, progress.episode_return.values()) if policy else None
        if found is None:
            continue
        low, high = found.mean - found.margin, found.mean + found.margin
        verdict = "" if low > 0 or high < 0 else ": no difference that these episodes show"
        own = " ".join(f"{name}={words_of(value)}" for name, value in values.items())
        its = " ".join(f"{name}={words_of(value)}" for name, value in given[0].items())
        lines.append(
            f"policy {policy} ({own}) against policy 0 ({its}): return {found.mean:+.2f}, 95 % interval"
            f" [{low:+.2f}, {high:+.2f}] over their last {progress.episode_return.count} and {len(first)}"
            f" episodes{verdict}"
        )
    return lines
