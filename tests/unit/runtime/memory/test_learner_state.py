import numpy as np
import pytest

from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import META_BYTES, LearnerState, StateBlock
from tests.states import adam_layout, adam_state, stacked

SIZE, MOMENTS = 7, 3


def block_of() -> tuple[Arena, StateBlock]:
    arena = Arena.create(StateBlock.declare(0, adam_layout(SIZE, MOMENTS).vectors))
    return arena, StateBlock(arena, 0)


def state_of(number: int) -> LearnerState:
    return adam_state(
        np.arange(3 * SIZE, dtype=np.float32).reshape(3, SIZE) + 100 * number,
        np.array([number, np.pi, -1e300]),
        {"version": number, "learning_rate": 0.1, "words": "x" * number},
    )


def assert_holds(block: StateBlock, number: int) -> None:
    state, expected = block.read(), state_of(number)
    assert state is not None
    assert state.vectors.keys() == expected.vectors.keys()
    assert all(np.array_equal(vector, expected.vectors[name]) for name, vector in state.vectors.items())
    assert state.meta == expected.meta


def test_nothing_is_read_before_the_first_write() -> None:
    _, block = block_of()
    assert block.read() is None
    assert block.writes == 0


def test_what_is_written_last_is_read_bit_for_bit() -> None:
    _, block = block_of()
    for number in (1, 2, 3, 50, 4):  # shorter plain values than before must not leave a tail
        block.write(state_of(number))
        assert_holds(block, number)
    assert block.writes == 5


def test_two_places_are_written_in_turn() -> None:
    arena, block = block_of()
    for number in range(1, 5):
        block.write(state_of(number))
    assert arena["state.0.vectors.weights"][0, 0] == 400.0
    assert arena["state.0.vectors.weights"][1, 0] == 300.0
    assert arena["state.0.sequence"].tolist() == [8, 6]


def test_a_read_copy_is_not_overwritten() -> None:
    _, block = block_of()
    block.write(state_of(1))
    state = block.read()
    for number in range(2, 6):
        block.write(state_of(number))
    assert state is not None
    assert np.array_equal(stacked(state), stacked(state_of(1)))


class _Killed(Exception):
    pass


class _DyingArray:
    """Stands for the moments of a state: the writer dies when it comes to copy them."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise _Killed


def test_a_writer_that_dies_half_way_leaves_the_state_before() -> None:
    arena, block = block_of()
    block.write(state_of(1))
    block.write(state_of(2))
    dying = LearnerState({**state_of(3).vectors, "statistics": _DyingArray()}, {"version": 3})  # type: ignore[arg-type]
    with pytest.raises(_Killed):
        block.write(dying)
    assert arena["state.0.vectors.weights"][1, 0] == 300.0  # half of it is there
    assert arena["state.0.sequence"].tolist() == [4, 5]
    assert_holds(block, 2)
    block.write(state_of(4))  # its successor writes the same place again
    assert_holds(block, 4)


def test_a_place_that_is_being_written_is_refused() -> None:
    arena, block = block_of()
    block.write(state_of(1))
    arena["state.0.sequence"][1] = 2 * 3 - 1
    with pytest.raises(RuntimeError, match="changed during every attempt"):
        block.read()


def test_plain_values_that_do_not_fit_are_refused_and_nothing_is_lost() -> None:
    _, block = block_of()
    block.write(state_of(1))
    too_long = LearnerState(state_of(2).vectors, {"words": "x" * META_BYTES})
    with pytest.raises(ValueError, match=f"{META_BYTES - 8} are reserved"):
        block.write(too_long)
    assert block.writes == 1
    assert_holds(block, 1)
    overhead = len('{"words": ""}')
    longest = LearnerState(too_long.vectors, {"words": "x" * (META_BYTES - 8 - overhead)})
    block.write(longest)
    state = block.read()
    assert state is not None
    assert state.meta == longest.meta
