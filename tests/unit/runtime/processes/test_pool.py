"""The start of all processes: how many make environments at a time, and what is said meanwhile."""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from appo.algorithms.runtime.messages import Message, WorkerReady
from appo.algorithms.runtime.processes import pool
from appo.algorithms.runtime.processes.pool import Processes
from appo.algorithms.runtime.topology import Topology
from appo.utils.errors import ResourceError
from appo.utils.system.signal_watch import SignalWatch

TOPOLOGY = Topology(
    placement="central",
    num_actors=4,
    groups_per_actor=1,
    slots_per_group=2,
    num_policies=1,
    policy_workers_per_policy=1,
    rows=1,
    rollout=2,
)


class Seats:
    """A supervisor whose processes are ready one by one, an actor only after `patience` looks at all of them."""

    def __init__(self, tell: Callable[[], None] = lambda: None, patience: int = 0) -> None:
        self.started: list[str] = []
        self.starting: list[str] = []
        self.most = 0
        self.begun = False
        self._tell, self._patience = tell, patience

    def launch(self, name: str, generation: int) -> None:
        assert generation == 0
        self.started.append(name)
        self.starting.append(name)
        self.most = max(self.most, sum(one.startswith("actor") for one in self.starting))

    def poll(self, timeout_seconds: float) -> Iterator[tuple[str, Message]]:
        self._tell()
        self._patience -= 1
        if self._patience < 0:
            name = self.starting.pop()
            yield name, WorkerReady(name)

    def begin(self) -> None:
        assert not self.starting
        self.begun = True


def start(seats: Seats, most_at_once: int) -> None:
    stalls: Any = SimpleNamespace()
    supervisor: Any = seats
    Processes(supervisor, TOPOLOGY, stalls, seats.launch, SignalWatch(), most_at_once).start()


@pytest.mark.parametrize(("most_at_once", "most"), [(0, 4), (1, 1), (3, 3), (9, 4)])
def test_so_many_actors_make_environments_at_a_time(most_at_once: int, most: int) -> None:
    seats = Seats()
    start(seats, most_at_once)
    assert seats.begun
    assert seats.started == list(TOPOLOGY.processes())
    assert seats.most == most


def test_a_long_start_says_who_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(pool.time, "monotonic", lambda: now[0])

    def tell() -> None:
        now[0] += 2.0

    with caplog.at_level(logging.INFO):
        start(Seats(tell, patience=3), most_at_once=2)
    first, *more = caplog.messages
    learner, policy_worker, *_ = TOPOLOGY.processes()
    assert first == (
        f"0 of 6 processes are ready, waiting for actor_0, actor_1, {learner}, {policy_worker}; 2 start later"
    )
    # Looks are two seconds apart, so lines come after six and twelve; after eighteen all are ready.
    assert more == [f"3 of 6 processes are ready, waiting for actor_0, {learner}, {policy_worker}"]


class Servers:
    """Launches that so many dying fork servers spoil, each in a way of its own."""

    def __init__(self, seats: Seats, errors: list[Exception]) -> None:
        self.seats, self.errors = seats, errors

    def launch(self, name: str, generation: int) -> None:
        if self.errors:
            raise self.errors.pop()
        self.seats.launch(name, generation)


DYING = [EOFError("unexpected EOF"), ConnectionRefusedError(111, "Connection refused"), FileNotFoundError(2, "gone")]


def start_with(errors: list[Exception]) -> Seats:
    seats: Any = Seats()
    stalls: Any = SimpleNamespace()
    Processes(seats, TOPOLOGY, stalls, Servers(seats, errors).launch, SignalWatch(), 0).start()
    result: Seats = seats
    return result


@pytest.mark.parametrize("error", DYING)
def test_a_fork_server_that_dies_over_a_first_start_is_no_end(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    seats = start_with([error, error])
    assert seats.started == list(TOPOLOGY.processes())
    first = next(iter(TOPOLOGY.processes()))
    assert len(caplog.messages) == 2
    for said in caplog.messages:
        assert said.startswith(
            f"{first} could not be started, trying again: the fork server ended when it was to start"
        )


def test_fork_servers_that_die_again_and_again_end_the_run_in_one_line() -> None:
    with pytest.raises(ResourceError, match=r"^the fork server ended when it was to start a process: \d+ MiB"):
        start_with([EOFError("unexpected EOF")] * 3)
