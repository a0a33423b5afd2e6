"""What a run has done is read from its memory, whoever still lives."""

from dataclasses import replace

from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.messages import WorkerReport
from appo.algorithms.runtime.processes.channels import Mailboxes
from appo.algorithms.runtime.processes.progress import Progress
from tests.states import adam_layout
from tests.unit.runtime.worlds import TOPOLOGY, world_of


def test_actors_that_cannot_report_are_reported_from_what_their_groups_have_noted() -> None:
    more = (*Mailboxes.declare(replace(TOPOLOGY, num_actors=2)), *StateBlock.declare(0, adam_layout(1, 1).vectors))
    world = world_of(num_actors=2, placement="central", more=more)
    progress = Progress(world.topology, world.arena, world.trajectories)
    world.trajectories.group_counts[:, :7] = [[i, 10 * i, 2, 3, 4, 5, 6] for i in (1, 2, 3, 4)]  # two groups each
    names = ("collected", "reset_rows", "trajectories", "sent", "released", "rebuilds", "episodes")
    assert list(progress.actor_reports()) == [
        WorkerReport("actor_0", dict(zip(names, (3, 30, 4, 6, 8, 10, 12), strict=True))),
        WorkerReport("actor_1", dict(zip(names, (7, 70, 4, 6, 8, 10, 12), strict=True))),
    ]
    assert (progress.collected(), progress.of("actor_1")) == (10, 4)
