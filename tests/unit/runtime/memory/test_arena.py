import errno
import gc
import mmap
import multiprocessing
import os
import resource

import numpy as np
import pytest

from appo.algorithms.runtime.memory.arena import ALIGNMENT, RESERVED_BYTES, Arena, Field, offsets
from appo.utils.errors import ResourceError
from tests.patience import HANG_SECONDS

FIELDS = (
    Field("flags", (3,), "bool"),
    Field("nothing", (5, 0, 2), "float32"),
    Field("exact", (32,), "float32"),  # 128 bytes
    Field("more", (33,), "float32"),
    Field("words", (2, 2), "int64"),
)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_alignment_is_two_cache_lines() -> None:
    assert ALIGNMENT == 128


def test_offsets_are_aligned_and_do_not_overlap() -> None:
    assert offsets(FIELDS) == ([0, 128, 128, 256, 512], 640)
    assert offsets([]) == ([], 128)


def test_arrays_are_aligned_zero_filled_and_apart() -> None:
    arena = Arena.create(FIELDS)
    assert arena.nbytes == 640
    for field in FIELDS:
        array = arena[field.name]
        assert array.shape == field.shape
        assert array.dtype == field.dtype
        assert not array.any()
        if array.size:
            assert address(array) % ALIGNMENT == 0
    for i, field in enumerate(FIELDS):
        arena[field.name][...] = i + 1
    assert [set(np.unique(arena[f.name]).tolist()) for f in FIELDS] == [{True}, set(), {3.0}, {4.0}, {5}]


def test_fields_of_zero_elements_take_no_memory() -> None:
    arena = Arena.create(
        [Field("nothing", (0,), "float64"), Field("one", (1,), "int64"), Field("none", (2, 0), "bool")]
    )
    assert (arena["nothing"].shape, arena["none"].shape) == ((0,), (2, 0))
    assert arena.nbytes == ALIGNMENT


def test_contains_only_its_fields() -> None:
    arena = Arena.create(FIELDS)
    assert "flags" in arena
    assert "flag" not in arena
    with pytest.raises(KeyError):
        arena["flag"]


def test_memory_is_shared_through_the_descriptor() -> None:
    arena = Arena.create(FIELDS)
    second = Arena(arena.fields, os.dup(arena.descriptor))
    second["words"][1, 0] = -7
    assert arena["words"].tolist() == [[0, 0], [-7, 0]]


def _write_in_child(arena: Arena) -> None:
    arena["exact"][:] = arena["words"][0, 0] + np.arange(32)
    arena["words"][1] = os.getpid()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_sees_and_writes_the_same_memory(method: str) -> None:
    arena = Arena.create(FIELDS)
    arena["words"][0, 0] = 1000
    child = multiprocessing.get_context(method).Process(target=_write_in_child, args=(arena,))
    child.start()
    child.join(HANG_SECONDS)
    assert child.exitcode == 0
    assert arena["exact"].tolist() == [1000 + i for i in range(32)]
    assert arena["words"].tolist() == [[1000, 0], [child.pid, child.pid]]


def test_memory_has_no_name() -> None:
    arena = Arena.create(FIELDS)
    assert os.readlink(f"/proc/self/fd/{arena.descriptor}") == "/memfd:appo-arena (deleted)"
    assert os.fstat(arena.descriptor).st_nlink == 0


def test_descriptors_of_an_arena_close_with_the_arena() -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    arena = Arena.create(FIELDS)
    array = arena["words"]
    del arena
    gc.collect()
    array[0, 0] = 7  # the mapping lives on, with its own descriptor
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del array
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_pages_are_reserved_at_once() -> None:
    arena = Arena.create([Field("large", (1 << 20,), "uint8")])
    assert os.fstat(arena.descriptor).st_blocks * 512 >= 1 << 20


def test_too_little_memory_is_an_error_at_the_start() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    open_before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ResourceError, match="the shared memory of this run needs 2 MiB: "):
            Arena.create([Field("large", (1 << 21,), "uint8")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == open_before


# Fields that fill.


FILLING = (Field("fills", (1 << 26,), "uint8", fills=True), *FIELDS, Field("more_fills", (3, 5), "int32", fills=True))


def reserved_bytes(arena: Arena) -> int:
    return os.fstat(arena.descriptor).st_blocks * 512


def test_what_fills_lies_behind_the_rest_and_is_not_reserved() -> None:
    arena = Arena.create(FILLING)
    assert arena.reserved_nbytes == mmap.PAGESIZE
    assert reserved_bytes(arena) == mmap.PAGESIZE
    assert arena.nbytes == mmap.PAGESIZE + (1 << 26) + ALIGNMENT
    assert sum(field.nbytes for field in FILLING) > 1 << 26  # the plan counts all of it
    arena["words"][:] = 1
    assert not arena["fills"][-1]


def test_what_fills_is_reserved_in_pieces() -> None:
    arena = Arena.create(FILLING)
    before = reserved_bytes(arena)
    arena.reserve("fills", 1)
    assert reserved_bytes(arena) == before + RESERVED_BYTES
    arena.reserve("fills", RESERVED_BYTES)
    assert reserved_bytes(arena) == before + RESERVED_BYTES
    arena.reserve("fills", RESERVED_BYTES + 1)
    assert reserved_bytes(arena) == before + 2 * RESERVED_BYTES
    arena.reserve("more_fills", 60)
    assert reserved_bytes(arena) == before + 2 * RESERVED_BYTES + mmap.PAGESIZE
    arena.reserve("fills", 1 << 26)
    assert reserved_bytes(arena) == before + (1 << 26) + mmap.PAGESIZE


def test_too_little_memory_for_what_fills_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    arena = Arena.create(FILLING)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ResourceError, match=r"the shared memory of this run needs 64 MiB: .*No space"):
        arena.reserve("fills", 1 << 25)


def test_clearing_gives_back_what_fills() -> None:
    arena = Arena.create(FILLING)
    other = Arena(arena.fields, os.dup(arena.descriptor))
    before = reserved_bytes(arena)
    for _ in range(2):
        arena.reserve("fills", 100)
        arena["fills"][:100], arena["words"][:] = 7, 8
        assert other["fills"][:101].tolist() == [7] * 100 + [0]
        arena.clear()
        assert reserved_bytes(arena) == before
        assert not other["words"].any()
    arena.reserve("fills", 1)
    assert not other["fills"][:100].any()
