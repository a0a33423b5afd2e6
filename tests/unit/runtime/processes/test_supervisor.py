"""When the supervisor takes a queue for poisoned; what it does then is shown by real processes in tests/chaos."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from appo.algorithms.runtime.messages import Address
from appo.algorithms.runtime.processes import supervisor
from appo.algorithms.runtime.processes.supervisor import _are_stuck, _other_end
from tests.unit.runtime.worlds import TOPOLOGY


@pytest.mark.parametrize(
    ("seconds", "asleep", "stuck"),
    [
        (1.9, {1, 2}, False),
        (2.1, {1, 2}, True),
        (2.1, {1}, False),  # the learner may hold the mutex: it is only late
        (2.1, {2}, False),
        (5.1, set(), True),
    ],
)
def test_a_queue_is_poisoned_when_nobody_runs_who_could_leave_it(
    monkeypatch: pytest.MonkeyPatch, seconds: float, asleep: set[int], stuck: bool
) -> None:
    monkeypatch.setattr(supervisor, "sleeps", lambda pid: pid in asleep)
    actor, learner = (_place(role, pid) for role, pid in (("actor", 1), ("learner", 2)))
    assert _are_stuck((actor, learner), seconds) is _are_stuck((learner, actor), seconds) is stuck
    assert _are_stuck((actor, None), seconds) is (seconds > 2 and (1 in asleep or seconds > 5))  # the learner is dead
    topology = replace(TOPOLOGY, num_actors=4, bridged=2)
    assert [_other_end(actor, 0, topology), _other_end(learner, 3, topology)] == ["learner_0", "actor_3"]
    assert _other_end(learner, 4, topology) == "bridge"


def _place(role: Any, pid: int) -> Any:
    index = {"actor": 3, "learner": 0}[role]
    return SimpleNamespace(process=SimpleNamespace(pid=pid), plan=SimpleNamespace(workers=[Address(role, index)]))
