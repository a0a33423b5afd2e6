"""The launcher of several learners on this machine: a process for each rank, a store for all, and restarts."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from appo.algorithms.run.config import Config
from appo.algorithms.run.ranks.meeting import name_of_run
from appo.algorithms.runtime.config import ENDLESS
from appo.algorithms.runtime.processes.prctl import bound_to_us
from appo.algorithms.runtime.processes.restarts import Revival
from appo.algorithms.runtime.ranks import Rank
from appo.algorithms.runtime.roles import MAIN
from appo.utils.command_line import own_command
from appo.utils.directories import closing
from appo.utils.errors import CheckpointError, Interrupted, NumericsError, Terminated, UsageError
from appo.utils.logging import configure
from appo.utils.system.interrupts import is_free
from appo.utils.system.signal_watch import LIKE_SIGTERM

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
END_SECONDS = 20.0
"""Time in which ranks must end after rank 0."""
GRACE_SECONDS = 4.0
"""Time in which ranks see that rank 0 has ended the run."""
JOIN_SECONDS = 10.0
"""Least time for a rank 0 that is started again: to take over the state of the others, which would be lost else."""
LASTING = (UsageError.exit_code, NumericsError.exit_code, CheckpointError.exit_code)
"""Exit codes of failures that a restart would repeat."""


@dataclass
class _Process:
    """The process of a rank, and the restarts.

    Attributes:
        asked: number of the first signal that asked the rank to end; 0: no such signal.
    """

    rank: Rank
    revival: Revival
    process: subprocess.Popen[bytes] | None = None
    words: list[str] = field(default_factory=list)
    asked: int = 0

    def start(self, argv: Sequence[str]) -> int:
        self.process = subprocess.Popen(  # noqa: S603 (our own program)
            own_command(["train", *argv, *self.words]),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.rank.variables()},
            process_group=0,  # a Ctrl-C reaches the launcher alone, which passes it on once
            preexec_fn=bound_to_us(),  # noqa: PLW1509 (one call to the kernel, no thread of ours)
        )
        self.revival.began(time.monotonic())
        if self.asked:  # before the process existed
            self.send(self.asked)
        return self.process.pid

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def launch(config: Config, argv: Sequence[str]) -> int:
    """Train with several learners on this machine; return the exit code of rank 0.

    A rank that dies is started again, and takes over the state of the others. Rank 0 also resumes the run's folder.
    """
    from appo.algorithms.runtime.learning.rank_store import device_to, serve  # late: one learner needs no torch here

    configure(MAIN.name, None, config.logging.log_level.upper(), as_json=config.logging.log_format == "json")
    store, size = serve(), config.run.num_learners
    ranks = [Rank(number, size, number, size, port=store.port) for number in range(size)]
    device_to(ranks[0])  # once, as every rank would refuse the interface in a line of its own
    processes = [_Process(rank, Revival(f"rank {rank.number}", config.run.run_directory)) for rank in ranks]
    grace = 0.0
    with _passing_signals_to(processes[0]):
        try:
            for process in processes:
                process.start(argv)
            code = _watch(processes, argv, config.run.train_for_seconds)
            grace = 0.0 if code in LASTING else GRACE_SECONDS
            return code
        finally:
            _end(processes, grace)


@contextmanager
def _passing_signals_to(process: _Process) -> Iterator[None]:
    """Pass the signals that end a run on to a process, while entered; SIGHUP ends nothing."""

    def send(number: int, frame: Any) -> None:
        process.asked = process.asked or number
        process.send(number)

    passed = (signal.SIGINT, signal.SIGTERM, *filter(is_free, LIKE_SIGTERM))
    handlers: dict[signal.Signals, Any] = {**dict.fromkeys(passed, send), signal.SIGHUP: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(processes: Sequence[_Process], argv: Sequence[str], seconds: float) -> int:
    """Start ranks again that have died, until rank 0 ends or a failure lasts; return the exit code."""
    began = time.monotonic()
    while True:
        _wait(processes)
        now = time.monotonic()
        for one in processes:
            if one.process is not None and (code := one.process.poll()) is not None:
                pid, one.process = one.process.pid, None
                if code in LASTING or (code >= 0 and one.rank.number == 0):
                    return code
                if code and not one.asked:
                    log.warning("%s", one.revival.ended(now, code).replace(" ended", f" (pid {pid}) ended", 1))
                if code and one.rank.number == 0 and one.revival.given_up:
                    return 1
            if one.process is None and one.asked:
                log.warning("ended by %s, which rank 0 could not answer by saving", signal.Signals(one.asked).name)
                return Interrupted.exit_code if one.asked == signal.SIGINT else Terminated.exit_code
            if one.process is None and one.revival.is_due(now):
                if one.rank.number == 0 and (name := name_of_run(one.rank)):
                    one.words = _resuming(name, seconds, now - began)
                log.warning("rank %d is started again, with pid %d", one.rank.number, one.start(argv))


def _resuming(name: str, seconds: float, elapsed: float) -> list[str]:
    """Return the words by which rank 0 goes on with the run, for what is left of the time."""
    words = [f"--experiment={name}", "--restart_behavior=resume"]
    if seconds < ENDLESS["seconds"]:  # a time on the command line takes the place of a preset's env steps
        words.append(f"--train_for_seconds={max(JOIN_SECONDS, seconds - elapsed):.0f}")
    return words


def _wait(processes: Sequence[_Process]) -> None:
    """Wait until a process ends, at most `LOOK_SECONDS`."""
    with ExitStack() as stack, suppress(ProcessLookupError):  # already gone
        pids = [one.process.pid for one in processes if one.process is not None]
        wait([stack.enter_context(closing(os.pidfd_open(pid))) for pid in pids], LOOK_SECONDS)


def _end(processes: Sequence[_Process], grace: float) -> None:
    """End all ranks; those that see the end of rank 0 have `grace` seconds to end by themselves."""
    deadline = time.monotonic() + grace
    for one in processes:
        if one.process is not None:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, deadline - time.monotonic()))
    deadline = time.monotonic() + END_SECONDS
    for one in processes:
        one.send(signal.SIGTERM)
    for one in processes:
        if one.process is not None:
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait(END_SECONDS)
