"""Frames that lz4 has compressed, in a ring of bytes: they come back bit by bit, however often it has gone round."""

import os
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appo.algorithms.apex.algorithm import APEX
from appo.algorithms.apex.config import ApexConfig
from appo.algorithms.replay import algorithm
from appo.algorithms.replay.frame_stores import PackedFrames
from appo.algorithms.replay.frames import FrameRing, Stack
from appo.algorithms.replay.storage import ReplayPlan, ReplayStorage, num_columns, replay_fields
from appo.algorithms.run.resources import memory_plan
from appo.algorithms.runtime.memory.arena import Arena
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.replay.replays import ROLLOUT, ROWS, STACKS, Replay, replay_of
from tests.unit.runtime.worlds import TOPOLOGY

SIDE, COLUMNS = 84, 12
PONG = EnvSpec({"obs": ObservationSpec((4, SIDE, SIDE), "uint8")}, ActionSpec((ActionPart("categorical", 6),)))


class Pong:
    """Shows two paddles and a ball on one colour, as the game does; in a share of its frames noise, as no game does.

    Args:
        noisy: that share.
    """

    def __init__(self, noisy: float = 0.0) -> None:
        self.random, self.noisy = np.random.default_rng(11), noisy
        self.frames = [self.frame() for _ in range(4)]

    def frame(self) -> np.ndarray:
        if self.random.random() < self.noisy:
            return self.random.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
        frame = np.full((SIDE, SIDE), 87, np.uint8)
        frame[:13], frame[-7:] = 236, 236
        for column, (color, height, width) in {9: (147, 8, 3), 72: (148, 8, 3), 0: (236, 2, 1)}.items():
            x, y = column or int(self.random.integers(SIDE - 2)), int(self.random.integers(13, SIDE - 16))
            frame[y : y + height, x : x + width] = color
        return frame

    def column(self, begins: tuple[int, ...] = ()) -> np.ndarray:
        """Observations [T+1, 4, 84, 84] that go on from the last one, with new episodes at some steps."""
        shown = []
        for step in range(ROLLOUT + 1):
            if step in begins:
                self.frames = [self.frame()] * 4
            elif step:
                self.frames = [*self.frames[1:], self.frame()]
            shown.append(np.stack(self.frames))
        return np.stack(shown)


def ring_of(num_bytes: int) -> FrameRing:
    """A ring of fewer bytes than two columns as they are would have, which is the least that is declared."""
    stack = Stack(4, 1, SIDE * SIDE)
    packed, *fields = FrameRing.declare("a", stack, COLUMNS, ROLLOUT, 0.0)
    assert packed.nbytes == (2 * 4 * (ROLLOUT + 1) + 2) * SIDE * SIDE
    return FrameRing(Arena.create([packed._replace(shape=(num_bytes,)), *fields]), "a", stack)


def read(ring: FrameRing, column: int) -> np.ndarray:
    out = np.empty((ROLLOUT + 1, 4, SIDE, SIDE), np.uint8)
    ring.read(np.full(ROLLOUT + 1, column), np.arange(ROLLOUT + 1), out)
    return out


@pytest.mark.parametrize(("noisy", "num_bytes"), [(0.0, 20_000), (0.1, 200_000), (1.0, 500_000)])
def test_observations_come_back_as_they_were(noisy: float, num_bytes: int) -> None:
    """All that are kept, after every insertion; columns leave when places or bytes are needed, and only then."""
    ring, game, random = ring_of(num_bytes), Pong(noisy), np.random.default_rng(5)
    store = ring.store
    assert isinstance(store, PackedFrames)
    kept: deque[tuple[int, np.ndarray]] = deque()
    end = 0
    for number in range(150):
        obs = game.column(tuple(np.flatnonzero(random.random(ROLLOUT + 1) < 0.2).tolist()))
        stored = ring.plan(obs)
        packed = ring.pack(obs, stored)
        while kept and (len(kept) == COLUMNS or not store.has_room(int(ring.frames_of(kept[0][0])[0]), end, packed)):
            kept.popleft()
        ring.write(number % COLUMNS, end, stored, packed)
        end += len(packed)
        kept.append((number % COLUMNS, obs))
        for column, expected in kept:
            assert np.array_equal(read(ring, column), expected)
    assert len(kept) == (COLUMNS if not noisy else len(kept)) >= 1
    assert store._at.max() > 3 * store.num_bytes
    sizes = np.diff(store._at[np.arange(end - len(packed), end) % store.size], axis=1).ravel()
    assert (sizes == SIDE * SIDE).all() if noisy == 1 else sizes.min() < 300


def test_a_frame_that_does_not_fit_before_the_end_begins_at_the_start() -> None:
    arena = Arena.create(PackedFrames.declare("a", 10, 100, 2.5))
    store = PackedFrames(arena, "a", 100)
    assert store.num_bytes == 250
    noise = np.random.default_rng(0).integers(0, 256, (6, 100), dtype=np.uint8)
    packed = store.pack(noise)
    assert [len(frame) for frame in packed] == [100] * 6
    assert store.has_room(0, 0, packed[:2])
    assert not store.has_room(0, 0, packed[:3])
    store.write(0, packed[:2])
    assert not store.has_room(0, 2, packed[2:3])  # 50 bytes are left out at the end
    assert store.has_room(1, 2, packed[2:3])
    store.write(2, packed[2:3])
    assert store._at[:3].tolist() == [[0, 100], [100, 200], [250, 350]]
    assert store.places(1, 3) == {"at": [(1, 3)], "packed": [(100, 250), (0, 100)]}
    out = np.empty((2, 100), np.uint8)
    store.take(np.array([1, 2]), out)
    assert np.array_equal(out, noise[1:3])


def played(share: float | None, path: Path | None = None, **changes: object) -> tuple[Replay, Pong]:
    return replay_of(PONG, replay_ratio=0.0, compressed_share=share, path=path, learning_starts=1, **changes), Pong()


def insert(replay: Replay, game: Pong, slots: int) -> list[np.ndarray]:
    """Hand slots over that show the game; their observations, a column each."""
    shown = []
    for number in range(slots):
        slot = number % 4
        replay.hand_over(slot)
        obs = np.stack([game.column() for _ in range(ROWS)], axis=1)
        replay.trajectories.obs["obs"][slot] = obs
        replay.fill()
        shown += list(obs.swapaxes(0, 1))
    return shown


def contents(storage: ReplayStorage) -> list[np.ndarray]:
    """The observations of all columns that are there, the oldest first."""
    found = []
    for number in range(storage.oldest, storage.newest + 1):
        out = np.empty((ROLLOUT + 1, 4, SIDE, SIDE), np.uint8)
        column = np.full(ROLLOUT + 1, (number - 1) % storage.columns)
        storage.read_obs("obs", column, np.arange(ROLLOUT + 1), out)
        found.append(out)
    return found


def test_a_replay_of_a_game_has_all_its_columns_in_a_tenth_of_the_memory() -> None:
    replay, game = played(0.1)
    shown = insert(replay, game, 20)
    storage = replay.source.storage
    found = contents(storage)
    assert len(found) == storage.columns == 20
    assert all(np.array_equal(a, b) for a, b in zip(found, shown[-20:], strict=True))
    batch = replay.source.take()
    assert batch is not None
    assert batch.obs["obs"].shape == (2, 16, 4, SIDE, SIDE)
    successor = ReplayStorage(replay.plan, PONG, replay.world.arena, 0)
    assert all(np.array_equal(a, b) for a, b in zip(contents(successor), found, strict=True))
    (packed,) = (field for field in replay.world.arena.fields if field.name.endswith(".packed"))
    assert packed.nbytes == (2 * (ROLLOUT + 1) * 4 + 2) * SIDE * SIDE  # that of two columns, the least there is


def test_where_bytes_are_short_the_oldest_leave_sooner_and_are_counted() -> None:
    replay, game = played(0.001)
    storage = replay.source.storage
    game.noisy = 1.0
    shown = insert(replay, game, 8)
    found = contents(storage)
    assert 1 <= len(found) < storage.columns
    assert all(np.array_equal(a, b) for a, b in zip(found, shown[-len(found) :], strict=True))
    assert storage.totals.dropped > 0
    assert storage.size == np.count_nonzero(storage.tree.levels[0])


def test_images_of_one_frame_are_compressed_too() -> None:
    spec = replace(STACKS, observations={"obs": ObservationSpec((3, SIDE, SIDE), "uint8")})
    replay = replay_of(spec, replay_ratio=0.0, compressed_share=0.5)
    assert list(replay.source.storage.rings) == ["obs"]
    t = replay.trajectories
    for slot in range(4):
        replay.hand_over(slot)
        t.obs["obs"][slot] = np.arange(ROLLOUT + 1, dtype=np.uint8)[:, None, None, None, None] + slot
        replay.fill()
    out = np.empty((ROLLOUT + 1, 3, SIDE, SIDE), np.uint8)
    storage = replay.source.storage
    storage.read_obs("obs", np.full(ROLLOUT + 1, 3 * ROWS % storage.columns), np.arange(ROLLOUT + 1), out)
    assert (out == np.arange(ROLLOUT + 1, dtype=np.uint8)[:, None, None, None] + 3).all()


def test_a_later_start_has_them_from_the_file_unless_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    replay, game = played(0.05, path)
    for slots in (5, 1, 9):
        insert(replay, game, slots)
        file = replay.source.file
        assert file is not None
        file.save()
        later, _ = played(0.05, path)
        expected = contents(replay.source.storage)
        assert all(np.array_equal(a, b) for a, b in zip(contents(later.source.storage), expected, strict=True))
    place = file._place["obs.obs.packed"]
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, b"\xff" * 40_000, place)
    os.close(descriptor)
    later, _ = played(0.05, path)
    assert later.source.storage.size == 0
    assert "it is damaged" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize(("place", "value"), [((3, 0), -5), ((3, 1), 1 << 62), ((0, 0), 1 << 40), ((5, 0), 0)])
def test_places_of_compressed_frames_that_cannot_be_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: tuple[int, int], value: int
) -> None:
    replay, game = played(0.05, path := tmp_path / "file")
    insert(replay, game, 3)
    assert replay.source.file is not None
    replay.source.file.save()
    places = replay.source.file._arrays["obs.obs.at"]
    file = np.memmap(path, np.int64, "r+")
    begin = replay.source.file._place["obs.obs.at"] // 8
    file[begin : begin + places.size].reshape(places.shape)[place] = value
    file.flush()
    later, _ = played(0.05, path)
    assert later.source.storage.size == 0
    assert "it is damaged: compressed frames cannot lie where it says" in caplog.text


def test_all_of_it_is_planned() -> None:
    plan = ReplayPlan(1_000_000, 0.6, 1e-6, True, 3, 0.99, 512, 8.0, 50_000, compressed_share=0.25)
    topology = replace(TOPOLOGY, rollout=32)
    fields = replay_fields(plan, PONG, topology)
    frames = num_columns(plan, 32, 1) * 36 + num_columns(plan, 32, 1) // 2
    (packed,) = (field for field in fields if field.name.endswith(".packed"))
    assert packed.nbytes == int(0.25 * frames * SIDE * SIDE)
    assert packed.fills
    assert f"replay {sum(field.nbytes for field in fields) / 2**20:.1f}" in memory_plan(fields)
    assert sum(field.nbytes for field in fields) < 2.5e9


def test_without_the_package_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'needs the package lz4: pip install "appo\[lz4\]"'):
        APEX().check(ApexConfig(replay_compression="lz4"), None)
    APEX().check(ApexConfig(), None)
