"""`appo launch` trains a grid of flags and seeds in one folder, some runs at a time; a second launch resumes runs."""

import contextlib
import itertools
import multiprocessing.connection
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from appo.algorithms.run.algorithms import algorithms_with
from appo.algorithms.run.config import flags_on, parse_train_flags, resolve
from appo.algorithms.run.folder import check_name, is_run
from appo.algorithms.run.summary import summary
from appo.algorithms.runtime.processes.prctl import bound_to_us
from appo.algorithms.tools.comparison.saved_runs import read_each, read_run, sweep_table
from appo.algorithms.tools.flags import LaunchConfig
from appo.utils.command_line import flag_text, own_command, say
from appo.utils.errors import Interrupted, ResourceError, StopNow, UsageError
from appo.utils.flags import Flag
from appo.utils.run_folder import RunFolder, append_to_own
from appo.utils.system.signal_watch import SignalWatch
from appo.utils.values import flag_hint, shown

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
LONGEST_NAME = 180


class Job(NamedTuple):
    """A run of the grid."""

    name: str
    words: tuple[str, ...]  # its command line


def launch(config: LaunchConfig, words: Sequence[str]) -> int:
    """Train all runs; return 0 if every run succeeded, else 1.

    Raises:
        UsageError: a setting is wrong; no run is started.
        Interrupted: a signal arrived; the runs have saved.
    """
    jobs = jobs_of(config, words)
    if config.dry_run:
        for job in jobs:
            say(f"appo {shlex.join(job.words)}")
        return 0
    if is_run(config.folder):
        raise UsageError(f"--name: {shown(str(config.folder))} is a run, and no folder of runs")
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {shown(str(config.folder))}: {error.strerror}") from None
    try:
        codes = _train_all(jobs, config)
    except StopNow:
        return Interrupted.exit_code
    directories = {job.name: config.folder / job.name for job in jobs if is_run(config.folder / job.name)}
    for line in sweep_table(read_each(directories, read_run), whole=True) if directories else ():
        say(line)
    if failed := [name for name, code in codes.items() if code]:
        say(f"{len(failed)} of {len(jobs)} runs failed: {' '.join(failed)}")
    return int(bool(failed))


def _train_all(jobs: Sequence[Job], config: LaunchConfig) -> dict[str, int]:
    codes: dict[str, int] = {}
    with SignalWatch() as signals, _Running() as running:
        waiting = list(jobs)
        while waiting or running.processes:
            signals.check()
            while waiting and len(running.processes) < config.parallel:
                running.start(waiting.pop(0), config.folder)
            for name, code in running.reap(POLL_SECONDS):
                codes[name] = code
                say(_line(config.folder, name, code))
    return codes


def jobs_of(config: LaunchConfig, words: Sequence[str]) -> list[Job]:
    """Return all runs, seed by seed, so every setting has an early result (UsageError: wrong flags)."""
    jobs = []
    flags = flags_on(words)
    values = {name: _values(name, given, flags) for name, given in config.flags_to_try.items()}
    for seed, chosen in itertools.product(config.seeds, itertools.product(*values.values())):
        setting = dict(zip(values, chosen, strict=True))
        text = re.sub(r"[^A-Za-z0-9._-]", "-", "_".join(f"{name}-{value}" for name, value in setting.items()))
        name = f"{text[:LONGEST_NAME]}_seed-{seed}".lstrip("_")
        check_name("experiment", name)
        own = {
            **setting, "seed": str(seed), "experiment": name, "experiments_root": config.name,
            "train_dir": config.train_dir, "restart_behavior": "resume",
        }  # fmt: skip
        own_words = (*words, *(f"--{key}={value}" for key, value in own.items()))
        resolve(parse_train_flags(own_words))
        jobs.append(Job(name, ("train", *own_words)))
    if len({job.name for job in jobs}) < len(jobs):
        raise UsageError("two runs of the grid have the same name: values must differ in letters and digits")
    return jobs


class _Running:
    """The training processes; leaving the block makes the runs save and end."""

    def __init__(self) -> None:
        self.processes: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}  # by pidfd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for _, process in self.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
            deadline = time.monotonic() + STOP_SECONDS
            while self.processes and time.monotonic() < deadline:
                for _ in self.reap(POLL_SECONDS):
                    pass

    def start(self, job: Job, folder: Path) -> None:
        """Start a run; the output goes to a file in the folder of logs."""
        log_path = log_of(folder, job.name)
        try:
            with os.fdopen(append_to_own(log_of(folder.resolve(), job.name), make=True), "ab") as log:
                process = subprocess.Popen(  # noqa: S603 (our own program; no shell sees the words)
                    own_command(job.words),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # only the launch forwards Ctrl-C
                    preexec_fn=bound_to_us(),  # noqa: PLW1509 (it calls the system alone)
                )
        except OSError as error:
            raise ResourceError(f"cannot start {job.name}: {error.strerror}") from error
        self.processes[os.pidfd_open(process.pid)] = (job.name, process)
        say(f"started   {job.name}, see {log_path}")

    def reap(self, timeout_seconds: float) -> Iterator[tuple[str, int]]:
        """Yield names and exit codes of ended runs, after a wait of at most `timeout_seconds` for an end."""
        for ready in multiprocessing.connection.wait(list(self.processes), timeout_seconds):
            assert isinstance(ready, int)
            name, process = self.processes.pop(ready)
            os.close(ready)
            yield name, process.wait(STOP_SECONDS)


def _values(name: str, given: object, flags: Mapping[str, Flag]) -> list[str]:
    """Return the values of a flag to try, as typed by a user."""
    if name not in flags:
        raise UsageError(f"--grid: unknown flag {shown(name)}{flag_hint(name, flags, algorithms_with, dashes='')}")
    if given == []:
        raise UsageError(f"--grid: {name} needs at least one value")
    if isinstance(given, str):
        return [word.strip() for word in given.split(",")]
    return [flag_text(value) for value in (given if isinstance(given, list) else [given])]


def log_of(folder: Path, name: str) -> Path:
    """Return the file of the output of a run, in a folder beside the runs."""
    return RunFolder(folder).logs / f"{name}.log"


def _line(folder: Path, name: str, code: int) -> str:
    run = summary(folder / name)
    state = f"{'ended' if code == 0 else f'failed ({code})':9} {name}"
    if run is None:
        return f"{state}: see {log_of(folder, name)}"
    last = "-" if run.last_return is None else f"{run.last_return:.2f}"
    return f"{state}: {run.env_steps or 0:,} env steps, return {last}{f', {run.reason}' if run.reason else ''}"
