"""Progress of a run, read from the arena: work of every process, and work that is awaited."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena, Array
from appo.algorithms.runtime.memory.output_ring import TAKEN
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.memory.units import Units
from appo.algorithms.runtime.messages import WorkerReport
from appo.algorithms.runtime.processes.channels import Mailbox, Mailboxes
from appo.algorithms.runtime.roles import LEARNER, POLICY_WORKER, WRITER
from appo.algorithms.runtime.sampling.env_group import NOTED
from appo.algorithms.runtime.topology import Topology

COLLECTED, TRAJECTORIES = NOTED.index("collected"), NOTED.index("trajectories")


class Progress:
    """The work done so far, read from the arena."""

    def __init__(self, topology: Topology, arena: Arena, trajectories: Trajectories) -> None:
        self.topology, self.trajectories, self.mailboxes = topology, trajectories, Mailboxes(arena)
        self._apart = {worker: Units(arena, place) for place, worker in enumerate(topology.workers_apart())}
        self._saves = [arena[f"state.{policy}.latest"] for policy in range(topology.num_policies)]
        self._written = arena[TAKEN] if topology.writes else np.zeros((0, 1), np.int64)
        self._served: dict[str, list[tuple[int, int]]] = defaultdict(list)  # empty for workers without a group
        for policy in range(topology.num_acting):
            for group in range(topology.num_groups):
                # Past versions share a process, named after the first.
                server = str(topology.policy_worker_of(min(policy, topology.num_policies), group))
                self._served[server].append((policy, group))

    def of(self, name: str) -> int:
        """Return the units of work of all processes in a seat: trajectories, replies, saved states."""
        worker = self.topology.processes()[name][0]
        if worker.facts.fills_slots:
            return int(self._noted(worker.index)[TRAJECTORIES])
        if worker.role == LEARNER.name:
            return int(self._saves[worker.index][0])
        if worker.role == WRITER.name:
            return int(self._written[:, 0].sum())
        if worker in self._apart:
            return self._apart[worker].count
        return sum(int(self.mailboxes.reply[p, g, Mailbox.SEQUENCE]) for p, g in self._served[name])

    def actor_reports(self) -> Iterator[WorkerReport]:
        """Yield the report of every actor and of the bridge, with or without a living process."""
        for filler in self.topology.fillers:
            yield WorkerReport(str(filler), dict(zip(NOTED, self._noted(filler.index).tolist(), strict=True)))

    def trained(self) -> int:
        """Return the sum of samples and uses of samples of all learners; one of both grows while learners work."""
        columns = [LearnerLedger.NAMES.index(name) for name in ("samples", "used")]
        return int(self.trajectories.learner_counts[:, columns].sum())

    def collected(self) -> int:
        """Return the steps of all actors."""
        return int(self.trajectories.group_counts[:, COLLECTED].sum())

    def owes(self, name: str) -> str:
        """Return in words the work of a process for which the run waits."""
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

    def _noted(self, filler: int) -> Array:
        """Return the counts of an actor or of the bridge, in the order of `NOTED`, summed over groups."""
        groups = self.topology.groups_of(filler)
        counts: Array = self.trajectories.group_counts[groups.start : groups.stop, : len(NOTED)].sum(axis=0)
        return counts
