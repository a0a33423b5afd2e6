"""A worker process: start, signals, the loop, and reports of errors and deaths."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.heartbeat import Activity, Heartbeat
from appo.algorithms.runtime.messages import Address, Begin, Stop, Worker, WorkerFailed, WorkerReady
from appo.algorithms.runtime.processes import prctl
from appo.algorithms.runtime.processes.channels import Channels, ProcessLinks
from appo.algorithms.runtime.processes.node import Node
from appo.algorithms.runtime.processes.restarts import ending_of
from appo.algorithms.runtime.processes.strays import MARK, mark_of, process_of
from appo.algorithms.runtime.processes.timekeeper import Timekeeper
from appo.algorithms.runtime.roles import Role
from appo.utils import failpoints, logging
from appo.utils.errors import AppoError, lack_of
from appo.utils.log_files import tail
from appo.utils.run_folder import append_to_own
from appo.utils.system import machine
from appo.utils.system.cgroups import KernelKills
from appo.utils.system.signal_watch import QUIET
from appo.utils.tracebacks import format_error, traceback_of

SERVER_GONE = 255  # multiprocessing's exit code of a child whose fork server has ended, and that of `exit(-1)` in C
SERVER_END_SECONDS = 1.0  # between the end of a server's pipes and that of the server
LOST = 256  # no exit code: the fork server that would have reported the exit code has ended
CRASHES = {-one for one in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)}
"""Exit codes of crashes in C code, whose Python stacks faulthandler writes into the log."""


@dataclass(frozen=True)
class ProcessPlan:
    """The settings of a process at its start.

    Attributes:
        workers: addresses of the workers in the process.
        links: doorbells and queues; None if all workers are in main.
        niceness: niceness relative to main.
        cores: cores to which the process is pinned; empty: not pinned.
        threads: number of threads of numeric libraries.
        visible_gpus: value of CUDA_VISIBLE_DEVICES; None leaves the variable alone.
        generation: number of earlier starts in the run.
        log_level: lowest level of logged messages.
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
        """Return the role of the first worker, which decides priority and limits of the process."""
        return self.workers[0].facts

    @property
    def runs_environments(self) -> bool:
        """Return whether the process runs environments: foreign code, which may start processes."""
        return any(worker.facts.runs_environments for worker in self.workers)


Build = Callable[[ProcessPlan, Heartbeat], Mapping[Address, Worker]]


def run_process(plan: ProcessPlan, pipe: Connection, build: Build) -> None:
    """Build the workers and run them until main sends `Stop`: the entry of every worker process.

    Every error is sent to main, with the traceback, before the process ends.
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
        if plan.runs_environments:  # only now: the run waits for a replacement
            _give_way(plan)
        timekeeper = Timekeeper(plan.name, plan.role.name, runs_environments=plan.runs_environments)
        _loop(node, channels, heartbeat, timekeeper)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of an environment are failures, no shutdown
        with contextlib.suppress(OSError):
            pipe.send(failure_of(plan.name, error))
        _end(1)
    heartbeat.beat(Activity.STOPPING)
    _end(0)


def failure_of(name: str, error: BaseException) -> WorkerFailed:
    """Return the message to main about an error; an error for the user has the traceback of its cause, if any."""
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
"""End of the line `killed by SIGKILL`, by whether the kernel killed for lack of memory; None: unknown."""


def exit_code_of(process: BaseProcess, server: int) -> int | None:
    """Return the exit code of a process, or `LOST`; `server` is the pid of its fork server, 0 without one."""
    if (code := process.exitcode) != SERVER_GONE or not server:
        return code
    deadline = time.monotonic() + SERVER_END_SECONDS
    while process_of(server) is not None:
        if time.monotonic() > deadline:
            return code
        time.sleep(0.01)
    return LOST


def cause_of_death(name: str, exit_code: int | None) -> str:
    """Return one line about a process that ended without a message."""
    if exit_code == LOST:
        return f"{name} was lost: the fork server that started it has ended"
    if exit_code is None or exit_code >= 0:
        return f"{name} ended unexpectedly with {ending_of(exit_code)}"
    hint = OF_SIGKILL[kernel_kills.explain()] if -exit_code == signal.SIGKILL else ""
    return f"{name} was killed by {ending_of(exit_code)}{hint}"


def crash_report(log_path: Path, exit_code: int | None) -> str:
    """Return the Python stacks of a crash in C code from the end of a log; empty without a crash."""
    if exit_code not in CRASHES:  # the log may have stacks of an earlier crash
        return ""
    lines = tail(log_path, 200)
    starts = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    return "\n".join(lines[starts[-1] :]) + "\n" if starts else ""


def stack_of(process: BaseProcess, log_path: Path) -> str:
    """Return the Python stacks of a process that may hang, which a signal makes it dump into its log."""
    before = size = log_path.stat().st_size if log_path.exists() else 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:  # the dump has ended when the file has stopped growing
        multiprocessing.connection.wait([process.sentinel], 0.05)
        grown = log_path.stat().st_size if log_path.exists() else 0
        if grown > before and grown == size:
            break
        size = grown
    return "\n".join(tail(log_path, 60)) + "\n"


def isolate(name: str, log_path: Path, *, leads_group: bool, log_level: str = "INFO") -> None:
    """Ignore the signals that main handles, and redirect the output to the log.

    Args:
        name: name of the process.
        log_path: path of the log, which also receives the output of environments and libraries.
        leads_group: whether to lead a process group, with which processes started by environments can be killed.
        log_level: lowest level of logged messages.
    """
    prctl.die_with_parent(prctl.server_pid or main_pid())
    if leads_group:
        os.setpgid(0, 0)
        if prctl.server_pid is None:  # no fork server adopts the orphans
            prctl.adopt_orphans()
        if main := main_pid():
            os.environ[MARK] = f"{mark_of(main)}:{os.getpid()}"
    for number in QUIET:  # only main reacts, and then sends `Stop`
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # main blocks signals while starting a process
    logging.configure(name, log_path, log_level)
    descriptor = append_to_own(log_path)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def main_pid() -> int | None:
    """Return the pid of main, also in a child of the fork server."""
    parent = multiprocessing.parent_process()
    return parent.pid if parent else None


def _enter(plan: ProcessPlan) -> None:
    """Isolate the process and set priority, cores and threads, before workers are built."""
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
    """Set the niceness and the turns of the role, also for processes that environments started."""
    machine.set_niceness(plan.niceness, group=plan.runs_environments)
    if plan.role.long_turns:
        prctl.take_long_turns()


def _end(exit_code: int) -> NoReturn:
    """End the process without finalizing the interpreter, which takes seconds with torch in a spawned process.

    Environments are closed already, and main kills their remaining processes.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # full disk; closed by an environment
            stream.flush()
    os._exit(exit_code)


def _loop(node: Node, channels: Channels, heartbeat: Heartbeat, timekeeper: Timekeeper) -> None:
    """Take messages and give every worker with work a turn; wait at the doorbell if no worker had work."""
    busy = False
    while True:
        heartbeat.beat(Activity.WORKING if busy else Activity.WAITING)
        for message in channels.receive(0.0 if busy else 0.2):
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
