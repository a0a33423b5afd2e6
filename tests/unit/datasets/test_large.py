"""Datasets of some kB that ask for any amount of memory or time are refused in one line, before any of it is taken."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest

from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.reader import Dataset, open_dataset
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from tests.unit.datasets.data import LENGTHS, assert_same, episodes, written
from tests.unit.datasets.test_datasets import minari_hdf5

MIB = 1 << 20
MOST_MIB = 700
MOST_SECONDS = 20.0  # of CPU time, where the slowest of these takes a fraction of a second


@contextmanager
def little_memory() -> Iterator[None]:
    """While entered, the process can take so much address space, and not more."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, began = resource.getrlimit(resource.RLIMIT_AS), time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_MIB * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - began < MOST_SECONDS


def require_refused(folder: Path, error: str) -> None:
    with little_memory(), pytest.raises(UsageError, match=rf"^--input: .*{error}") as raised:
        list(open_dataset([str(folder)]))
    assert "\n" not in str(raised.value)
    assert "MemoryError" not in str(raised.value)


# Metadata.


def box(**changes: object) -> dict[str, object]:
    return {"type": "Box", "dtype": "float32", "shape": [2], "low": [0, 0], "high": [1, 1]} | changes


def nested(depth: int) -> Any:
    space: Any = box()
    for _ in range(depth):
        space = {"type": "Tuple", "subspaces": [space]}
    return space


OF_TYPE = "a Box of the type .*, which is none of bool int8"
LARGE = "a space of [0-9]+ choices and [0-9]+ numbers, where at most 65536 and 8388608 are read"
DISCRETE: dict[str, object] = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        *(
            ({"observation_space": box(dtype=dtype)}, OF_TYPE)
            for dtype in (
                "V2000000000",
                "S2000000000",
                "U2000000000",
                "object",
                "float128",
                "<f4",
                "datetime64[s]",
                "M8",
            )
        ),
        ({"action_space": DISCRETE | {"n": 10**9}}, LARGE),
        ({"observation_space": DISCRETE | {"n": 1e9}}, LARGE),
        ({"action_space": {"type": "Tuple", "subspaces": [DISCRETE | {"n": 60_000}] * 900}}, LARGE),
        ({"action_space": {"type": "MultiDiscrete", "nvec": [10**9]}}, LARGE),
        ({"action_space": {"type": "MultiDiscrete", "nvec": [2**62] * 4}}, LARGE),
        ({"action_space": {"type": "MultiBinary", "n": 10**9}}, LARGE),
        ({"observation_space": {"type": "MultiBinary", "n": [1000, 1000, 1000]}}, LARGE),
        ({"observation_space": box(shape=[10**9])}, "cannot reshape"),
        ({"observation_space": box(shape=[0, 10**12], low=[], high=[])}, LARGE),
        ({"observation_space": box(shape=[1] * 1000, low=[0], high=[1])}, "metadata.json"),
        (
            {"observation_space": {"type": "Dict", "subspaces": {str(i): box() for i in range(50_000)}}},
            "more than 1000",
        ),
        ({"observation_space": {"type": "Tuple", "subspaces": [DISCRETE] * 100_000}}, "more than 1000 spaces"),
        ({"observation_space": nested(150)}, "nested deeper than 100 levels"),
        ({"observation_space": "[" * 100_000}, "metadata.json"),
        ({"total_episodes": 10**12}, "cannot read .*/5/metadata.json"),
        ({"total_episodes": 10**30}, "total_episodes must be a whole number"),
        ({"total_episodes": -1}, "total_episodes must be a whole number"),
        ({"total_episodes": 1e300}, "total_episodes must be a whole number"),
        ({"frames_per_step": 10**12}, "frames_per_step must be a whole number"),
    ],
)
def test_spaces_and_counts_without_bounds(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    written(tmp_path / "d")
    path = tmp_path / "d" / "part-00000" / "data" / "metadata.json"
    plain = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in changes.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | plain))
    require_refused(tmp_path / "d", error)


# Arrow.


def batch_of(steps: int, **columns: Any) -> pa.RecordBatch:
    plain = {
        "observations": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2 * (steps + 1), np.float32)), 2),
        "actions": pa.array(np.zeros(steps + 1, np.int64)),
        "rewards": pa.array(np.zeros(steps + 1)),
        "terminations": pa.array(np.arange(steps + 1) == steps - 1),
        "truncations": pa.array(np.zeros(steps + 1, np.bool_)),
    }
    return pa.RecordBatch.from_pydict(plain | columns)


def stored(folder: Path, batch: pa.RecordBatch, steps: int = 7) -> Path:
    """Put a batch in the place of an episode."""
    written(folder)
    episode = folder / "part-00000" / "data" / "2"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(episode / "part-0.arrow", batch.schema, options=options) as file:
        file.write_batch(batch)
    (episode / "metadata.json").write_text(json.dumps({"id": 2, "total_steps": steps}))
    return episode / "part-0.arrow"


def zeros(rows: int, size: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * size, np.int8)), size)


def views(rows: int) -> pa.Array:
    """Lists that all name the same numbers."""
    begins, sizes = pa.array([0] * rows, pa.int32()), pa.array([MIB] * rows, pa.int32())
    return pa.ListViewArray.from_arrays(begins, sizes, pa.array(np.zeros(MIB, np.float32)))


def runs(rows: int) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array([0.0]))


def hollow_lists(rows: int, size: int, kind: pa.DataType) -> pa.Array:
    """Lists of values that take no room."""
    inner = pa.Array.from_buffers(kind, rows * size, [None, pa.py_buffer(b"")][: 2 - pa.types.is_struct(kind)])
    return pa.FixedSizeListArray.from_arrays(inner, size)


def texts(rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), pa.array(["a" * 100]))


TOO_LARGE = "would take [0-9]+ bytes, where the steps and the space allow [0-9]+$"
TYPES = "a column of the type {}, which is not read$"


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"observations": views(8)}, TYPES.format("list_view")),
        ({"other": views(8)}, TYPES.format("list_view")),
        ({"rewards": runs(8)}, TYPES.format("run_end_encoded")),
        ({"other": runs(8)}, TYPES.format("run_end_encoded")),
        ({"rewards": texts(8)}, TYPES.format("dictionary")),
        ({"infos": pa.StructArray.from_arrays([texts(8)], names=["a"])}, TYPES.format("dictionary")),
        ({"observations": zeros(8, 8 * MIB)}, f"observations {TOO_LARGE}"),
        ({"actions": zeros(8, 8 * MIB)}, f"actions {TOO_LARGE}"),
        ({"rewards": zeros(8, 8 * MIB)}, f"rewards {TOO_LARGE}"),
        ({"truncations": zeros(8, 8 * MIB)}, f"truncations {TOO_LARGE}"),
        ({"observations": pa.array([[0.0] * 100_000] * 8)}, f"observations {TOO_LARGE}"),
        ({"rewards": pa.nulls(8)}, "an array with gaps"),
        ({"rewards": pa.array([{}] * 8, pa.struct([]))}, "an array of struct<>$"),
        ({"rewards": hollow_lists(8, 10**8, pa.struct([]))}, "an array of struct<>$"),
        ({"observations": hollow_lists(8, 10**8, pa.binary(0))}, r"an array of fixed_size_binary\[0\]$"),
    ],
)
def test_columns_of_arrow_without_bounds(tmp_path: Path, columns: dict[str, Any], error: str) -> None:
    stored(tmp_path / "d", batch_of(7, **columns))
    require_refused(tmp_path / "d", error)
    assert_same(open_dataset([str(tmp_path / "d")])[0], episodes()[0])


def test_infos_without_bounds(tmp_path: Path) -> None:
    path = stored(tmp_path / "d", batch_of(7, infos=pa.StructArray.from_arrays([zeros(8, 40 * MIB)], names=["a"])))
    assert path.stat().st_size < 100_000
    require_refused(tmp_path / "d", "infos would take 320 MiB of memory, and has [0-9]+ bytes on the disk$")


def test_infos_of_values_that_take_no_room_are_left_out(tmp_path: Path) -> None:
    infos = pa.StructArray.from_arrays([hollow_lists(8, 10**8, pa.struct([]))], names=["a"])
    stored(tmp_path / "d", batch_of(7, infos=infos))
    dataset = open_dataset([str(tmp_path / "d")])
    with little_memory():
        assert dataset[2].infos == {}


def test_columns_that_nobody_needs_take_no_memory(tmp_path: Path) -> None:
    """They are not even decompressed."""
    stored(tmp_path / "d", batch_of(7, other=zeros(8, 16 * MIB)))
    dataset, before = open_dataset([str(tmp_path / "d")]), pa.default_memory_pool().max_memory()
    pool = pa.system_memory_pool()
    pa.set_memory_pool(pool)
    try:
        before = pool.max_memory()
        assert len(dataset[2]) == 7
        assert pool.max_memory() - before < MIB
    finally:
        pa.set_memory_pool(pa.default_memory_pool())


def test_a_size_that_a_buffer_only_claims(tmp_path: Path) -> None:
    path = stored(tmp_path / "d", batch_of(130), 130)
    content, size = path.read_bytes(), (131 * 2 * 4).to_bytes(8, "little")
    assert size in content
    path.write_bytes(content.replace(size, (1 << 50).to_bytes(8, "little")))
    require_refused(tmp_path / "d", "would take [0-9]+ bytes, where the steps and the space allow")


def test_a_file_of_holes(tmp_path: Path) -> None:
    path = stored(tmp_path / "d", batch_of(7))
    os.truncate(path, 30 << 30)
    require_refused(tmp_path / "d", "part-0.arrow would take 30720 MiB of memory, and has [0-9]+ bytes on the disk$")


def test_columns_without_number(tmp_path: Path) -> None:
    stored(tmp_path / "d", batch_of(7, **{f"other{i}": pa.nulls(8) for i in range(10_001)}))
    require_refused(tmp_path / "d", "it has more than 10000 columns$")


@pytest.mark.parametrize("steps", [10**9, 10**12, 10**30, 1e300, 0, -7, True, 7.5, "7", None])
def test_steps_that_no_file_holds(tmp_path: Path, steps: object) -> None:
    stored(tmp_path / "d", batch_of(7), steps)  # type: ignore[arg-type]
    require_refused(tmp_path / "d", "(total_steps must be a positive whole number|would take [0-9]+ MiB of memory)")


def test_images_that_are_all_black_are_believed(tmp_path: Path) -> None:
    """They compress as nothing else does."""
    spec = EnvSpec({"obs": ObservationSpec((84, 84, 4), "uint8")}, ActionSpec((ActionPart("categorical", 3),)))
    one = Episode(
        {"obs": np.zeros((2001, 84, 84, 4), np.uint8)}, np.zeros((2000, 1), np.int32), np.ones(2000, np.float32), True
    )
    written(tmp_path / "d", [one], spec)
    assert (tmp_path / "d" / "part-00000" / "data" / "0" / "part-0.arrow").stat().st_size < 56_000_000 / 200
    assert_same(open_dataset([str(tmp_path / "d")])[0], one)


# HDF5.


def array(name: str, shape: tuple[int, ...], kind: Any = np.float32, **options: Any) -> Callable[[h5py.File], None]:
    """Put an array in the place of one of episode 1, of which nothing is written."""

    def change(file: h5py.File) -> None:
        del file[f"episode_1/{name}"]
        file["episode_1"].create_dataset(name, shape, kind, **options)

    return change


def same_episodes(file: h5py.File) -> None:
    for index in range(len(LENGTHS), 500):
        file[f"episode_{index}"] = file["episode_0"]


def hollow(file: h5py.File) -> None:
    for name, shape in (("observations", (2**40 + 1, 2)), ("actions", (2**40,)), ("rewards", (2**40,))):
        array(name, shape, chunks=(1024, *shape[1:]))(file)


@pytest.mark.parametrize(
    ("change", "count", "error"),
    [
        (
            array("observations", (5, 600_000_000), compression="gzip"),
            5,
            r"observations has the shape \(5, 600000000\)",
        ),
        (
            array("observations", (10**9, 2), chunks=(1000, 2)),
            5,
            "observations has 1000000000, where its steps need 2$",
        ),
        (array("actions", (10**9,), np.int64, chunks=(1000,)), 5, "actions has 1000000000, where its steps need 1$"),
        (
            array("terminations", (10**9,), np.bool_, chunks=(1000,)),
            5,
            "terminations has 1000000000, where its steps need 1$",
        ),
        (array("rewards", (2**40,), chunks=(1000,)), 5, "would take [0-9]+ MiB of memory, and has [0-9]+ bytes"),
        (array("rewards", (2**62,), chunks=(1000,)), 5, "would take [0-9]+ MiB of memory, and has [0-9]+ bytes"),
        (hollow, 5, "would take [0-9]+ MiB of memory, and has [0-9]+ bytes on the disk"),
        (array("rewards", (1,), maxshape=(None,), chunks=(1 << 29,)), 5, "a chunk of rewards would take 2048 MiB"),
        (array("rewards", (1,), "V1000000"), 5, "rewards is an array of"),
        (array("rewards", (1,), "S1000000"), 5, "rewards is an array of"),
        (array("rewards", (1,), np.complex64), 5, "rewards is an array of complex64"),
        (array("rewards", (1,), np.longdouble), 5, "rewards is an array of float128"),
        (array("rewards", (1,), np.dtype((np.float32, (10**6,)))), 5, "rewards is an array of|has the shape"),
        (same_episodes, 500, "episode_5 is another one, once more"),
        (same_episodes, 10**11, "episode_5 is another one, once more"),
        (lambda file: None, 10**11, "there is no episode_5"),
    ],
)
def test_arrays_of_hdf5_without_bounds(
    tmp_path: Path, change: Callable[[h5py.File], None], count: int, error: str
) -> None:
    data = minari_hdf5(tmp_path / "d") / "data"
    with h5py.File(data / "main_data.hdf5", "a") as file:
        change(file)
    plain = json.loads((data / "metadata.json").read_text()) | {"total_episodes": count}
    (data / "metadata.json").write_text(json.dumps(plain))
    require_refused(tmp_path / "d", error)


def test_a_key_of_a_space_leads_through_no_link_of_hdf5(tmp_path: Path) -> None:
    elsewhere = minari_hdf5(tmp_path / "other") / "data" / "main_data.hdf5"
    data = minari_hdf5(tmp_path / "d") / "data"
    with h5py.File(data / "main_data.hdf5", "a") as file:
        for index in range(len(LENGTHS)):
            group = file[f"episode_{index}"]
            del group["observations"]
            group.create_group("observations")["a"] = h5py.ExternalLink(elsewhere, f"episode_{index}")
    space = {"type": "Dict", "subspaces": {"a/observations": box()}}
    plain = json.loads((data / "metadata.json").read_text()) | {"observation_space": json.dumps(space)}
    (data / "metadata.json").write_text(json.dumps(plain))
    require_refused(tmp_path / "d", "a is a link, which may lead anywhere: it is not followed$")


def test_all_that_is_whole_is_read(tmp_path: Path) -> None:
    """Of both kinds, with little memory."""
    written(tmp_path / "a")
    for folder in (tmp_path / "a", minari_hdf5(tmp_path / "h")):
        with little_memory():
            dataset: Dataset = open_dataset([str(folder)])
            assert [len(one) for one in dataset] == list(LENGTHS)
