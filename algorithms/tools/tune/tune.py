"""`appo tune` searches for better flags: trials in processes, in a study on disk that goes on after any end."""

import contextlib
import math
import multiprocessing.connection
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from appo.algorithms.run.config import Config, check, resolve
from appo.algorithms.run.first_batch import budget_of
from appo.algorithms.run.folder import MARK, folders, is_run
from appo.algorithms.run.preload import preloaded
from appo.algorithms.run.trust import is_marked, marked
from appo.algorithms.run.tuning.measure import made_once, resolve_defaults
from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes.fork_server import start_fork_server
from appo.algorithms.runtime.processes.inquiry import Inquiry
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.processes.supervisor import WorkerError
from appo.algorithms.tools.flags import TUNE_DECIDES, TuneConfig
from appo.algorithms.tools.tune.results import Results, words_of_first, write
from appo.algorithms.tools.tune.space import (
    Space,
    built_in,
    dead_flags,
    differences,
    parse_space,
    refused,
    require_effect,
    values_of,
    words_of_preset,
)
from appo.algorithms.tools.tune.study import Job, Record, Study, require_optuna
from appo.algorithms.tools.tune.trial import Alive, Outcome, Point, run_trial
from appo.envs.make import check_name
from appo.utils.command_line import flag_text, say, words_of
from appo.utils.errors import Interrupted, StopNow, UsageError, text_of
from appo.utils.files import read_mapping
from appo.utils.lock import RunLock
from appo.utils.run_folder import RunFolder, read_own_mapping, remove_own, write_json_atomic
from appo.utils.system.limits import raise_limit
from appo.utils.system.machine import available_cores
from appo.utils.system.signal_watch import SignalWatch
from appo.utils.values import shown

POLL_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 2.0
START_PATIENCE = 10
"""Factor of the limit of silence before a run's first sign of life: one process makes all environments."""
STUDY_FILE = "study.json"
RUN_NAME = re.compile(r"(trial|confirm)_\d+_seed-\d+")
TRIALS, SEEDS, CONFIRM_SEEDS = 40, (1, 2, 3), 3
QUIET: Mapping[str, object] = {
    "learner_main_loop_num_cores": 1, "tensorboard": False, "plot": False, "save_best_after": -1,
    "save_every_sec": 1_000_000, "save_replay": False,
}  # fmt: skip
"""Flags of every run unless the user gives another value: one thread, and no file that a search does not need."""


@dataclass(frozen=True)
class Settings:
    """The content of study.json. Only `trials`, `tune_for_seconds` and `confirm_seeds` may change.

    Attributes:
        asked: flags of the first command line, of training and of the study; the content in place of --config=FILE.
        shared: flags of all runs.
        preset: all flags of the preset.
        space: search space, as the mapping of a file.
        frames_per_step: env steps of an agent step.
    """

    asked: dict[str, Any]
    shared: dict[str, Any]
    preset: dict[str, Any]
    space: dict[str, Any]
    frames_per_step: int = 1  # of studies from before this was kept
    trials: int = 0
    tune_for_seconds: float = 0.0
    confirm_seeds: int = CONFIRM_SEEDS

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of a trial."""
        return list(self.asked.get("seeds", SEEDS))

    @property
    def most_samples(self) -> float:
        """Return the budget of a run in agent steps; inf: the budget is a time."""
        return float(self.shared.get("train_for_env_steps", math.inf)) / self.frames_per_step

    def parsed(self, source: str) -> tuple[Config, Space, dict[str, object]]:
        """Return the flags of all runs, the space, and trial 0's parameters; `source` begins messages."""
        flags = Config.from_flat({**self.preset, **self.shared})
        space = parse_space(self.space, flags.table, source)
        return flags, space, words_of_preset(space, self.preset)


def tune(config: TuneConfig, given: Mapping[str, object]) -> int:
    """Search until the limits of the study, run the winner again and write the results; return the exit code.

    Raises:
        UsageError: a flag is wrong, or the study was begun with other flags.
        DirectoryInUse: another process searches in the study.
        AppoError: the preset failed.
    """
    require_optuna()
    if is_run(config.folder):
        raise UsageError(f"--study: {shown(str(config.folder))} is a run, and no study")
    of_study = ("trial_env_steps", "trial_seconds", "seeds", "space")
    asked = {**given, **{name: value for name in of_study if (value := getattr(config, name))}}
    if file := given.get("config"):
        asked["config"] = read_mapping(Path(str(file)))
    path = config.folder / STUDY_FILE
    settings = _read_settings(config, asked) if os.path.exists(path) else _new_settings(config, given, asked)
    limits = {name: getattr(config, name) for name in ("trials", "tune_for_seconds", "confirm_seeds")}
    settings = replace(settings, **{name: limit for name, limit in limits.items() if limit is not None})
    raise_limit()
    janitor = Janitor()
    janitor.owns_main = True
    again = f"appo tune {config.study}" + f" --train_dir={config.train_dir}" * (config.train_dir != "./train_dir")
    try:
        with RunLock(RunFolder(config.folder).lock):
            write_json_atomic(path, marked(asdict(settings)))
            with (
                SignalWatch() as signals,
                janitor,
                contextlib.closing(_Search(config, settings, signals, janitor)) as search,
            ):
                winner = search.run()
            if winner is None:
                say(f"no trial has run with all seeds: {again} goes on")
                return 0
            for line in write(search.results(winner), config.folder):
                say(line)
            return 0
    except (FileNotFoundError, NotADirectoryError) as error:  # the folder was taken away
        raise UsageError(f"study {config.study} cannot be written: {text_of(error)}") from None
    except (Interrupted, StopNow) as interruption:
        say(f"study {config.study} is saved: {again} goes on")
        return getattr(interruption, "exit_code", Interrupted.exit_code)


def _new_settings(config: TuneConfig, given: Mapping[str, object], asked: dict[str, Any]) -> Settings:
    """Return the settings of a new study; makes the environment (UsageError: a flag is wrong)."""
    if not (config.trial_env_steps or config.trial_seconds):
        raise UsageError(f"the new study {config.study} needs --trial_env_steps=N or --trial_seconds=S")
    place = {"experiment": "trial", "experiments_root": config.study, "train_dir": config.train_dir}
    resolved, origins = resolve({**given, **place, "restart_behavior": "overwrite"})
    if not resolved.algorithm.needs_actors:
        raise UsageError(f"--algo={resolved.run.algo} plays no episodes whose return could be tuned")
    check_name(resolved.env)
    preset, flat = resolve_defaults(resolved), resolved.to_flat()
    shared: dict[str, Any] = {} if preset.algorithm.whole_rollouts else {"inference": "serial"}
    # A file of --print_config names every flag: one at its default is no wish for files or more processes.
    told = {name for name, origin in origins.items() if origin in ("command line", "config file")}
    quiet = {name for name in (*QUIET, "inference") if origins.get(name) == "config file"} - resolved.given
    shared |= {name: flat[name] for name in sorted(told - quiet - {*TUNE_DECIDES})}
    shared |= {"env": resolved.env.env, "algo": resolved.run.algo}
    limits = {"train_for_env_steps": config.trial_env_steps, "train_for_seconds": config.trial_seconds}
    shared |= {name: limit for name, limit in limits.items() if limit}
    source = f"--space={shown(config.space)}" if config.space else "the built-in space"
    of_runs = replace(Config.from_flat({**preset.to_flat(), **shared}), by_kind=preset.by_kind)
    frames = made_once(preset).frames_per_step
    if not config.space:
        _require_update(of_runs, frames)
    content = read_mapping(Path(config.space)) if config.space else built_in(of_runs, given)
    space = parse_space(content, preset.table, source)
    for name in space:
        if name in given:
            raise UsageError(f"{source}: {name} is fixed by --{name}={words_of(given[name])}")
    if config.space:
        require_effect(space, of_runs, source)
        for name, value in refused(space, of_runs):
            say(f"{source}: a start refuses {name}={words_of(value)} beside trial 0, whose values then take its place")
    # A start with the winner's flags would let the cost of a step decide these, which no trial measures.
    images = "encoder_mlp_layers" not in preset.by_kind
    by_cost = preset.algorithm.preset_by_cost(images=images, rollout=preset.learning.rollout).keys() & preset.by_kind
    shared |= {name: preset.to_flat()[name] for name in sorted(by_cost - space.keys())}
    settings = Settings(asked, shared, preset.to_flat(), content, frames)
    for line in dead_flags(of_runs, given, space):
        say(line)
    first = values_of(settings.parsed(source)[2], space, of_runs, settings.most_samples)
    _require_update(Config.from_flat({**of_runs.to_flat(), **first}), frames)
    return settings


def _require_update(trial: Config, frames_per_step: int) -> None:
    """Refuse flags of trial 0 that contradict each other or end before the first update (UsageError)."""
    try:
        check(trial)
        budget_of(trial, frames_per_step)
    except UsageError as error:
        raise UsageError(f"trial 0: {error}") from None


def _read_settings(config: TuneConfig, asked: Mapping[str, object]) -> Settings:
    """Return the settings of a study that exists (UsageError: damaged or foreign, or a given flag differs)."""
    content = read_own_mapping(config.folder / STUDY_FILE)
    if not (config.trust or is_marked(content)):
        why = "has no mark of yours, or was changed since: --trust if you know where it comes from"
        raise UsageError(f"study {config.study} {why}")
    try:
        found = Settings(**{name: value for name, value in content.items() if name != MARK})  # type: ignore[arg-type]
        found.parsed(STUDY_FILE)
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{config.folder / STUDY_FILE} is damaged: {text_of(error)}") from None
    if config.space and read_mapping(Path(config.space)) != found.space:
        raise UsageError(f"study {config.study} has another search space than {config.space}: give another --study")
    asked, had = dict(asked), found.asked
    # A study from before the content was kept has the name of the file.
    file, before = asked.pop("config", None), had.get("config")
    if file is not None and file != before and not isinstance(before, str):
        raise UsageError(f"study {config.study} has other flags than --config: give another --study")
    for name, value in asked.items():
        if name not in had or flag_text(value) != flag_text(had[name]):
            words = f"--{name}={words_of(had[name])}" if name in had else f"no --{name}"
            raise UsageError(f"study {config.study} has {words}, not {words_of(value)}: give another --study")
    return found


class _Ending(NamedTuple):
    """A process that closes its environments after its run."""

    job: Job
    inquiry: Inquiry
    failed: bool


class _Search:
    """The runs of a study, some at a time, each in a process. Closing kills the processes and removes their folders."""

    def __init__(self, config: TuneConfig, settings: Settings, signals: SignalWatch, janitor: Janitor) -> None:
        self.config, self.settings, self.signals, self.janitor = config, settings, signals, janitor
        self.folder, self.parallel = config.folder, config.parallel or available_cores()
        self.preset, self.space, first = settings.parsed(STUDY_FILE)
        self.quiet = {name: value for name, value in QUIET.items() if name in self.preset.table.flags}
        self.study = Study(self.folder, self.space, settings.seeds, first)
        self.running: dict[str, tuple[Job, Inquiry]] = {}
        self.ending: list[_Ending] = []
        self.silent, self.begun = dict[str, float](), set[str]()
        limits = self.preset.sampling
        self.patience = limits.reset_timeout_seconds + limits.step_timeout_seconds + limits.work_timeout_seconds
        self.killed: set[str] = set()
        self.repeats: list[Job] = []
        *before, last = preloaded(with_torch=True)
        self.preload = (*before, run_trial.__module__, last)
        if moved := differences(self.values(first), settings.preset):
            say(f"trial 0 is {words_of_first(moved)}: the space or the budget excludes the preset")

    def run(self) -> Record | None:
        """Search until a limit, and run the winner again; return the winner, None without one."""
        records, settings = self.study.records(), self.settings
        kept = {Job(one.number, {}, 0, seed, True).name for one in records for seed in self.study.confirmed(one.number)}
        for name in folders(self.folder):
            if RUN_NAME.fullmatch(name) and name not in kept:  # a run that was killed
                self._remove(name)
        say(f"study {self.config.study}: {len(records)} trials so far, flags to tune: {' '.join(self.space)}")
        seconds = settings.tune_for_seconds or math.inf
        most = settings.trials or (TRIALS if math.isinf(seconds) else math.inf)
        self._run_all(partial(self.study.next, most), time.monotonic() + seconds)
        self.close()
        if winner := self.study.winner():
            seeds = [max(settings.seeds) + 1 + place for place in range(settings.confirm_seeds)]
            known = self.study.confirmed(winner.number)
            if jobs := [Job(winner.number, winner.words, 0, seed, True) for seed in seeds if seed not in known]:
                write(self.results(winner), self.folder)  # confirming may take long, and be interrupted
            self._run_all(partial(next, iter(jobs), None), math.inf)
        return winner

    def values(self, words: Mapping[str, object]) -> dict[str, object]:
        """Return the flags of a trial that the study searches."""
        return values_of(words, self.space, self.preset, self.settings.most_samples)

    def results(self, winner: Record) -> Results:
        """Return everything that the study has found."""
        records, preset = self.study.records(), self.settings.preset
        changes = {
            one.number: differences(self.values(one.words), preset) if one.words.keys() == self.space.keys() else {}
            for one in records
        }
        flags = {**self.settings.shared, **self.values(winner.words)}
        return Results(flags, records, changes, winner, self.study.confirmed(winner.number), self.study.importances())

    def close(self) -> None:
        """End all processes."""
        for job, _ in list(self.running.values()):
            self._end(job)
        with contextlib.ExitStack() as stack:
            for one in self.ending:
                stack.callback(self._bury, one)
            self.ending = []

    def _run_all(self, next_job: Callable[[], Job | None], deadline: float) -> None:
        """Make runs, at most `parallel` at a time, until none is left or the monotonic `deadline`."""
        looked = time.monotonic()
        while (now := time.monotonic()) < deadline:
            self.signals.check()
            # A process that was stopped or swapped out has not watched the others meanwhile.
            passed, looked = min(now - looked, LONGEST_LOOK_SECONDS), now
            for one in [one for one in self.ending if one.inquiry.has_closed]:
                self.ending.remove(one)
                self._bury(one)
            while len(self.running) < self.parallel and (job := self.repeats.pop() if self.repeats else next_job()):
                self._start(job)
            if not self.running:
                return
            pipes = [inquiry.pipe for _, inquiry in self.running.values()]
            multiprocessing.connection.wait(pipes, min(POLL_SECONDS, deadline - now))
            for job, inquiry in list(self.running.values()):
                self.silent[job.name] += passed
                while job.name in self.running and (answer := self._answer(job, inquiry)) is not None:
                    self.silent[job.name] = 0.0
                    self.begun.add(job.name)
                    if isinstance(answer, WorkerFailed) and inquiry.was_killed and job.name not in self.killed:
                        self._repeat(job, answer.summary)
                        break
                    self._take(job, answer)

    def _answer(self, job: Job, inquiry: Inquiry) -> object | None:
        """Return the next answer of a process, `WorkerFailed` if the process hangs or has died; None: no answer yet."""
        answer = inquiry.answer_by(0.0, "the process")
        patience = self.patience * (1 if job.name in self.begun else START_PATIENCE)
        if answer is None and self.silent[job.name] > patience:
            return inquiry.end_hanging(patience)
        return answer

    def _start(self, job: Job) -> None:
        start_fork_server(self.janitor, self.preload, with_torch=True)  # again, if it has died
        flags = {
            **self.quiet,
            **self.settings.shared,
            **self.values(job.words),
            "seed": job.seed,
            "experiment": job.name,
        }
        place = {"experiments_root": self.config.study, "train_dir": self.config.train_dir}
        inquiry = Inquiry(
            run_trial,
            ({**flags, **place, "restart_behavior": "overwrite"},),
            log_path=RunFolder(self.folder).log(job.name),
            method="forkserver",
            signals=self.signals,
            janitor=self.janitor,
        )
        self.running[job.name], self.silent[job.name] = (job, inquiry.__enter__()), 0.0

    def _repeat(self, job: Job, cause: str) -> None:
        """Make a run again, once: whoever killed the process need not have meant the trial."""
        self._end(job)
        self._bury(self.ending.pop())  # the run has the same folder again
        self.killed.add(job.name)
        self.repeats.append(job)
        say(f"{job.title}: {cause}; the run begins again")

    def _take(self, job: Job, answer: object) -> None:
        """Write the answer of a run into the study."""
        who = job.title
        match answer:
            case Point(number, score):
                if not job.confirms and self.study.report(job, number, score):
                    self._end(job)
                    self.study.stop(job.number)
                    say(f"{who}: ended early at {number} tenths with {score:.2f}")
            case Alive():
                pass
            case Outcome(score):
                self._end(job)
                (self.study.confirm if job.confirms else self.study.add)(job, answer)
                say(f"{who}: {score:.2f}")
            case WorkerFailed():
                if job.number == 0 and not job.confirms:
                    raise WorkerError(f"{who}: {answer.summary}", answer.exit_code, answer.traceback)
                self._end(job, failed=True)
                if job.confirms:
                    self.study.confirm(job, answer.summary)
                else:
                    self.study.stop(job.number, answer.summary)
                say(f"{who} failed: {answer.summary}")

    def _end(self, job: Job, *, failed: bool = False) -> None:
        """Let a process close its environments, while the next run begins."""
        _, inquiry = self.running.pop(job.name)
        self.begun.discard(job.name)
        inquiry.close()
        self.ending.append(_Ending(job, inquiry, failed))

    def _bury(self, one: _Ending) -> None:
        """End a process; remove the run unless it confirms, and the log unless the run failed."""
        try:
            one.inquiry.__exit__(None, None, None)
        finally:
            self._remove(one.job.name, run=not one.job.confirms, log=not one.failed)

    def _remove(self, name: str, *, run: bool = True, log: bool = True) -> None:
        if run:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if log:
            remove_own(RunFolder(self.folder).log(name))
