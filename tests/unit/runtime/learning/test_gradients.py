"""The ring of gradients: its order, its totals, and what each end finds that takes the place of a dead one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from appo.algorithms.runtime.learning.batches import Batch, BatchCounts, Entered
from appo.algorithms.runtime.learning.gradients import FIGURES, GRADIENT, PLACES, GradientRing, GradientSource
from appo.algorithms.runtime.memory.learner_state import WEIGHTS, LearnerState, StateBlock, Vector
from appo.algorithms.runtime.memory.ownership import LearnerLedger
from appo.algorithms.runtime.messages import Address, TrajectoryReady, Wake
from appo.algorithms.runtime.roles import POLICY_WORKER
from tests.unit.runtime.worlds import World, world_of

WEIGHTS_SIZE = 5
MAX_LAG = 10
ROLE = replace(POLICY_WORKER, name="gradient")


def world() -> World:
    more = (*GradientRing.declare(0, 2, WEIGHTS_SIZE, 3), *StateBlock.declare(0, {WEIGHTS: Vector(1)}))
    return world_of(num_actors=2, groups_per_actor=1, slots_per_group=2, rows=3, rollout=4, more=more)


def source_of(world: World) -> GradientSource:
    block = StateBlock(world.arena, 0)
    return GradientSource(GradientRing(world.arena, 0), 0, world.trajectories, block, ROLE, MAX_LAG)


def hand_over(world: World, slot: int, valid: int) -> TrajectoryReady:
    """Fill a slot with so many valid steps of two frames each, all others of 100."""
    t = world.trajectories
    t.valid[slot], t.num_frames[slot] = False, 100
    t.valid[slot].flat[:valid] = True
    t.num_frames[slot].flat[:valid] = 2
    t.sequence[slot] += 1
    t.owner[slot] = 1
    return TrajectoryReady(0, slot, int(t.sequence[slot]), 0)


def commit(world: World, actor: int, message: TrajectoryReady, value: float, version: int = 1) -> None:
    batch, gradient = Batch.of_slot(world.trajectories, message.slot), np.full(WEIGHTS_SIZE - 2, value, np.float32)
    figures = np.array([value + 0.25, version])
    GradientRing(world.arena, 0).commit(actor, gradient, figures, batch, message, version)
    world.trajectories.released[message.slot, 0] = message.sequence


def test_gradients_come_in_order_with_their_steps() -> None:
    w = world()
    source, ring = source_of(w), GradientRing(w.arena, 0)
    assert source.take() is None
    assert source.waiting == 0
    for value, valid in enumerate((3, 5, 7)):
        commit(w, 1, hand_over(w, 2, valid), float(value), version=value + 4)
    assert (source.waiting, ring.unapplied_samples()) == (3, 15)
    for value, valid in enumerate((3, 5, 7)):
        batch = source.take()
        assert batch is not None
        assert batch.recorded[GRADIENT].tolist() == [value] * 3 + [0] * 2
        assert batch.recorded[FIGURES].tolist() == [value + 0.25, value + 4, 0]
        assert (batch.valid.shape, int(batch.valid.sum())) == ((1, valid), valid)
        assert torch.equal(batch.policy_version, torch.full((1, valid), value + 4))
        assert source.entered() == Entered(valid, 2 * valid)
        assert list(source.trained()) == [Wake(Address("gradient", 0, 1))]
    assert source.take() is None


def test_the_actor_with_most_gradients_comes_first() -> None:
    w = world()
    for actor, slot in ((0, 0), (1, 2), (1, 3)):
        commit(w, actor, hand_over(w, slot, 1), actor)
    source, found = source_of(w), []
    while (batch := source.take()) is not None:
        found.append(int(batch.recorded[GRADIENT][0]))
    assert found == [1, 0, 1]


def test_a_full_ring_has_room_again_when_an_entry_is_applied() -> None:
    w = world()
    ring = GradientRing(w.arena, 0)
    for _ in range(PLACES - 1):
        assert ring.has_room(0)
        commit(w, 0, hand_over(w, 0, 2), 0.0)
    assert not ring.has_room(0)
    assert ring.has_room(1)
    ring.apply(0)
    assert ring.has_room(0)


def test_totals_outlive_many_rounds_of_the_ring() -> None:
    w = world()
    source, rng, sent = source_of(w), np.random.default_rng(3), [0, 0]
    entered = np.zeros(2, np.int64)
    for _ in range(200):
        actor = int(rng.integers(2))
        if source.ring.has_room(actor):
            sent[actor] += (valid := int(rng.integers(12)))
            commit(w, actor, hand_over(w, 2 * actor, valid), 0.0)
        if rng.random() < 0.5 and source.take() is not None:
            entered += source.entered()[:2]
        assert entered[0] + source.ring.unapplied_samples() == sum(sent)
    assert entered[0] > 12 * PLACES
    assert entered[1] == 2 * entered[0]


def test_a_successor_beside_an_actor_knows_what_only_lacks_its_release() -> None:
    w = world()
    message = hand_over(w, 1, 2)
    ring = GradientRing(w.arena, 0)
    assert not ring.holds(0, message.slot, message.sequence)
    commit(w, 0, message, 0.0)
    assert ring.holds(0, message.slot, message.sequence)
    assert not ring.holds(0, message.slot, message.sequence + 1)
    assert not ring.holds(1, message.slot, message.sequence)


@pytest.mark.parametrize("noted", [False, True])
def test_a_successor_of_the_learner_counts_what_was_applied_and_not_told(noted: bool) -> None:
    w = world()
    StateBlock(w.arena, 0).write(
        LearnerState({WEIGHTS: np.zeros(1)}, {"samples": 1000, "env_steps": 3000, "discarded": 50})
    )
    source = source_of(w)
    for valid in (3, 5):
        commit(w, 0, hand_over(w, 0, valid), 0.0)
    source.take()
    if noted:  # the first entry; the second one is applied and the learner is killed before it has told that
        assert source.entered() == Entered(3, 6)
        zero = dict.fromkeys(LearnerLedger.NAMES, 0)
        noted_counts = {"samples": 1003, "env_steps": 3006, "released": 2, "discarded": 50}
        LearnerLedger(w.trajectories, 0).note(zero | noted_counts)
    source.take()
    successor = source_of(w)
    assert successor.take() is None
    assert successor.entered() == (Entered(5, 10) if noted else Entered(8, 16))
    assert successor.entered() == Entered(0, 0)
    assert successor.counts().released == (0 if noted else 2)


def test_every_step_is_counted_where_it_is() -> None:
    w = world()
    source = source_of(w)
    commit(w, 0, hand_over(w, 0, 3), 0.0)
    commit(w, 0, hand_over(w, 0, 4), 0.0)
    hand_over(w, 1, 5)
    assert source.counts() == BatchCounts(trajectories=3, released=2, discarded=0, in_flight=12, held=1)
    source.take()
    assert source.counts() == BatchCounts(trajectories=3, released=2, discarded=0, in_flight=9, held=1)
    assert list(source.fill(1)) == []
    source.add(hand_over(w, 3, 1))
    assert (source.waiting, source.counts().held) == (1, 2)


def test_what_is_too_old_is_dropped_and_counted() -> None:
    w = world()
    source = source_of(w)
    for valid, version in ((3, 1), (5, 2), (7, 3)):
        commit(w, 0, hand_over(w, 0, valid), float(valid), version=version)
    commit(w, 1, hand_over(w, 2, 4), 4.0, version=3)
    assert list(source.fill(MAX_LAG)) == []
    assert list(source.fill(MAX_LAG + 2)) == [Wake(Address("gradient", 0, 0))]
    assert source.counts() == BatchCounts(trajectories=4, released=4, discarded=8, in_flight=11, held=0)
    assert source.entered() == Entered(0, 0)
    left = [batch.recorded[GRADIENT][0].item() for batch in (source.take(), source.take()) if batch is not None]
    assert left == [7.0, 4.0]
    commit(w, 1, hand_over(w, 2, 6), 6.0, version=2)  # after `fill` has looked
    assert source.take() is None
    list(source.fill(MAX_LAG + 2))
    assert source.take() is None
    assert source.entered() == Entered(11, 22)
    assert source.counts() == BatchCounts(trajectories=5, released=5, discarded=14, in_flight=0, held=0)


def test_what_was_dropped_outlives_the_learner() -> None:
    w = world()
    state = LearnerState({WEIGHTS: np.zeros(1)}, {"samples": 1000, "env_steps": 3000, "discarded": 50})
    StateBlock(w.arena, 0).write(state)
    source = source_of(w)
    commit(w, 0, hand_over(w, 0, 3), 0.0, version=1)
    commit(w, 0, hand_over(w, 0, 5), 0.0, version=90)
    list(source.fill(90))
    assert source.counts().discarded == 3  # the learner worker adds the 50 of before
    zero = dict.fromkeys(LearnerLedger.NAMES, 0)
    LearnerLedger(w.trajectories, 0).note(zero | {"samples": 1000, "env_steps": 3000, "discarded": 53, "released": 2})
    list(source.fill(200))  # and killed before that is noted
    successor = source_of(w)
    assert successor.counts().discarded == 5
    assert successor.ring.discarded_total() == 58
    assert successor.entered() == Entered(0, 0)


def test_applied_and_dropped_entries_add_up_to_what_was_committed() -> None:
    w = world()
    source, rng, sent, version = source_of(w), np.random.default_rng(4), 0, 1
    entered = np.zeros(2, np.int64)
    for _ in range(300):
        actor = int(rng.integers(2))
        version += int(rng.integers(4))
        if source.ring.has_room(actor):
            sent += (valid := int(rng.integers(12)))
            commit(w, actor, hand_over(w, 2 * actor, valid), 0.0, version=version)
        list(source.fill(version))
        if rng.random() < 0.4 and source.take() is not None:
            entered += source.entered()[:2]
        assert entered[0] + source.counts().discarded + source.ring.unapplied_samples() == sent
    assert entered[0] > 12 * PLACES
    assert source.counts().discarded > 12 * PLACES
    assert entered[1] == 2 * entered[0]
