"""Journals of the actions that groups give their environments, and main's record of them when an actor is gone.

An environment that raises is told of by its own actor (`envs/incidents.py`). One that crashes in C code, ends the
process or hangs takes its actor with it; its journal stays in the arena.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from appo.algorithms.runtime.disk import within
from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.processes.restarts import Death
from appo.algorithms.runtime.roles import ACTOR
from appo.algorithms.runtime.topology import Topology
from appo.envs.incidents import Ending, IncidentFolder
from appo.envs.journal import JournalMemory, Story, unfinished
from appo.envs.spec import EnvSpec

log = logging.getLogger(__name__)

WRITE_SECONDS = 3.0  # for an incident, on a disk that may not answer


def declare(topology: Topology, spec: EnvSpec) -> list[Field]:
    """Return the arena fields of all journals."""
    num_envs = topology.rows // spec.num_agents
    shapes = JournalMemory.shapes(num_envs, spec.num_agents, spec.action, walk_steps=topology.rollout)
    return [Field(f"journal.{name}", (topology.num_groups, *shape), dtype) for name, (shape, dtype) in shapes.items()]


def memory_of(arena: Arena, group: int) -> JournalMemory:
    """Return the journal of one group."""
    return JournalMemory(*(arena[f"journal.{name}"][group] for name in JournalMemory._fields))


class CrashRecorder:
    """Main's end of the journals.

    Args:
        topology: of the run.
        arena: where the journals are.
        incidents: folder for what they tell.
        flags: of the environment.
    """

    def __init__(self, topology: Topology, arena: Arena, incidents: Path, flags: Mapping[str, object]) -> None:
        self.topology, self.arena, self.incidents, self.flags = topology, arena, incidents, flags
        self._found: dict[str, list[tuple[int, Story]]] = {}

    def look(self, name: str) -> None:
        """Note the activity of a process that hangs: asked for its stacks, and so interrupted, it may go on."""
        self._found[name] = [found for memory in self._memories(name) if (found := unfinished(memory))]

    def tell(self, name: str, death: Death) -> None:
        """Write the actions that led to the death of an actor, if it ended by itself in the code of an environment.

        Its successor begins with empty journals.
        """
        if death.ending and name not in self._found:
            self.look(name)
        for index, story in self._found.pop(name, ()):
            ending = Ending(death.ending, death.cause, death.traceback)
            folder = IncidentFolder(self.incidents, name, self.flags)
            path = within(WRITE_SECONDS, partial(folder.write_of_process, index, ending, story), None)
            if path:
                log.info("%s: what led to it is in %s", death.cause, path)
        for memory in self._memories(name):
            memory.head.fill(0)

    def _memories(self, name: str) -> list[JournalMemory]:
        actors = [worker.index for worker in self.topology.processes()[name] if worker.role == ACTOR.name]
        return [memory_of(self.arena, group) for actor in actors for group in self.topology.groups_of(actor)]
