"""Journals of actions in the arena, and the incidents that main writes from the journals of dead actors.

An actor writes the incident of an environment that raises (`envs/incidents.py`). An environment that crashes in C code,
exits or hangs ends the actor too; the journal stays in the arena.
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


def declare(topology: Topology, spec: EnvSpec) -> list[Field]:
    """Return the arena fields of all journals."""
    num_envs = topology.rows // spec.num_agents
    shapes = JournalMemory.shapes(num_envs, spec.num_agents, spec.action, walk_steps=topology.rollout)
    return [Field(f"journal.{name}", (topology.num_groups, *shape), dtype) for name, (shape, dtype) in shapes.items()]


def memory_of(arena: Arena, group: int) -> JournalMemory:
    """Return the journal of one group."""
    return JournalMemory(*(arena[f"journal.{name}"][group] for name in JournalMemory._fields))


class CrashRecorder:
    """Writes incidents from the journals, in main."""

    def __init__(self, topology: Topology, arena: Arena, incidents: Path, flags: Mapping[str, object]) -> None:
        self.topology, self.arena, self.incidents, self.flags = topology, arena, incidents, flags
        self._found: dict[str, list[tuple[int, Story]]] = {}

    def look(self, name: str) -> None:
        """Keep the current activity of a hung process, before the signal that dumps its stacks interrupts the hang."""
        self._found[name] = [found for memory in self._memories(name) if (found := unfinished(memory))]

    def tell(self, name: str, death: Death) -> None:
        """Write the actions that led to the death of an actor in the code of an environment; reset the journals."""
        if death.ending and name not in self._found:
            self.look(name)
        for index, story in self._found.pop(name, ()):
            ending = Ending(death.ending, death.cause, death.traceback)
            folder = IncidentFolder(self.incidents, name, self.flags)
            path = within(3.0, partial(folder.store, index, ending, story, ended_process=True), None)
            if path:
                log.info("%s: what led to it is in %s", death.cause, path)
        for memory in self._memories(name):
            memory.head.fill(0)

    def _memories(self, name: str) -> list[JournalMemory]:
        actors = [worker.index for worker in self.topology.processes()[name] if worker.role == ACTOR.name]
        return [memory_of(self.arena, group) for actor in actors for group in self.topology.groups_of(actor)]
