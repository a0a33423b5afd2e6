"""The workers of a run, in separate processes or all in main: start, messages and end."""

import logging
import time
from collections.abc import Callable, Iterator

from appo.algorithms.runtime.messages import Begin, Message, Stop, WorkerReady, WorkerRestarted
from appo.algorithms.runtime.processes.fork_server import server_ended
from appo.algorithms.runtime.processes.node import Node
from appo.algorithms.runtime.processes.stalls import StallWatch
from appo.algorithms.runtime.processes.supervisor import Supervisor
from appo.algorithms.runtime.processes.timekeeper import Timekeeper
from appo.algorithms.runtime.roles import MAIN, ROLES
from appo.algorithms.runtime.topology import Topology
from appo.utils.system.signal_watch import SignalWatch
from appo.utils.timing import FRAMEWORK, clock

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
START_LINE_SECONDS = 5.0  # between log lines about the progress of the start
MOST_NAMED = 4  # processes in a log line
MOST_FIRST_LAUNCHES = 3  # a server that dies more often is killed on purpose, or for lack of memory


class InProcess:
    """All workers in main, in order.

    Args:
        build: function that makes the node; the argument takes the messages for main.
    """

    def __init__(self, build: Callable[[Callable[[Message], None]], Node]) -> None:
        self._outbox: list[Message] = []
        self._build = build
        self._node: Node | None = None
        self._timekeeper = Timekeeper(MAIN.name, MAIN.name, runs_environments=True)

    def start(self) -> None:
        """Build and begin all workers."""
        self._node = self._build(self._outbox.append)
        self._timekeeper.begin()
        self._node.deliver(Begin())

    def poll(self, timeout_seconds: float) -> list[Message]:
        """Give every worker one turn and return messages for main."""
        assert self._node is not None
        if not self._node.turn():
            clock.wait()
            time.sleep(min(timeout_seconds, 0.01))  # only a spent budget or a bug leaves all workers idle
            clock.enter(FRAMEWORK)
        if self._timekeeper.due():
            self._outbox.append(self._timekeeper.report())
        messages, self._outbox[:] = list(self._outbox), []
        return messages

    def send(self, message: Message) -> None:
        """Send a message to its worker."""
        assert self._node is not None
        self._node.deliver(message)

    def stop(self, deadline: float) -> Iterator[Message]:
        """Stop all workers; yield the last messages."""
        if self._node is not None:
            self._outbox.append(self._timekeeper.report())
            self._node.deliver(Stop())
        yield from self._outbox
        self._outbox.clear()

    def close(self) -> None:
        """Delete the workers."""
        self._node = None


class Processes:
    """Workers in separate processes.

    Args:
        launch: function that starts the process of a name and generation through the supervisor.
        signals: signals, checked while waiting.
        most_at_once: number of processes that may create environments at once at the start; 0: all.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        topology: Topology,
        stalls: StallWatch,
        launch: Callable[[str, int], None],
        signals: SignalWatch,
        most_at_once: int = 0,
    ) -> None:
        self.supervisor, self.topology, self.stalls, self.most_at_once = supervisor, topology, stalls, most_at_once
        self._launch, self.signals = launch, signals
        self._address_of = topology.address_book().address_of
        self._home = {w: name for name, workers in topology.processes().items() for w in workers}
        self._timekeeper = Timekeeper(MAIN.name, MAIN.name, runs_environments=False)
        self._restarted: list[Message] = []  # restarts before the run began

    def start(self) -> None:
        """Start all processes, and begin the run after the last is ready.

        An actor that crashes, hangs or is killed in the first reset restarts, at most three times.
        """
        coming, waiting = self.topology.started(), set[str]()
        due = time.monotonic() + START_LINE_SECONDS
        while coming or waiting:
            self.signals.check()
            while coming and self._may_start(next(iter(coming)), waiting):
                name = next(iter(coming))
                del coming[name]
                waiting.add(name)
                self._launch_first(name)
                self.signals.check()
            for name, message in self.supervisor.poll(POLL_SECONDS):
                if isinstance(message, WorkerReady):
                    waiting.discard(name)
                elif isinstance(message, WorkerRestarted):
                    waiting.add(name)  # the dead process may have been ready
                    self._restarted.append(message)
            if waiting and (now := time.monotonic()) >= due:
                due = now + START_LINE_SECONDS
                log.info("%s", self._progress(len(coming), waiting))
        self.supervisor.begin()
        self._timekeeper.begin()

    def _launch_first(self, name: str) -> None:
        """Start the first process in a seat; if the fork server dies, try again with a new server.

        Raises:
            ResourceError: `MOST_FIRST_LAUNCHES` servers died.
        """
        for attempt in range(1, MOST_FIRST_LAUNCHES + 1):
            try:
                return self._launch(name, 0)
            except (EOFError, ConnectionError, FileNotFoundError, TimeoutError) as error:
                ended = server_ended()
                if attempt == MOST_FIRST_LAUNCHES:
                    raise ended from error
                log.warning("%s could not be started, trying again: %s", name, ended)
        return None

    def _may_start(self, name: str, waiting: set[str]) -> bool:
        """Return whether the process may start beside the waiting: at most `most_at_once` may create environments."""
        processes = self.topology.processes()
        making = [one for one in (name, *waiting) if processes[one][0].facts.runs_environments]
        return not self.most_at_once or name not in making or len(making) <= self.most_at_once

    def _progress(self, num_coming: int, waiting: set[str]) -> str:
        total, first = len(self.topology.started()), sorted(waiting)[:MOST_NAMED]
        more = f" and {len(waiting) - MOST_NAMED} more" * (len(waiting) > MOST_NAMED)
        ready = total - num_coming - len(waiting)
        later = f"; {num_coming} start later" * (num_coming > 0)
        return f"{ready} of {total} processes are ready, waiting for {', '.join(first)}{more}{later}"

    def poll(self, timeout_seconds: float) -> list[Message]:
        """Return messages for main, after waiting at most `timeout_seconds`."""
        clock.wait()
        messages = [*self._restarted, *(message for _, message in self.supervisor.poll(timeout_seconds))]
        self._restarted.clear()
        clock.enter(FRAMEWORK)
        self.stalls.look(self.supervisor, time.monotonic())
        return [*messages, self._timekeeper.report()] if self._timekeeper.due() else messages

    def send(self, message: Message) -> None:
        """Send a message to its worker."""
        self.supervisor.send(self._home[self._address_of(message)], message)

    def stop(self, deadline: float) -> Iterator[Message]:
        """Stop all processes until monotonic `deadline`; yield the last messages.

        Actors stop first, then policy workers, then learners, so every step is counted. Each role has a share of the
        time, because a hung environment must not cost the state of the learner.
        """
        if not self.supervisor.begun:  # nothing was sampled, and a starting process reads no messages
            return
        yield self._timekeeper.report()  # the only report of a run shorter than a second
        now = time.monotonic()
        for role in sorted(ROLES.values(), key=lambda role: role.stop_share):
            names = [name for name, seat in self.supervisor.seats.items() if seat.plan.role is role]
            yield from self.supervisor.stop(names, now + role.stop_share * (deadline - now))
        yield from self.stalls.progress.actor_reports()  # includes killed actors and due restarts

    def close(self) -> None:
        """Kill all remaining processes."""
        self.supervisor.kill_all()
        self.supervisor.links.close()


Workers = InProcess | Processes
