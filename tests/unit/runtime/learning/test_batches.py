from dataclasses import replace

import numpy as np
import pytest
import torch

from appo.algorithms.runtime.learning.batches import Batch, BatchCounts
from appo.algorithms.runtime.learning.column_batches import ColumnBatches
from appo.algorithms.runtime.learning.staging import Staging
from appo.algorithms.runtime.messages import SlotReleased, TrajectoryReady
from tests.unit.runtime.worlds import SPEC, World, columns_in, copy_of, hand_over, number_all, world_of

ROWS, ROLLOUT = 3, 4


def numbered_world(**counts: object) -> World:
    world = world_of(replace(SPEC, same_step=True), rnn_state_size=2, recurrence=2, **counts)
    number_all(world)
    return world


def batches_of(
    world: World, columns: int, *, policy: int = 0, max_policy_lag: int = 100, hold: bool = False, num_policies: int = 1
) -> ColumnBatches:
    return ColumnBatches(Staging(world.trajectories), policy, columns, max_policy_lag, hold, num_policies)


def fill(batches: ColumnBatches, version: int = 1) -> list[SlotReleased]:
    return list(batches.fill(version))


def assert_takes(batches: ColumnBatches, world: World, places: list[tuple[int, int]]) -> None:
    batch = batches.take()
    assert batch is not None
    found, expected = copy_of(batch), columns_in(world, places)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert np.array_equal(array, expected[name]), name
        assert array.dtype == expected[name].dtype


def test_a_batch_of_one_slot_holds_every_field() -> None:
    world = numbered_world()
    batches = batches_of(world, ROWS)
    assert batches.take() is None
    message = hand_over(world, 1)
    batches.add(message)
    assert batches.waiting == 1
    assert batches.take() is None
    assert fill(batches) == [SlotReleased(0, 1, message.sequence)]
    assert batches.waiting == 0
    assert_takes(batches, world, [(1, 0), (1, 1), (1, 2)])
    assert batches.take() is None


def test_columns_of_one_slot_go_to_two_batches() -> None:
    world = numbered_world()
    batches = batches_of(world, 4)
    messages = [hand_over(world, slot) for slot in (2, 0, 3)]
    for message in messages:
        batches.add(message)
    assert fill(batches) == [SlotReleased(0, 2, 1)]
    assert fill(batches) == []  # a full batch takes no more
    assert_takes(batches, world, [(2, 0), (2, 1), (2, 2), (0, 0)])
    assert fill(batches) == [SlotReleased(0, 0, 1)]
    assert_takes(batches, world, [(0, 1), (0, 2), (3, 0), (3, 1)])
    assert fill(batches) == [SlotReleased(0, 3, 1)]
    assert batches.take() is None
    assert batches.counts() == BatchCounts(trajectories=3, released=3, discarded=0, in_flight=ROLLOUT, held=0)


def test_one_slot_can_fill_several_batches() -> None:
    world = numbered_world()
    batches = batches_of(world, 1)
    batches.add(hand_over(world, 0))
    for row in range(ROWS):
        assert fill(batches) == ([SlotReleased(0, 0, 1)] if row == ROWS - 1 else [])
        assert_takes(batches, world, [(0, row)])


def test_slots_may_change_as_soon_as_they_are_released() -> None:
    world = numbered_world()
    batches = batches_of(world, 4)
    expected = columns_in(world, [(0, 0), (0, 1), (0, 2), (1, 0)])
    batches.add(hand_over(world, 0))
    assert len(fill(batches)) == 1
    world.trajectories.reward[0] = -1
    world.trajectories.obs["obs"][0] = -1
    batches.add(hand_over(world, 1))
    fill(batches)
    batch = batches.take()
    assert batch is not None
    found = copy_of(batch)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_stale_columns_are_discarded_and_their_steps_counted_once() -> None:
    world = numbered_world()
    t = world.trajectories
    t.policy_version[:] = 9
    t.policy_version[0, 2, 1] = 3  # the oldest step decides
    t.policy_version[1, :, 0] = 2
    t.valid[0, 0, 1] = False
    batches = batches_of(world, 4, max_policy_lag=6)
    for slot in (0, 1):
        batches.add(hand_over(world, slot))
    assert fill(batches, version=9) == [SlotReleased(0, 0, 1), SlotReleased(0, 1, 1)]
    assert_takes(batches, world, [(0, 0), (0, 2), (1, 1), (1, 2)])
    assert batches.counts() == BatchCounts(trajectories=2, released=2, discarded=7, in_flight=0, held=0)
    assert fill(batches, version=9) == []
    assert batches.counts().discarded == 7


@pytest.mark.parametrize(("lag", "discarded"), [(5, 0), (6, 12), (7, 12)])
def test_lag_is_measured_against_the_version_of_now(lag: int, discarded: int) -> None:
    world = numbered_world()
    batches = batches_of(world, ROWS, max_policy_lag=6)
    batches.add(hand_over(world, 0))
    fill(batches, version=1 + lag)
    assert batches.counts().discarded == discarded
    assert (batches.take() is None) == bool(discarded)


def test_the_version_of_invalid_steps_does_not_matter() -> None:
    world = numbered_world()
    world.trajectories.policy_version[0, 1] = -1000
    world.trajectories.valid[0, 1] = False
    batches = batches_of(world, ROWS, max_policy_lag=1)
    batches.add(hand_over(world, 0))
    fill(batches)
    assert batches.take() is not None
    assert batches.counts().discarded == 0


def test_columns_waiting_for_the_next_batch_can_become_stale() -> None:
    world = numbered_world()
    batches = batches_of(world, 2, max_policy_lag=5)
    batches.add(hand_over(world, 0))
    fill(batches, version=1)
    assert_takes(batches, world, [(0, 0), (0, 1)])
    assert batches.counts() == BatchCounts(trajectories=1, released=0, discarded=0, in_flight=ROLLOUT, held=1)
    assert fill(batches, version=6) == [SlotReleased(0, 0, 1)]
    assert batches.take() is None
    assert batches.counts() == BatchCounts(trajectories=1, released=1, discarded=ROLLOUT, in_flight=0, held=0)


def test_stale_columns_at_the_end_of_a_full_batch_are_counted_once() -> None:
    world = numbered_world()
    world.trajectories.policy_version[0, :, 1] = -50
    batches = batches_of(world, 1, max_policy_lag=10)
    batches.add(hand_over(world, 0))
    fill(batches)
    assert batches.counts() == BatchCounts(1, 0, discarded=ROLLOUT, in_flight=2 * ROLLOUT, held=1)
    assert_takes(batches, world, [(0, 0)])
    assert fill(batches) == [SlotReleased(0, 0, 1)]
    assert_takes(batches, world, [(0, 2)])
    assert batches.counts() == BatchCounts(1, 1, discarded=ROLLOUT, in_flight=0, held=0)


def test_columns_without_a_valid_step_are_skipped_and_count_nothing() -> None:
    world = numbered_world()
    world.trajectories.valid[0, :, 1] = False
    batches = batches_of(world, 2)
    batches.add(hand_over(world, 0))
    assert fill(batches) == [SlotReleased(0, 0, 1)]
    assert_takes(batches, world, [(0, 0), (0, 2)])
    assert batches.counts() == BatchCounts(1, 1, discarded=0, in_flight=0, held=0)


def test_steps_are_in_flight_until_their_batch_is_taken() -> None:
    world = numbered_world()
    world.trajectories.valid[0, 3, 2] = False
    batches = batches_of(world, 4)
    batches.add(hand_over(world, 0))
    assert batches.counts() == BatchCounts(trajectories=1, released=0, discarded=0, in_flight=11, held=1)
    fill(batches)
    assert batches.counts() == BatchCounts(trajectories=1, released=1, discarded=0, in_flight=11, held=0)
    batches.add(hand_over(world, 1))
    fill(batches)
    assert batches.counts() == BatchCounts(trajectories=2, released=1, discarded=0, in_flight=11 + 12, held=1)
    batch = batches.take()
    assert batch is not None
    assert int(batch.valid.sum()) == 11 + 4
    assert batches.counts() == BatchCounts(trajectories=2, released=1, discarded=0, in_flight=8, held=1)


def test_a_message_of_an_earlier_hand_over_is_dropped() -> None:
    world = numbered_world()
    old = hand_over(world, 0)
    current = hand_over(world, 0)
    batches = batches_of(world, ROWS)
    batches.add(old)
    batches.add(TrajectoryReady(0, 1, 7, 0))
    assert batches.counts() == BatchCounts(0, 0, 0, 0, 0)
    batches.add(current)
    assert fill(batches) == [SlotReleased(0, 0, current.sequence)]


def test_held_slots_are_released_after_training() -> None:
    world = numbered_world()
    batches = batches_of(world, 4, hold=True)
    for slot in (0, 1):
        batches.add(hand_over(world, slot))
    assert fill(batches) == []
    assert_takes(batches, world, [(0, 0), (0, 1), (0, 2), (1, 0)])
    assert batches.counts() == BatchCounts(2, 0, discarded=0, in_flight=8, held=2)
    assert list(batches.trained()) == [SlotReleased(0, 0, 1)]
    assert list(batches.trained()) == []
    assert batches.counts() == BatchCounts(2, 1, discarded=0, in_flight=8, held=1)


@pytest.mark.parametrize("columns", range(1, 13))
def test_held_slots_never_starve_the_batch_they_are_held_for(columns: int) -> None:
    """Four slots of three columns, all handed over again as soon as they are free."""
    world = numbered_world()
    world.trajectories.valid[1, :, 1] = False  # a column that is skipped
    batches = batches_of(world, columns, hold=True)
    free, trained = [0, 1, 2, 3], 0
    for _ in range(200):
        for slot in free:
            batches.add(hand_over(world, slot))
        free = [message.slot for message in fill(batches)]
        if batches.take() is not None:
            trained += 1
            free += [message.slot for message in batches.trained()]
    assert trained >= 90  # of 200 turns, some of which only gather


def test_of_held_slots_only_those_go_back_that_the_batch_lacks() -> None:
    """Whatever else came back would be acted before the step, and be trained on after it."""
    world = numbered_world()
    world.trajectories.policy_version[:] = 9
    world.trajectories.policy_version[:2] = 2  # acted before a learner died
    batches = batches_of(world, 4 * ROWS, max_policy_lag=6, hold=True)
    for slot in range(4):
        batches.add(hand_over(world, slot))
    assert [message.slot for message in fill(batches, version=9)] == [0, 1]
    assert batches.counts().held == 2
    world.trajectories.policy_version[:2] = 9
    for slot in (0, 1):
        batches.add(hand_over(world, slot))
    assert fill(batches, version=9) == []
    assert_takes(batches, world, [(slot, row) for slot in (2, 3, 0, 1) for row in range(ROWS)])
    assert [message.slot for message in batches.trained()] == [2, 3, 0, 1]


def test_several_policies_never_hold() -> None:
    world = numbered_world(num_policies=2)
    batches = batches_of(world, ROWS, hold=True, num_policies=2)
    batches.add(hand_over(world, 0))
    assert fill(batches) == [SlotReleased(0, 0, 1)]


def test_a_policy_trains_only_its_own_steps() -> None:
    world = numbered_world(num_policies=2)
    t = world.trajectories
    t.policy_id[0, :2, 0], t.policy_id[0, 2:, 0] = 0, 1  # both play in column 0
    t.policy_id[0, :, 1] = 0
    t.policy_id[0, :, 2] = 1
    t.valid[0, 3, 2] = False
    t.policy_version[0, :2, 0] = -1000  # of the other policy: no reason to discard for policy 1
    batches = batches_of(world, 2, policy=1, max_policy_lag=10, num_policies=2)
    batches.add(hand_over(world, 0, policy=1))
    assert batches.counts().in_flight == 2 + 3
    assert fill(batches) == [SlotReleased(1, 0, 1)]
    batch = batches.take()
    assert batch is not None
    expected = columns_in(world, [(0, 0), (0, 2)])
    expected["valid"] = np.array([[0, 1], [0, 1], [1, 1], [1, 0]], bool)
    found = copy_of(batch)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert batches.counts() == BatchCounts(1, 1, discarded=0, in_flight=0, held=0)


def test_a_slot_without_a_step_of_the_policy_goes_back_at_once() -> None:
    world = numbered_world(num_policies=2)
    batches = batches_of(world, ROWS, policy=1, num_policies=2)
    batches.add(hand_over(world, 0, policy=1))
    assert fill(batches) == [SlotReleased(1, 0, 1)]
    assert batches.counts() == BatchCounts(1, 1, discarded=0, in_flight=0, held=0)
    assert batches.take() is None


def test_the_policy_of_the_observation_after_the_last_step_is_not_that_of_a_step() -> None:
    world = numbered_world(num_policies=2)
    world.trajectories.policy_id[0, ROLLOUT] = 1
    batches = batches_of(world, ROWS, policy=1, num_policies=2)
    batches.add(hand_over(world, 0, policy=1))
    assert batches.counts().in_flight == 0


def test_every_collected_step_is_trained_discarded_or_in_flight() -> None:
    """Random slots of two policies, ages and invalid steps; nothing is lost and nothing counted twice."""
    rng = np.random.default_rng(0)
    world = numbered_world(num_policies=2)
    t = world.trajectories
    sources = [batches_of(world, 5, policy=p, max_policy_lag=8, num_policies=2) for p in (0, 1)]
    collected, trained, busy = [0, 0], [0, 0], np.zeros((4, 2), bool)
    for version in range(10, 200):
        for slot in np.flatnonzero(~busy.any(axis=1)):
            t.valid[slot] = rng.random((ROLLOUT, ROWS)) < 0.7
            t.policy_id[slot] = rng.integers(2, size=(ROLLOUT + 1, ROWS))
            t.policy_version[slot] = version - rng.integers(12, size=(ROLLOUT, ROWS)) * (rng.random() < 0.5)
            message = hand_over(world, int(slot))
            for policy, batches in enumerate(sources):
                mine = t.valid[slot] & (t.policy_id[slot, :ROLLOUT] == policy)
                collected[policy] += int(mine.sum())
                batches.add(message._replace(policy=policy))
                busy[slot, policy] = True
        for policy, batches in enumerate(sources):
            for released in batches.fill(version):
                busy[released.slot, policy] = False
            batch = batches.take()
            trained[policy] += 0 if batch is None else int(batch.valid.sum())
            counts = batches.counts()
            assert trained[policy] + counts.discarded + counts.in_flight == collected[policy]
            assert counts.trajectories == counts.released + counts.held
    assert min(trained) > 500
    assert all(batches.counts().discarded > 100 for batches in sources)


def test_columns_and_devices_of_a_batch() -> None:
    world = numbered_world()
    batches = batches_of(world, ROWS)
    batches.add(hand_over(world, 0))
    fill(batches)
    batch = batches.take()
    assert batch is not None
    assert batch.recorded["final_value"].shape == (ROLLOUT, ROWS)
    for part in (batch.columns(torch.tensor([2, 0])), batch.columns(slice(0, 2)), batch.copy()):
        assert isinstance(part, Batch)
        assert list(part.named()) == list(batch.named())
    part = batch.columns(torch.tensor([2, 0]))
    assert torch.equal(part.obs["obs"], batch.obs["obs"][:, [2, 0]])
    assert torch.equal(part.rnn_state, batch.rnn_state[:, [2, 0]])
    assert torch.equal(part.first, batch.first[:, [2, 0]])
    assert batch.columns(slice(1, 2)).reward.tolist() == batch.reward[:, 1:2].tolist()
