"""The shell around the workers of one process: start, signals, the loop, and how errors leave it."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.heartbeat import Activity, Heartbeat
from appo.algorithms.runtime.messages import (
    ALL,
    Address,
    Begin,
    Message,
    Stop,
    TimeReport,
    Worker,
    WorkerFailed,
    WorkerReady,
)
from appo.algorithms.runtime.processes import prctl
from appo.algorithms.runtime.processes.channels import Channels, ProcessLinks
from appo.algorithms.runtime.processes.restarts import ending_of
from appo.algorithms.runtime.processes.strays import MARK, mark_of
from appo.algorithms.runtime.roles import Role
from appo.utils import failpoints, logging
from appo.utils.errors import AppoError, lack_of
from appo.utils.log_files import tail
from appo.utils.run_folder import append_to_own
from appo.utils.system import machine
from appo.utils.system.cgroups import KernelKills
from appo.utils.system.signal_watch import QUIET
from appo.utils.system.usage import Descendants
from appo.utils.timing import ENV, PHASES, clock
from appo.utils.tracebacks import format_error, traceback_of

# The workers that share a process, and how messages pass between them.


class Node:
    """Delivers messages among its workers, and hands the rest to `send`.

    Args:
        workers: in the order in which they get their turn.
        address_of: the receiver of a message.
        send: takes messages whose receiver lives elsewhere.
    """

    def __init__(
        self,
        workers: Mapping[Address, Worker],
        address_of: Callable[[Message], Address],
        send: Callable[[Message], None],
    ) -> None:
        self.workers, self.address_of, self.send = workers, address_of, send

    def deliver(self, message: Message) -> None:
        """Give a message to the worker it is for, or to all."""
        address = self.address_of(message)
        if address is ALL:
            for worker in self.workers.values():
                self._post_all(worker.handle(message))
            return
        worker_or_none = self.workers.get(address)
        if worker_or_none is None:
            self.send(message)
        else:
            self._post_all(worker_or_none.handle(message))

    def turn(self) -> bool:
        """Let every worker that has work do one unit of it; return False when none had any."""
        busy = False
        for worker in self.workers.values():
            if worker.pending():
                busy = True
                self._post_all(worker.work())
        return busy

    def _post_all(self, messages: Iterator[Message]) -> None:
        for message in messages:
            self.deliver(message)


# Reports how a process spends its time.


REPORT_NS = 1_000_000_000


class Timekeeper:
    """Reads the clock of this process once a second.

    Args:
        process: its name.
        role: of its first worker.
        runs_environments: whether processes that it has started, such as games, do the work of its environments.
    """

    def __init__(self, process: str, role: str, *, runs_environments: bool) -> None:
        self.process, self.role = process, role
        self._children = Descendants() if runs_environments else None
        self._children_before = 0.0
        self.begin()

    def begin(self) -> None:
        """Count from now."""
        clock.restart()
        self._reported_ns = clock.started_ns
        self._children_before = self._children.cpu_seconds() if self._children else 0.0

    def due(self) -> bool:
        """Return whether the last report is a second old."""
        return clock.entered_ns - self._reported_ns >= REPORT_NS

    def report(self) -> TimeReport:
        """Report how the time was spent since the beginning."""
        seconds, cpu_seconds = clock.spent()
        self._reported_ns = clock.entered_ns
        if self._children:
            children = self._children.cpu_seconds() - self._children_before
            cpu_seconds[PHASES[ENV]] = cpu_seconds.get(PHASES[ENV], 0.0) + children
        return TimeReport(
            self.process, self.role, clock.started_ns, seconds, cpu_seconds, clock.collected, clock.trained
        )


IDLE_SECONDS = 0.2

REPORT_LINES = 200

STACK_LINES = 60

STACK_SECONDS = 1.0

LOST = 255  # what multiprocessing says of a child whose fork server is gone


@dataclass(frozen=True)
class ProcessPlan:
    """The settings of a process at its start.

    Attributes:
        name: unique in the run.
        row: of its heartbeat.
        workers: addresses of the workers it holds.
        links: doorbells and queues; None when all workers live in main.
        arena: the shared memory.
        log_path: its log file.
        niceness: relative to main.
        cores: to which it is pinned; empty: not pinned.
        threads: of its numeric libraries.
        visible_gpus: value of CUDA_VISIBLE_DEVICES; None leaves it alone.
        generation: how often this process has been started before in the run.
        log_level: below which its messages are dropped.
    """

    name: str
    row: int
    workers: tuple[Address, ...]
    links: ProcessLinks | None
    arena: Arena
    log_path: Path
    niceness: int
    cores: frozenset[int]
    threads: int
    visible_gpus: str | None = None
    generation: int = 0
    log_level: str = "INFO"

    @property
    def role(self) -> Role:
        """Return the role of its first worker, by which it is treated."""
        return self.workers[0].facts

    @property
    def runs_environments(self) -> bool:
        """Return whether foreign code runs here, which may start processes of its own."""
        return any(worker.facts.runs_environments for worker in self.workers)


Build = Callable[[ProcessPlan, Heartbeat], Mapping[Address, Worker]]


def run_process(plan: ProcessPlan, pipe: Connection, build: Build) -> None:
    """Entry of every worker process: build its workers, then let them work until main says stop.

    An error of any kind reaches main with its traceback before the process ends.
    """
    _enter(plan)
    heartbeat = Heartbeat(plan.arena, plan.row)
    heartbeat.beat(Activity.STARTING)
    try:
        assert plan.links is not None
        workers = build(plan, heartbeat)
        channels = Channels(plan.links, plan.arena, pipe, heartbeat)
        node = Node(workers, channels.address_of, channels.send)
        channels.send(WorkerReady(plan.name))
        if plan.runs_environments:  # only now: one that takes the place of another is waited for
            _give_way(plan)
        timekeeper = Timekeeper(plan.name, plan.role.name, runs_environments=plan.runs_environments)
        _loop(node, channels, heartbeat, timekeeper)
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt from an environment are failures, not our shutdown
        with contextlib.suppress(OSError):
            pipe.send(failure_of(plan.name, error))
        _end(1)
    heartbeat.beat(Activity.STOPPING)
    _end(0)


def failure_of(name: str, error: BaseException) -> WorkerFailed:
    """Make the message about an error to main; an error for the user has the traceback of its cause, if any."""
    if lack := lack_of(error):
        return WorkerFailed(name, lack.exit_code, str(lack), lack.traceback)
    if not isinstance(error, AppoError):
        return WorkerFailed(name, 1, f"{type(error).__name__}: {error}", format_error(error))
    return WorkerFailed(name, error.exit_code, str(error), traceback_of(error), error.lasting)


kernel_kills = KernelKills()

OF_SIGKILL = {
    True: ": out of memory (the kernel's count of such kills rose)",
    False: ", not by the kernel's out-of-memory killer",
    None: " (out of memory?)",
}
"""What follows `killed by SIGKILL`, by whether the kernel has done it for want of memory; None: it does not say."""


def cause_of_death(name: str, exit_code: int | None) -> str:
    """Return one line about a process that ended without a word."""
    if exit_code == LOST:
        return f"{name} was lost: the fork server that started it has ended"
    if exit_code is None or exit_code >= 0:
        return f"{name} ended unexpectedly with {ending_of(exit_code)}"
    hint = OF_SIGKILL[kernel_kills.explain()] if -exit_code == signal.SIGKILL else ""
    return f"{name} was killed by {ending_of(exit_code)}{hint}"


def crash_report(log_path: Path) -> str:
    """Return the Python stacks that a crash in C code left at the end of a log; empty if it left none."""
    lines = tail(log_path, REPORT_LINES)
    starts = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    return "\n".join(lines[starts[-1] :]) + "\n" if starts else ""


def stack_of(process: BaseProcess, log_path: Path) -> str:
    """Return the Python stacks of a process that may hang, as it dumps them into its log file."""
    before = size = log_path.stat().st_size if log_path.exists() else 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline:  # the dump has ended when the file has stopped growing
        multiprocessing.connection.wait([process.sentinel], 0.05)
        grown = log_path.stat().st_size if log_path.exists() else 0
        if grown > before and grown == size:
            break
        size = grown
    return "\n".join(tail(log_path, STACK_LINES)) + "\n"


def isolate(name: str, log_path: Path, *, leads_group: bool, log_level: str = "INFO") -> None:
    """Make this process deaf to signals meant for main, and let its output go to its log.

    Args:
        name: of the process.
        log_path: what environments and libraries print belongs there, not between main's lines.
        leads_group: whether it leads a process group, so that what its environments start can be ended with it.
        log_level: below which messages are dropped.
    """
    prctl.die_with_parent(prctl.server_pid or main_pid())
    if leads_group:
        os.setpgid(0, 0)
        if prctl.server_pid is None:  # which would take orphans in
            prctl.adopt_orphans()
        if main := main_pid():
            os.environ[MARK] = f"{mark_of(main)}:{os.getpid()}"
    for number in QUIET:  # only main reacts; it will tell us
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # main blocks signals while it starts a process
    logging.configure(name, log_path, log_level)
    _redirect_output(log_path)


def main_pid() -> int | None:
    """Return the process that asked for this one, whatever process started it."""
    parent = multiprocessing.parent_process()
    return parent.pid if parent else None


def _enter(plan: ProcessPlan) -> None:
    """Isolate this process, and set its priority, cores and threads, before anything is built."""
    isolate(plan.name, plan.log_path, leads_group=plan.runs_environments, log_level=plan.log_level)
    prctl.die_earlier(plan.role.oom_score)
    machine.allocator_settings()
    if not plan.runs_environments:
        _give_way(plan)
    if plan.cores:
        machine.pin_to(plan.cores)
    machine.limit_threads(plan.threads)
    if plan.visible_gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = plan.visible_gpus
    failpoints.arm(worker=plan.workers[0].index)


def _give_way(plan: ProcessPlan) -> None:
    """Take the priority and the turns of the role, for all that environments have started too."""
    machine.set_niceness(plan.niceness, group=plan.runs_environments)
    if plan.role.long_turns:
        prctl.take_long_turns()


def _end(exit_code: int) -> NoReturn:
    """End this process without taking its interpreter apart: with torch in it, a spawned one needs seconds for that.

    Environments have been closed, and main ends what they have left.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # full disk; closed by an environment
            stream.flush()
    os._exit(exit_code)


def _redirect_output(path: Path) -> None:
    descriptor = append_to_own(path)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _loop(node: Node, channels: Channels, heartbeat: Heartbeat, timekeeper: Timekeeper) -> None:
    """Work while there is work, wait for the doorbell while there is none."""
    busy = False
    while True:
        heartbeat.beat(Activity.WORKING if busy else Activity.WAITING)
        for message in channels.receive(0.0 if busy else IDLE_SECONDS):
            if isinstance(message, Begin):
                timekeeper.begin()
            if isinstance(message, Stop):
                channels.send(timekeeper.report())
            node.deliver(message)
            if isinstance(message, Stop):
                return
        busy = node.turn()
        if timekeeper.due():
            channels.send(timekeeper.report())
            logging.follow_log()
