"""The processes of a run as main sees them: started, listened to, and ended, whatever happens."""

import contextlib
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from algorithms.runtime.channels import Doorbell
from algorithms.runtime.janitor import Janitor, kill_group
from algorithms.runtime.messages import Message, Stop, WorkerFailed
from algorithms.runtime.process import (
    Activity,
    Build,
    Heartbeat,
    ProcessPlan,
    cause_of_death,
    crash_report,
    run_process,
    stack_of,
)
from utils.errors import AppoError

JOIN_SECONDS = 1.0
EXIT_CODE_SECONDS = 0.5


class WorkerError(AppoError):
    """A worker process failed or died; `traceback` is its own, if it could still send it."""

    def __init__(self, summary: str, exit_code: int = 1, traceback: str = "") -> None:
        super().__init__(summary)
        self.exit_code, self.traceback = exit_code, traceback


@dataclass
class Place:
    """Where one process of the run lives; a process that is started again in it gets the next generation."""

    plan: ProcessPlan
    process: BaseProcess
    pipe: Connection
    heartbeat: Heartbeat


class Supervisor:
    """Starts processes, passes messages between them and main, and ends them.

    Args:
        bells: doorbell of every process by name.
        janitor: told which process groups there are.
        reset_timeout_seconds: how long environments may take for their first reset.
    """

    def __init__(self, bells: Mapping[str, Doorbell], janitor: Janitor, reset_timeout_seconds: float) -> None:
        self.bells, self.janitor, self.reset_timeout_seconds = bells, janitor, reset_timeout_seconds
        self.places: dict[str, Place] = {}

    def start(self, context: ForkServerContext | SpawnContext, plan: ProcessPlan, build: Build) -> None:
        """Start a process; from the main thread only, as the parent-death signal follows the starting thread."""
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(target=run_process, args=(plan, theirs, build), name=plan.name, daemon=False)
        process.start()
        theirs.close()
        if plan.runs_environments:
            self.janitor.watch(process.pid or 0)
        self.places[plan.name] = Place(plan, process, ours, Heartbeat(plan.arena, plan.row))

    def poll(self, timeout_seconds: float) -> list[tuple[str, Message]]:
        """Messages that have arrived from workers, after waiting for at most this long.

        Raises:
            WorkerError: a worker failed, died, or hangs in the first reset of an environment.
        """
        waiting = [w for p in self.places.values() for w in (p.pipe, p.process.sentinel)]
        ready = set(multiprocessing.connection.wait(waiting, timeout_seconds))
        messages = []
        for name, place in self.places.items():
            if place.pipe in ready or place.process.sentinel in ready:
                messages += [(name, message) for message in _received(place.pipe)]
        for name, place in self.places.items():
            for sender, message in messages:
                if sender == name and isinstance(message, WorkerFailed):
                    raise WorkerError(f"{name}: {message.summary}", message.exit_code, message.traceback)
            if place.process.sentinel in ready:
                raise _death(place)
        self._check_resets()
        return messages

    def send(self, name: str, message: Message) -> None:
        """Leave a message for a process and wake it; one that is gone is noticed by `poll`."""
        with contextlib.suppress(OSError):
            self.places[name].pipe.send(message)
            self.bells[name].ring()

    def stop(self, names: list[str], deadline: float) -> Iterator[tuple[str, Message]]:
        """Ask processes to stop; yields their last messages until all have ended or monotonic `deadline` has passed."""
        for name in names:
            self.send(name, Stop())
        running = dict.fromkeys(names)
        while running and (left := deadline - time.monotonic()) > 0:
            places = {name: self.places[name] for name in running}
            waiting = [w for p in places.values() for w in (p.pipe, p.process.sentinel) if not _closed(w)]
            ready = set(multiprocessing.connection.wait(waiting, min(left, 0.1)))
            for name, place in places.items():
                for message in _received(place.pipe):
                    yield name, message
                if place.process.sentinel in ready:
                    for message in _received(place.pipe):
                        yield name, message
                    del running[name]

    def kill_all(self) -> None:
        """End whatever still runs, what environments have started included, and forget all processes."""
        for place in self.places.values():
            if place.process.is_alive():
                place.process.kill()
        deadline = time.monotonic() + JOIN_SECONDS
        for place in self.places.values():
            place.process.join(max(0.0, deadline - time.monotonic()))
            place.pipe.close()
            if place.plan.runs_environments:
                kill_group(place.process.pid or 0)
                self.janitor.forget(place.process.pid or 0)
        self.places.clear()

    def _check_resets(self) -> None:
        for name, place in self.places.items():
            activity, since, _ = place.heartbeat.read()
            seconds = time.monotonic() - since
            if activity is Activity.RESETTING and seconds > self.reset_timeout_seconds:
                stack = stack_of(place.process, place.plan.log_path)
                summary = f"{name}: the first reset of its environments took longer than {seconds:.0f} s"
                raise WorkerError(summary, exit_code=3, traceback=stack)


def _received(pipe: Connection) -> list[Message]:
    messages: list[Message] = []
    if pipe.closed:
        return messages
    try:
        while pipe.poll(0):
            messages.append(pipe.recv())
    except (EOFError, OSError):  # the other end is gone; its sentinel tells
        pass
    return messages


def _closed(waitable: object) -> bool:
    return isinstance(waitable, Connection) and waitable.closed


def _death(place: Place) -> WorkerError:
    place.process.join(EXIT_CODE_SECONDS)
    summary = cause_of_death(place.plan.name, place.process.exitcode)
    return WorkerError(summary, traceback=crash_report(place.plan.log_path))
