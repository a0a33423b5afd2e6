import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from appo.algorithms.runtime.messages import (
    MAIN_ADDRESS,
    ActionRequest,
    ActionsReady,
    Address,
    SaveState,
    SlotReleased,
    StateSaved,
    TrajectoryReady,
    Wake,
    WorkerReady,
)
from appo.algorithms.runtime.roles import ACTOR, LEARNER, POLICY_WORKER, ROLES, Role, register
from appo.algorithms.runtime.topology import Topology, check_slots, slots_per_group
from appo.utils.errors import UsageError
from tests.patience import HANG_SECONDS

CENTRAL = Topology(
    placement="central",
    num_actors=3,
    groups_per_actor=2,
    slots_per_group=4,
    num_policies=2,
    policy_workers_per_policy=2,
    rows=5,
    rollout=8,
)


def names(workers: tuple[Address, ...]) -> list[str]:
    return [str(worker) for worker in workers]


def test_counts() -> None:
    assert (CENTRAL.num_groups, CENTRAL.num_slots) == (6, 24)
    assert [list(CENTRAL.groups_of(a)) for a in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [s for g in range(6) for s in CENTRAL.slots_of(g)] == list(range(24))
    for actor in range(3):
        for group in CENTRAL.groups_of(actor):
            assert {CENTRAL.filler_of_slot(slot) for slot in CENTRAL.slots_of(group)} == {actor}


def test_central_processes_start_learners_first() -> None:
    assert {name: names(workers) for name, workers in CENTRAL.processes().items()} == {
        "learner_0": ["learner_0"],
        "learner_1": ["learner_1"],
        "policy_worker_0.0": ["policy_worker_0.0"],
        "policy_worker_0.1": ["policy_worker_0.1"],
        "policy_worker_1.0": ["policy_worker_1.0"],
        "policy_worker_1.1": ["policy_worker_1.1"],
        "actor_0": ["actor_0"],
        "actor_1": ["actor_1"],
        "actor_2": ["actor_2"],
    }
    assert list(CENTRAL.processes())[:2] == ["learner_0", "learner_1"]


def test_colocated_policy_workers_live_with_their_learner() -> None:
    assert {name: names(workers) for name, workers in replace(CENTRAL, colocated=True).processes().items()} == {
        "learner_0": ["learner_0", "policy_worker_0.0", "policy_worker_0.1"],
        "learner_1": ["learner_1", "policy_worker_1.0", "policy_worker_1.1"],
        "actor_0": ["actor_0"],
        "actor_1": ["actor_1"],
        "actor_2": ["actor_2"],
    }
    for placement in ("local", "serial"):  # they live elsewhere there
        apart = replace(CENTRAL, placement=placement)
        assert replace(apart, colocated=True).processes() == apart.processes()


def test_local_actors_hold_a_policy_worker_of_every_policy() -> None:
    processes = replace(CENTRAL, placement="local").processes()
    assert list(processes) == ["learner_0", "learner_1", "actor_0", "actor_1", "actor_2"]
    assert names(processes["actor_1"]) == ["actor_1", "policy_worker_0.1", "policy_worker_1.1"]


def test_serial_is_one_process_in_the_order_of_the_loop() -> None:
    serial = replace(CENTRAL, placement="serial", num_actors=1, num_policies=1)
    assert {name: names(workers) for name, workers in serial.processes().items()} == {
        "main": ["actor_0", "policy_worker_0.0", "learner_0"]
    }


@pytest.mark.parametrize("placement", ["central", "local", "serial"])
def test_every_policy_and_group_has_one_policy_worker_and_it_exists(placement: str) -> None:
    topology = replace(CENTRAL, placement=placement)
    existing = {worker for workers in topology.processes().values() for worker in workers}
    for policy in range(2):
        for group in range(6):
            worker = topology.policy_worker_of(policy, group)
            assert worker in existing
            assert worker.index == policy
            if placement == "central":
                assert worker.member == group % 2
            else:
                assert worker.member == group // 2  # beside the actor of the group


def test_addresses_of_messages() -> None:
    address_of = CENTRAL.address_book().address_of
    assert address_of(ActionRequest(1, 3, 12, 0, 0)) == Address("policy_worker", 1, 1)
    assert address_of(ActionsReady(1, 3, 12, 0, 0)) == Address("actor", 1)
    assert address_of(SlotReleased(1, 16, 1)) == Address("actor", 2)
    assert address_of(TrajectoryReady(1, 16, 1, 0)) == Address("learner", 1)
    assert address_of(SaveState(0)) == Address("learner", 0)
    assert address_of(WorkerReady("actor_0")) == MAIN_ADDRESS
    assert address_of(StateSaved(0)) == MAIN_ADDRESS


@pytest.mark.parametrize(
    ("minimum", "waiting", "columns", "rows", "groups", "expected"),
    [
        (2, 2, 32, 8, 4, 3),  # 1 + 2 batches of 4 slots over 4 groups
        (2, 2, 32, 8, 3, 4),
        (2, 1, 32, 64, 2, 2),  # a slot holds more than a batch
        (7, 1, 32, 64, 2, 7),
        (2, 0, 32, 8, 4, 1),  # synchronous: exactly one batch, whatever the minimum
        (2, 0, 33, 8, 4, 2),
        (1, 2, 1, 1, 1, 3),
    ],
)
def test_slots_per_group(minimum: int, waiting: int, columns: int, rows: int, groups: int, expected: int) -> None:
    slots = slots_per_group(minimum=minimum, waiting_batches=waiting, batch_columns=columns, rows=rows, groups=groups)
    assert slots == expected
    check_slots(slots=slots, rows=rows, groups=groups, batch_columns=columns)


def test_a_plan_that_cannot_fill_a_batch_is_refused_with_its_numbers() -> None:
    check_slots(slots=2, rows=4, groups=3, batch_columns=24)
    with pytest.raises(UsageError, match="3 groups x 2 slots x 4 rows hold 24 trajectories, but a batch needs 25"):
        check_slots(slots=2, rows=4, groups=3, batch_columns=25)


# Roles of an algorithm's own.

SCRIBE = replace(POLICY_WORKER, name="scribe", worker="scribe_{index}.{member}", takes_trajectories=True)


@pytest.fixture
def scribe() -> Iterator[Role]:
    """A role that is in the table for the time of a test."""
    yield register(SCRIBE)
    del ROLES[SCRIBE.name]


def test_a_role_of_an_algorithm_is_in_the_table_once(scribe: Role) -> None:
    assert register(replace(SCRIBE)) is ROLES["scribe"] is scribe
    with pytest.raises(ValueError, match="another role named scribe"):
        register(replace(SCRIBE, oom_score=1))
    with pytest.raises(ValueError, match="another role named actor"):
        register(replace(ACTOR, oom_score=1))


def test_roles_travel_to_processes_that_have_not_heard_of_them(scribe: Role) -> None:
    topology = replace(CENTRAL, further=((scribe, ACTOR),))
    code = (
        "import pickle, sys; topology = pickle.loads(sys.stdin.buffer.read());"
        "print(topology.processes()['actor_1'][1].facts == topology.further[0][0], topology.processes()['actor_1'][1])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(topology),
        capture_output=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    assert found.stdout.split() == [b"True", b"scribe_0.1"]
    assert pickle.loads(pickle.dumps(ACTOR)) is ACTOR


@pytest.mark.parametrize("placement", ["central", "local"])
def test_workers_of_an_algorithm_live_beside_those_of_the_runtime(placement: str, scribe: Role) -> None:
    plain = replace(CENTRAL, placement=placement, num_past=1)
    beside_actors = replace(plain, further=((scribe, ACTOR),)).processes()
    for name, workers in plain.processes().items():
        more = [f"scribe_{p}.{name[-1]}" for p in range(2)] if name.startswith("actor") else []
        assert names(beside_actors[name]) == [*names(workers), *more]
    beside_learners = replace(plain, further=((scribe, LEARNER),)).processes()
    assert names(beside_learners["learner_1"]) == ["learner_1", "scribe_1.0"]
    assert names(beside_learners["actor_1"]) == names(plain.processes()["actor_1"])


def test_workers_beside_policy_workers_are_for_policies_that_learn(scribe: Role) -> None:
    topology = replace(CENTRAL, placement="local", num_past=1, further=((scribe, POLICY_WORKER),))
    assert names(topology.processes()["actor_2"])[-2:] == ["scribe_0.2", "scribe_1.2"]
    central = replace(topology, placement="central").processes()
    assert names(central["policy_worker_1.1"]) == ["policy_worker_1.1", "scribe_1.1"]
    assert names(central["policy_worker_2.0"]) == ["policy_worker_2.0"]


def test_in_one_process_the_workers_of_an_algorithm_come_last(scribe: Role) -> None:
    (workers,) = replace(CENTRAL, placement="serial", further=((scribe, ACTOR),)).processes().values()
    assert names(workers)[-6:] == [f"scribe_{p}.{a}" for a in range(3) for p in range(2)]


def test_trajectories_go_to_whom_takes_them(scribe: Role) -> None:
    ready = TrajectoryReady(1, 17, 0, 0)  # slot 17 is of actor 2
    assert CENTRAL.address_book().address_of(ready) == Address("learner", 1)
    topology = replace(CENTRAL, further=((scribe, ACTOR),))
    assert topology.address_book().address_of(ready) == Address("scribe", 1, 2)
    listens = replace(scribe, name="listener", takes_trajectories=False)
    try:
        topology = replace(CENTRAL, further=((register(listens), ACTOR),))
        assert topology.address_book().address_of(ready) == Address("learner", 1)
    finally:
        del ROLES["listener"]


def test_a_wake_goes_to_whom_it_names(scribe: Role) -> None:
    address = Address("scribe", 1, 2)
    assert CENTRAL.address_book().address_of(Wake(address)) is address


def test_roles_in_processes_of_their_own_come_after_the_learners_and_share_out_trajectories(scribe: Role) -> None:
    takes = replace(scribe, name="taker", takes_trajectories=True, worker="taker_{index}.{member}")
    try:
        topology = replace(CENTRAL, apart=((register(takes), 2),))
        own = ["taker_0.0", "taker_0.1", "taker_1.0", "taker_1.1"]
        processes = topology.processes()
        assert list(processes)[:6] == ["learner_0", "learner_1", *own]
        assert list(processes)[6:] == [name for name in CENTRAL.processes() if not name.startswith("learner")]
        assert [names(processes[name]) for name in own] == [[name] for name in own]
        assert (CENTRAL.num_takers, topology.num_takers) == (0, 2)
        ready = TrajectoryReady(1, 17, 0, 0, taker=1)
        assert topology.address_book().address_of(ready) == Address("taker", 1, 1)
        beside = replace(topology, further=((scribe, takes),)).processes()
        assert names(beside["taker_1.1"]) == ["taker_1.1", "scribe_1.1"]
    finally:
        del ROLES["taker"]
