"""The supervisor of a run's processes in main: start, messages, restarts and end."""

import logging
import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from appo.algorithms.runtime.disk import within
from appo.algorithms.runtime.memory.heartbeat import Heartbeat, Pulse
from appo.algorithms.runtime.messages import (
    Address,
    Begin,
    Message,
    Stop,
    WorkerFailed,
    WorkerReady,
    WorkerRestarted,
    WorkerRetires,
)
from appo.algorithms.runtime.processes.channels import Links, Postbox
from appo.algorithms.runtime.processes.crash_recorder import CrashRecorder
from appo.algorithms.runtime.processes.fork_server import abandon, server_of, wake_tracker, without_missing_script
from appo.algorithms.runtime.processes.janitor import Janitor, kill_groups
from appo.algorithms.runtime.processes.prctl import sleeps
from appo.algorithms.runtime.processes.process import (
    LOST,
    Build,
    ProcessPlan,
    cause_of_death,
    crash_report,
    exit_code_of,
    run_process,
    stack_of,
)
from appo.algorithms.runtime.processes.restarts import (
    QUEUE_PATIENCE_SECONDS,
    QUEUE_SECONDS,
    SETTLED_SECONDS,
    Death,
    Limits,
    SeatHistory,
    ending_of,
)
from appo.algorithms.runtime.roles import BRIDGE, LEARNER, WRITER
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import AppoError

log = logging.getLogger(__name__)

JOIN_SECONDS = 1.0
LOOK_SECONDS = 3.0  # to read a log; a disk may hang


class WorkerError(AppoError):
    """The failure or death of a worker process that ends the run; with its traceback if one was sent."""

    def __init__(self, summary: str, exit_code: int = 1, traceback: str = "") -> None:
        super().__init__(summary)
        self.exit_code, self.traceback = exit_code, traceback


@dataclass
class Seat:
    """A process of the run and its seat; a restart gets the next generation.

    Attributes:
        server: pid of the fork server that started the process; 0: a spawned process.
        work_before: units of work of earlier processes in the seat; None until the process is ready.
    """

    plan: ProcessPlan
    process: BaseProcess
    postbox: Postbox
    heartbeat: Heartbeat
    started: float  # monotonic seconds
    server: int
    work_before: int | None = None

    def failure(self, heard: list[Message], *, ended: bool) -> Death | None:
        """Return the death of the process, from its messages or the exit code; None while alive."""
        name = self.plan.name
        for message in heard:
            if isinstance(message, WorkerFailed):
                cause = f"{name}: {message.summary}"
                return Death(cause, True, message.exit_code, message.traceback, lasting=message.lasting, said=True)
            if isinstance(message, WorkerRetires):
                return Death(f"{name}: {message.reason}", own_fault=False, retired=True)
        if not ended:
            return None
        self.process.join(0.5)
        code = exit_code_of(self.process, self.server)
        from_outside = code in (None, LOST, -signal.SIGKILL)
        report = within(LOOK_SECONDS, partial(crash_report, self.plan.log_path, code), "")
        ending = "" if from_outside else ending_of(code)
        cause = cause_of_death(name, code)
        return Death(cause, not from_outside, traceback=report, collateral=code == LOST, ending=ending)

    def end(self, janitor: Janitor) -> None:
        """Kill the process and all processes that its environments started."""
        self.process.kill()
        bury([self], janitor)

    def close(self, deadline: float) -> None:
        """Wait for the end of a process that was killed."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        self.postbox.pipe.close()


def bury(seats: Sequence[Seat], janitor: Janitor) -> None:
    """Clean up after processes that were killed or ended, and kill all processes that their environments started."""
    deadline = time.monotonic() + JOIN_SECONDS
    for seat in seats:
        seat.close(deadline)
    groups = [seat.process.pid or 0 for seat in seats if seat.plan.runs_environments]
    kill_groups(groups)
    for group in groups:
        janitor.forget(group)


class Supervisor:
    """Starts, restarts and ends processes, and passes messages between processes and main.

    Args:
        janitor: janitor, which receives all process groups.
        limits: limits of a process's activities.
        launch: function that starts the process of a name and generation through `start`.
        work_of: function from a name to the units of work done in the seat.
        recorder: recorder of crashes, called after every death and before the restart.

    Attributes:
        seats: living processes by name.
        begun: whether all processes were ready once; an earlier failure ends the run, except a few of actors.
        due: monotonic times of the restarts of empty seats.
        deaths: number of deaths so far, without retirements.
    """

    def __init__(
        self,
        links: Links,
        janitor: Janitor,
        limits: Limits,
        launch: Callable[[str, int], None],
        work_of: Callable[[str], int],
        recorder: CrashRecorder,
    ) -> None:
        self.links, self.janitor, self.limits = links, janitor, limits
        self._launch, self._work_of, self._recorder = launch, work_of, recorder
        self.seats: dict[str, Seat] = {}
        self.begun, self.deaths = False, 0
        self.due: dict[str, float] = {}
        self.last_death: Death | None = None
        self._generations: dict[str, int] = {}
        self._gone: dict[str, Death] = {}  # latest death in each seat
        self._histories: dict[str, SeatHistory] = {}
        self._resumed = self._polled = time.monotonic()

    def start(self, context: ForkServerContext | SpawnContext, plan: ProcessPlan, build: Build) -> None:
        """Start a process, from the main thread only: the end of the starting thread would kill the process."""
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(target=run_process, args=(plan, theirs, build), name=plan.name, daemon=False)
        heartbeat = Heartbeat(plan.arena, plan.row)
        heartbeat.clear()
        with without_missing_script():
            process.start()
        theirs.close()
        if plan.runs_environments:
            self.janitor.watch(process.pid or 0)
        self._generations[plan.name] = plan.generation
        postbox = Postbox(ours, self.links.bells[plan.name])
        server = server_of(context.get_start_method())
        self.seats[plan.name] = Seat(plan, process, postbox, heartbeat, time.monotonic(), server)

    def begin(self) -> None:
        """Send `Begin` to all processes, after the last is ready. A process that ends later is replaced."""
        for name in self.seats:
            self.send(name, Begin())
        self.begun = True

    def poll(self, timeout_seconds: float) -> list[tuple[str, Message]]:
        """Return the messages of workers with the names of processes, after waiting at most `timeout_seconds`.

        Raises:
            WorkerError: a worker failed, died or hangs, and is not replaced.
        """
        messages: list[tuple[str, Message]] = list(self._replace_dead())
        seats = list(self.seats.values())
        waiting = [w for p in seats for w in (p.postbox.pipe, p.process.sentinel)]
        # Until the next restart at most.
        patience = max(0.0, min([timeout_seconds, *(due - time.monotonic() for due in self.due.values())]))
        ready = set(multiprocessing.connection.wait(waiting, patience))
        now = time.monotonic()
        if now - self._polled > timeout_seconds + 1.0:  # main paused: a sleeping laptop, a stopped run
            self._resumed = now
        self._polled = now
        self.janitor.revive()
        for seat in seats:
            seat.postbox.flush()
            heard = seat.postbox.take() if {seat.postbox.pipe, seat.process.sentinel} & ready else []
            messages += [(seat.plan.name, message) for message in heard]
            if any(isinstance(message, WorkerReady) for message in heard):
                seat.work_before = self._work_of(seat.plan.name)
                if self.begun:
                    self.send(seat.plan.name, Begin())
            gone = self.seats.get(seat.plan.name) is not seat  # killed with the peer of a queue
            if not gone and (death := self._death(seat, heard, ended=seat.process.sentinel in ready)):
                self._lose(seat, death)
        return messages

    def send(self, name: str, message: Message) -> None:
        """Send a message to a process and ring; a message to a dead process is dropped."""
        if name in self.seats:
            self.seats[name].postbox.post(message)

    def pulses(self) -> dict[str, Pulse]:
        """Return the heartbeats of all living processes, without pauses of the machine or of main."""
        return {name: seat.heartbeat.read().not_before(self._resumed) for name, seat in self.seats.items()}

    def stop(self, names: list[str], deadline: float) -> Iterator[Message]:
        """Send `Stop` to processes; yield the last messages until all have ended or until monotonic `deadline`."""
        for name in names:
            self.send(name, Stop())
        running = dict.fromkeys(names)
        while running and (left := deadline - time.monotonic()) > 0:
            seats = {name: self.seats[name] for name in running}
            pipes = [seat.postbox.pipe for seat in seats.values() if not seat.postbox.pipe.closed]
            sentinels = [seat.process.sentinel for seat in seats.values()]
            ready = set(multiprocessing.connection.wait([*pipes, *sentinels], min(left, 0.1)))
            for name, seat in seats.items():
                seat.postbox.flush()
                yield from seat.postbox.take()
                if seat.process.sentinel in ready:  # ended before the messages were read
                    del running[name]
        # Learners, replays and writers save at their end, and have most of the time.
        if late := [name for name in running if self.seats[name].plan.role.stop_share > 0.5]:
            log.warning("%s did not end in time and is killed: what it has not saved is lost", ", ".join(late))

    def kill_all(self) -> None:
        """Kill all remaining processes, with the processes of environments."""
        self.due.clear()
        for seat in self.seats.values():
            if seat.process.is_alive():
                seat.process.kill()
        bury([*self.seats.values()], self.janitor)
        wake_tracker()
        abandon([seat.process for seat in self.seats.values() if seat.process.is_alive()])
        self.seats.clear()

    def _death(self, seat: Seat, heard: list[Message], *, ended: bool) -> Death | None:
        """Return the death of a process, also of a hung process that must be killed; None for a healthy process."""
        if death := seat.failure(heard, ended=ended):
            return death
        pulse, now = seat.heartbeat.read().not_before(self._resumed), time.monotonic()
        other = None if pulse.peer is None else self.seats.get(_other_end(seat, pulse.peer, self.links.topology))
        if pulse.peer is not None and _are_stuck((seat, other), now - pulse.entered):
            return self._renew_queue(seat, pulse.peer)
        hang = self.limits.hang(seat.plan.name, pulse, now, is_actor=seat.plan.runs_environments)
        if hang is None:
            return None
        self._recorder.look(seat.plan.name)  # before the request for stacks interrupts the process
        return replace(hang, traceback=within(LOOK_SECONDS, partial(stack_of, seat.process, seat.plan.log_path), ""))

    def _renew_queue(self, seat: Seat, peer: int) -> Death:
        """Replace a queue whose mutex a dead process holds; kill both ends, and return the death of `seat`."""
        worker = seat.plan.workers[0]
        actor, policy = (worker.index, peer) if worker.facts.fills_slots else (peer, worker.index)
        other = _other_end(seat, peer, self.links.topology)
        seat.end(self.janitor)
        blocked = "blocked in its queue to {} by a process that died in it"
        if other in self.seats:
            self._lose(self.seats[other], Death(f"{other}: {blocked.format(seat.plan.name)}", own_fault=False))
        self.links.renew(actor, policy)
        return Death(f"{seat.plan.name}: {blocked.format(other)}", own_fault=False)

    def _lose(self, seat: Seat, death: Death) -> None:
        """Clean up after the death of a process, and plan the restart (WorkerError: the seat is given up)."""
        name, now = seat.plan.name, time.monotonic()
        seat.end(self.janitor)
        del self.seats[name]
        self._recorder.tell(name, death)
        self._gone[name] = death
        self.deaths += not death.retired
        self.last_death = self.last_death if death.retired else death
        worked = seat.work_before is not None and self._work_of(name) > seat.work_before
        first_reset = not self.begun and seat.plan.runs_environments
        self._plan_restart(name, death, worked=worked, lived_seconds=now - seat.started, first_reset=first_reset)

    def _plan_restart(
        self, name: str, death: Death, *, worked: bool, lived_seconds: float, first_reset: bool = False
    ) -> None:
        history = self._histories.setdefault(name, SeatHistory())
        if first_reset:
            delay = history.delay_at_start(death)
        else:
            delay = history.delay(death, worked=worked, lived_seconds=lived_seconds) if self.begun else None
            if delay is None and self.begun and name in (WRITER.name, BRIDGE.name):  # training continues without
                delay = SETTLED_SECONDS
        if delay is None or not self.limits.restart:
            raise WorkerError(death.cause, death.exit_code, death.traceback)
        log.warning("%s; starting it again (restart %d)", death.cause, self._generations[name] + 1)
        if death.traceback:
            log.info("%s", death.traceback.rstrip())
        self.due[name] = time.monotonic() + delay

    def _replace_dead(self) -> Iterator[tuple[str, Message]]:
        now = time.monotonic()
        for name in [name for name, due in self.due.items() if due <= now]:
            del self.due[name]
            try:
                self._launch(name, self._generations[name] + 1)
            except (OSError, EOFError) as error:  # the fork server died; the next attempt starts a new server
                cause = f"{name} could not be started: {error or type(error).__name__}"
                self.deaths += 1
                self._plan_restart(name, Death(cause, False, collateral=True), worked=False, lived_seconds=0.0)
                continue
            death = self._gone[name]
            yield name, WorkerRestarted(name, death.cause, death.retired)
            # The dead process may have left a message without ringing.
            for bell in self.links.bells.values():
                bell.ring()


def _are_stuck(ends: Sequence[Seat | None], seconds: float) -> bool:
    """Return whether a process died with the mutex of a queue locked, by the processes and seconds in the queue."""
    # With too few cores the owner of the mutex may be alive and wait for a core, for a while.
    if seconds <= QUEUE_SECONDS or seconds > QUEUE_PATIENCE_SECONDS:
        return seconds > QUEUE_SECONDS
    return all(sleeps(end.process.pid or 0) for end in ends if end)


def _other_end(seat: Seat, peer: int, topology: Topology) -> str:
    """Return the process at the far end of a queue; one end is a learner, the other end owns slots."""
    return str(Address(LEARNER.name, peer) if seat.plan.workers[0].facts.fills_slots else topology.fillers[peer])
