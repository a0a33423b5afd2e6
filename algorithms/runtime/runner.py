"""The main loop: listen to the workers, ask for checkpoints, stop when it is time, and leave nothing behind."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from algorithms.runtime.checkpointing import Checkpointing
from algorithms.runtime.config import RunConfig, SamplingConfig
from algorithms.runtime.messages import MAIN, Begin, Message, Stop, WorkerReady
from algorithms.runtime.monitor import Limits, Monitor, PolicyProgress
from algorithms.runtime.node import Node
from algorithms.runtime.signals import SignalWatch
from algorithms.runtime.stalls import StallWatch
from algorithms.runtime.status import Status
from algorithms.runtime.supervisor import Supervisor
from algorithms.runtime.timekeeper import Timekeeper
from algorithms.runtime.topology import Topology
from utils.errors import ResourceError
from utils.timing import FRAMEWORK, clock

log = logging.getLogger(__name__)

Turns = Generator[None, None, str]
"""A run in steps, one after each look at the workers; it returns why it ended. Closed early, it saves nothing more."""

POLL_SECONDS = 0.1
STOP_SECONDS = 4.0
STOP_SHARES = {"actor": 0.4, "policy_worker": 0.5, "learner": 1.0}  # of the time, when each must have ended
BENCHMARK_ENV_STEPS, BENCHMARK_SAMPLES = 2_000_000, 1_000_000


def ended(turns: Turns) -> str:
    """Take all turns of a run; why it ended."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return str(end.value)


@dataclass(frozen=True)
class Budget:
    """When a run has done what was asked of it.

    Attributes:
        env_steps, samples: per policy.
        seconds: of this start.
        episode_return: mean return of the last episodes that every policy must reach; None: any.
        collected: steps of all actors; for runs that only sample.
    """

    env_steps: int
    samples: int
    seconds: float
    episode_return: float | None
    collected: int | None

    @classmethod
    def of(cls, run: RunConfig, sampling: SamplingConfig, frames_per_step: int) -> "Budget":
        """The budget that the flags describe."""
        env_steps, samples = run.train_for_env_steps, 2**62
        if sampling.benchmark:
            env_steps, samples = min(env_steps, BENCHMARK_ENV_STEPS), BENCHMARK_SAMPLES
        collected = min(-(-env_steps // frames_per_step), samples) if sampling.sampler_only else None
        return cls(env_steps, samples, run.train_for_seconds, run.train_until_return, collected)

    def limits(self) -> Limits:
        """Those whose coming can be estimated."""
        return Limits(self.env_steps, self.samples, self.seconds, self.collected)

    def plain(self) -> dict[str, float | None]:
        """The limits that hold from one start to the next, as status.json has them."""
        return {name: value for name, value in asdict(self).items() if name != "collected"}

    def spent(self, monitor: Monitor, now: float) -> str | None:
        """Why the run is over, or None while it is not."""
        if now - monitor.started >= self.seconds:
            return f"{self.seconds:g} seconds are over"
        if self.collected is not None and sum(w["collected"] for w in monitor.workers.values()) >= self.collected:
            return f"{self.collected} steps are collected"
        return self.reached(monitor.policies)

    def reached(self, policies: Sequence[PolicyProgress]) -> str | None:
        """Why there is nothing left to learn for these policies, or None while there is."""
        policies = [policy for policy in policies if not policy.frozen]
        if all(p.totals["env_steps"] >= self.env_steps or p.totals["samples"] >= self.samples for p in policies):
            return f"every policy has learned from {min(p.totals['env_steps'] for p in policies)} env steps"
        goal = self.episode_return
        if goal is not None and all(
            p.episode_return.count >= p.stats_avg and p.episode_return.mean >= goal for p in policies
        ):
            return f"the mean return has reached {min(p.episode_return.mean for p in policies):.2f}"
        return None


class Workers(Protocol):
    """All workers of a run, wherever they live."""

    def start(self) -> None:
        """Bring all workers up and let them begin."""
        ...

    def poll(self, timeout_seconds: float) -> Iterable[Message]:
        """Messages for main, after waiting for at most this long."""
        ...

    def send(self, message: Message) -> None:
        """Give a message to its worker."""
        ...

    def stop(self, deadline: float) -> Iterator[Message]:
        """End all workers until monotonic `deadline`; yields their last messages."""
        ...

    def close(self) -> None:
        """End whatever is left."""
        ...


class Population(Protocol):
    """What changes the policies of a run while they learn."""

    def handle(self, message: Message) -> None:
        """Take in a report."""
        ...

    def tick(self) -> Iterator[Message]:
        """Messages to workers."""
        ...

    def close(self) -> None:
        """Wait until all that it has decided is on disk."""
        ...


class Legs(Protocol):
    """Parts of a run, each of which begins as a start does that resumes from the checkpoint between them.

    Attributes:
        end: env steps after which the present one is over.
    """

    end: int

    def next(self) -> Workers:
        """The workers of the next one, when those of the last have ended and their states are in the blocks."""
        ...


class InProcess:
    """All workers in this process, in order.

    Args:
        topology: of the run.
        build: makes the node, given what receives the messages for main.
    """

    def __init__(self, build: Callable[[Callable[[Message], None]], Node]) -> None:
        self._outbox: list[Message] = []
        self._build = build
        self._node: Node | None = None
        self._timekeeper = Timekeeper(str(MAIN), MAIN.role, runs_environments=True)

    def start(self) -> None:
        """Build the workers and let them begin."""
        self._node = self._build(self._outbox.append)
        self._timekeeper.begin()
        self._node.deliver(Begin())

    def poll(self, timeout_seconds: float) -> list[Message]:
        """One turn of every worker."""
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
        """Give a message to its worker."""
        assert self._node is not None
        self._node.deliver(message)

    def stop(self, deadline: float) -> Iterator[Message]:
        """Collect the last messages."""
        if self._node is not None:
            self._outbox.append(self._timekeeper.report())
            self._node.deliver(Stop())
        yield from self._outbox
        self._outbox.clear()

    def close(self) -> None:
        """Nothing is left when the objects are gone."""
        self._node = None


class Processes:
    """Workers in processes of their own.

    Args:
        supervisor: of the processes.
        topology: of the run.
        stalls: asked whether the run gets anywhere.
        launch: starts the process of that name and generation through the supervisor.
        signals: looked at while waiting for them.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        topology: Topology,
        stalls: StallWatch,
        launch: Callable[[str, int], None],
        signals: SignalWatch,
    ) -> None:
        self.supervisor, self.topology, self.stalls = supervisor, topology, stalls
        self._launch, self.signals = launch, signals
        self._home = {w: name for name, workers in topology.processes().items() for w in workers}
        self._timekeeper = Timekeeper(str(MAIN), MAIN.role, runs_environments=False)

    def start(self) -> None:
        """Start all processes and, when the last of them is ready, let them begin."""
        for name in self.topology.processes():
            self.signals.check()
            self._launch(name, 0)
        waiting = set(self.topology.processes())
        while waiting:
            self.signals.check()
            for name, message in self.supervisor.poll(POLL_SECONDS):
                if isinstance(message, WorkerReady):
                    waiting.discard(name)
        self.supervisor.begin()
        self._timekeeper.begin()

    def poll(self, timeout_seconds: float) -> list[Message]:
        """Messages for main."""
        clock.wait()
        messages: list[Message] = [message for _, message in self.supervisor.poll(timeout_seconds)]
        clock.enter(FRAMEWORK)
        self.stalls.look(self.supervisor, time.monotonic())
        return [*messages, self._timekeeper.report()] if self._timekeeper.due() else messages

    def send(self, message: Message) -> None:
        """Give a message to its worker."""
        self.supervisor.send(self._home[self.topology.address_of(message)], message)

    def stop(self, deadline: float) -> Iterator[Message]:
        """End the actors first, then who acts for them, then the learners, so that every step is accounted for.

        Each role has its share of the time: an environment that hangs must not cost what was learned.
        """
        if not self.supervisor.begun:  # nothing was sampled, and what is still starting would not hear it
            return
        yield self._timekeeper.report()  # of a run that took less than a second it is the only one
        now = time.monotonic()
        for role, share in STOP_SHARES.items():
            names = [name for name in self.supervisor.places if name.startswith(role)]
            for _, message in self.supervisor.stop(names, now + share * (deadline - now)):
                yield message
        yield from self.stalls.progress.actor_reports()  # of those too that were killed, or are to be started again

    def close(self) -> None:
        """Kill what has not ended."""
        self.supervisor.kill_all()
        self.supervisor.links.close()


class Runner:
    """Runs to the end of the budget, a signal or a failure.

    Args:
        workers: all workers.
        monitor: told every report.
        checkpointing: told every report; asks for states.
        budget: when to stop.
        signals: entered by the caller.
        status: written meanwhile.
        legs: of the run, if it is divided into some.

    Attributes:
        population: of the policies, if they are several.
    """

    population: Population | None = None

    def __init__(
        self,
        workers: Workers,
        monitor: Monitor,
        checkpointing: Checkpointing,
        budget: Budget,
        signals: SignalWatch,
        status: Status,
        legs: Legs | None = None,
    ) -> None:
        self.workers, self.monitor, self.checkpointing = workers, monitor, checkpointing
        self.budget, self.signals, self.status, self.legs = budget, signals, status, legs

    def turns(self) -> Turns:
        """Why the run ended. Whatever happens, no process is left, and what was learned is saved.

        Raises:
            Interrupted: a signal ended it, after saving.
            AppoError: a worker failed.
        """
        try:
            try:
                reason = yield from self._train()
            except Exception:
                self._save_what_can_be()
                raise
            self._finish()
            return reason
        finally:
            self.workers.close()
            self.monitor.close()
            if self.population:
                self.population.close()

    def _save_what_can_be(self) -> None:
        """After a failure, which a failure to save must not hide."""
        try:
            self._finish()
        except Exception as error:
            log.warning("what was learned last is not saved: %s: %s", type(error).__name__, error)

    def _train(self) -> Turns:
        self.workers.start()
        self.monitor.started = time.monotonic()
        try:
            return (yield from self._until_it_is_over())
        finally:
            self.monitor.console.close()  # what is said from here on stands below it

    def _until_it_is_over(self) -> Turns:
        while True:
            self.signals.check()
            for message in self.workers.poll(POLL_SECONDS):
                self._hear(message)
                self.checkpointing.handle(message)
            now = time.monotonic()
            self.monitor.tick(now)
            self.status.tick(now)
            for request in self.checkpointing.tick(now):
                self.workers.send(request)
            for order in self.population.tick() if self.population else ():
                self.workers.send(order)
            if reason := self.budget.spent(self.monitor, now):
                return reason
            if self.legs and all(policy.totals["env_steps"] >= self.legs.end for policy in self.monitor.policies):
                self._begin_next_leg(self.legs)
            yield

    def _begin_next_leg(self, legs: Legs) -> None:
        """Save, and go on from there as a later start would."""
        self._stop()
        self.monitor.write_summaries(time.monotonic())
        try:
            self.checkpointing.finish()
        except ResourceError as error:  # what is in memory is the same; a later start would repeat this leg
            log.warning("checkpoint not saved: %s", error)
        self.workers = legs.next()
        self.workers.start()

    def _hear(self, message: Message) -> None:
        self.monitor.handle(message)
        if self.population:
            self.population.handle(message)

    def _stop(self) -> None:
        for message in self.workers.stop(time.monotonic() + STOP_SECONDS):
            self._hear(message)
        self.workers.close()

    def _finish(self) -> None:
        """Stop the workers, take their last reports and save.

        Of a run in legs only a state at the end of one is to be gone on from, and that at the end of the budget.
        """
        whole = self.legs is None or self.budget.reached(self.monitor.policies) is not None
        self._stop()
        self.monitor.write_last()
        self.checkpointing.finish(regular=whole)
        if not whole:
            log.info("--deterministic_resume: what was learned since the last checkpoint is not saved")
        log.info("%s", self.monitor.line())
