"""Shards of a replay and the learner that trains on their batches, each of which may die between any two stores."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms.models.config import ModelConfig
from appo.algorithms.replay.algorithm import REPLAY
from appo.algorithms.replay.batch_ring import PLACES
from appo.algorithms.replay.config import REPLAY_METRICS
from appo.algorithms.replay.shards import ReplayShard, make_shard, num_shards, shard_fields
from appo.algorithms.replay.source import ShardedSource
from appo.algorithms.replay.storage import ReplayPlan
from appo.algorithms.run.resources import memory_plan
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.learning.batches import BatchCounts, Entered
from appo.algorithms.runtime.memory.learner_state import StateBlock
from appo.algorithms.runtime.memory.ownership import LearnerLedger, SlotBoard
from appo.algorithms.runtime.memory.units import Units
from appo.algorithms.runtime.messages import Address, SlotReleased, Wake
from appo.algorithms.runtime.roles import register
from tests.unit.replay.replays import PLAN, RECORDED, ROLLOUT, ROWS, SPEC, STACKS, fill_slot
from tests.unit.runtime.worlds import TOPOLOGY, World, assert_blank, world_of

SHARDS, STEPS = 2, ROWS * ROLLOUT
WAKE = Wake(Address("learner", 0))
register(REPLAY)


class DyingError(Exception):
    """The process is gone here."""


@dataclass
class Sharded:
    """A world with shards, and the source of its learner."""

    world: World
    plan: ReplayPlan
    paths: list[Path | None]
    shards: list[ReplayShard] = field(default_factory=list)
    source: ShardedSource = None  # type: ignore[assignment]
    random: Any = None
    board: SlotBoard = None  # type: ignore[assignment]

    @property
    def trajectories(self) -> Any:
        return self.world.trajectories

    def context(self, seed: int = 3) -> Context:
        seeds = np.random.SeedSequence(seed)
        return Context(SPEC, None, ModelConfig(), "float32", "cpu", seeds=seeds, arena=self.world.arena)

    def succeed(self, shard: int) -> ReplayShard:
        """Let a shard that takes the place of one that died begin."""
        address, context = Address(REPLAY.name, 0, shard), replace(self.context(shard), spec=self.world.spec)
        made = make_shard(address, context, self.plan, self.trajectories, self.paths[shard])
        self.shards[shard : shard + 1] = [made]
        board = SlotBoard(self.world.arena, [(0, shard)], [])
        for message in board.handed_over():
            list(made.handle(message))
        return made

    def learner(self) -> ShardedSource:
        """Let a learner that takes the place of one that died begin."""
        self.source = ShardedSource(self.plan, replace(self.context(), spec=self.world.spec), self.trajectories, REPLAY)
        return self.source

    def hand_over(self, slot: int, shard: int, ends: float = 0.2) -> None:
        """Fill a slot, and hand it over as a group does."""
        t = self.trajectories
        fill_slot(self, slot, ends)  # type: ignore[arg-type]
        t.taker[slot] = shard
        t.sequence[slot] += 1
        t.owner[slot] = 1
        for message in SlotBoard(self.world.arena, [(0, shard)], []).handed_over():
            list(self.shards[shard].handle(message))

    def work(self) -> list[SlotReleased]:
        """Let the shards do all that they can; the releases that their actor takes back."""
        for shard in self.shards:
            while shard.pending():
                assert list(shard.work())[-1] == WAKE
        released = list(self.board.released())
        for message in released:
            self.trajectories.owner[message.slot] = 0
        return released

    def train(self, error: float = 1.0) -> int:
        """Use every batch that is due; how many."""
        batches = 0
        while True:
            self.work()
            if (batch := self.source.take()) is None:
                return batches
            feedback = [{"priority": np.full(batch.valid.shape, error, np.float32)}]
            assert [type(wake) for wake in self.source.trained(feedback)] == [Wake]
            batches += 1

    @property
    def inserted(self) -> int:
        return sum(shard.part.storage.totals.samples for shard in self.shards)


def sharded(spec: Any = SPEC, paths: list[Path | None] | None = None, **changes: object) -> Sharded:
    plan = replace(PLAN, **changes)
    topology = replace(TOPOLOGY, rows=ROWS, rollout=ROLLOUT, placement="local", apart=((REPLAY, SHARDS),))
    fields = (*shard_fields(plan, spec, topology, 2, (0, SHARDS)), Units.declare(topology), *StateBlock.declare(0, {}))
    world = world_of(spec, rnn_state_size=2, more=fields, recorded=RECORDED, rows=ROWS, rollout=ROLLOUT)
    made = Sharded(world, plan, paths or [None] * SHARDS, random=np.random.default_rng(4))
    made.board = SlotBoard(world.arena, [], range(4))
    for shard in range(SHARDS):
        made.succeed(shard)
    made.learner()
    return made


def test_a_slot_is_inserted_and_released_by_its_shard_alone() -> None:
    replay = sharded()
    assert num_shards(replay.world.arena, 0) == SHARDS
    assert replay.source.waiting == 0
    replay.hand_over(2, shard=1, ends=0.0)
    assert [shard.pending() for shard in replay.shards] == [False, True]
    assert replay.source.counts() == BatchCounts(1, 0, 0, in_flight=STEPS, held=1)
    assert replay.work() == [SlotReleased(0, 2, 1)]
    assert replay.work() == []
    assert replay.source.counts() == BatchCounts(1, 1, 0, in_flight=0, held=0)
    assert replay.source.waiting == 1  # steps that are not counted
    assert replay.source.entered() == Entered(STEPS, int(replay.trajectories.num_frames[2].sum()))
    assert replay.source.entered() == Entered()
    assert replay.source.waiting == 0
    assert [shard.part.storage.size for shard in replay.shards] == [0, STEPS]


def test_the_board_tells_of_every_hand_over_once_and_of_releases_until_they_are_taken_back() -> None:
    replay = sharded()
    t = replay.trajectories
    board = SlotBoard(replay.world.arena, [(0, 1)], range(2))
    t.taker[:], t.sequence[:], t.owner[:] = [0, 1, 1, 1], [4, 5, 6, 7], [1, 1, 1, 0]
    t.released[:, 0] = [4, 4, 6, 6]
    assert [(m.slot, m.sequence, m.taker) for m in board.handed_over()] == [(1, 5, 1)]
    assert list(board.handed_over()) == []
    assert list(board.released()) == list(board.released()) == [SlotReleased(0, 0, 4)]
    t.owner[0], t.owner[3] = 0, 1
    assert list(board.released()) == []
    assert [m.slot for m in board.handed_over()] == [3]


@pytest.mark.parametrize("ratio", [0.7, 2.0, 7.7])
def test_uses_per_step_are_what_the_flag_says(ratio: float) -> None:
    replay = sharded(replay_ratio=ratio, capacity=400)
    random = np.random.default_rng(0)
    for number in range(200):
        replay.hand_over(number % 4, int(random.integers(SHARDS)))
        replay.train()
    figures = replay.source.metrics()
    assert figures["replay/uses_per_step"] == pytest.approx(ratio, rel=0.02)
    assert {name for name in figures if "shard_" not in name} == REPLAY_METRICS.keys()
    assert figures["replay/shard_0/size"] + figures["replay/shard_1/size"] == figures["replay/size"]
    assert figures["replay/size"] <= 2 * (200 + ROLLOUT)


def test_while_uses_are_owed_slots_wait_and_batches_are_drawn_ahead_of_the_learner() -> None:
    replay = sharded(learning_starts=40)  # 20 of a shard
    for slot in range(3):
        replay.hand_over(slot, shard=0, ends=0.0)
    released = replay.work()  # the first slot begins training, the second owes 3 batches, the third waits for them
    assert [message.slot for message in released] == [0, 1]
    assert replay.source.waiting == PLACES - 1
    assert replay.train() == 6
    assert int(replay.trajectories.released[2, 0]) == 1
    assert replay.train() == 0


def test_without_a_ratio_nobody_waits() -> None:
    replay = sharded(replay_ratio=0.0)
    for slot in range(4):
        replay.hand_over(slot, shard=slot % 2, ends=0.0)
    assert len(replay.work()) == 4
    for _ in range(20):
        batch = replay.source.take()
        assert batch is not None
        assert_blank(replay.source.blank(), batch)
        list(replay.source.trained())
        replay.work()


def test_slots_are_inserted_however_fast_the_learner_is() -> None:
    replay = sharded(replay_ratio=0.0, learning_starts=2)
    replay.hand_over(0, shard=0, ends=0.0)
    list(replay.shards[0].work())
    assert replay.shards[0].part.owes
    for slot in range(1, 4):
        replay.hand_over(slot, shard=0, ends=0.0)
        list(replay.shards[0].work())
        assert replay.trajectories.released[:, 0].tolist() == [1] * (slot + 1) + [0] * (3 - slot)
        assert replay.source.take() is not None  # and there is room for another one
        list(replay.source.trained())


def test_errors_become_priorities_unless_the_column_is_another_one() -> None:
    replay = sharded(replay_ratio=0.0, learning_starts=2)
    for slot in range(3):  # 9 columns of 10
        replay.hand_over(slot, shard=0, ends=0.0)
    replay.work()
    storage, ring = replay.shards[0].part.storage, replay.shards[0].ring
    assert replay.source.take() is not None
    drawn = ring._drawn[ring.next_place, :3].copy()
    old = int(drawn[0, 0])
    storage.word[old] += 2  # as if another one had been inserted there
    before = storage._leaf.copy()
    list(replay.source.trained([{"priority": np.full((1, PLAN.batch_size), 7.0, np.float32)}]))
    replay.shards[0].part.update(*ring.next_errors())
    for column, step, _ in drawn.T.tolist():
        expected = before[column, step] if column == old else (7.0 + PLAN.priority_epsilon) ** PLAN.alpha
        assert storage._leaf[column, step] == pytest.approx(expected)
    assert 0 < (drawn[0] == old).sum() < PLAN.batch_size


def dies_at(monkeypatch: pytest.MonkeyPatch, place: str, passage: int) -> Callable[[], None]:
    """Let a shard die at the n-th passage of a place; what is returned lets it live again."""
    passages = 0

    def dying(*arguments: Any, real: Callable[..., Any] = lambda *_: None) -> Any:
        nonlocal passages
        if arguments == (place,) or real.__name__ == place:
            passages += 1
            if passages == passage:
                raise DyingError
        return real(*arguments)

    from appo.algorithms.replay import part

    real = part.note_columns_used
    monkeypatch.setattr("appo.algorithms.replay.shards.failpoint", dying)
    monkeypatch.setattr("appo.algorithms.replay.part.note_columns_used", lambda *a: dying(*a, real=real))
    return monkeypatch.undo


@pytest.mark.parametrize("passage", [1, 2, 3])
@pytest.mark.parametrize("place", ["note_columns_used", "replay.inserted", "replay.drawn"])
def test_a_shard_that_dies_loses_nothing(monkeypatch: pytest.MonkeyPatch, place: str, passage: int) -> None:
    """Between insertion and its note, between that and the release, and after drawing a batch that nobody gets."""
    replay = sharded(replay_ratio=2.0, learning_starts=20)
    live = dies_at(monkeypatch, place, passage)
    valid = frames = died = 0
    for number in range(40):
        slot, shard = number % 4, number // 2 % 2
        replay.hand_over(slot, shard)
        t = replay.trajectories
        valid += int(t.valid[slot].sum())
        frames += int(t.num_frames[slot][t.valid[slot]].sum())
        try:
            replay.train()
        except DyingError:
            died += 1
            live()
            replay.succeed(shard)
            replay.train()
    assert died == 1
    entered = replay.source.entered()
    assert entered == Entered(valid, frames)
    assert replay.inserted == valid
    assert replay.source.counts() == BatchCounts(40, 40, 0, in_flight=0, held=0)
    assert replay.source.metrics()["replay/uses_per_step"] == pytest.approx(2.0, rel=0.03)


def test_a_learner_that_dies_leaves_its_batch_to_its_successor() -> None:
    replay = sharded(replay_ratio=1.0, learning_starts=20)
    for slot in range(4):
        replay.hand_over(slot, shard=slot % 2, ends=0.0)
    replay.work()
    entered = replay.source.entered()
    batch = replay.source.take()
    assert batch is not None
    counts = dict.fromkeys(LearnerLedger.NAMES, 0) | entered._asdict() | {"batches": 1}
    LearnerLedger(replay.trajectories, 0).note(counts)
    reward = batch.reward.clone()
    successor = replay.learner()
    again = successor.take()
    assert again is not None
    assert (again.reward == reward).all()
    assert successor.entered() == Entered()
    replay.work()
    assert entered.samples + successor.entered().samples == replay.inserted


def test_each_shard_goes_on_with_its_file(tmp_path: Path) -> None:
    paths: list[Path | None] = [tmp_path / f"replay_p0.{shard}" for shard in range(SHARDS)]
    replay = sharded(STACKS, paths, learning_starts=20)
    for number in range(8):
        replay.hand_over(number % 4, number % 2, ends=0.0)
        replay.train()
    sizes = []
    for shard in replay.shards:
        assert shard.file is not None
        sizes.append(shard.file.save())
    later = sharded(STACKS, paths, learning_starts=20)
    assert [shard.part.storage.size for shard in later.shards] == sizes
    assert later.source.entered() == Entered()
    assert later.train() == 0
    later.hand_over(0, shard=1, ends=0.0)
    assert later.train() == 3
    assert later.source.entered().samples == STEPS


def test_each_shard_forgets_priorities_that_a_later_start_does_not_use(tmp_path: Path) -> None:
    paths: list[Path | None] = [tmp_path / f"replay_p0.{shard}" for shard in range(SHARDS)]
    replay = sharded(STACKS, paths, learning_starts=20)
    for number in range(8):
        replay.hand_over(number % 4, number % 2)
        replay.train()
    for shard in replay.shards:
        assert shard.file is not None
        shard.file.save()
    later = sharded(STACKS, paths, learning_starts=20, prioritized=False)
    for before, after in zip(replay.shards, later.shards, strict=True):
        leaf = before.part.storage._leaf
        assert len(np.unique(leaf[leaf > 0])) > 2
        assert np.array_equal(after.part.storage._leaf, leaf > 0)


def test_all_of_it_is_in_the_memory_plan() -> None:
    plan = replace(PLAN, capacity=10_000)
    topology = replace(TOPOLOGY, rows=ROWS, rollout=ROLLOUT, apart=((REPLAY, SHARDS),))
    fields = shard_fields(plan, STACKS, topology, 0, (0, SHARDS))
    of_frames = sum(one.nbytes for one in fields if one.name.endswith(".frames"))
    assert of_frames >= 10_000 * 36
    assert f"replay {sum(one.nbytes for one in fields) / 2**20:.1f}" in memory_plan(fields)
