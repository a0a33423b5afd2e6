"""Stalls: whether a run gets anywhere, and which process waits for which when nothing is trained."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.heartbeat import Activity, Pulse
from appo.algorithms.runtime.memory.output_ring import TAKEN
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.units import Units
from appo.algorithms.runtime.messages import Address, WorkerReport
from appo.algorithms.runtime.processes.channels import Mailbox, Mailboxes
from appo.algorithms.runtime.processes.restarts import MAX_FAULTS
from appo.algorithms.runtime.processes.supervisor import Supervisor, WorkerError
from appo.algorithms.runtime.roles import ACTOR, LEARNER, POLICY_WORKER, WRITER
from appo.algorithms.runtime.sampling.env_group import NOTED
from appo.algorithms.runtime.topology import Topology

# What the processes of a run have done so far, and what they owe each other, as the arena says it.


COLLECTED, TRAJECTORIES = NOTED.index("collected"), NOTED.index("trajectories")


class Progress:
    """The work done so far, read from the arena.

    Args:
        topology: of the run.
        arena: its memory.
        trajectories: the shared arrays in it.
    """

    def __init__(self, topology: Topology, arena: Arena, trajectories: Trajectories) -> None:
        self.topology, self.trajectories, self.mailboxes = topology, trajectories, Mailboxes(arena)
        self._apart = {worker: Units(arena, place) for place, worker in enumerate(topology.workers_apart())}
        self._saves = [arena[f"state.{policy}.latest"] for policy in range(topology.num_policies)]
        self._written = arena[TAKEN] if topology.writes else np.zeros((0, 1), np.int64)
        self._served: dict[str, list[tuple[int, int]]] = defaultdict(list)  # a worker more than groups serves none
        for policy in range(topology.num_acting):
            for group in range(topology.num_groups):
                # Past versions share a process, which has the name of the first.
                server = str(topology.policy_worker_of(min(policy, topology.num_policies), group))
                self._served[server].append((policy, group))

    def of(self, name: str) -> int:
        """Return units of work of all processes that have been in this place: trajectories, replies, saved states."""
        worker = self.topology.processes()[name][0]
        if worker.role == ACTOR.name:
            return int(self._noted(worker.index)[TRAJECTORIES])
        if worker.role == LEARNER.name:
            return int(self._saves[worker.index][0])
        if worker.role == WRITER.name:
            return int(self._written[:, 0].sum())
        if worker in self._apart:
            return self._apart[worker].count
        return sum(int(self.mailboxes.reply[p, g, Mailbox.SEQUENCE]) for p, g in self._served[name])

    def actor_reports(self) -> Iterator[WorkerReport]:
        """Yield the report that every actor worker would give, whether or not a process is in its place."""
        for actor in range(self.topology.num_actors):
            totals = dict(zip(NOTED, self._noted(actor).tolist(), strict=True))
            yield WorkerReport(str(Address(ACTOR.name, actor)), totals)

    def trained(self) -> int:
        """Sum samples of all learners, and how often they have used them: one of both grows while they live."""
        columns = [LearnerLedger.NAMES.index(name) for name in ("samples", "used")]
        return int(self.trajectories.learner_counts[:, columns].sum())

    def collected(self) -> int:
        """Return the steps of all actors."""
        return int(self.trajectories.group_counts[:, COLLECTED].sum())

    def owes(self, name: str) -> str:
        """Return in words what others wait for from this process."""
        worker = self.topology.processes()[name][0]
        if worker.role == LEARNER.name:
            held = int((self.trajectories.owner >> worker.index & 1).sum())
            return f"holds {held} of {len(self.trajectories.owner)} slots" * (not self.topology.num_takers)
        if worker.facts.takes_trajectories:
            t = self.trajectories
            held = int(((t.owner >> worker.index & 1 > 0) & (t.taker == worker.member)).sum())
            return f"holds {held} of {len(t.owner)} slots"
        if worker.role == POLICY_WORKER.name:
            unanswered = self.mailboxes.unanswered()
            return f"{sum(bool(unanswered[place]) for place in self._served[name])} requests unanswered"
        return ""

    def _noted(self, actor: int) -> Array:
        """Return the counts of an actor by `NOTED`, summed over its groups."""
        groups = self.topology.groups_of(actor)
        counts: Array = self.trajectories.group_counts[groups.start : groups.stop, : len(NOTED)].sum(axis=0)
        return counts


log = logging.getLogger(__name__)

SAY_AFTER_SECONDS = 5.0

LOOK_SECONDS = 0.5

PATIENCE_SECONDS = 60.0

VERBS = {
    Activity.STARTING: "starts",
    Activity.RESETTING: "resets its environments",
    Activity.WAITING: "waits",
    Activity.WORKING: "works",
    Activity.STOPPING: "stops",
}


def who_waits(pulses: Mapping[str, Pulse], owes: Mapping[str, str], dead: Mapping[str, float], now: float) -> str:
    """Return a line of every process, its activity and since when, the longest one first."""
    parts = []
    for name, pulse in sorted(pulses.items(), key=lambda item: item[1].began):
        owed = f" ({owes[name]})" if owes.get(name) else ""
        began = pulse.since if pulse.activity is Activity.WORKING else pulse.began
        parts.append(f"{name} {VERBS[pulse.activity]} since {now - began:.1f} s{owed}")
    parts += [f"{name} is started again in {max(0.0, due - now):.1f} s" for name, due in dead.items()]
    return ", ".join(parts)


def all_wait_since(pulses: Mapping[str, Pulse], *, complete: bool) -> float | None:
    """Return when the last process began to wait; None while one does something, or is not there."""
    if not complete or any(pulse.activity is not Activity.WAITING for pulse in pulses.values()):
        return None
    return max((pulse.began for pulse in pulses.values()), default=None)


@dataclass
class Stall:
    """A time without training, and whether it is the end.

    An environment may be so slow that a batch takes minutes. So time alone ends no run: workers must have died
    meanwhile, and it must be much longer than it ever took before; or all of them wait, which only a lost message can
    explain.

    Attributes:
        patience_seconds: nothing is the end before.
        progress: of the run, any number that grows.
        since: when it last grew.
        longest: time that it ever took to grow.
        deaths: since then.
    """

    patience_seconds: float = 60.0
    progress: int = -1
    since: float = 0.0
    longest: float = 0.0
    deaths: int = 0
    _said: float = field(default=0.0, repr=False)

    def note(self, now: float, progress: int) -> None:
        """Look at the progress now."""
        if progress != self.progress:
            if self.progress > 0:
                self.longest = max(self.longest, now - self.since)
            self.progress, self.since, self.deaths, self._said = progress, now, 0, now

    def hopeless(self, now: float, all_wait_since: float | None) -> bool:
        """Return whether the run shall end.

        Args:
            now: monotonic seconds.
            all_wait_since: when the last worker began to wait; None while one works or is started.
        """
        limit = max(self.patience_seconds, 3 * self.longest)
        waited = 0.0 if all_wait_since is None else now - max(self.since, all_wait_since)
        return waited >= self.patience_seconds or (self.deaths >= MAX_FAULTS and now - self.since >= limit)

    def worth_saying(self, now: float, every_seconds: float) -> bool:
        """Return whether it is time for a line about it: later and later."""
        if now - self._said < max(every_seconds, 2 * self.longest, self._said - self.since):
            return False
        self._said = now
        return True


class StallWatch:
    """Looks at a run from time to time.

    Args:
        progress: what has been done, and who owes what.
        grows: the number that must grow.
        patience_seconds: how long it may stay before that is the end.
    """

    def __init__(
        self, progress: Progress, grows: Callable[[], int], patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.progress, self.grows = progress, grows
        self.stall = Stall(patience_seconds)
        self._due = 0.0
        self._deaths = 0

    def look(self, supervisor: Supervisor, now: float) -> None:
        """Log which process waits for which if nothing has been trained for a while.

        Raises:
            WorkerError: there is no hope that anything will be trained any more.
        """
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        self.stall.deaths += supervisor.deaths - self._deaths
        self._deaths = supervisor.deaths
        self.stall.note(now, self.grows())
        if now - self.stall.since < SAY_AFTER_SECONDS:
            return
        pulses = supervisor.pulses()
        nothing = f"nothing trained for {now - self.stall.since:.0f} s"
        if self.stall.hopeless(now, all_wait_since(pulses, complete=not supervisor.due)):
            last = supervisor.last_death
            line = who_waits(pulses, self._owed(pulses), supervisor.due, now)
            summary = f"{nothing}: {last.cause if last else line}"
            raise WorkerError(summary, last.exit_code if last else 1, last.traceback if last else "")
        if self.stall.worth_saying(now, SAY_AFTER_SECONDS):
            log.info("%s: %s", nothing, who_waits(pulses, self._owed(pulses), supervisor.due, now))

    def _owed(self, pulses: Mapping[str, Pulse]) -> dict[str, str]:
        return {name: self.progress.owes(name) for name in pulses}
