"""The observers of a run in main: the monitor, the displays of it, and the callbacks of the user."""

import contextlib
import importlib.util
import json
import logging
import math
import multiprocessing.process
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean, variance
from types import TracebackType
from typing import Any, NamedTuple, Self

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
from appo.algorithms.runtime.processes.janitor import Janitor, kill_group
from appo.algorithms.runtime.processes.restarts import Revival
from appo.algorithms.runtime.topology import Topology
from appo.utils.command_line import own_command, words_of
from appo.utils.errors import UsageError
from appo.utils.run_folder import append_to_own
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
            raise UsageError(f'{flag} needs the package {name}: pip install "appo[{name}]"')
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


def evaluate_beside(config: Config, janitor: Janitor) -> "AbstractContextManager[ObserverProcess | None]":
    """Return the process that plays the newest checkpoints while entered; None without `--eval_every_sec`."""
    if not config.logging.eval_every_sec:
        return nullcontext()
    return ObserverProcess(evaluation_words(config), config.run.folder.log("evaluator"), janitor)


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


CONFIDENCE = 0.95


class Difference(NamedTuple):
    """The difference of two means; the true one lies within `margin` on both sides with `CONFIDENCE`."""

    mean: float
    margin: float


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Return mean of the second minus mean of the first, of numbers of unequal variances; None for less than two each.

    Source: Welch 1947, Biometrika 34; the quantile of Student's t by its expansion (Abramowitz and Stegun, 26.7.5).
    """
    if min(len(first), len(second)) < 2:
        return None
    squares = [variance(one) / len(one) for one in (first, second)]
    mean, square = fmean(second) - fmean(first), sum(squares)
    if not square:
        return Difference(mean, 0.0)
    freedom = square**2 / sum(s**2 / (len(one) - 1) for s, one in zip(squares, (first, second), strict=True))
    return Difference(mean, _quantile(freedom) * math.sqrt(square))


def _quantile(freedom: float) -> float:
    """Return the quantile of Student's t, two-sided, for `CONFIDENCE`."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


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
        found = difference(first, progress.episode_return.values()) if policy else None
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


# A command of ours that runs beside training; whatever becomes of it, training does not notice.


JOIN_SECONDS = 1.0


class ObserverProcess:
    """A process that lives while entered, and is started again when it ends before.

    Args:
        words: of its command line, after `appo`.
        log_path: what it prints goes there.
        janitor: ends it should main be killed.
    """

    def __init__(self, words: Sequence[str], log_path: Path, janitor: Janitor) -> None:
        self.words, self.log_path, self.janitor = words, log_path, janitor
        self.revival = Revival(f"appo {words[0]}", log_path)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start(time.monotonic())
        return self

    def _start(self, now: float) -> None:
        with os.fdopen(append_to_own(self.log_path, make=True), "ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 (our own program)
                own_command(self.words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_temporary()},
                process_group=0,  # no session: the scheduler may share the cores between sessions first
            )
        self.janitor.watch(self._process.pid)
        self.revival.began(now)

    def look(self, now: float) -> None:
        """Log that the process has ended, if it has; start it again when that is due at this monotonic time."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._end(self._process)
            log.warning("%s", self.revival.ended(now, code))
        elif self.revival.is_due(now):
            try:
                self._start(now)
            except OSError as error:
                log.warning("%s", self.revival.not_started(now, error))

    def plain(self) -> dict[str, object]:
        """Return the entry of the process in status.json."""
        return self.revival.plain()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (process := self._process) is None:
            return
        if code := process.poll():
            log.warning("appo %s ended before its time with exit code %d; see %s", self.words[0], code, self.log_path)
        self._end(process)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """End the process with all that it has started."""
        kill_group(process.pid)
        try:
            process.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:  # the kernel does not let it go
            log.warning("appo %s does not end", self.words[0])
        self.janitor.forget(process.pid)
        self._process = None


def _temporary() -> dict[str, str]:
    """Return the variable that puts a process's temporary files, should it be killed, into a folder of the run."""
    folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return {"TMPDIR": folder} if folder else {}


class CommandBeside:
    """A command of ours whose answer is waited for while training goes on; entered, it runs.

    Args:
        words: of its command line, after `appo`.
        janitor: ends it should main be killed.
    """

    def __init__(self, words: Sequence[str], janitor: Janitor) -> None:
        self.words, self.janitor = words, janitor
        self._said, self._complaints = b"", b""

    def __enter__(self) -> Self:
        self._files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        output, errors = self._files
        self._process = subprocess.Popen(  # noqa: S603 (our own program)
            own_command(self.words), stdin=subprocess.DEVNULL, stdout=output, stderr=errors, process_group=0
        )
        self.janitor.watch(self._process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        kill_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel does not let it go
            self._process.wait(JOIN_SECONDS)
        self.janitor.forget(self._process.pid)
        for file in self._files:
            file.seek(0)
        self._said, self._complaints = (file.read() for file in self._files)
        for file in self._files:
            file.close()

    def is_running(self, timeout_seconds: float) -> bool:
        """Return whether the command has not ended, after waiting for that for so long."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def output(self) -> str:
        """Return the text that the command has printed.

        Raises:
            UsageError: it failed; with its last line.
        """
        if code := self._process.returncode:
            lines = self._complaints.decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
            raise UsageError(f"appo {self.words[0]} failed: {last.removeprefix('error: ')}")
        return self._said.decode(errors="replace")
