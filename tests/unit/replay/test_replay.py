from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from appo.algorithms.replay.config import REPLAY_METRICS
from appo.algorithms.runtime.learning.batches import BatchCounts, Entered
from appo.algorithms.runtime.memory.ownership import LearnerLedger, note_columns_used
from appo.algorithms.runtime.messages import SlotReleased
from appo.algorithms.sac.config import SACConfig
from tests.unit.replay.replays import PLAN, ROLLOUT, ROWS, SPEC, STACKS, Replay, replay_of
from tests.unit.replay.test_storage import one_step
from tests.unit.runtime.worlds import assert_blank

STEPS = ROWS * ROLLOUT  # of a slot in which no episode ends


def train(replay: Replay) -> int:
    """Use every batch that is due; how many."""
    batches = 0
    while replay.source.take() is not None:
        assert list(replay.source.trained([{"priority": np.ones(PLAN.batch_size, np.float32)}])) == []
        batches += 1
    return batches


def test_a_slot_is_inserted_and_released_at_once() -> None:
    replay = replay_of()
    source = replay.source
    assert source.waiting == 0
    message = replay.hand_over(2, ends=0.0)
    assert source.counts() == BatchCounts(1, 0, 0, in_flight=STEPS, held=1)
    assert source.waiting == 1
    assert replay.fill() == [SlotReleased(0, 2, message.sequence)]
    assert source.counts() == BatchCounts(1, 1, 0, in_flight=0, held=0)
    frames = int(replay.trajectories.num_frames[2].sum())
    assert source.entered() == Entered(STEPS, frames)
    assert source.entered() == Entered()


def test_a_stale_hand_over_is_dropped() -> None:
    replay = replay_of()
    message = replay.hand_over(0)
    replay.fill()
    replay.trajectories.sequence[0] += 1
    replay.source.add(message)
    assert replay.source.waiting == 0
    assert replay.source.counts().trajectories == 1


@pytest.mark.parametrize("ratio", [0.0, 2.0])
def test_a_source_that_has_retired_releases_slots_and_keeps_and_draws_nothing(ratio: float) -> None:
    replay = replay_of(replay_ratio=ratio)
    for slot in (0, 1, 2):
        replay.hand_over(slot, ends=0.0)
        replay.fill()
    source = replay.source
    assert source.waiting == 1  # training has begun, and a batch is due
    replay.source.entered()
    source.retire()
    replay.hand_over(3, ends=0.0)
    assert source.waiting == 1
    assert len(replay.fill()) == 1
    assert (source.waiting, source.take(), source.entered()) == (0, None, Entered())
    assert source.counts() == BatchCounts(4, 4, STEPS, in_flight=0, held=0)
    assert source.storage.totals.samples == 3 * STEPS


def test_uses_per_step_are_held_from_both_sides() -> None:
    """Batches of 16 at 2 uses per step: 3 of every slot of 24 steps. While one is due, slots wait, and so do actors."""
    replay = replay_of()
    replay.hand_over(0, ends=0.0)
    replay.fill()
    assert train(replay) == 0  # 24 steps: learning starts with 30
    replay.hand_over(1, ends=0.0)
    replay.fill()
    assert train(replay) == 0  # what came before the start is not made up for
    for slot in (0, 1, 2):
        replay.hand_over(slot, ends=0.0)
    assert len(replay.fill()) == 1
    assert replay.fill() == []
    assert replay.source.waiting == 1  # a batch
    assert train(replay) == 3
    assert replay.source.waiting == 2
    assert len(replay.fill()) == 1
    assert train(replay) == 3
    assert len(replay.fill()) == 1
    assert train(replay) == 3
    assert replay.fill() == []
    figures = replay.source.metrics()
    assert figures["replay/uses_per_step"] == 2.0
    assert figures.keys() == REPLAY_METRICS.keys()


@pytest.mark.parametrize("ratio", [0.3, 1.0, 7.7])
def test_uses_per_step_are_what_the_flag_says(ratio: float) -> None:
    replay = replay_of(replay_ratio=ratio)
    for number in range(120):
        replay.hand_over(number % 4)
        replay.fill()
        train(replay)
    assert replay.source.metrics()["replay/uses_per_step"] == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize(("words", "own"), [((), 16), (("sampler:0.5", "a:0.5"), 8), (("sampler:0.25", "a:0.75"), 4)])
@pytest.mark.parametrize("updates", [0.5, 1.0, 2.0])
def test_updates_per_step_of_a_mix_are_what_the_flag_says(words: tuple[str, ...], own: int, updates: float) -> None:
    config = SACConfig(batch_size=16, updates_per_step=updates, input=words)
    replay = replay_of(replay_ratio=config.uses_per_step, learning_starts=1)
    replay.source.draw_of(own)
    batches = 0
    for number in range(4):
        replay.hand_over(number, ends=0.0)
        replay.fill()
        while replay.source.take() is not None:
            list(replay.source.trained([{"priority": np.ones((1, own), np.float32)}]))
            batches += 1
    assert batches == updates * 3 * STEPS  # the slot that began training is not made up for


def test_without_a_ratio_nobody_waits() -> None:
    replay = replay_of(replay_ratio=0.0)
    for slot in range(4):
        replay.hand_over(slot, ends=0.0)
    assert len(replay.fill()) == 4
    assert replay.source.waiting == 1
    for _ in range(50):
        assert replay.source.take() is not None


@pytest.mark.parametrize("prioritized", [True, False])
@pytest.mark.parametrize("spec", [SPEC, STACKS, replace(SPEC, same_step=True)], ids=["plain", "stacks", "same_step"])
def test_batches_hold_n_step_transitions(spec: object, prioritized: bool) -> None:
    """Every sample is compared with the slot that it came from, which is known by its reward to be so."""
    replay = replay_of(spec, replay_ratio=0.0, prioritized=prioritized)  # type: ignore[arg-type]
    t, storage = replay.trajectories, replay.source.storage
    for slot in range(4):
        replay.hand_over(slot)
    replay.fill(version=9)
    for _ in range(5):
        batch = replay.source.take()
        drawn = replay.source._drawn
        assert batch is not None
        assert drawn is not None
        assert_blank(replay.source.blank(), batch)
        named = {name: tensor.numpy() for name, tensor in batch.named().items()}
        assert named["valid"].all()
        assert not named["first"].any()
        for b, (column, step) in enumerate(zip(drawn.column.tolist(), drawn.step.tolist(), strict=True)):
            slot, row = divmod(int(storage._note[column, 0]), ROWS)
            length, reward, discount = one_step(t, slot, row, step, PLAN.n_steps, replay.world.spec.same_step)
            assert length > 0
            assert named["reward"][0, b] == pytest.approx(reward, rel=1e-5, abs=1e-6)
            assert named["recorded.discount"][0, b] == pytest.approx(discount)
            assert named["terminated"][0, b] == (discount == 0)
            for key, obs in t.obs.items():
                assert np.array_equal(named[f"obs.{key}"][:, b], obs[slot, [step, step + length], row])
            for name in ("action", "num_frames", "policy_version"):
                assert np.array_equal(named[name][0, b], getattr(t, name)[slot, step, row])
            assert np.array_equal(named["rnn_state"][0, b], t.rnn_state[slot, 0, row])
        leaf = storage.tree.levels[0][drawn.column * ROLLOUT + drawn.step]
        expected = leaf.min() / leaf if prioritized else np.ones(len(leaf))
        assert named["recorded.weight"][0] == pytest.approx(expected, rel=1e-6)


def test_priorities_come_back_to_what_was_drawn() -> None:
    replay = replay_of()
    for slot in range(3):
        replay.hand_over(slot)
        replay.fill()
    assert replay.source.take() is not None
    drawn, storage = replay.source._drawn, replay.source.storage
    assert drawn is not None
    error = np.linspace(0, 3, PLAN.batch_size).astype(np.float32)
    assert list(replay.source.trained([{"priority": error}])) == []
    expected = {
        (c, s): (float(e) + PLAN.priority_epsilon) ** PLAN.alpha
        for c, s, e in zip(drawn.column.tolist(), drawn.step.tolist(), error, strict=True)
    }
    for (column, step), leaf in expected.items():
        assert storage.tree.levels[0][column * ROLLOUT + step] == pytest.approx(leaf)


def test_batches_of_another_size() -> None:
    replay = replay_of(replay_ratio=0.0)
    replay.hand_over(0, ends=0.0)
    replay.hand_over(1, ends=0.0)
    replay.fill()
    replay.source.resize(2)
    batch = replay.source.take()
    assert batch is not None
    assert batch.reward.shape == (1, 2 * ROLLOUT)


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "died before its counts were noted"])
def test_a_successor_counts_every_step_once_and_keeps_the_pace(noted: bool) -> None:
    replay = replay_of()
    for slot in range(3):
        replay.hand_over(slot, ends=0.0)
        replay.fill()
    used = train(replay) * PLAN.batch_size
    before = replay.note(replay.source.entered())
    assert before.samples == 3 * STEPS
    replay.hand_over(3, ends=0.0)
    replay.fill()
    train(replay)
    entered = replay.source.entered()
    frames = int(replay.trajectories.num_frames.sum())
    if noted:
        replay.note(entered, before)
    pace, totals = replay.source.pace, replay.source.storage.totals
    successor = replay.succeed()
    assert successor.pace == pace
    assert successor.pace.used == used + 3 * PLAN.batch_size
    assert successor.storage.totals == totals
    again = successor.entered()
    assert again == (Entered() if noted else entered)
    total = replay.note(again, before if not noted else Entered(*[a + b for a, b in zip(before, entered, strict=True)]))
    assert total == Entered(4 * STEPS, frames)


@pytest.mark.parametrize("inserted", range(ROWS + 1))
def test_a_slot_of_which_a_part_is_inserted_is_finished_by_a_successor(
    inserted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner dies between a column and the note in its slot: the arena has both, or the column says it."""
    replay = replay_of()
    replay.hand_over(0, ends=0.0)
    replay.fill()
    replay.note(replay.source.entered())
    message = replay.hand_over(1, ends=0.0)
    left = inserted

    def dying(*_: object) -> None:
        nonlocal left
        if not left:
            raise SystemExit
        left -= 1

    monkeypatch.setattr("appo.algorithms.replay.part.note_columns_used", dying)
    with pytest.raises(SystemExit) if inserted < ROWS else nullcontext():
        replay.fill()
    monkeypatch.undo()
    note_columns_used(replay.trajectories, message, inserted)
    successor = replay.succeed()
    if inserted < ROWS:
        assert [m for m in LearnerLedger(replay.trajectories, 0).unsettled() if m[1] == 1] == [
            message._replace(generation=0)
        ]
        successor.add(message)
        assert len(replay.fill()) == 1
    assert successor.storage.newest == 2 * ROWS
    assert successor.entered().samples == STEPS


def test_in_lockstep_a_round_is_taken_in_order_and_released_after_its_uses() -> None:
    replay = replay_of(lockstep=True, learning_starts=4 * STEPS)
    source = replay.source
    for slot in (2, 0, 3):
        replay.hand_over(slot, ends=0.0)
    assert source.waiting == 0
    assert replay.fill() == []
    replay.hand_over(1, ends=0.0)
    assert source.waiting == 4
    assert [message.slot for message in replay.fill()] == [0, 1, 2, 3]  # learning has just begun: nothing is due
    for slot in (3, 1, 2, 0):
        replay.hand_over(slot, ends=0.0)
    for slot in range(4):
        assert replay.fill() == []
        assert source.storage.totals.place // ROWS == slot
        released = []
        while source.take() is not None:
            released = [message.slot for message in source.trained([])]
    assert released == [0, 1, 2, 3]
    assert source.waiting == 0


def test_training_begins_when_the_replay_is_full_though_it_has_not_room_for_as_many_steps_as_asked_for() -> None:
    replay = replay_of(replay_ratio=0.0, learning_starts=PLAN.capacity)  # steps that only reset take places too
    storage = replay.source.storage
    while storage.newest < storage.columns:
        assert replay.source.take() is None
        replay.hand_over(storage.newest % 4)
        replay.fill()
    replay.hand_over(0)
    replay.fill()
    assert storage.oldest > 1
    assert storage.size < PLAN.capacity
    assert replay.source.take() is not None
