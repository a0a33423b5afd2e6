from dataclasses import replace
from math import prod

import numpy as np
import pytest

from appo.algorithms.replay.frames import FrameRing, Stack, stack_of
from appo.algorithms.runtime.memory.arena import Arena
from appo.envs.spec import ObservationSpec

ROLLOUT, COLUMNS = 5, 6


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 84, 84), Stack(4, 1, 84 * 84)),
        ((84, 84, 4), Stack(4, 84 * 84, 1)),
        ((12, 72, 128), Stack(4, 1, 3 * 72 * 128)),
        ((72, 128, 6), Stack(2, 72 * 128, 3)),
        ((2, 10, 10), Stack(2, 1, 100)),
        ((7, 7, 20), None),  # a board with a channel of every kind, as MiniGrid's
        ((10, 10, 16), None),
        ((3, 84, 84), None),
        ((84, 84, 3), None),
        ((1, 84, 84), None),
        ((84, 84), None),
        ((8,), None),
    ],
)
def test_stacks_are_known_by_their_shape(shape: tuple[int, ...], expected: Stack | None) -> None:
    observation = ObservationSpec(shape, "uint8")
    assert stack_of(observation) == expected
    assert stack_of(replace(observation, dtype="float32")) is None
    assert stack_of(observation, single=True) == (expected or (len(shape) == 3 and Stack(1, 1, prod(shape))) or None)


@pytest.mark.parametrize(("frames", "channels", "count"), [(6, 6, 6), (3, 3, 3), (2, 6, 2), (1, 6, 2), (4, 6, 2)])
def test_flags_know_the_frames_of_a_stack(frames: int, channels: int, count: int) -> None:
    assert stack_of(ObservationSpec((channels, 84, 84), "uint8", frames=frames)) == Stack(
        count, 1, channels // count * 84 * 84
    )


class Game:
    """Shows stacks of random frames.

    Args:
        stack: of the observations.
        shape: of an observation.
        begin: what a stack shows before the first frame: "copies" of it, "zeros" or "others".
    """

    def __init__(self, stack: Stack, shape: tuple[int, ...], begin: str, random: np.random.Generator) -> None:
        self.stack, self.shape, self.begin, self.random = stack, shape, begin, random
        self.frames = self.first()

    def first(self) -> list[np.ndarray]:
        newest = self.frame()
        earlier = {"copies": lambda: newest, "zeros": lambda: np.zeros_like(newest), "others": self.frame}[self.begin]
        return [*(earlier() for _ in range(self.stack.frames - 1)), newest]

    def frame(self) -> np.ndarray:
        return self.random.integers(0, 256, (self.stack.outer, self.stack.inner), dtype=np.uint8)

    def column(self, begins: tuple[int, ...]) -> np.ndarray:
        """Observations [T+1, *] that go on from the last one, with new episodes at some steps."""
        shown = []
        for step in range(ROLLOUT + 1):
            if step in begins:
                self.frames = self.first()
            elif step:
                self.frames = [*self.frames[1:], self.frame()]
            shown.append(np.stack(self.frames, axis=1).reshape(self.shape))
        return np.stack(shown)


def ring_of(stack: Stack) -> FrameRing:
    return FrameRing(Arena.create(FrameRing.declare("a", stack, COLUMNS, ROLLOUT)), "a", stack)


def store(ring: FrameRing, column: int, start: int, obs: np.ndarray) -> int:
    stored = ring.plan(obs)
    ring.write(column, start, stored, ring.pack(obs, stored))
    assert ring.frames_of(column).tolist() == [start, start + int(stored.sum())]
    return start + int(stored.sum())


def read(ring: FrameRing, column: int, shape: tuple[int, ...]) -> np.ndarray:
    out = np.empty((ROLLOUT + 1, *shape), np.uint8)
    ring.read(np.full(ROLLOUT + 1, column), np.arange(ROLLOUT + 1), out)
    return out


@pytest.mark.parametrize("begin", ["copies", "zeros", "others"])
@pytest.mark.parametrize("shape", [(4, 6, 8), (6, 8, 4), (6, 7, 9), (4, 5, 5)])
def test_observations_come_back_as_they_were(shape: tuple[int, ...], begin: str) -> None:
    """Through several rounds of the ring, with episodes that begin anywhere, at both ends of columns too."""
    stack = stack_of(ObservationSpec(shape, "uint8"))
    assert stack is not None
    random = np.random.default_rng(5)
    ring, game = ring_of(stack), Game(stack, shape, begin, random)
    end = 0
    for number in range(40):
        begins = tuple(np.flatnonzero(random.random(ROLLOUT + 1) < 0.3).tolist())
        obs = game.column(begins)
        end = store(ring, number % COLUMNS, end, obs)
        assert np.array_equal(read(ring, number % COLUMNS, shape), obs)
    assert end > 3 * ring.size


@pytest.mark.parametrize(("begin", "at_start", "later"), [("copies", 1, 1), ("zeros", 2, 2), ("others", 4, 4)])
def test_frames_that_are_stored(begin: str, at_start: int, later: int) -> None:
    """One a step; the whole stack where an episode or a column begins, without frames that are there already."""
    shape = (4, 6, 8)
    stack = Stack(4, 1, 48)
    game = Game(stack, shape, begin, np.random.default_rng(6))
    ring = ring_of(stack)
    assert int(ring.plan(game.column((0,))).sum()) == at_start + ROLLOUT
    assert int(ring.plan(game.column(())).sum()) == 4 + ROLLOUT
    assert int(ring.plan(game.column((3,))).sum()) == 4 + (ROLLOUT - 1) + later


def test_what_is_no_stack_takes_more_frames_and_is_right_all_the_same() -> None:
    random, shape, stack = np.random.default_rng(7), (4, 6, 8), Stack(4, 1, 48)
    ring = ring_of(stack)
    obs = random.integers(0, 256, (ROLLOUT + 1, *shape), dtype=np.uint8)
    assert store(ring, 2, 13, obs) == 13 + 4 * (ROLLOUT + 1)
    assert np.array_equal(read(ring, 2, shape), obs)


def test_frames_that_stand_still_are_no_new_episode() -> None:
    shape, stack = (4, 6, 8), Stack(4, 1, 48)
    ring = ring_of(stack)
    obs = np.full((ROLLOUT + 1, *shape), 9, np.uint8)
    assert store(ring, 0, 0, obs) == 1 + ROLLOUT
    assert np.array_equal(read(ring, 0, shape), obs)


def test_room_is_for_half_a_frame_more_than_columns_need() -> None:
    fields = {f.name: f for f in FrameRing.declare("a", Stack(4, 1, 7056), 31_250, 32)}
    assert fields["a.frames"].shape == (31_250 * 36 + 15_625, 7056)
    assert fields["a.frames"].fills
    assert FrameRing.declare("a", Stack(4, 1, 48), 2, ROLLOUT)[0].shape == (2 * 6 * 4, 48)
