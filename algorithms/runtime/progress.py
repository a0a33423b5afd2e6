"""What the processes of a run have done so far, and what they owe each other, as the arena says it."""

from collections import defaultdict
from collections.abc import Iterator

from algorithms.runtime.arena import Arena, Array
from algorithms.runtime.channels import Mailbox, Mailboxes
from algorithms.runtime.env_group import NOTED
from algorithms.runtime.messages import Address, WorkerReport
from algorithms.runtime.ownership import LearnerLedger
from algorithms.runtime.topology import Topology
from algorithms.runtime.trajectories import Trajectories

COLLECTED, TRAJECTORIES = NOTED.index("collected"), NOTED.index("trajectories")


class Progress:
    """What has been done so far, read from the arena.

    Args:
        topology: of the run.
        arena: its memory.
        trajectories: the shared arrays in it.
    """

    def __init__(self, topology: Topology, arena: Arena, trajectories: Trajectories) -> None:
        self.topology, self.trajectories, self.mailboxes = topology, trajectories, Mailboxes(arena)
        self._saves = [arena[f"state.{policy}.latest"] for policy in range(topology.num_policies)]
        self._served: dict[str, list[tuple[int, int]]] = defaultdict(list)  # a worker more than groups serves none
        for policy in range(topology.num_acting):
            for group in range(topology.num_groups):
                # Past versions share a process, which has the name of the first.
                server = str(topology.policy_worker_of(min(policy, topology.num_policies), group))
                self._served[server].append((policy, group))

    def of(self, name: str) -> int:
        """Units of work of all processes that have been in this place: trajectories, replies or saved states."""
        worker = self.topology.processes()[name][0]
        if worker.role == "actor":
            return int(self._noted(worker.index)[TRAJECTORIES])
        if worker.role == "learner":
            return int(self._saves[worker.index][0])
        return sum(int(self.mailboxes.reply[p, g, Mailbox.SEQUENCE]) for p, g in self._served[name])

    def actor_reports(self) -> Iterator[WorkerReport]:
        """What every actor worker would report, whether or not a process is in its place."""
        for actor in range(self.topology.num_actors):
            totals = dict(zip(NOTED, self._noted(actor).tolist(), strict=True))
            yield WorkerReport(str(Address("actor", actor)), totals)

    def trained(self) -> int:
        """Samples of all learners."""
        return int(self.trajectories.learner_counts[:, LearnerLedger.NAMES.index("samples")].sum())

    def collected(self) -> int:
        """Steps of all actors."""
        return int(self.trajectories.group_counts[:, COLLECTED].sum())

    def owes(self, name: str) -> str:
        """What others wait for from this process."""
        worker = self.topology.processes()[name][0]
        if worker.role == "learner":
            held = int((self.trajectories.owner >> worker.index & 1).sum())
            return f"holds {held} of {len(self.trajectories.owner)} slots"
        if worker.role == "policy_worker":
            unanswered = self.mailboxes.unanswered()
            return f"{sum(bool(unanswered[place]) for place in self._served[name])} requests unanswered"
        return ""

    def _noted(self, actor: int) -> Array:
        """The counts of an actor by `NOTED`, summed over its groups."""
        groups = self.topology.groups_of(actor)
        counts: Array = self.trajectories.group_counts[groups.start : groups.stop, : len(NOTED)].sum(axis=0)
        return counts
