import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from appo.algorithms.runtime.memory.arena import Arena, Field
from appo.algorithms.runtime.memory.weights import WeightRing, checksum
from appo.utils import failpoints
from tests.patience import HANG_SECONDS

SIZE = 1 << 16


@pytest.fixture
def armed() -> Iterator[None]:
    yield
    failpoints.arm("")


def ring_of(size: int = 5) -> tuple[Arena, WeightRing]:
    arena = Arena.create([*WeightRing.declare(0, size), Field("stop", (1,), "int64")])
    return arena, WeightRing(arena, 0)


def constant(version: int, size: int = 5) -> np.ndarray:
    return np.full(size, version, np.float32)


def test_nothing_is_published_at_first() -> None:
    _, ring = ring_of()
    assert ring.published == 0
    assert ring.fetch(0) == (0, None)


def test_the_newest_version_is_fetched_once() -> None:
    _, ring = ring_of()
    for version in range(1, 11):
        ring.publish(constant(version), version)
    version, weights = ring.fetch(7)
    assert version == 10
    assert weights is not None
    assert weights.tolist() == [10.0] * 5
    assert ring.fetch(10) == (10, None)


def test_a_fetched_copy_is_not_overwritten_by_later_publications() -> None:
    _, ring = ring_of()
    ring.publish(constant(1), 1)
    _, weights = ring.fetch(0)
    for version in range(2, 6):
        ring.publish(constant(version), version)
    assert weights is not None
    assert weights.tolist() == [1.0] * 5


def test_versions_may_jump() -> None:
    _, ring = ring_of()
    ring.publish(constant(3), 3)
    ring.publish(constant(104), 104)
    version, weights = ring.fetch(3)
    assert version == 104
    assert weights is not None
    assert weights.tolist() == [104.0] * 5


def test_policies_have_rings_of_their_own() -> None:
    arena = Arena.create([*WeightRing.declare(0, 5), *WeightRing.declare(1, 2)])
    WeightRing(arena, 1).publish(constant(4, 2), 4)
    assert (WeightRing(arena, 0).published, WeightRing(arena, 1).published) == (0, 4)


def test_an_unfinished_publication_is_not_seen(armed: None) -> None:
    _, ring = ring_of()
    for version in range(1, 4):
        ring.publish(constant(version), version)
    failpoints.arm("learner.publish:raise")
    with pytest.raises(failpoints.FailpointError):
        ring.publish(constant(4), 4)
    assert ring.published == 3
    version, weights = ring.fetch(0)
    assert version == 3
    assert weights is not None
    assert weights.tolist() == [3.0] * 5


@pytest.mark.parametrize("versions", [(2, 3, 4, 5), (3, 5, 7, 9), (2, 13, 24, 25)])
def test_the_newest_version_is_never_written_over(armed: None, versions: tuple[int, ...]) -> None:
    """Whatever the versions, and though every learner dies once before it has published."""
    _, ring = ring_of()
    ring.publish(constant(1), 1)
    for version in versions:
        newest = ring.published
        failpoints.arm("learner.publish:raise")
        with pytest.raises(failpoints.FailpointError):
            ring.publish(constant(version), version)
        failpoints.arm("")
        fetched, weights = ring.fetch(0)
        assert fetched == newest
        assert weights is not None
        assert weights.tolist() == [newest] * 5
        ring.publish(constant(version), version)
        assert ring.published == version


@pytest.mark.parametrize("later", [2 * 5 - 1, 2 * 5])
def test_a_buffer_that_was_overtaken_is_refused(later: int) -> None:
    """A reader that looks which version is the newest may then find the next but one, or half of it."""
    arena, ring = ring_of()
    ring.publish(constant(3), 3)
    arena["weights.0.sequence"][arena["weights.0.sequence"] == 2 * 3] = later
    assert ring.fetch(0) == (0, None)
    assert ring.fetch(2) == (2, None)
    assert ring.damaged() is None


@pytest.mark.parametrize("damage", ["buffer", "checksum"])
def test_a_copy_whose_checksum_disagrees_is_refused(damage: str) -> None:
    arena, ring = ring_of()
    ring.publish(constant(1), 1)
    place = arena["weights.0.sequence"].argmax()
    if damage == "buffer":
        arena["weights.0.buffer"][place, 4] = np.nextafter(np.float32(1), np.float32(2))
    else:
        arena["weights.0.checksum"][place] += np.uint64(1)
    assert ring.fetch(0) == (0, None)


def test_checksum_sees_every_bit_of_every_word() -> None:
    vector = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    sums = {checksum(vector)}
    for word in range(64):
        for bit in range(32):
            changed = vector.copy()
            changed.view(np.uint32)[word] ^= np.uint32(1 << bit)
            assert checksum(changed) != checksum(vector)
            sums.add(checksum(changed))
    assert len(sums) > 64  # not all the same
    word = int(np.float32(np.nan).view(np.uint32))
    assert checksum(np.full(1 << 17, np.nan, np.float32)) == (1 << 16) * (word + (word << 32)) % 2**64
    assert checksum(np.full(3, np.nan, np.float32)) == 2 * word + (word << 32)
    assert checksum(np.full(1, np.nan, np.float32)) == word


def _publish_until_stopped(arena: Arena) -> None:
    ring, version = WeightRing(arena, 0), 0
    weights = np.empty(SIZE, np.float32)
    while not arena["stop"][0]:
        version += 1
        weights[:] = version
        ring.publish(weights, version)


def _stop(writer: multiprocessing.process.BaseProcess) -> None:
    os.kill(writer.pid or 0, signal.SIGSTOP)
    os.waitid(os.P_PID, writer.pid or 0, os.WSTOPPED)


def test_no_copy_is_torn_while_the_writer_runs_and_is_stopped_anywhere() -> None:
    arena, ring = ring_of(SIZE)
    writer = multiprocessing.get_context("fork").Process(target=_publish_until_stopped, args=(arena,))
    writer.start()
    seen = copies = half_written = 0
    deadline = time.monotonic() + HANG_SECONDS
    try:
        for _ in range(100):
            newer = 0
            while newer < 5:  # of a writer that runs
                assert time.monotonic() < deadline
                version, weights = ring.fetch(seen)
                if weights is not None:
                    assert version > seen
                    assert weights.min() == weights.max() == version
                    newer += 1
                seen = version
            copies += newer
            _stop(writer)
            half_written += bool((arena["weights.0.sequence"] % 2).any())
            version, weights = ring.fetch(seen)  # of a writer that may be in the middle of a publication
            assert version == ring.published
            assert weights is None or weights.min() == weights.max() == version
            seen = version
            os.kill(writer.pid or 0, signal.SIGCONT)
    finally:
        arena["stop"][0] = 1
        os.kill(writer.pid or 0, signal.SIGCONT)
        writer.join(HANG_SECONDS)
    assert writer.exitcode == 0
    assert copies == 500
    assert half_written > 0
    assert ring.published >= seen
