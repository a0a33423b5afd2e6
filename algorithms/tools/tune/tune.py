"""`appo tune` searches for better flags: trials in processes, in a study on disk that goes on after any end."""

import contextlib
import math
import multiprocessing.connection
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from appo.algorithms.run.config import Config, resolve
from appo.algorithms.run.folder import MARK, folders, is_run
from appo.algorithms.run.preload import preloaded
from appo.algorithms.run.trust import is_marked, marked
from appo.algorithms.run.tuning.measure import resolve_defaults
from appo.algorithms.runtime.messages import WorkerFailed
from appo.algorithms.runtime.processes.fork_server import start_fork_server
from appo.algorithms.runtime.processes.inquiry import Inquiry
from appo.algorithms.runtime.processes.janitor import Janitor
from appo.algorithms.runtime.processes.supervisor import WorkerError
from appo.algorithms.tools.flags import TUNE_DECIDES, TuneConfig
from appo.algorithms.tools.tune import results, trial
from appo.algorithms.tools.tune.space import built_in, first_words, parse_space, values_of
from appo.algorithms.tools.tune.study import Job, Study, new_seeds, require_optuna
from appo.algorithms.tools.tune.trial import Budget, Outcome, Point, run_trial
from appo.envs.make import check_name
from appo.utils.command_line import flag_text, say, words_of
from appo.utils.errors import Interrupted, StopNow, UsageError
from appo.utils.files import read_mapping
from appo.utils.lock import RunLock
from appo.utils.run_folder import RunFolder, read_own_mapping, remove_own, write_json_atomic
from appo.utils.system.limits import raise_limit
from appo.utils.system.machine import available_cores
from appo.utils.system.signal_watch import SignalWatch
from appo.utils.values import shown

POLL_SECONDS = 0.5
STUDY_FILE = "study.json"
RUN_NAME = re.compile(r"(trial|confirm)_\d+_seed-\d+")
TRIALS, SEEDS, CONFIRM_SEEDS = 40, (1, 2, 3), 3
QUIET: Mapping[str, object] = {
    "learner_main_loop_num_cores": 1,
    "tensorboard": False,
    "plot": False,
    "save_best_after": -1,
    "save_every_sec": 1_000_000,
}
"""Flags of every run unless the user gives another value: one thread, and no file that a search needs."""


@dataclass(frozen=True)
class Settings:
    """The content of study.json. Only the limits in the last line may change.

    Attributes:
        shared: flags of all runs.
        fixed: flags of the command line, which are not searched.
        config: config file of the command line; empty: none.
        preset: all flags of the preset.
        space: search space, as the mapping of a file.
    """

    shared: dict[str, Any]
    fixed: dict[str, Any]
    config: str
    preset: dict[str, Any]
    space: dict[str, Any]
    seeds: tuple[int, ...]
    trial_env_steps: int
    trial_seconds: float
    trials: int = 0
    tune_for_seconds: float = 0.0
    confirm_seeds: int = CONFIRM_SEEDS

    @property
    def budget(self) -> Budget:
        """Return the budget of a run."""
        return Budget(self.trial_env_steps or math.inf, self.trial_seconds or math.inf)

    @property
    def most_trials(self) -> int | None:
        """Return the limit of trials; None: only the time ends the search."""
        return self.trials or (None if self.tune_for_seconds else TRIALS)


def tune(config: TuneConfig, given: Mapping[str, object]) -> int:
    """Search until the limits of the study, run the winner again and write the results; return the exit code.

    Raises:
        UsageError: a flag is wrong, or an existing study has other flags.
        DirectoryInUse: another process searches in the study.
        AppoError: the preset failed.
    """
    require_optuna()
    if is_run(config.folder):
        raise UsageError(f"--study: {shown(str(config.folder))} is a run, and no study")
    path = config.folder / STUDY_FILE
    settings = read_settings(path, config, given) if path.exists() else new_settings(config, given)
    try:
        with RunLock(RunFolder(config.folder).lock):
            write_json_atomic(path, marked(asdict(settings)))
            return _search(config, settings)
    except (Interrupted, StopNow) as interruption:
        say(f"study {config.study} is saved: appo tune {config.study}{_place(config)} goes on")
        return getattr(interruption, "exit_code", Interrupted.exit_code)


def new_settings(config: TuneConfig, given: Mapping[str, object]) -> Settings:
    """Return the settings of a new study; makes an unknown environment once (UsageError: a flag is wrong)."""
    if not (config.trial_env_steps or config.trial_seconds):
        raise UsageError(f"the new study {config.study} needs --trial_env_steps=N or --trial_seconds=S")
    place = {"experiment": "trial", "experiments_root": config.study, "train_dir": config.train_dir}
    resolved, origins = resolve({**given, **place, "restart_behavior": "overwrite"})
    if not resolved.algorithm.needs_actors:
        raise UsageError(f"--algo={resolved.run.algo} plays no episodes whose return could be tuned")
    check_name(resolved.env)
    fixed = {name: value for name, value in given.items() if name != "config"}
    preset, flat = resolve_defaults(resolved), resolved.to_flat()
    told = [name for name, origin in origins.items() if origin in ("command line", "config file")]
    shared = {name: flat[name] for name in told if name not in TUNE_DECIDES} | {
        "env": resolved.env.env,
        "algo": resolved.run.algo,
    }
    if not preset.algorithm.whole_rollouts:
        shared.setdefault("inference", "serial")
    space = _content(config, preset, fixed)
    return _with_limits(
        Settings(
            shared=shared,
            fixed=fixed,
            config=str(given.get("config", "")),
            preset=preset.to_flat(),
            space=space,
            seeds=config.seeds or SEEDS,
            trial_env_steps=config.trial_env_steps,
            trial_seconds=config.trial_seconds,
        ),
        config,
    )


def read_settings(path: Path, config: TuneConfig, given: Mapping[str, object]) -> Settings:
    """Return the settings of an existing study, with the given limits.

    Raises:
        UsageError: the file is damaged or foreign, or a given flag differs.
    """
    content = read_own_mapping(path)
    if not (config.trust or is_marked(content)):
        why = "has no mark of yours, or was changed since: --trust if you know where it comes from"
        raise UsageError(f"study {config.study} {why}")
    try:
        found = Settings(**{name: value for name, value in content.items() if name != MARK})  # type: ignore[arg-type]
        preset = Config.from_flat(found.preset)
    except TypeError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    before: dict[str, object] = {**found.fixed, "config": found.config}
    asked = dict(given)
    for name in ("trial_env_steps", "trial_seconds", "seeds"):
        before[name] = getattr(found, name)
        asked |= {name: value} if (value := getattr(config, name)) else {}
    for name, value in asked.items():
        if name not in before or flag_text(value) != flag_text(before[name]):
            had = f"--{name}={words_of(before[name])}" if name in before else f"no --{name}"
            raise UsageError(f"study {config.study} has {had}, not {words_of(value)}: give another --study")
    if config.space and _content(config, preset, found.fixed) != found.space:
        raise UsageError(f"study {config.study} has another space than {shown(config.space)}: give another --study")
    return _with_limits(replace(found, seeds=tuple(found.seeds)), config)


def _with_limits(settings: Settings, config: TuneConfig) -> Settings:
    """Return the settings with the limits that the user gives now."""
    confirm_seeds = settings.confirm_seeds if config.confirm_seeds is None else config.confirm_seeds
    return replace(
        settings,
        trials=config.trials or settings.trials,
        tune_for_seconds=config.tune_for_seconds or settings.tune_for_seconds,
        confirm_seeds=confirm_seeds,
    )


def _content(config: TuneConfig, preset: Config, fixed: Mapping[str, object]) -> dict[str, Any]:
    """Return the search space as the mapping of a file, checked."""
    content = read_mapping(Path(config.space)) if config.space else built_in(preset, fixed)
    source = f"--space={shown(config.space)}" if config.space else "the built-in space"
    for name in parse_space(content, preset.table, source):
        if name in fixed:
            raise UsageError(f"{source}: {name} is fixed by --{name}={words_of(fixed[name])}")
    return content


def _place(config: TuneConfig) -> str:
    return "" if config.train_dir == "./train_dir" else f" --train_dir={config.train_dir}"


def _search(config: TuneConfig, settings: Settings) -> int:
    preset = Config.from_flat(settings.preset)
    space = parse_space(settings.space, preset.table, STUDY_FILE)
    first, moved = first_words(space, settings.preset)
    study = Study(config.folder, space, settings.seeds, first)
    values = partial(values_of, space=space, preset=preset, budget_env_steps=settings.budget.env_steps)
    if moved:
        at = " ".join(f"{name}={words_of(first[name])}" for name in moved)
        say(f"trial 0 is the preset except {at}: the preset lies outside of the space")
    _clean(config.folder, study)
    begun = len(study.records())
    say(f"study {config.study}: {begun} trials so far, {len(space)} flags to tune: {' '.join(space)}")
    deadline = time.monotonic() + (settings.tune_for_seconds or math.inf)
    raise_limit()
    janitor = Janitor()
    janitor.owns_main = True
    with SignalWatch() as signals, janitor, _Running(config, settings, values, signals, janitor) as running:
        parallel = config.parallel or available_cores()
        _run_all(partial(study.next, settings.most_trials), study, running, parallel, deadline)
        running.end_all()
        if (winner := study.winner()) is None:
            say(f"no trial has run with all seeds: appo tune {config.study}{_place(config)} goes on")
            return 0
        known = study.confirmed(winner.number)
        seeds = new_seeds(settings.seeds, settings.confirm_seeds)
        jobs = iter([Job(winner.number, winner.words, n, s, True) for n, s in enumerate(seeds) if s not in known])
        _run_all(lambda: next(jobs, None), study, running, parallel, math.inf)
    records = study.records()
    found = results.Results(
        shared={**settings.shared, **settings.budget.flags},
        preset=settings.preset,
        values={one.number: values(one.words) for one in records if one.words.keys() == space.keys()},
        records=records,
        winner=winner,
        confirmed=study.confirmed(winner.number),
        importances=study.importances(),
    )
    for line in results.write(found, config.folder):
        say(line)
    return 0


def _clean(folder: Path, study: Study) -> None:
    """Remove folders and logs of runs that were killed; runs of a finished confirmation stay."""
    kept = {Job(one.number, {}, 0, seed, True).name for one in study.records() for seed in study.confirmed(one.number)}
    for name in folders(folder):
        if RUN_NAME.fullmatch(name) and name not in kept:
            shutil.rmtree(folder / name, ignore_errors=True)
            remove_own(RunFolder(folder).log(name))


def _run_all(
    next_job: Callable[[], Job | None], study: Study, running: "_Running", parallel: int, deadline: float
) -> None:
    """Make runs, at most `parallel` at a time, until none is left or the monotonic `deadline`."""
    while (now := time.monotonic()) < deadline:
        running.signals.check()
        while len(running.jobs) < parallel and (job := next_job()) is not None:
            running.start(job)
        if not running.jobs:
            return
        for job, answer in running.answers(min(POLL_SECONDS, deadline - now)):
            _take(job, answer, study, running)


def _take(job: Job, answer: object, study: Study, running: "_Running") -> None:
    """Write the answer of a run into the study."""
    match answer:
        case Point(number, score):
            if not job.confirms and study.report(job, number, score):
                running.end(job)
                study.stop(job)
                say(f"trial {job.number} seed {job.seed}: ended early at {number} tenths with {score:.2f}")
        case Outcome(score):
            running.end(job)
            study.add(job, answer)
            say(f"trial {job.number} seed {job.seed}: {score:.2f}{' (new seed)' * job.confirms}")
        case WorkerFailed():
            if job.number == 0 or job.confirms:
                raise WorkerError(f"{job.name}: {answer.summary}", answer.exit_code, answer.traceback)
            running.end(job, failed=True)
            study.stop(job, answer.summary)
            say(f"trial {job.number} seed {job.seed} failed: {answer.summary}")


class _Running:
    """The runs that are made now, each in a process; leaving the block kills the processes and removes their folders.

    Attributes:
        jobs: run -> its process.
    """

    def __init__(
        self,
        config: TuneConfig,
        settings: Settings,
        values: Callable[[Mapping[str, object]], Mapping[str, object]],
        signals: SignalWatch,
        janitor: Janitor,
    ) -> None:
        self.config, self.settings, self.values, self.signals, self.janitor = config, settings, values, signals, janitor
        self.jobs: dict[str, tuple[Job, Inquiry]] = {}
        self.folder = config.folder
        *before, last = preloaded(with_torch=True)
        self.preload = (*before, trial.__name__, last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_all()

    def start(self, job: Job) -> None:
        """Fork the process of a run."""
        start_fork_server(self.janitor, self.preload, with_torch=True)  # again, if it has died
        place = {"experiment": job.name, "experiments_root": self.config.study, "train_dir": self.config.train_dir}
        flags = {**QUIET, **self.settings.shared, **self.values(job.words), **place}
        flags |= {"seed": job.seed, "restart_behavior": "overwrite"}
        inquiry = Inquiry(
            run_trial,
            (flags, self.settings.budget),
            log_path=RunFolder(self.folder).log(job.name),
            method="forkserver",
            signals=self.signals,
            janitor=self.janitor,
        )
        self.jobs[job.name] = (job, inquiry.__enter__())

    def answers(self, seconds: float) -> Iterator[tuple[Job, object]]:
        """Yield all answers, after a wait of at most so many seconds for the first one."""
        multiprocessing.connection.wait([inquiry.pipe for _, inquiry in self.jobs.values()], seconds)
        for job, inquiry in list(self.jobs.values()):
            while job.name in self.jobs and (answer := inquiry.answer_by(0.0)) is not None:
                yield job, answer

    def end(self, job: Job, *, failed: bool = False) -> None:
        """End a process; remove the folder of the run unless the run confirms, and the log unless the run failed."""
        _, inquiry = self.jobs.pop(job.name)
        try:
            inquiry.__exit__(None, None, None)
        finally:
            if not job.confirms:
                shutil.rmtree(self.folder / job.name, ignore_errors=True)
            if not failed:
                remove_own(inquiry.log_path)

    def end_all(self) -> None:
        """End all processes."""
        with contextlib.ExitStack() as stack:
            for job, _ in list(self.jobs.values()):
                stack.callback(self.end, job)
