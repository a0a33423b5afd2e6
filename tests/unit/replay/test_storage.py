from dataclasses import replace

import numpy as np
import pytest

from appo.algorithms.replay.storage import (
    NStep,
    Outcomes,
    ReplayPlan,
    ReplayStorage,
    Samples,
    n_step_returns,
    replay_fields,
)
from appo.algorithms.runtime.memory.slots import Recorded, Trajectories
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from tests.unit.replay.replays import PLAN, ROLLOUT, ROWS, SPEC, STACKS, Replay, fill_slot, replay_of
from tests.unit.runtime.worlds import TOPOLOGY, hand_over

GAMMA = PLAN.gamma
SAME_STEP = replace(SPEC, same_step=True)


def one_step(
    t: Trajectories, slot: int, row: int, step: int, n_steps: int, same_step: bool
) -> tuple[int, float, float]:
    """Return length, return and discount of one step, by the definition and one step after the other."""
    length, total = 0, 0.0
    while length < n_steps and step + length < t.valid.shape[1]:
        at = slot, step + length, row
        if not t.valid[at] or (same_step and t.truncated[at]):
            break
        total += GAMMA**length * float(t.reward[at])
        length += 1
        if t.terminated[at]:
            return length, total, 0.0
        if t.truncated[at]:
            break
    return length, total, GAMMA**length


def first_error_of(t: Trajectories, slot: int, row: int, step: int, same_step: bool) -> float | None:
    """Return the error of one step by what acting recorded; None where that says nothing."""
    length, total, discount = one_step(t, slot, row, step, PLAN.n_steps, same_step)
    value = 0.0
    if discount:
        if step + length == t.valid.shape[1]:
            return None
        value = float(t.recorded["q_max"][slot, step + length, row])
    return abs(total + discount * value - float(t.recorded["q_taken"][slot, step, row]))


@pytest.mark.parametrize("n_steps", [1, 3, 20])
@pytest.mark.parametrize("spec", [SPEC, SAME_STEP], ids=["next_step", "same_step"])
def test_n_step_returns_are_those_of_the_definition(spec: EnvSpec, n_steps: int) -> None:
    replay = replay_of(spec)
    t, storage = replay.trajectories, replay.source.storage
    storage.plan = replace(PLAN, n_steps=n_steps)
    seen = set()
    for number in range(10):
        fill_slot(replay, 0, ends=0.25)
        for row in range(ROWS):
            storage.insert(t, 0, row, t.valid[0, :, row], np.zeros(ROLLOUT))
            place = (number * ROWS + row) % storage.columns
            steps = np.arange(ROLLOUT)
            samples = Samples(np.full(ROLLOUT, place), steps, storage.word[np.full(ROLLOUT, place)], steps)
            found = storage.returns_of(samples)
            for step in range(ROLLOUT):
                length, total, discount = one_step(t, 0, row, step, n_steps, spec.same_step)
                seen.add((length, discount == 0))
                assert found.length[step] == length
                if length:
                    assert found.reward[step] == pytest.approx(total, rel=1e-12, abs=1e-12)
                    assert found.discount[step] == pytest.approx(discount, rel=1e-12)
                    assert found.terminated[step] == (discount == 0)
                    assert found.truncated[step] == t.truncated[0, step + length - 1, row]
    assert {(0, False), (1, False), (1, True)} <= seen


def test_golden_returns() -> None:
    """Rewards 1, 2, 4, 8; the episode terminates with the third step; gamma 0.5, n = 2."""
    yes, no = np.ones(4, bool), np.zeros(4, bool)
    terminated = np.array([False, False, True, False])
    outcomes = Outcomes(yes, np.array([1.0, 2.0, 4.0, 8.0]), terminated, no, same_step=False)
    found = n_step_returns(outcomes, np.arange(4), 4 - np.arange(4), 1, 2, 0.5)
    assert found.length.tolist() == [2, 2, 1, 1]
    assert found.reward.tolist() == [2.0, 4.0, 4.0, 8.0]
    assert found.discount.tolist() == [0.25, 0.0, 0.0, 0.5]
    assert isinstance(found, NStep)


@pytest.mark.parametrize("following", [None, [-1, -1]])
def test_a_sum_stops_where_no_row_goes_on(following: list[int] | None) -> None:
    """As above, in two columns of two steps, with an n that no loop would reach."""
    terminated = np.array([False, False, True, False])
    outcomes = Outcomes(np.ones(4, bool), np.array([1.0, 2.0, 4.0, 8.0]), terminated, np.zeros(4, bool), False)
    places = None if following is None else np.array(following)
    found = n_step_returns(outcomes, np.arange(4), np.array([2, 1, 2, 1]), 1, 10**15, 0.5, places)
    assert found.length.tolist() == [2, 1, 1, 1]
    assert found.reward.tolist() == [2.0, 2.0, 4.0, 8.0]
    assert found.discount.tolist() == [0.25, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("spec", [SPEC, SAME_STEP], ids=["next_step", "same_step"])
def test_first_priorities_are_errors_of_what_acting_recorded(spec: EnvSpec) -> None:
    replay = replay_of(spec)
    t, storage = replay.trajectories, replay.source.storage
    unknown = 0
    for _ in range(10):
        fill_slot(replay, 1, ends=0.25)
        found = storage.first_errors(t, 1, t.valid[1])
        for row in range(ROWS):
            drawable = [one_step(t, 1, row, step, PLAN.n_steps, spec.same_step)[0] > 0 for step in range(ROLLOUT)]
            errors = [first_error_of(t, 1, row, step, spec.same_step) for step in range(ROLLOUT)]
            largest = max(e for e, is_drawable in zip(errors, drawable, strict=True) if e is not None and is_drawable)
            for step in range(ROLLOUT):
                error = errors[step]
                unknown += error is None
                expected = -1.0 if not drawable[step] else largest if error is None else error
                assert found[step, row] == pytest.approx(expected, rel=1e-5), (step, row)
    assert unknown > 10


def test_without_recorded_values_new_steps_have_the_largest_error_so_far() -> None:
    replay = replay_of(recorded={"other": Recorded(("T", "R"))})
    replay.hand_over(0, ends=0.0)
    replay.fill()
    storage = replay.source.storage
    leaves = storage.tree.levels[0][: ROWS * ROLLOUT]
    assert leaves == pytest.approx((1.0 + PLAN.priority_epsilon) ** PLAN.alpha)
    samples = storage.draw(4, np.random.default_rng(0))
    storage.update(samples, np.array([1.0, 7.0, 2.0, 3.0]))
    replay.hand_over(1, ends=0.0)
    replay.fill()
    added = storage.tree.levels[0][ROWS * ROLLOUT : 2 * ROWS * ROLLOUT]
    assert added == pytest.approx((7.0 + PLAN.priority_epsilon) ** PLAN.alpha)


def contents(storage: ReplayStorage) -> dict[str, np.ndarray]:
    """Everything that can be drawn, by name, in the order of insertion."""
    numbers = np.arange(storage.oldest, storage.newest + 1)
    place = (numbers - 1) % storage.columns
    if not len(place):
        return {}
    found = {name: array[place] for name, array in storage.arrays.items() if name != "drawn"}
    for key, o in storage.spec.observations.items():
        column, step = (a.ravel() for a in np.meshgrid(place, np.arange(storage.rollout + 1), indexing="ij"))
        out = np.empty((len(column), *o.shape), o.dtype)
        storage.read_obs(key, column, step, out)
        found[f"obs.{key}"] = out.reshape(len(place), storage.rollout + 1, *o.shape)
    return found


@pytest.mark.parametrize("spec", [SPEC, STACKS], ids=["plain", "stacks"])
def test_the_newest_columns_are_there_as_they_were_in_the_slots(spec: EnvSpec) -> None:
    replay = replay_of(spec, replay_ratio=0.0)
    storage, inserted = replay.source.storage, []
    names = [name for name in storage.arrays if name != "drawn"]
    for number in range(12):
        slot = number % 4
        replay.hand_over(slot)
        t = replay.trajectories
        for row in range(ROWS):
            column = {name: getattr(t, name)[slot, :, row].copy() for name in names}
            inserted.append(column | {f"obs.{key}": a[slot, :, row].copy() for key, a in t.obs.items()})
        assert len(replay.fill()) == 1
        t.reward[slot] = np.inf  # the slot is written again at once
        for a in t.obs.values():
            a[slot] = 99
        kept = contents(storage)
        live = len(kept["reward"])
        assert live == min(len(inserted), storage.columns) or (spec is STACKS and live >= storage.columns - 3)
        for name, array in kept.items():
            assert np.array_equal(array, np.stack([c[name] for c in inserted[-live:]]), equal_nan=True), name
    assert storage.newest == 36


def assert_same(one: ReplayStorage, other: ReplayStorage) -> None:
    assert (one.newest, one.oldest, one.size, one.totals) == (other.newest, other.oldest, other.size, other.totals)
    for a, b in zip(one.tree.levels, other.tree.levels, strict=True):
        assert np.array_equal(a, b)
    found, expected = contents(one), contents(other)
    for name, array in expected.items():
        assert np.array_equal(found[name], array, equal_nan=True), name


def attach(replay: Replay) -> ReplayStorage:
    return ReplayStorage(replay.plan, replay.world.spec, replay.world.arena, 0)


@pytest.mark.parametrize("spec", [SPEC, STACKS], ids=["plain", "stacks"])
@pytest.mark.parametrize("slots", [0, 1, 5, 11])
def test_a_successor_finds_everything_again(spec: EnvSpec, slots: int) -> None:
    replay = replay_of(spec, replay_ratio=0.0)
    for number in range(slots):
        replay.hand_over(number % 4)
        replay.fill()
    assert_same(attach(replay), replay.source.storage)


class Killed(BaseException):
    """Ends a process, as far as a test can."""


@pytest.mark.parametrize("spec", [SPEC, STACKS], ids=["plain", "stacks"])
@pytest.mark.parametrize("after", range(8))
def test_an_insertion_that_was_cut_off_is_as_if_it_had_not_been_begun(
    spec: EnvSpec, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner dies at each of the calls that an insertion makes; its successor inserts the column, once."""
    replay = replay_of(spec, replay_ratio=0.0)
    for number in range(8):  # the ring is full
        replay.hand_over(number % 4)
        replay.fill()
    storage, t = replay.source.storage, replay.trajectories
    before = attach(replay)
    fill_slot(replay, 0, 0.2)
    valid = t.valid[0]
    error = storage.first_errors(t, 0, valid)
    calls = 0

    def dying(function: object) -> object:
        def call(*arguments: object) -> object:
            nonlocal calls
            if calls == after:
                raise Killed
            calls += 1
            return function(*arguments)  # type: ignore[operator]

        return call

    monkeypatch.setattr("appo.algorithms.replay.storage.barrier", dying(lambda: None))
    monkeypatch.setattr(storage.tree, "set", dying(storage.tree.set))
    monkeypatch.setattr(storage, "reserve_columns", dying(storage.reserve_columns))
    for ring in storage.rings.values():
        monkeypatch.setattr(ring, "write", dying(ring.write))
    try:
        storage.insert(t, 0, 1, valid[:, 1], error[:, 1])
    except Killed:
        monkeypatch.undo()
        successor = attach(replay)
        assert successor.totals.samples == before.totals.samples
        assert successor.newest == before.newest
        assert successor.size == np.count_nonzero(successor.tree.levels[0])
        assert successor.insert(t, 0, 1, valid[:, 1], error[:, 1]) == np.count_nonzero(valid[:, 1])
        storage = successor
    else:
        assert after >= calls == (6 if spec is SPEC else 7)
    assert storage.totals.samples == before.totals.samples + np.count_nonzero(valid[:, 1])
    assert storage.newest == before.newest + 1
    assert_same(attach(replay), storage)


def test_priorities_of_overwritten_columns_are_dropped() -> None:
    replay = replay_of(replay_ratio=0.0)
    storage = replay.source.storage
    for number in range(7):
        replay.hand_over(number % 4)
        replay.fill()
    samples = storage.draw(32, np.random.default_rng(1))
    replay.hand_over(3)
    replay.fill()
    before = storage.tree.levels[0].copy()
    gone = storage.word[samples.column] != samples.word
    assert 0 < gone.sum() < 32
    assert storage.update(samples, np.full(32, 5.0)) == 32 - gone.sum()
    index = samples.column * ROLLOUT + samples.step
    after = storage.tree.levels[0]
    assert after[index[~gone]] == pytest.approx((5.0 + PLAN.priority_epsilon) ** PLAN.alpha)
    assert np.array_equal(np.delete(after, index[~gone]), np.delete(before, index[~gone]))


def test_errors_that_are_not_finite_change_nothing() -> None:
    replay = replay_of()
    replay.hand_over(0)
    replay.fill()
    storage = replay.source.storage
    samples = storage.draw(3, np.random.default_rng(2))
    assert len({*zip(samples.column, samples.step, strict=True)}) == 3
    before = storage.tree.levels[0][samples.column * ROLLOUT + samples.step].copy()
    assert storage.update(samples, np.array([np.nan, 2.0, np.inf], np.float32)) == 1
    after = storage.tree.levels[0][samples.column * ROLLOUT + samples.step]
    assert (after == before).tolist() == [True, False, True]
    assert np.isfinite(storage.largest[0])


@pytest.mark.parametrize("spec", [SPEC, SAME_STEP], ids=["next_step", "same_step"])
def test_steps_that_say_nothing_are_never_drawn_and_counted(spec: EnvSpec) -> None:
    replay = replay_of(spec, replay_ratio=0.0, capacity=10_000)
    truncated = valid = 0
    for number in range(12):
        replay.hand_over(number % 4)
        t = replay.trajectories
        valid += int(t.valid[number % 4].sum())
        truncated += int((t.valid & t.truncated)[number % 4].sum())
        replay.fill()
    storage = replay.source.storage
    assert storage.totals.samples == valid
    assert storage.totals.unsampled == (truncated if spec.same_step else 0)
    assert storage.size == valid - storage.totals.unsampled
    drawn = storage.draw(2000, np.random.default_rng(0))
    assert storage.arrays["valid"][drawn.column, drawn.step].all()
    if spec.same_step:
        assert not storage.arrays["truncated"][drawn.column, drawn.step].any()


def test_steps_that_no_batch_had_are_counted_when_they_are_overwritten() -> None:
    replay = replay_of(replay_ratio=0.0, learning_starts=10**6)
    storage = replay.source.storage
    for number in range(6):
        replay.hand_over(number % 4, ends=0.0)
        replay.fill()
    assert storage.columns == 20
    assert storage.totals.dropped == 0
    storage.note_drawn(Samples(*np.zeros((4, 1), np.int64)))  # a step of the column that goes next
    for number in range(6, 8):
        replay.hand_over(number % 4, ends=0.0)
        replay.fill()
    assert storage.totals.dropped == 4 * ROLLOUT - 1


@pytest.mark.parametrize(("capacity", "policies", "columns"), [(160, 1, 20), (161, 1, 21), (160, 2, 10), (3, 1, 2)])
def test_capacity_is_that_of_the_run(capacity: int, policies: int, columns: int) -> None:
    plan, topology = replace(PLAN, capacity=capacity), replace(TOPOLOGY, rollout=ROLLOUT, num_policies=policies)
    fields = [field for policy in range(policies) for field in replay_fields(plan, SPEC, topology, policy=policy)]
    assert sum(field.name.endswith(".word") for field in fields) == policies
    assert {field.shape for field in fields if field.name.endswith(".reward")} == {(columns, ROLLOUT)}


def test_bytes_of_a_million_atari_steps() -> None:
    """Planned as a whole, and reserved as they fill but for what says which of them are there."""
    spec = EnvSpec({"obs": ObservationSpec((4, 84, 84), "uint8")}, ActionSpec((ActionPart("categorical", 6),)))
    plan = ReplayPlan(1_000_000, 0.6, 1e-6, True, 3, 0.99, 512, 8.0, 50_000)
    fields = replay_fields(plan, spec, replace(TOPOLOGY, rollout=32))
    assert sum(field.nbytes for field in fields) <= 8.2e9
    assert sum(field.nbytes for field in fields if not field.fills) <= 0.012e9


def test_images_that_share_no_frames_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Random images of four channels look like stacks: each takes the room of four frames."""
    replay = replay_of(STACKS, replay_ratio=0.0)
    fresh = np.random.default_rng(1)
    replay.trajectories.valid[:] = True
    for number in range(40):
        for array in replay.trajectories.obs.values():
            array[number % 4] = fresh.integers(0, 256, array[number % 4].shape)
        message = hand_over(replay.world, number % 4)
        replay.trajectories.owner[number % 4] = 1
        replay.source.add(message)
        replay.fill()
    storage = replay.source.storage
    assert 0 < storage.newest - storage.oldest + 1 < 0.9 * storage.columns
    (line,) = caplog.messages
    assert line.startswith("the replay has room for ")
    assert f" of {storage.columns} trajectories only, because their images share too few frames" in line
