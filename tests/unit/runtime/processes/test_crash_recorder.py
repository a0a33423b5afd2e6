from pathlib import Path

import numpy as np

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.processes.crash_recorder import CrashRecorder, declare, memory_of
from appo.algorithms.runtime.processes.restarts import Death
from appo.algorithms.runtime.topology import Topology
from appo.envs.incidents import Incident
from appo.envs.journal import Journal
from tests.unit.runtime.worlds import SPEC

TOPOLOGY = Topology("local", 2, 2, 2, 1, 1, rows=3, rollout=4)
CRASHED = Death("actor_1 was killed by SIGSEGV", True, traceback="stacks\n", ending="SIGSEGV")


def test_what_an_actor_was_doing_when_it_crashed_is_written_and_forgotten(tmp_path: Path) -> None:
    arena = Arena.create(declare(TOPOLOGY, SPEC))
    recorder = CrashRecorder(TOPOLOGY, arena, tmp_path / "incidents", {"env": "Name"})
    recorder.tell("actor_0", CRASHED)
    recorder.tell("learner_0", CRASHED)
    journals = [Journal(3, memory_of(arena, group)) for group in range(4)]
    for journal in journals[1:]:
        journal.begins(2, 7, None)
        journal.began(2)
        journal.add(np.arange(3, dtype=np.int32)[:, None])
    for journal in (journals[1], journals[3]):
        journal.inside[0] = 2
    recorder.look("actor_1")
    journals[3].leaves()  # it was interrupted, and went on
    recorder.tell("actor_1", CRASHED)
    (path,) = (tmp_path / "incidents").iterdir()
    assert path.name == "env_actor_1_0.json"
    incident = Incident.read(path)
    assert (incident.error, incident.message, incident.traceback) == ("SIGSEGV", CRASHED.cause, "stacks\n")
    assert (incident.index, incident.seed, incident.actions, incident.num_steps) == (2, 7, [[2]], 1)
    assert [int(memory_of(arena, group).head.any()) for group in range(4)] == [1, 1, 0, 0]
    recorder.tell("actor_1", CRASHED)
    recorder.tell("actor_0", Death("actor_0 was killed by SIGKILL (out of memory?)", own_fault=False))
    assert [path] == list((tmp_path / "incidents").iterdir())
    assert not memory_of(arena, 1).head.any()
