from dataclasses import replace

import numpy as np
import pytest

from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.gpu_batches import COUNTED, DeviceStaging
from appo.algorithms.runtime.messages import SlotReleased
from tests.unit.runtime.devices import LateDevice
from tests.unit.runtime.worlds import SPEC, World, columns_in, copy_of, hand_over, number_all, world_of

ROWS = 3


def numbered_world() -> World:
    world = world_of(replace(SPEC, same_step=True), rnn_state_size=2, recurrence=2)
    number_all(world)
    return world


def batches_of(world: World, columns: int, device: Device | None = None, **more: object) -> ColumnBatches:
    given = {"max_policy_lag": 100, "hold": False, "num_policies": 1} | more
    staging = DeviceStaging(world.trajectories, device or Device())
    return ColumnBatches(staging, 0, columns, **given)  # type: ignore[arg-type]


def give(batches: ColumnBatches, world: World, *slots: int) -> None:
    for slot in slots:
        batches.add(hand_over(world, slot))


def assert_holds(found: dict[str, np.ndarray], world: World, places: list[tuple[int, int]]) -> None:
    expected = columns_in(world, places)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert np.array_equal(array, expected[name]), name
        assert array.dtype == expected[name].dtype


def test_batches_hold_every_field_of_their_columns() -> None:
    world = numbered_world()
    batches = batches_of(world, 4)
    give(batches, world, 2, 0, 3)
    world.trajectories.policy_version[3, 1, 1] = -200  # one column in the middle is too old: the others are picked
    assert list(batches.fill(1)) == [SlotReleased(0, 2, 1)]
    first = batches.take()
    assert first is not None
    assert_holds(copy_of(first), world, [(2, 0), (2, 1), (2, 2), (0, 0)])
    assert list(batches.fill(1)) == [SlotReleased(0, 0, 1), SlotReleased(0, 3, 1)]
    second = batches.take()
    assert second is not None
    assert_holds(copy_of(second), world, [(0, 1), (0, 2), (3, 0), (3, 2)])
    assert batches.counts().discarded == 4
    assert batches.waiting == 0


def test_slots_are_released_in_order_and_only_behind_their_copies() -> None:
    world, device = numbered_world(), LateDevice()
    batches = batches_of(world, 2 * ROWS, device)
    events = device.streams[0].events
    give(batches, world, 1, 0)
    assert list(batches.fill(1)) == []
    assert (batches.waiting, batches.counts().held, batches.counts().released) == (3, 2, 0)  # and a batch to come
    copied_1, used_up_1, copied_0, used_up_0 = events
    used_up_0.reached = True
    assert list(batches.fill(1)) == []
    used_up_1.reached = True
    assert list(batches.fill(1)) == [SlotReleased(0, 1, 1), SlotReleased(0, 0, 1)]
    assert (batches.waiting, batches.counts().held, batches.counts().released) == (1, 0, 2)
    assert batches.take() is None
    copied_1.reached = copied_0.reached = True
    assert batches.take() is not None
    assert batches.waiting == 0


def test_a_batch_stays_while_the_next_is_filled() -> None:
    world, device = numbered_world(), LateDevice()
    batches = batches_of(world, ROWS, device)
    stream = device.streams[0]
    taken = []
    for slot in (0, 1, 2):
        give(batches, world, slot)
        list(batches.fill(1))
        for event in stream.events:
            event.reached = True
        stream.asked.clear()
        batch = batches.take()
        assert batch is not None
        # Training waits for the copies; copies to the other memory wait for the training issued before.
        assert stream.asked == ["lead", "follow"]
        taken.append(batch)
        if slot:
            before = copy_of(taken[-2])
            for name in set(before) - set(COUNTED):
                assert np.array_equal(before[name], columns_in(world, [(slot - 1, r) for r in range(ROWS)])[name])
    assert taken[0].obs["obs"].data_ptr() == taken[2].obs["obs"].data_ptr() != taken[1].obs["obs"].data_ptr()


def test_slots_that_are_held_in_vain_are_released_behind_their_copies() -> None:
    world, device = numbered_world(), LateDevice()
    slots = range(len(world.trajectories.owner))
    batches = batches_of(world, 2 * len(slots) * ROWS, device, hold=True)
    give(batches, world, *slots)
    assert list(batches.fill(1)) == []
    assert batches.counts().held == len(slots)
    for event in device.streams[0].events:
        event.reached = True
    assert list(batches.fill(1)) == [SlotReleased(0, slot, 1) for slot in slots]


@pytest.mark.parametrize("hold", [False, True])
def test_synchronous_runs_hold_slots_until_the_batch_is_trained(hold: bool) -> None:
    world = numbered_world()
    batches = batches_of(world, ROWS, hold=hold)
    give(batches, world, 0)
    assert len(list(batches.fill(1))) == (not hold)
    assert batches.take() is not None
    assert len(list(batches.trained())) == hold
