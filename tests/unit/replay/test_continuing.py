"""N-step returns that go on in the next trajectory of a row, beside a walk along the row's whole stream."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.replay.part import batch_shapes
from appo.algorithms.replay.storage import ReplayStorage, Samples
from appo.algorithms.runtime.memory.arena import Array
from appo.algorithms.runtime.messages import TrajectoryReady
from appo.envs.spec import EnvSpec
from tests.unit.replay.replays import PLAN, ROWS, SPEC, STACKS, Replay, fill_slot, replay_of
from tests.unit.runtime.worlds import TOPOLOGY, hand_over

SAME_STEP = replace(SPEC, same_step=True)
SLOTS = TOPOLOGY.slots_per_group


@dataclass
class Column:
    """One row of a slot as the learner took it.

    Attributes:
        arrays: by name, [T, *]; observations [T+1, *].
        number: of the column in the replay.
        goes_on: the column inserted later that continues this one.
    """

    arrays: dict[str, Array]
    number: int = 0
    goes_on: "Column | None" = None


@dataclass
class Group:
    """A group of environments: the slot filled last, and what every row went on with.

    Attributes:
        filled: slots filled so far.
        policy: of every row now.
        last: newest column of every row, None if the environments have begun anew.
    """

    filled: int = 0
    policy: Array = field(default_factory=lambda: np.zeros(ROWS, np.int32))
    last: list[Column | None] = field(default_factory=lambda: [None] * ROWS)


class Stream:
    """Groups that fill slots in turn, and the columns that the replay has."""

    def __init__(self, replay: Replay, policies: int) -> None:
        self.replay, self.policies = replay, policies
        replay.source.part.num_policies = policies
        self.groups = [Group(), Group()]
        self.columns: list[Column] = []
        self.newest: dict[tuple[int, int], Column] = {}

    def fill(self, number: int) -> tuple[TrajectoryReady, list[tuple[Column, Column | None]]]:
        """Fill the next slot of a group; return the hand-over, and each column with the one before."""
        group, t, random = self.groups[number], self.replay.trajectories, self.replay.random
        slot, before = number * SLOTS + group.filled % SLOTS, number * SLOTS + (group.filled - 1) % SLOTS
        goes_on = group.filled > 0 and random.random() < 0.9  # else the actor was replaced
        last_obs = {key: obs[before, -1].copy() for key, obs in t.obs.items()}
        ended = (t.valid & (t.terminated | t.truncated))[before, -1].copy()
        follows = int(t.sequence[before])
        fill_slot(self.replay, slot, ends=0.15)
        t.continues[slot], t.follows[slot] = (before, follows) if goes_on else (-1, 0)
        if goes_on:
            for key, obs in t.obs.items():
                obs[slot, 0] = last_obs[key]
            t.first[slot, 0] = ended if t.continues[slot] >= 0 and self.replay.world.spec.same_step else False
            if not self.replay.world.spec.same_step:  # the step that resets
                t.valid[slot, 0] &= ~ended
                t.terminated[slot, 0] &= ~ended
                t.truncated[slot, 0] &= ~ended
        group.filled += 1
        for step in range(t.valid.shape[1]):
            began = t.first[slot, step] if step or not goes_on else ended
            group.policy = np.where(began, random.integers(0, self.policies, ROWS), group.policy).astype(np.int32)
            t.policy_id[slot, step] = group.policy
        mine = t.valid[slot] & (t.policy_id[slot, : t.valid.shape[1]] == 0)
        pairs = []
        for row in range(ROWS):
            arrays = {name: getattr(t, name)[slot, :, row].copy() for name in ("reward", "terminated", "truncated")}
            obs = {f"obs.{key}": a[slot, :, row].copy() for key, a in t.obs.items()}
            column = Column({**arrays, **obs, "valid": mine[:, row].copy()})
            pairs.append((column, group.last[row] if goes_on else None))
            group.last[row] = column
        return hand_over(self.replay.world, slot), pairs

    def insert(self, message: TrajectoryReady, pairs: list[tuple[Column, Column | None]]) -> None:
        storage = self.replay.source.storage
        before = storage.newest
        self.replay.source.part.insert(message)
        for row, (column, previous) in enumerate(pairs):
            if not column.arrays["valid"].any():
                continue
            before += 1
            column.number = before
            came_from = int(self.replay.trajectories.continues[message.slot]), row
            if previous is not None and self.newest.get(came_from) is previous:  # not of a later hand-over
                previous.goes_on = column
            self.newest[message.slot, row] = column
            self.columns.append(column)
        assert storage.newest == before


def walk(column: Column, step: int, n_steps: int, same_step: bool) -> tuple[int, float, float, Column, int]:
    """Return length, return, discount, and the place of the observation behind them, one step after the other."""
    length, total, rollout = 0, 0.0, len(column.arrays["valid"])
    while length < n_steps:
        if step == rollout:
            if column.goes_on is None:
                break
            column, step = column.goes_on, 0
        a = column.arrays
        if not a["valid"][step] or (same_step and a["truncated"][step]):
            break
        total += PLAN.gamma**length * float(a["reward"][step])
        length, step = length + 1, step + 1
        if a["terminated"][step - 1]:
            return length, total, 0.0, column, step
        if a["truncated"][step - 1]:
            break
    return length, total, PLAN.gamma**length, column, step


def check(stream: Stream, storage: ReplayStorage, n_steps: int) -> int:
    """Compare every step of every column that is there; return the largest number of columns in one return."""
    longest, same_step = 0, storage.spec.same_step
    for column in stream.columns:
        if column.number < storage.oldest:
            continue
        steps = np.arange(storage.rollout)
        place = np.full(storage.rollout, (column.number - 1) % storage.columns)
        returns = storage.returns_of(Samples(place, steps, storage.word[place], steps))
        later = storage.rollout - returns.room
        behind = {}
        for key, one in storage.spec.observations.items():
            behind[f"obs.{key}"] = np.empty((storage.rollout, *one.shape), one.dtype)
            storage.read_obs(key, (returns.end - later) // storage.rollout, later, behind[f"obs.{key}"])
        for step in steps.tolist():
            length, total, discount, where, at = walk(column, step, n_steps, same_step)
            assert returns.length[step] == length
            if length:
                assert abs(returns.reward[step] - total) < 1e-12 * max(1, length)
                assert abs(returns.discount[step] - discount) < 1e-12
                assert all(np.array_equal(obs[step], where.arrays[key][at]) for key, obs in behind.items())
                longest = max(longest, where.number - column.number)
    return longest


@pytest.mark.parametrize("policies", [1, 2])
@pytest.mark.parametrize(("rollout", "n_steps"), [(1, 3), (2, 5), (8, 20)])
@pytest.mark.parametrize("spec", [SPEC, SAME_STEP, STACKS], ids=["next_step", "same_step", "stacks"])
def test_returns_go_on_as_the_row_does(
    spec: EnvSpec, rollout: int, n_steps: int, policies: int, tmp_path: Path
) -> None:
    """In a ring that wraps around, with episodes that end, other policies, new actors and late hand-overs."""
    replay = replay_of(spec, rollout=rollout, n_steps=n_steps, capacity=24 * rollout, path=tmp_path / "replay")
    stream, storage, longest = Stream(replay, policies), replay.source.storage, 0
    for time in range(30):
        handed = [stream.fill(number) for number in (0, 0, 1)]
        if replay.random.random() < 0.2:  # a learner that died takes the slots in another order
            handed = handed[::-1]
        for message, pairs in handed:
            stream.insert(message, pairs)
        if time % 6 == 5:
            longest = max(longest, check(stream, storage, n_steps))
    assert storage.oldest > 1
    assert longest > ROWS * (n_steps - 1) // rollout // 2
    check(stream, replay.succeed().storage, n_steps)
    assert replay.source.file is not None
    replay.source.file.save()
    fresh = replay_of(spec, rollout=rollout, n_steps=n_steps, capacity=24 * rollout, path=tmp_path / "replay")
    check(stream, fresh.source.storage, n_steps)
    fresh.hand_over(0)  # of this start: no row goes on in it
    fresh.trajectories.continues[0] = 1
    fresh.fill()
    assert fresh.source.storage.totals.previous == 0


def test_whole_trajectories_have_returns_of_their_own_steps() -> None:
    replay = replay_of(sequences=True)
    stream, storage = Stream(replay, 1), replay.source.storage
    for _ in range(2):
        stream.insert(*stream.fill(0))
    steps = np.arange(storage.rollout)
    returns = storage.returns_of(Samples(np.zeros_like(steps), steps, steps, steps))
    assert (returns.length <= storage.rollout - steps).all()


def test_a_batch_can_be_relabelled_where_it_is_drawn() -> None:
    def doubled(storage: ReplayStorage, samples: Samples, staging: dict[str, Array]) -> None:
        staging["reward"] *= 2.0
        staging["action"][0] = storage.arrays["action"][samples.column, samples.step] + 1

    staged = []
    for relabel in (None, doubled):
        replay = replay_of(replay_ratio=0.0, relabel=relabel)
        for slot in range(4):
            replay.hand_over(slot)
        replay.fill()
        shapes = batch_shapes(replay.plan, SPEC, replay.source.storage.rollout, 2)
        staging = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        replay.source.part.draw(staging)
        staged.append(staging)
    assert np.array_equal(staged[1]["reward"], 2.0 * staged[0]["reward"])
    assert np.array_equal(staged[1]["action"], staged[0]["action"] + 1)
