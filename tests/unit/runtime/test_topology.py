from dataclasses import replace

import pytest

from algorithms.runtime.messages import (
    MAIN_ADDRESS,
    ActionRequest,
    ActionsReady,
    Address,
    SaveState,
    SlotReleased,
    StateSaved,
    TrajectoryReady,
    WorkerReady,
)
from algorithms.runtime.topology import Topology, check_slots, slots_per_group
from utils.errors import UsageError

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
            assert {CENTRAL.actor_of_slot(slot) for slot in CENTRAL.slots_of(group)} == {actor}


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
    assert address_of(StateSaved(0, 5)) == MAIN_ADDRESS


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
