"""A replay in its file: the same after it is loaded, whole whenever writing is cut off, and written piece by piece."""

import contextlib
import hashlib
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms.apex.algorithm import APEX
from appo.algorithms.apex.config import ApexConfig
from appo.algorithms.replay import keeper
from appo.algorithms.replay.algorithm import REPLAY
from appo.algorithms.replay.keeper import HEADER_BYTES, NOT_WRITTEN, REST, ReplayFile, ReplayKeeper
from appo.algorithms.replay.part import ReplayPart
from appo.algorithms.replay.storage import Pace, ReplayStorage
from appo.algorithms.runtime.learning.batches import Entered
from appo.algorithms.runtime.messages import Begin, Stop, WorkerReport
from appo.algorithms.runtime.topology import Topology
from appo.envs.spec import EnvSpec, ObservationSpec
from appo.utils.errors import UsageError
from appo.utils.logging import configure
from appo.utils.run_folder import RunFolder
from tests.unit.replay.replays import PLAN, ROLLOUT, ROWS, SPEC, STACKS, Replay, replay_of
from tests.unit.replay.test_storage import contents
from tests.unit.runtime.worlds import TOPOLOGY

KINDS = [(SPEC, False), (STACKS, False), (SPEC, True)]
NAMES = ["plain", "stacks", "sequences"]


def filled(spec: EnvSpec, path: Path, slots: int, *, sequences: bool = False) -> Replay:
    """Columns of so many slots are in the replay; nothing is in the file yet."""
    replay = replay_of(spec, path=path, replay_ratio=0.0, sequences=sequences, learning_starts=1)
    insert(replay, slots)
    return replay


def insert(replay: Replay, slots: int) -> None:
    for number in range(slots):
        replay.hand_over(number % 4)
        replay.fill()


def file_of(replay: Replay) -> ReplayFile:
    assert replay.source.file is not None
    return replay.source.file


def digest(storage: ReplayStorage) -> str:
    """A hash of all that can be drawn, in the order of insertion, and of how probable it is."""
    numbers = np.arange(storage.oldest, storage.newest + 1)
    whole = hashlib.sha256(storage._leaf[(numbers - 1) % storage.columns].tobytes())
    for name, array in sorted(contents(storage).items()):
        whole.update(name.encode() + array.tobytes())
    return whole.hexdigest()


def later(replay: Replay) -> Replay:
    """The replay of a later start: its memory is new."""
    return replay_of(replay.world.spec, path=replay.path, replay_ratio=0.0, sequences=replay.plan.sequences)


@pytest.mark.parametrize("slots", [1, 3, 7, 13])
@pytest.mark.parametrize(("spec", "sequences"), KINDS, ids=NAMES)
def test_a_later_start_has_the_replay_of_the_one_before(
    tmp_path: Path, spec: EnvSpec, sequences: bool, slots: int
) -> None:
    """Of 20 columns 3, 9, all and almost two rounds; then, written in between, some more."""
    replay = filled(spec, tmp_path / "file", slots, sequences=sequences)
    storage = replay.source.storage
    for more in (0, 1, 8):
        insert(replay, more)
        assert replay.source.take() is not None
        error = np.linspace(0, 3, PLAN.batch_size).reshape((ROLLOUT, -1) if sequences else (1, -1))
        assert list(replay.source.trained([{"priority": error}])) == []
        assert file_of(replay).save() == storage.arrays["valid"][storage.word > 0].sum()
        found = later(replay).source.storage
        assert digest(found) == digest(storage)
        assert (found.newest, found.oldest, found.size) == (storage.newest, storage.oldest, storage.size)
        assert found.totals == storage.totals._replace(place=-1)
        assert found.largest == storage.largest
        assert np.array_equal(found.tree.levels[-1], storage.tree.levels[-1])


@pytest.mark.parametrize(("spec", "sequences"), KINDS, ids=NAMES)
def test_a_later_start_without_priorities_draws_with_equal_probability(
    tmp_path: Path, spec: EnvSpec, sequences: bool
) -> None:
    replay = filled(spec, tmp_path / "file", 3, sequences=sequences)
    assert replay.source.take() is not None
    error = np.linspace(0, 3, PLAN.batch_size).reshape((ROLLOUT, -1) if sequences else (1, -1))
    list(replay.source.trained([{"priority": error}]))
    file_of(replay).save()
    before = replay.source.storage._leaf
    assert len(np.unique(before[before > 0])) > 2
    again = replay_of(spec, path=replay.path, replay_ratio=0.0, sequences=sequences, prioritized=False).source
    assert np.array_equal(again.storage._leaf, before > 0)
    assert again.storage.tree.total == np.count_nonzero(before)
    again.part.set_pace(starts=1)
    batch = again.take()
    assert batch is not None
    assert batch.recorded["weight"].unique().tolist() == [1.0]


def test_a_later_start_owes_uses_of_what_enters_in_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replay = replay_of(path=path)
    insert(replay, 2)  # learning has started
    file_of(replay).save()
    again = replay_of(path=path)
    assert again.source.pace.used == 0
    assert again.source.entered().samples == 0
    assert not again.source.part.owes
    again.hand_over(0, ends=0.0)
    again.fill()
    batches = 0
    while again.source.take() is not None:
        batches += 1
    assert batches == PLAN.replay_ratio * ROWS * ROLLOUT // PLAN.batch_size
    assert again.source.entered().samples == ROWS * ROLLOUT


def test_a_first_hand_over_like_the_last_one_before_is_inserted(tmp_path: Path) -> None:
    """Slots and sequences begin anew, so the newest column cannot be told apart by them."""
    replay = filled(SPEC, tmp_path / "file", 1)
    file_of(replay).save()
    again = later(replay)
    insert(again, 1)
    assert again.source.storage.newest == 2 * ROWS


def test_only_what_is_new_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = filled(SPEC, tmp_path / "file", 3)
    file, written = file_of(replay), []
    monkeypatch.setattr(file, "_write_columns", lambda descriptor, begin, end: written.append((begin, end)))
    assert [file.save() > 0, written] == [True, [(0, 9)]]
    assert [file.save() > 0, written] == [True, [(0, 9)]]
    insert(replay, 4)  # 21 columns in the places of 20
    file.save()
    assert written[1:] == [(0, 1), (9, 20)]
    insert(replay, 9)  # more than a whole round
    file.save()
    assert written[3:] == [(0, 20)]


class Killed(BaseException):
    """Ends a process, as far as a test can."""


@pytest.mark.parametrize(
    ("owner", "passage"), [(ReplayFile, "_check_columns"), (ReplayFile, "_check_content"), (ReplayPart, "begin")]
)
def test_a_successor_of_a_learner_that_died_while_loading_loads_all(
    tmp_path: Path, owner: type, passage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = replay_of(path=tmp_path / "file")
    insert(before, 3)
    file_of(before).save()
    replay = replay_of()
    replay.source.storage.pace[:] = 0  # a start whose first learner loads the file
    replay.path = before.path

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(owner, passage, die)
    with pytest.raises(Killed):
        replay.succeed()
    monkeypatch.undo()
    assert Pace(*replay.source.storage.pace.tolist()).known == 0
    found = replay.succeed()
    assert digest(found.storage) == digest(before.source.storage)
    totals = before.source.storage.totals
    assert found.pace == Pace(starts=totals.samples + 1, samples=-totals.samples, env_steps=-totals.env_steps, known=1)
    assert found.entered() == Entered()


@pytest.mark.parametrize("spec", [SPEC, STACKS], ids=["plain", "stacks"])
@pytest.mark.parametrize("after", range(0, 60, 3))
def test_whenever_writing_is_cut_off_what_is_whole_is_right(
    tmp_path: Path, spec: EnvSpec, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = filled(spec, tmp_path / "file", 6)
    storage, file = replay.source.storage, file_of(replay)
    file.save()
    before = storage.newest
    insert(replay, 3)
    everything, calls, write = dict(columns_of(storage)), 0, os.pwrite

    def dying(*arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Killed
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", dying)
    with contextlib.suppress(Killed):
        file.save()
    monkeypatch.undo()
    if calls <= after:
        before = storage.newest  # nothing was cut off
    found = dict(columns_of(later(replay).source.storage))
    assert found.keys() <= everything.keys() | (set(range(1, before + 1)) if not after else set())
    for number in found.keys() & everything.keys():
        assert found[number] == everything[number]
    if after and found.keys() != everything.keys():  # only the last checksum was cut off
        # Those in whose places something is written are struck out, all others are there.
        assert found.keys() == {number for number in everything if number <= before}
    successor, written = ReplayFile(file.path, storage), list[int]()  # it takes from the file what is whole in it
    with monkeypatch.context() as patch:
        patch.setattr(successor, "_write_columns", lambda descriptor, begin, end: written.extend(range(begin, end)))
        successor.save()
    assert len(written) == len(everything.keys() - found.keys())
    file.save()
    assert digest(later(replay).source.storage) == digest(storage)


def columns_of(storage: ReplayStorage) -> Iterator[tuple[int, str]]:
    """Number and content of every column."""
    kept = contents(storage)
    for index, number in enumerate(range(storage.oldest, storage.newest + 1)):
        yield number, hashlib.sha256(b"".join(array[index].tobytes() for array in kept.values())).hexdigest()


def test_a_column_whose_place_is_taken_while_it_is_written_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = filled(SPEC, tmp_path / "file", 6)
    storage, file = replay.source.storage, file_of(replay)
    write = file._write_columns

    def slow(descriptor: int, begin: int, end: int) -> None:
        insert(replay, 2)  # 24 columns: those numbered 1 to 4 are gone
        write(descriptor, begin, end)

    monkeypatch.setattr(file, "_write_columns", slow)
    file.save()
    found, now = later(replay).source.storage, dict(columns_of(storage))
    assert (found.oldest, found.newest) == (5, 18)
    for number, column in columns_of(found):
        assert column == now[number]
    monkeypatch.undo()
    file.save()
    assert digest(later(replay).source.storage) == digest(storage)


@pytest.mark.parametrize("spec", [SPEC, STACKS], ids=["plain", "stacks"])
@pytest.mark.parametrize("after", range(1, 60, 2))
def test_what_is_inserted_while_it_is_written_costs_the_columns_in_whose_place_it_is_alone(
    tmp_path: Path, spec: EnvSpec, after: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 20 places the last four and the first two; the process is killed on the way, or when all is written."""
    replay = filled(spec, tmp_path / "file", 11)
    storage, file = replay.source.storage, file_of(replay)
    file.save()
    before = dict(columns_of(storage))
    insert(replay, 1)
    before |= dict(columns_of(storage))
    calls, write, write_columns = 0, os.pwrite, file._write_columns

    def dying(*arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Killed
        return write(*arguments)  # type: ignore[arg-type]

    def slow(descriptor: int, begin: int, end: int) -> None:
        write_columns(descriptor, begin, end)
        insert(replay, 2)

    monkeypatch.setattr(os, "pwrite", dying)
    monkeypatch.setattr(file, "_write_columns", slow)
    with contextlib.suppress(Killed):
        file.save()
    monkeypatch.undo()
    found = dict(columns_of(later(replay).source.storage))
    assert found.items() <= before.items()
    assert set(found) >= set(range(23, 34))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_that_cannot_be_used_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = filled(SPEC, path := tmp_path / "file", 3)
    file_of(replay).save()
    whole = path.read_bytes()
    word = HEADER_BYTES + 8  # of the second column
    cases = (whole[:-1], b"x" + whole[1:], whole[:word] + b"\7" + whole[word + 1 :], whole[:1])
    for number, damaged in enumerate(cases, 1):
        path.write_bytes(damaged)
        again = later(replay)
        assert again.source.storage.size == 0
        assert f"{path} is put aside as file.old-{number}, the replay fills again" in caplog.text
        assert (tmp_path / f"file.old-{number}").read_bytes() == damaged
        caplog.clear()
        insert(again, 1)
        assert file_of(again).save() == again.source.storage.size > 0
        assert digest(later(again).source.storage) == digest(again.source.storage)
    path.write_bytes(b"")  # a first writing that was cut off before its first byte
    assert later(replay).source.storage.size == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_of_another_shape_is_put_aside_with_all_that_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is read, and when another process than its own would write to it; what was put aside before stays."""
    replay = filled(SPEC, path := tmp_path / "replay_p0", 3)
    steps = file_of(replay).save()
    kept = path.read_bytes()
    (tmp_path / "replay_p0.old-1").write_text("older")
    other = replay_of(path=path, capacity=80, replay_ratio=0.0)
    assert other.source.storage.size == 0
    (record,) = caplog.records
    why = "it is of a replay of another shape, or cut off"
    assert record.getMessage() == f"{path} is put aside as replay_p0.old-2, the replay fills again: {why}"
    path.write_bytes(kept)
    insert(other, 1)
    assert file_of(other).save() == other.source.storage.size > 0
    assert [(tmp_path / f"replay_p0.old-{number}").read_bytes() for number in (1, 2, 3)] == [b"older", kept, kept]
    assert RunFolder(tmp_path).replays() == [path]
    (tmp_path / "replay_p0.old-3").rename(path)
    assert later(replay).source.storage.size == steps


@pytest.mark.parametrize("nbytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("spec", [SPEC, STACKS], ids=["plain", "stacks"])
def test_checksums_are_those_of_all_arrays_of_a_column_in_turn(
    tmp_path: Path, spec: EnvSpec, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are checked one by one, some at a time or all together, by the writing and by the reading process."""
    monkeypatch.setattr(keeper, "CHECKED_BYTES", nbytes)
    replay = filled(spec, tmp_path / "file", 8)  # 24 columns in 20 places
    storage, file = replay.source.storage, file_of(replay)
    file.save()
    for column in range(storage.columns):
        parts = [np.array([storage.word[column]]), file._arrays["note"][column, 1:]]
        parts += [array[column] for name, array in storage.arrays.items() if name != "drawn"]
        parts += [array[column] for array in storage.obs.values()]
        parts += [file._arrays[name][column] for name in file._of_columns if name.count(".") == 2]
        parts += [file._arrays[name][begin:end] for name, begin, end in file._frames_of(column)]
        assert file._check[column] == zlib.crc32(b"".join(part.tobytes() for part in parts))
    found = later(replay).source
    assert found.file is not None
    assert np.array_equal(found.file._check, file._check)
    assert digest(found.storage) == digest(storage)


@pytest.mark.parametrize(("spec", "sequences"), KINDS, ids=NAMES)
def test_a_flipped_bit_anywhere_in_what_was_saved_is_found(
    tmp_path: Path, spec: EnvSpec, sequences: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In every array, at the first, a middle and the last byte that was written of it."""
    replay = filled(spec, path := tmp_path / "file", 3, sequences=sequences)
    file = file_of(replay)
    file.save()
    whole = path.read_bytes()
    assert later(replay).source.storage.size == replay.source.storage.size
    for name, array in (*file._arrays.items(), ("check", file._check)):
        used = 9 * array[0].nbytes if len(array) == replay.source.storage.columns else array.nbytes
        if name == "obs.obs.frames":
            used = int(file._arrays["obs.obs.span"][8, 1]) * array[0].nbytes
        for byte in (0, used // 2, used - 1):
            if name == "note" and byte < 8:
                continue  # the slot that a trajectory came from, which no later start reads
            damaged, place = bytearray(whole), file._place[name] + byte
            damaged[place] ^= 1 << byte % 8
            path.write_bytes(damaged)
            assert later(replay).source.storage.size == 0, (name, byte)
            assert f"{path} is put aside as file.old-1, the replay fills again: it is damaged: " in caplog.text
            caplog.clear()
            (tmp_path / "file.old-1").unlink()


@pytest.mark.parametrize(
    ("name", "value"), [("reward", np.nan), ("reward", -np.inf), ("obs.obs", np.nan), ("obs.obs", np.inf)]
)
def test_numbers_that_are_none_are_found_by_their_name(
    tmp_path: Path, name: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Where checksums are right, as memory was wrong."""
    spec = replace(SPEC, observations={**SPEC.observations, "obs": ObservationSpec((2,), "float32")})
    replay = filled(spec, tmp_path / "file", 3)
    valid = replay.source.storage.arrays["valid"]
    column, step = np.argwhere(valid)[len(np.argwhere(valid)) // 2]
    file_of(replay)._arrays[name][column, step] = value
    file_of(replay).save()
    assert later(replay).source.storage.size == 0
    assert f"it is damaged: {name} of trajectory {column + 1} is no number" in caplog.text


def test_main_shows_that_a_replay_was_put_aside(tmp_path: Path) -> None:
    """As a learner in a process of its own logs to a file, and people look at main."""
    replay = filled(SPEC, path := tmp_path / "file", 1)
    path.write_bytes(b"x")
    before = logging.getLogger().handlers[:]
    try:
        configure("learner_0", tmp_path / "log")
        again = later(replay)
    finally:
        for handler in set(logging.getLogger().handlers) - set(before):
            logging.getLogger().removeHandler(handler)
            handler.close()
        logging.getLogger().handlers[:] = before
    keeper = ReplayKeeper(file_of(again), 60.0, name="learner_0")
    (report,) = keeper.handle(Begin())
    why = "it is of a replay of another shape, or cut off"
    said = f"{path} is put aside as file.old-1, the replay fills again: {why}"
    assert report == WorkerReport("learner_0", {}, (said,))
    assert list(keeper.handle(Begin())) == []


@pytest.mark.parametrize(
    ("name", "index", "value", "said"),
    [
        ("word", 1, 1 << 62, "its columns have other places"),
        ("note", (1, 2), -1, "steps are counted wrongly"),
        ("largest", 0, float("nan"), "a priority is negative or no number"),
        ("leaf", 3, -1.0, "a priority is negative or no number"),
        ("valid", (1, 2), 7, "a flag is neither true nor false"),
        ("action", (1, 2, 0), 4, "an action is no choice"),
        ("action", (1, 2, 1), -1, "an action is no choice"),
        ("obs.obs.span", (1, 1), 1 << 60, "frames cannot lie where it says"),
        ("obs.obs.span", (0, 0), -(1 << 63), "frames cannot lie where it says"),
        ("obs.obs.span", (1, 0), 0, "frames cannot lie where it says"),
        ("obs.obs.index", (1, 2, 0), 65_535, "observations consist of frames that are not theirs"),
    ],
)
def test_a_file_that_would_have_something_read_beside_an_array_is_refused_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, index: int, value: float, said: str
) -> None:
    replay = filled(STACKS, path := tmp_path / "file", 3)
    file_of(replay).save()
    array = file_of(replay)._arrays[name]
    file = np.memmap(path, np.uint8, "r+")
    file[REST : REST + len(NOT_WRITTEN)] = np.frombuffer(NOT_WRITTEN, np.uint8)  # a checksum would find it before
    place = file_of(replay)._place[name]
    there = file[place : place + array.nbytes].view(np.uint8 if array.dtype == bool else array.dtype)
    there.reshape(array.shape)[index] = value
    file.flush()
    again = later(replay)
    assert again.source.storage.size == 0
    assert not again.source.storage.word.any()
    (record,) = caplog.records
    assert record.getMessage() == f"{path} is put aside as file.old-1, the replay fills again: it is damaged: {said}"
    insert(again, 1)
    assert again.source.storage.size > 0


def test_a_later_start_says_that_its_replay_fills_again_unless_its_own_files_are_there(tmp_path: Path) -> None:
    kept, several = ApexConfig(save_replay=True), replace(TOPOLOGY, apart=((REPLAY, 2),))

    def said(topology: Topology, flags: ApexConfig = kept) -> str:
        return APEX().resumes(flags, tmp_path, topology).partition(":")[0]

    assert said(TOPOLOGY) == said(several) == "no replay has been saved yet"
    assert said(TOPOLOGY, ApexConfig()) == "the replay was not saved (--save_replay)"
    (tmp_path / "replay_p0").touch()
    assert said(TOPOLOGY) == ""
    one_shard = replace(TOPOLOGY, apart=((REPLAY, 1),))
    assert said(one_shard) == ""
    with pytest.raises(UsageError, match=r"^replay_p0: saved by another number of processes, which --num_re"):
        said(several)
    assert said(replace(TOPOLOGY, num_policies=2)) == "a part of the replay was not saved"
    (tmp_path / "replay_p0").rename(tmp_path / "replay_p0.0")
    assert said(several) == "a part of the replay was not saved"
    (tmp_path / "replay_p0.1").touch()
    assert said(several) == ""
    for topology in (TOPOLOGY, one_shard):
        with pytest.raises(UsageError, match=r"^replay_p0\.0, replay_p0\.1: saved by another number"):
            said(topology)
    assert said(TOPOLOGY, ApexConfig()) == "the replay was not saved (--save_replay)"
    (tmp_path / "replay_p0.1").unlink()
    assert said(one_shard) == ""  # of an older run
    assert [path.name for path in RunFolder(tmp_path).replays()] == ["replay_p0"]


def test_the_keeper_writes_when_it_is_time_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replay = filled(SPEC, path := tmp_path / "file", 2)
    now = 100.0
    keeper = ReplayKeeper(file_of(replay), 60.0, lambda: now)
    assert not keeper.pending()
    now += 60
    assert keeper.pending()
    assert list(keeper.work()) == []
    assert not keeper.pending()
    assert keeper.thread.finish("a test")
    assert digest(later(replay).source.storage) == digest(replay.source.storage)
    insert(replay, 1)
    assert list(keeper.handle(Stop())) == []
    assert digest(later(replay).source.storage) == digest(replay.source.storage)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert list(keeper.handle(Stop())) == []
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    assert path.exists()


def test_a_failure_of_the_code_that_writes_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = ReplayKeeper(file := file_of(filled(SPEC, tmp_path / "file", 2)), 60.0)

    def fails() -> int:
        raise ValueError("a mistake")

    monkeypatch.setattr(file, "save", fails)
    assert list(keeper.work()) == []
    assert keeper.thread.finish("a test")
    with pytest.raises(ValueError, match="a mistake"):
        list(keeper.work())


def test_without_the_flag_nothing_is_written() -> None:
    keeper = ReplayKeeper(None, 60.0, lambda: 1e9)
    assert not keeper.pending()
    assert list(keeper.handle(Stop())) == []


def test_a_later_start_does_not_give_up_a_saved_replay_of_another_shape(tmp_path: Path) -> None:
    replay = filled(SPEC, tmp_path / "replay_p0", 3)
    file_of(replay).save()
    same = ApexConfig(save_replay=True, replay_capacity=PLAN.capacity, rollout=ROLLOUT)
    topology = replace(TOPOLOGY, rollout=ROLLOUT)
    assert APEX().resumes(same, tmp_path, topology) == ""
    # Asked for, but where there is one process, or a lockstep, the learner has the whole replay.
    assert APEX().resumes(replace(same, num_replay_shards=2), tmp_path, topology) == ""
    with pytest.raises(
        UsageError, match=r"the saved replay has 20 trajectories of 8 steps and not 40 of 8; give .*_p0"
    ):
        APEX().resumes(replace(same, replay_capacity=2 * PLAN.capacity), tmp_path, topology)
    assert later(replay).source.storage.size > 0


def test_a_first_writing_that_was_cut_off_leaves_an_empty_replay_that_waits_for_its_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = filled(SPEC, tmp_path / "file", 3)
    assert replay.source.pace.starts
    write = ReplayFile._write

    def failing(self: ReplayFile, descriptor: int, name: str, array: Any, begin: int = 0) -> None:
        if name == "drawn" and begin == 0 and len(array) != replay.source.storage.columns:
            raise OSError("the disk is full")
        write(self, descriptor, name, array, begin)

    monkeypatch.setattr(ReplayFile, "_write", failing)
    with pytest.raises(OSError, match="the disk is full"):
        file_of(replay).save()
    monkeypatch.undo()
    found = later(replay).source
    assert (found.storage.size, found.pace.starts, found.storage.largest[0]) == (0, 0, 0)


def test_a_file_of_another_reset_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Behind a truncated step the observation belongs to another episode only where resets take no step."""
    replay = filled(SPEC, path := tmp_path / "replay_p0", 3)
    assert file_of(replay).save() > 0
    assert later(replay).source.storage.size > 0
    assert replay_of(replace(SPEC, same_step=True), path=path, replay_ratio=0.0).source.storage.size == 0
    assert f"{path} is put aside as replay_p0.old-1, the replay fills again" in caplog.text
