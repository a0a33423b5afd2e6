"""Datasets: what is written is read again bit by bit, by Minari too; what is damaged or dangerous is named."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces

from appo.algorithms.datasets import door
from appo.algorithms.datasets.config import OutputConfig
from appo.algorithms.datasets.episodes import Episode
from appo.algorithms.datasets.reader import Dataset, open_dataset
from appo.algorithms.datasets.writer import DatasetWriter
from appo.envs.spec import ActionPart, ActionSpec, EnvSpec, ObservationSpec
from appo.utils.errors import ResourceError, UsageError
from tests.patience import HANG_SECONDS
from tests.unit.datasets.data import LENGTHS, SPEC, assert_same, episode, episodes, write_and_wait, written

NAME = r"[^ ]*"


def read(*words: Path | str) -> Dataset:
    return open_dataset([str(word) for word in words])


def parts_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_what_is_written_is_read_again(tmp_path: Path, compression: str) -> None:
    writer = written(tmp_path / "d", output_compression=compression)
    assert (writer.episodes, writer.steps, writer.parts) == (5, sum(LENGTHS), 1)
    dataset = read(tmp_path / "d")
    assert dataset.spec == SPEC
    assert dataset.lengths.tolist() == list(LENGTHS)
    assert dataset.steps == sum(LENGTHS)
    for found, expected in zip(dataset, episodes(), strict=True):
        assert_same(found, expected)


def test_what_was_added_or_replaced_is_read_by_the_next_one_that_asks(tmp_path: Path) -> None:
    """In one process: equal words mean the same object only while the folder stays as it is."""
    written(tmp_path / "d")
    first = read(tmp_path / "d")
    assert read(tmp_path / "d") is first
    written(tmp_path / "d", [episode(9, 4)])
    second = read(tmp_path / "d")
    assert (len(first), len(second)) == (5, 6)
    assert_same(second[5], episode(9, 4))
    assert read(tmp_path / "d") is second
    shutil.rmtree(tmp_path / "d")
    with pytest.raises(UsageError, match=f"^--input: there is no dataset {NAME}d$"):
        read(tmp_path / "d")
    written(tmp_path / "d", [episode(8, 2)])
    assert_same(read(tmp_path / "d")[0], episode(8, 2))


def test_columns_are_stored_as_asked(tmp_path: Path) -> None:
    written(tmp_path / "d", output_columns=("log_prob",))
    assert read(tmp_path / "d")[0].infos.keys() == {"log_prob"}
    with pytest.raises(UsageError, match=r"^--output_columns=q is none of logits, log_prob, value, policy_version$"):
        OutputConfig(output_columns=("q",)).check()


def test_long_episodes_are_compressed_and_short_ones_are_not(tmp_path: Path) -> None:
    sizes = {}
    for compression in ("none", "lz4", "zstd"):
        written(tmp_path / compression, [episode(1, 5000), episode(2, 20)], output_compression=compression)
        folder = tmp_path / compression / "part-00000" / "data"
        sizes[compression] = [(folder / str(index) / "part-0.arrow").stat().st_size for index in range(2)]
        assert_same(read(tmp_path / compression)[0], episode(1, 5000))
        assert len(minari.MinariDataset(folder)[0].rewards) == 5000
    for compression in ("lz4", "zstd"):
        assert sizes[compression][0] < 0.8 * sizes["none"][0]
        assert sizes[compression][1] == sizes["none"][1]


def test_a_new_part_begins_where_one_is_large_enough(tmp_path: Path) -> None:
    writer = written(tmp_path / "d", output_max_file_size=1)
    assert writer.parts == 5
    assert parts_in(tmp_path / "d") == [f"part-{number:05}" for number in range(5)]
    for found, expected in zip(read(tmp_path / "d"), episodes(), strict=True):
        assert_same(found, expected)


def test_later_writers_add_parts(tmp_path: Path) -> None:
    for number in (1, 2):
        written(tmp_path / "d", [episode(number, 4)])
    assert parts_in(tmp_path / "d") == ["part-00000", "part-00001"]
    assert [int(one.obs["obs"][0, 0]) for one in read(tmp_path / "d")] == [1, 2]
    other = EnvSpec({"obs": ObservationSpec((3,), "float32")}, SPEC.action)
    with pytest.raises(UsageError, match=r"^--output: .* holds a dataset of other spaces$"):
        written(tmp_path / "d", [], other)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_no_part_is_added_beside_one_whose_metadata_is_damaged(tmp_path: Path, content: str) -> None:
    written(tmp_path / "d")
    (path,) = (tmp_path / "d").glob("*/data/metadata.json")
    path.write_text(content)
    with pytest.raises(UsageError, match=r"^--output: .*metadata.json (is damaged: |must hold a mapping)") as raised:
        written(tmp_path / "d")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("inner", ["part-00000", "part-00000/data"])
def test_no_part_is_written_where_none_would_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    """A dataset of Minari's, as each part is one, is read without parts beside its data."""
    monkeypatch.chdir(tmp_path)
    written(Path("d"))
    before = sorted(Path("d").rglob("*"))
    with pytest.raises(UsageError, match=r"^--output: .* is a dataset by itself, to which no part is added: name"):
        written(Path("d", inner))
    assert sorted(Path("d").rglob("*")) == before


def test_metadata_behind_a_link_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path / "d")
    (path,) = (tmp_path / "d").glob("*/data/metadata.json")
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UsageError, match=r"^--output: cannot read .*metadata.json"):
        written(tmp_path / "d")


def test_a_kill_costs_the_open_part_at_most(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=write_and_wait, args=(str(tmp_path / "d"), theirs))
    process.start()
    theirs.close()  # of a child that dies, the end of the pipe is read
    try:
        assert ours.poll(HANG_SECONDS)
        parts, count = ours.recv()
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(HANG_SECONDS)
    assert count == 4
    names = parts_in(tmp_path / "d")
    assert names == [".open-writer"] * (parts < 4) + [f"part-{number:05}" for number in range(parts)]
    whole = len(read(tmp_path / "d")) if parts else 0
    written(tmp_path / "d", [episode(9, 2)])
    assert parts_in(tmp_path / "d") == [f"part-{number:05}" for number in range(parts + 1)]
    assert len(read(tmp_path / "d", tmp_path / "d" / "part-00000")) >= whole + 1


def test_minari_reads_what_is_written(tmp_path: Path) -> None:
    written(tmp_path / "d", output_max_file_size=1 << 20)
    loaded = minari.MinariDataset(tmp_path / "d" / "part-00000" / "data")
    assert (loaded.total_episodes, loaded.total_steps) == (5, sum(LENGTHS))
    for found, expected in zip(loaded.iterate_episodes(), episodes(), strict=True):
        np.testing.assert_array_equal(found.observations, expected.obs["obs"])
        np.testing.assert_array_equal(found.actions, expected.action[:, 0])
        np.testing.assert_array_equal(found.rewards, expected.reward)
        assert bool(found.terminations[-1]) == expected.terminated
        assert bool(found.truncations[-1]) == (not expected.terminated)
        for name, values in expected.infos.items():
            np.testing.assert_array_equal(found.infos[name][:-1], values)


MIXED = EnvSpec(
    {"camera": ObservationSpec((4, 3, 1), "uint8"), "speed": ObservationSpec((2,), "float32")},
    ActionSpec((ActionPart("categorical", 4), ActionPart("gaussian", 2)), (-1.0, 0.0), (1.0, 2.0)),
)


def mixed(length: int) -> Episode:
    random = np.random.default_rng(length)
    obs = {
        "camera": random.integers(256, size=(length + 1, 4, 3, 1)).astype(np.uint8),
        "speed": random.normal(size=(length + 1, 2)).astype(np.float32),
    }
    action = np.concatenate((random.integers(4, size=(length, 1)), 3 * random.normal(size=(length, 2))), axis=1)
    return Episode(obs, action.astype(np.float32), random.normal(size=length).astype(np.float32), True)


def test_images_and_actions_beyond_their_bounds_come_back(tmp_path: Path) -> None:
    content = [mixed(3), mixed(5)]
    written(tmp_path / "d", content, MIXED)
    for found, expected in zip(read(tmp_path / "d"), content, strict=True):
        assert_same(found, expected)
    loaded = minari.MinariDataset(tmp_path / "d" / "part-00000" / "data")
    choice, force = loaded[0].actions
    np.testing.assert_array_equal(choice, content[0].action[:, 0])
    np.testing.assert_array_equal(force, content[0].action[:, 1:].clip([-1, 0], [1, 2]))
    np.testing.assert_array_equal(loaded[1].observations["camera"], content[1].obs["camera"])


def test_datasets_are_found_by_folders_patterns_and_lists(tmp_path: Path) -> None:
    for name in ("a1", "a2", "b", "b[1]"):
        written(tmp_path / name, [episode(len(name), 3)])
    assert len(read(tmp_path / "a*")) == 2
    assert len(read(tmp_path / "a*", tmp_path / "b")) == 3
    assert read(tmp_path / "b[1]").sources[0].name == str(tmp_path / "b[1]" / "part-00000" / "data")  # no pattern
    assert len(read(tmp_path / "a1" / "part-00000")) == len(read(tmp_path / "a1" / "part-00000" / "data")) == 1


def minari_hdf5(folder: Path) -> Path:
    """Episodes as Minari's own writer stores them on HDF5."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    (folder / "data").mkdir(parents=True)
    storage = MinariStorage.new(
        folder / "data", spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Discrete(3), data_format="hdf5"
    )
    for one in episodes():
        ended = np.arange(len(one)) == len(one) - 1
        storage.update_episodes(
            [
                EpisodeBuffer(
                    observations=one.obs["obs"],
                    actions=one.action[:, 0],
                    rewards=one.reward,
                    terminations=ended & one.terminated,
                    truncations=ended & (not one.terminated),
                )
            ]
        )
    return folder


def test_minaris_own_files_are_read(tmp_path: Path) -> None:
    dataset = read(minari_hdf5(tmp_path / "h"))
    for found, expected in zip(dataset, episodes(), strict=True):
        assert_same(found, Episode(expected.obs, expected.action, expected.reward, expected.terminated))


def balanced() -> tuple[Any, Any, list[dict[str, Any]]]:
    ended = np.array([False, True])
    one = {"observations": np.zeros((3, 2)), "actions": np.array([1, 2]), "rewards": np.ones(2)}
    return spaces.Box(-1, 1, (2,)), spaces.Discrete(3), [one | {"terminations": ended, "truncations": ~ended & False}]


def halved(one: Episode) -> Episode:
    return Episode(one.obs, one.action, one.reward / 2, one.terminated, one.infos)


def test_a_function_gives_episodes_and_another_changes_them() -> None:
    dataset = open_dataset([f"{__name__}:balanced"], f"{__name__}:halved")
    assert dataset.lengths.tolist() == [2]
    np.testing.assert_array_equal(dataset[0].reward, np.full(2, 0.5, np.float32))
    np.testing.assert_array_equal(dataset[0].action, [[1], [2]])


# What is refused.


def raising(one: Episode) -> Episode:
    return Episode(one.obs["nothing"], one.action, one.reward, one.terminated)


def unbound(one: Episode) -> Episode:
    return Episode(one.obs, one.action + 9, one.reward, one.terminated)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("raising", "--postprocess_inputs raised KeyError at episode 0 of .*:balanced: 'nothing'"),
        ("unbound", "episode 0 of .*:balanced, as --postprocess_inputs returns it.*: an action is none of its space"),
    ],
)
def test_a_function_that_spoils_an_episode_is_named_in_one_line(function: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        open_dataset([f"{__name__}:balanced"], f"{__name__}:{function}")[0]


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def spoil_metadata(folder: Path, **changes: object) -> None:
    path = folder / "part-00000" / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
    path = folder / "part-00000" / "data" / "1" / "part-0.arrow"
    (batch,) = pa.ipc.open_file(path.read_bytes()).read_all().to_batches()
    changed = change(batch)
    with pa.ipc.new_file(path, changed.schema) as file:
        file.write_batch(changed)


def with_extension(batch: pa.RecordBatch) -> pa.RecordBatch:
    fields = [batch.schema.field(name) for name in batch.schema.names]
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": b"cos\nsystem\n."}
    fields[0] = fields[0].with_metadata(metadata)
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))


def with_gap(batch: pa.RecordBatch) -> pa.RecordBatch:
    rewards = batch.column("rewards").to_pylist()
    return batch.set_column(batch.schema.names.index("rewards"), "rewards", pa.array([None, *rewards[1:]]))


def truncate(folder: Path) -> None:
    path = folder / "part-00000" / "data" / "1" / "part-0.arrow"
    path.write_bytes(path.read_bytes()[:-40])


def link(folder: Path) -> None:
    path = folder / "part-00000" / "data" / "1" / "part-0.arrow"
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def longer(folder: Path) -> None:
    path = folder / "part-00000" / "data" / "1" / "metadata.json"
    path.write_text(json.dumps({"id": 1, "total_steps": 2}))


def empty(folder: Path) -> None:
    (folder / "part-00000" / "data" / "1" / "part-0.arrow").write_bytes(b"")


def pickled(folder: Path) -> None:
    """What would make a file if anybody unpickled it."""
    path = folder / "part-00000" / "data" / "1" / "part-0.arrow"
    path.write_bytes(pickle.dumps(Planted(str(folder / "planted"))))


def with_nested_extension(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One of the infos claims to be what a class of Python restores."""
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": b"cos\nsystem\n."}
    infos = batch.column("infos")
    fields = [pa.field(field.name, field.type, metadata=metadata) for field in infos.type]
    changed = pa.StructArray.from_arrays(infos.flatten(), fields=fields)
    return batch.set_column(batch.schema.names.index("infos"), "infos", changed)


def with_nan(batch: pa.RecordBatch) -> pa.RecordBatch:
    rewards = batch.column("rewards").to_pylist()
    return batch.set_column(batch.schema.names.index("rewards"), "rewards", pa.array([float("nan"), *rewards[1:]]))


def with_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    texts = pa.array(["1"] * batch.num_rows)
    return batch.set_column(batch.schema.names.index("rewards"), "rewards", texts)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (empty, "is damaged: "),
        (pickled, "is damaged: "),
        (lambda folder: rewrite(folder, with_nested_extension), "an extension type, which a pickle could stand for"),
        (lambda folder: rewrite(folder, with_nan), "is damaged: ValueError: it holds what is not finite"),
        (lambda folder: rewrite(folder, with_text), "is damaged: ValueError: an array of string"),
        (lambda folder: rewrite(folder, lambda batch: batch.drop_columns(["actions"])), "is damaged: KeyError: "),
        (truncate, "is damaged: "),
        (link, "is damaged: OSError: .*is a link"),
        (longer, ": it has 1 steps and not 2: 2 steps need 3 observations, there are 2$"),
        (lambda folder: rewrite(folder, with_extension), "an extension type, which a pickle could stand for"),
        (lambda folder: rewrite(folder, with_gap), "is damaged: ValueError: an array with gaps"),
    ],
)
def test_damaged_episodes_are_named_in_one_line(tmp_path: Path, spoil: Callable[[Path], None], error: str) -> None:
    written(tmp_path / "d")
    spoil(tmp_path / "d")
    dataset = read(tmp_path / "d")
    assert_same(dataset[0], episodes()[0])
    with pytest.raises(UsageError, match=rf"^--input: episode 1 of .*data.*{error}") as raised:
        dataset[1]
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "d" / "planted").exists()


def test_infos_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    """Text, structures and gaps, as other programs have them beside what is learned from."""

    def with_more(batch: pa.RecordBatch) -> pa.RecordBatch:
        infos, rows = batch.column("infos"), batch.num_rows
        more = {
            "text": pa.array(["a"] * rows),
            "nested": pa.array([{"x": 1}] * rows),
            "gaps": pa.array([None] + [1.0] * (rows - 1)),
            "number": pa.array([2.0] * rows),
        }
        fields = [*infos.type, *(pa.field(name, array.type) for name, array in more.items())]
        changed = pa.StructArray.from_arrays([*infos.flatten(), *more.values()], fields=fields)
        return batch.set_column(batch.schema.names.index("infos"), "infos", changed)

    written(tmp_path / "d")
    rewrite(tmp_path / "d", with_more)
    one = read(tmp_path / "d")[1]
    assert one.infos.keys() == {*episodes()[1].infos, "number"}
    assert (one.infos["number"] == 2).all()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"data_format": "parquet"}, "has the format parquet: arrow and hdf5 are read"),
        ({"observation_space": "{"}, "metadata.json is damaged: "),
        ({"action_space": '{"type": "Text"}'}, "metadata.json: a space of type Text cannot be learned from: "),
        ({"total_episodes": "5"}, "metadata.json is damaged: ValueError: total_episodes must be a whole number"),
        ({"total_episodes": 6}, "cannot read .*/5/metadata.json"),
        ({"total_episodes": 0}, "holds no step"),
    ],
)
def test_damaged_metadata_is_named_in_one_line(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    written(tmp_path / "d")
    spoil_metadata(tmp_path / "d", **changes)
    with pytest.raises(UsageError, match=error) as raised:
        read(tmp_path / "d")
    assert "\n" not in str(raised.value)


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    content = pickle.dumps(Planted(str(tmp_path / "planted")))
    for name in ("x.pkl", "x.pickle", "x.npy", "x.npz", "x.pt", "x.PTH"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=r"^--input: .* may be a pickle, which could run code: it is not read$"):
            read(tmp_path / name)
    (tmp_path / "p" / "data").mkdir(parents=True)
    (tmp_path / "p" / "data" / "metadata.json").write_bytes(content)
    for word, error in (
        ("empty", "there is no dataset .*, no folder with data/metadata.json as Minari writes it"),
        ("nothing", "there is no dataset"),
        ("n*", "there is no dataset"),
    ):
        with pytest.raises(UsageError, match=rf"^--input: .*{error}"):
            read(tmp_path / word)
    with pytest.raises(UsageError, match=r"metadata\.json"):
        read(tmp_path / "p")
    assert not (tmp_path / "planted").exists()
    with pytest.raises(UsageError, match=r"there is no module|No module"):
        read("nowhere_at_all:function")


def test_datasets_of_other_spaces_are_not_mixed(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b", [mixed(2)], MIXED)
    with pytest.raises(UsageError, match=r"^--input: .*b.* has other spaces, or another frame skip, than .*a"):
        read(tmp_path / "a", tmp_path / "b")


def external_link(file: h5py.File, elsewhere: Path) -> None:
    del file["episode_1"]
    file["episode_1"] = h5py.ExternalLink(elsewhere, "episode_1")


def soft_link(file: h5py.File, elsewhere: Path) -> None:
    del file["episode_1/rewards"]
    file["episode_1/rewards"] = h5py.SoftLink("/episode_0/rewards")


def external_bytes(file: h5py.File, elsewhere: Path) -> None:
    del file["episode_1/rewards"]
    file["episode_1"].create_dataset("rewards", (1,), np.float32, external=[(str(elsewhere), 0, 4)])


def virtual(file: h5py.File, elsewhere: Path) -> None:
    layout = h5py.VirtualLayout((1,), np.float32)
    layout[:] = h5py.VirtualSource(str(elsewhere), "episode_1/rewards", (1,))
    del file["episode_1/rewards"]
    file["episode_1"].create_virtual_dataset("rewards", layout)


def nested_link(file: h5py.File, elsewhere: Path) -> None:
    del file["episode_1/observations"]
    file["episode_1/observations"] = h5py.ExternalLink(elsewhere, "episode_1/observations")


def references(file: h5py.File, elsewhere: Path) -> None:
    del file["episode_1/rewards"]
    kind = h5py.special_dtype(ref=h5py.Reference)
    file["episode_1"].create_dataset("rewards", data=np.array([file["episode_0"].ref], kind), dtype=kind)


def texts(file: h5py.File, elsewhere: Path) -> None:
    del file["episode_1/rewards"]
    file["episode_1"].create_dataset("rewards", data=["cos\nsystem\n."])


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (references, "rewards is an array of object"),
        (texts, "rewards is an array of object"),
        (external_link, "episode_1 is a link, which may lead anywhere: it is not followed"),
        (soft_link, "rewards is a link, which may lead anywhere: it is not followed"),
        (external_bytes, "rewards is no array, or lies in another file"),
        (virtual, "rewards is no array, or lies in another file"),
    ],
)
def test_links_out_of_hdf5_are_refused(tmp_path: Path, spoil: Callable[[h5py.File, Path], None], error: str) -> None:
    folder, elsewhere = minari_hdf5(tmp_path / "h"), minari_hdf5(tmp_path / "other") / "data" / "main_data.hdf5"
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        spoil(file, elsewhere)
    with pytest.raises(UsageError, match=rf"^--input: .* is damaged: ValueError: {error}$"):
        read(folder)


def test_a_link_deep_in_an_episode_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder, elsewhere = minari_hdf5(tmp_path / "h"), minari_hdf5(tmp_path / "other") / "data" / "main_data.hdf5"
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        nested_link(file, elsewhere)
    dataset = read(folder)
    with pytest.raises(UsageError, match=r"episode 1 of .* is damaged: ValueError: observations is a link"):
        dataset[1]


def test_files_of_a_dataset_that_was_replaced_are_closed(tmp_path: Path) -> None:
    for number in range(2):
        if number:
            shutil.rmtree(tmp_path / "h")
        assert read(minari_hdf5(tmp_path / "h")).steps
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert sum(link.startswith(str(tmp_path)) for link in links) == 1


def test_hdf5_that_is_cut_off_or_a_link_is_named_in_one_line(tmp_path: Path) -> None:
    path = minari_hdf5(tmp_path / "h") / "data" / "main_data.hdf5"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"^--input: .*main_data.hdf5 is damaged: OSError: .*is a link"):
        read(tmp_path / "h")
    path.unlink()
    path.write_bytes((tmp_path / "elsewhere").read_bytes()[:3000])
    with pytest.raises(UsageError, match=r"^--input: .*main_data.hdf5 is damaged: ") as raised:
        read(tmp_path / "h")
    assert "\n" not in str(raised.value)


def test_a_disk_that_is_full_ends_in_one_line(tmp_path: Path) -> None:
    writer = DatasetWriter(OutputConfig(output=str(tmp_path / "d")), SPEC, {})
    (tmp_path / "d").rmdir()
    (tmp_path / "d").write_text("no folder any more")
    with pytest.raises(ResourceError, match=r"^cannot write .*: Not a directory$"):
        writer.write(episode(1, 2))


def test_whole_episodes_are_kept_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, files = door._write, []

    def limited(folder: int, name: str, content: bytes) -> None:
        files.append(name)
        if len(files) == 4:  # the second episode's metadata
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, name, content)

    monkeypatch.setattr(door, "_write", limited)
    writer = DatasetWriter(OutputConfig(output=str(tmp_path / "d")), SPEC, {})
    with pytest.raises(ResourceError, match=r"No space left on device$"), writer:  # noqa: PT012 (the second line fails)
        writer.write(episode(1, 2))
        writer.write(episode(2, 2))
    assert (writer.episodes, writer.steps) == (1, 2)
    (kept,) = read(tmp_path / "d")
    assert_same(kept, episode(1, 2))
    assert len(parts_in(tmp_path / "d")) == 1


def test_a_disk_without_room_for_metadata_keeps_no_hidden_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DatasetWriter(OutputConfig(output=str(tmp_path / "d")), SPEC, {})
    with pytest.raises(ResourceError, match="left"), writer:  # noqa: PT012 (the second line fails)
        writer.write(episode(1, 2))
        monkeypatch.setattr(door, "_write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room is left")))
        writer.write(episode(2, 2))
    assert (writer.episodes, parts_in(tmp_path / "d")) == (0, [])


# Links, and others who may write into the folder.


def moved(folder: Path, name: str) -> None:
    """Move something in a dataset elsewhere, and put a link to it in its place."""
    path, elsewhere = folder / name, folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


LINKS = [
    ("arrow", "part-00000"),
    ("arrow", "part-00000/data"),
    ("arrow", "part-00000/data/metadata.json"),
    ("arrow", "part-00000/data/1"),
    ("arrow", "part-00000/data/1/metadata.json"),
    ("arrow", "part-00000/data/1/part-0.arrow"),
    ("hdf5", "data"),
    ("hdf5", "data/metadata.json"),
    ("hdf5", "data/main_data.hdf5"),
]


@pytest.mark.parametrize(("stored", "name"), LINKS)
def test_links_in_a_dataset_are_not_followed(tmp_path: Path, stored: str, name: str) -> None:
    if stored == "arrow":
        written(tmp_path / "d")
    else:
        minari_hdf5(tmp_path / "d")
    moved(tmp_path / "d", name)
    last = name.rpartition("/")[2]
    with pytest.raises(UsageError, match=rf"^--input: .*\b{last} is a link, and no link is followed here$") as raised:
        list(read(tmp_path / "d"))
    assert str(raised.value).count("--input") == 1
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["part-00000", "part-00000/data", "part-00000/data/metadata.json"])
def test_no_part_is_added_beside_links(tmp_path: Path, name: str) -> None:
    written(tmp_path / "d")
    moved(tmp_path / "d", name)
    with pytest.raises(UsageError, match=r"^--output: cannot read .* is a link, and no link is followed here$"):
        written(tmp_path / "d")


def test_the_folder_that_is_named_may_be_a_link(tmp_path: Path) -> None:
    written(tmp_path / "real" / "d")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "d").symlink_to(tmp_path / "real" / "d")
    for word in (tmp_path / "link" / "d", tmp_path / "d", tmp_path / "d" / "part-00000" / "data"):
        assert len(read(word)) == len(LENGTHS)
    written(tmp_path / "d")
    assert parts_in(tmp_path / "real" / "d") == ["part-00000", "part-00001"]


def test_hdf5_is_read_from_the_file_that_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one, or a link, that takes its place behind the check is not opened."""
    folder = minari_hdf5(tmp_path / "h")
    path = folder / "data" / "main_data.hdf5"
    real = h5py.File

    def opened(name: str, mode: str) -> h5py.File:
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "nowhere")
        return real(name, mode)

    monkeypatch.setattr(h5py, "File", opened)
    assert [len(one) for one in read(folder)] == list(LENGTHS)


def victim_in(folder: Path) -> Path:
    """A folder of somebody's, with a file."""
    folder.mkdir()
    (folder / "metadata.json").write_text("precious")
    return folder


def require_untouched(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["metadata.json"]
    assert (folder / "metadata.json").read_text() == "precious"


@pytest.mark.parametrize("target", ["victim", "victim/metadata.json", "nothing"])
def test_a_link_in_the_place_of_the_hidden_folder_is_removed_itself(tmp_path: Path, target: str) -> None:
    victim = victim_in(tmp_path / "victim")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".open-writer").symlink_to(tmp_path / target)
    written(tmp_path / "d")
    assert parts_in(tmp_path / "d") == ["part-00000"]
    require_untouched(victim)


def replace_hidden_folder(folder: Path, victim: Path) -> None:
    (folder / ".open-writer").rename(folder / "aside")
    (folder / ".open-writer" / "data").mkdir(parents=True)
    (folder / ".open-writer" / "data" / "metadata.json").symlink_to(victim / "metadata.json")


def replace_hidden_folder_by_a_link(folder: Path, victim: Path) -> None:
    (folder / ".open-writer").rename(folder / "aside")
    (folder / ".open-writer").symlink_to(victim)


def replace_data(folder: Path, victim: Path) -> None:
    (folder / ".open-writer" / "data").rename(folder / ".open-writer" / "aside")
    (folder / ".open-writer" / "data").symlink_to(victim)


def plant_metadata(folder: Path, victim: Path) -> None:
    (folder / ".open-writer" / "data" / "metadata.json").symlink_to(victim / "metadata.json")


def plant_episode(folder: Path, victim: Path) -> None:
    (folder / ".open-writer" / "data" / "1").symlink_to(victim)


@pytest.mark.parametrize(
    ("plant", "error"),
    [
        (replace_hidden_folder, "somebody has replaced .open-writer"),
        (replace_hidden_folder_by_a_link, "somebody has replaced .open-writer"),
        (replace_data, ""),
        (plant_metadata, "File exists"),
        (plant_episode, "File exists"),
    ],
)
def test_links_that_others_plant_while_it_is_written_are_not_followed(
    tmp_path: Path, plant: Callable[[Path, Path], None], error: str
) -> None:
    victim = victim_in(tmp_path / "victim")
    writer = DatasetWriter(OutputConfig(output=str(tmp_path / "d")), SPEC, {})
    writer.write(episode(1, 2))
    plant(tmp_path / "d", victim)
    if error:
        with pytest.raises(ResourceError, match=rf"^cannot write .*d: {error}$"):  # noqa: PT012 (either may find it)
            writer.write(episode(2, 2))
            writer.close()
        assert writer.abandon() >= 1
    else:
        writer.write(episode(2, 2))
        writer.close()  # into the folder that it has open
    require_untouched(victim)
    assert [path for path in (tmp_path / "d").glob("part-*/data/*") if path.is_symlink()] == []


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        written(tmp_path / "d", output_max_file_size=1)
    writer = DatasetWriter(OutputConfig(output=str(tmp_path / "d")), SPEC, {})
    writer.write(episode(1, 2))
    writer.abandon()
    list(read(tmp_path / "d"))
    assert len(os.listdir("/proc/self/fd")) == before
