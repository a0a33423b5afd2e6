from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.batches import BatchCounts
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.gpu_batches import DeviceStaging
from appo.algorithms.runtime.learning.staging import Staging
from appo.algorithms.runtime.memory.slots import Trajectories
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady
from tests.unit.runtime.worlds import World, assert_blank, columns_in, copy_of, hand_over, number_all, world_of

GROUPS, ROWS = 3, 2


def world_of_groups() -> World:
    world = world_of(groups_per_actor=GROUPS, slots_per_group=1, rows=ROWS)
    number_all(world)
    return world


def consume(batches: ColumnBatches, version: int = 1) -> tuple[list[dict[str, np.ndarray]], list[int]]:
    """Work as a learner does, while there is something to do: batches, and after how many of them slots went back."""
    trained: list[dict[str, np.ndarray]] = []
    released_after: list[int] = []

    def note(messages: list[SlotReleased]) -> None:
        released_after.extend([len(trained)] * len(messages))

    while batches.waiting:
        note(list(batches.fill(version)))
        if (batch := batches.take()) is not None:
            assert_blank(batches.blank(), batch)
            trained.append(copy_of(batch))
            note(list(batches.trained()))
    return trained, released_after


@pytest.mark.parametrize("staging", [Staging, lambda trajectories: DeviceStaging(trajectories, Device())])
@pytest.mark.parametrize("order", list(permutations(range(GROUPS))))
def test_batches_are_the_same_whoever_comes_first(
    order: tuple[int, ...], staging: Callable[[Trajectories], Staging]
) -> None:
    world = world_of_groups()
    batches = ColumnBatches(staging(world.trajectories), 0, 4, 100, True, 1, rounds=True)
    places = [(slot, row) for slot in range(GROUPS) for row in range(ROWS)]
    for number in range(2):
        messages = {slot: hand_over(world, slot) for slot in order}
        for slot in order:
            assert consume(batches) == ([], [])  # nothing happens before the round is complete
            batches.add(messages[slot])
        trained, released_after = consume(batches)
        # Six columns a round, four a batch: the first round fills one batch, the second two.
        expected = [places[:4]] if number == 0 else [places[4:] + places[:2], places[2:]]
        assert len(trained) == len(expected)
        for batch, columns in zip(trained, expected, strict=True):
            assert all(np.array_equal(batch[name], array) for name, array in columns_in(world, columns).items())
        assert released_after == [len(expected)] * GROUPS  # all at once, when the last batch is trained


def test_a_slot_that_waits_for_its_round_is_counted() -> None:
    world = world_of_groups()
    batches = ColumnBatches(Staging(world.trajectories), 0, 4, 100, True, 1, rounds=True)
    batches.add(hand_over(world, 2))
    assert batches.waiting == 0
    assert batches.counts() == BatchCounts(1, 0, 0, in_flight=ROWS * 4, held=1)
    batches.add(TrajectoryReady(0, 1, 7, 0))  # of another hand-over
    assert batches.counts().trajectories == 1
