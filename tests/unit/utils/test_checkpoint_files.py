import json
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from appo.utils.checkpoint_files import (
    MANIFEST,
    TEMPORARY,
    Damaged,
    FoundCheckpoint,
    checkpoint_name,
    listed,
    load,
    prune,
    quarantine,
    read,
    save,
    verify,
)
from appo.utils.errors import CheckpointError


def contents(step: int) -> dict[str, bytes]:
    # The model is more than two of the chunks in which it is written, so that a fault can tear it.
    return {"model.safetensors": bytes([step % 256]) * 2_200_000, "state.json": json.dumps({"step": step}).encode()}


def save_step(parent: Path, step: int) -> Path:
    return save(parent, checkpoint_name(step), contents(step))


def newest(parent: Path) -> FoundCheckpoint | None:
    loaded = load(parent)
    return None if loaded is None else loaded.found


def temporaries(parent: Path) -> list[str]:
    return [entry.name for entry in parent.iterdir() if entry.name.startswith(TEMPORARY)]


def test_saved_files_come_back_and_the_manifest_describes_them(tmp_path):
    parent = tmp_path / "run" / "checkpoint_p0"
    path = save(parent, "ckpt_000000000042", {"a.bin": b"abc", "b.bin": b"de"})
    assert path == parent / "ckpt_000000000042"
    assert sorted(entry.name for entry in path.iterdir()) == [MANIFEST, "a.bin", "b.bin"]
    assert (read(path, "a.bin", 3), read(path, "b.bin", 3)) == (b"abc", b"de")
    document = json.loads((path / MANIFEST).read_text())
    assert document["format_version"] == 1
    assert document["files"]["a.bin"] == {
        "size": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    verify(path)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no c\.bin"):
        read(path, "c.bin", 3)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", MANIFEST])
def test_names_that_leave_the_directory_or_clash_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name"):
        save(tmp_path, "ckpt_000000000001", {name: b""})
    with pytest.raises(ValueError, match="cannot name"):
        save(tmp_path, name, {})


def test_everything_is_on_disk_before_it_gets_its_name_and_the_name_before_save_returns(tmp_path, monkeypatch):
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def recorded_rename(source: str, target: str, **folders: int) -> None:
        rename(source, target, **folders)
        calls.append(f"rename to {target}")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path / "new", checkpoint_name(1), {"a": b"1", "b": b"2"})
    steps = ["tmp" if call.startswith(TEMPORARY) else call for call in calls]
    assert steps[0] == tmp_path.name  # the new parent itself
    assert steps[1:] == ["a", "b", "tmp", MANIFEST, "tmp", f"rename to {checkpoint_name(1)}", "new"]


def test_newest_orders_by_number_and_an_empty_parent_has_none(tmp_path):
    assert newest(tmp_path / "missing") is None
    assert newest(tmp_path) is None
    for step in (9, 10**12, 10**11):  # the second has thirteen digits and sorts first as text
        save_step(tmp_path, step)
    (tmp_path / ".tmp-ckpt_000000000099-1").mkdir()
    (tmp_path / "ckpt_latest").mkdir()
    (tmp_path / ("ckpt_" + "\u0661" * 13)).mkdir()  # digits, but none that a save writes
    found = newest(tmp_path)
    assert found is not None
    assert (found.step, found.path.name, found.damaged) == (10**12, "ckpt_1000000000000", ())


def test_a_file_is_read_up_to_the_size_that_the_caller_allows(tmp_path):
    path = save(tmp_path, checkpoint_name(1), {"a": b"123"})
    assert read(path, "a", 3) == b"123"
    with pytest.raises(CheckpointError, match="a has more than 2 bytes"):
        read(path, "a", 2)
    with pytest.raises(CheckpointError, match="has no b"):
        read(path, "b", 3)


def test_newest_names_the_damaged_ones_it_skipped_newest_first(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / checkpoint_name(3) / MANIFEST).unlink()
    (tmp_path / checkpoint_name(2) / "state.json").write_bytes(b"")
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert [damaged.path.name for damaged in found.damaged] == [checkpoint_name(3), checkpoint_name(2)]
    assert "cannot read MANIFEST.json" in found.damaged[0].reason
    assert "state.json has 0 bytes instead of 11" in found.damaged[1].reason
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.files == contents(1)


def test_only_damaged_checkpoints_is_an_error_never_a_fresh_start(tmp_path):
    for step in (1, 2):
        shutil.rmtree(save_step(tmp_path, step) / MANIFEST, ignore_errors=True)
        (tmp_path / checkpoint_name(step) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints can be used") as error:
        load(tmp_path)
    assert error.value.exit_code == 6
    assert "\n" not in str(error.value)


def test_verify_says_what_is_wrong(tmp_path):
    path = save_step(tmp_path, 1)
    state = path / "state.json"
    good = state.read_bytes()
    state.write_bytes(good.replace(b"1", b"2"))
    with pytest.raises(CheckpointError, match=r"the content of state\.json has changed"):
        verify(path)
    state.unlink()
    with pytest.raises(CheckpointError, match=r"missing state\.json"):
        verify(path)
    state.mkdir()
    with pytest.raises(CheckpointError, match=r"state\.json is not a file"):
        verify(path)
    state.rmdir()
    os.mkfifo(state)  # must not wait for somebody to write into it
    with pytest.raises(CheckpointError, match=r"state\.json is not a file"):
        verify(path)
    state.unlink()
    state.write_bytes(good)
    verify(path)
    (path / ".nfs0001").touch()
    verify(path)
    (path / "extra.bin").touch()
    with pytest.raises(CheckpointError, match=r"extra\.bin not in MANIFEST\.json"):
        verify(path)
    manifest = path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="format 2 is not 1"):
        verify(path)


def bit_flip(path: Path, random_: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    path.write_bytes(content)


def truncation(path: Path, random_: random.Random) -> None:
    os.truncate(path, random_.randrange(path.stat().st_size))


def growth(path: Path, random_: random.Random) -> None:
    path.write_bytes(path.read_bytes() + random_.randbytes(random_.randint(1, 100)))


def zeros(path: Path, random_: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = random_.randrange(len(content))
    end = min(len(content), start + random_.randint(1, 4096))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def removal(path: Path, random_: random.Random) -> None:
    path.unlink()


def directory_instead(path: Path, random_: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link_instead(path: Path, random_: random.Random) -> None:
    path.rename(path.with_name(".moved"))
    path.symlink_to(".moved")


def foreign_file(path: Path, random_: random.Random) -> None:
    path.with_name(f"x{random_.randrange(10**6)}").write_bytes(random_.randbytes(9))


def noise(path: Path, random_: random.Random) -> None:
    path.write_bytes(random_.randbytes(path.stat().st_size))


@pytest.mark.parametrize("attempts", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_damages_are_all_detected_and_the_previous_one_is_found(tmp_path, attempts):
    random_ = random.Random(20261121)
    damages = [bit_flip, truncation, growth, zeros, removal, directory_instead, link_instead, foreign_file, noise]
    good = tmp_path / "good"
    files = {"model.safetensors": random_.randbytes(3000), "state.json": b'{"step": 2}'}
    save(good, checkpoint_name(1), files)
    save(good, checkpoint_name(2), files)
    for attempt in range(attempts):
        parent = tmp_path / "damaged"
        shutil.copytree(good, parent)
        target = parent / checkpoint_name(2) / random_.choice([*files, MANIFEST])
        damage = random_.choice(damages)
        damage(target, random_)
        with pytest.raises(CheckpointError):
            verify(parent / checkpoint_name(2))
        found = newest(parent)
        assert found is not None, (attempt, damage)
        assert (found.step, len(found.damaged)) == (1, 1), (attempt, damage)
        shutil.rmtree(parent)


def test_every_bit_of_a_manifest_counts(tmp_path):
    path = save(tmp_path, checkpoint_name(1), {"state.json": b"{}"})
    original = (path / MANIFEST).read_bytes()
    for place in range(len(original)):
        for bit in range(8):
            changed = bytearray(original)
            changed[place] ^= 1 << bit
            (path / MANIFEST).write_bytes(changed)
            with pytest.raises(CheckpointError):
                verify(path)


def test_an_error_of_the_caller_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        save(tmp_path, checkpoint_name(1), {"state.json": b"{}", "model": "no bytes"})
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_the_newest_and_does_not_count_the_damaged(tmp_path):
    for step in range(1, 7):
        save_step(tmp_path, step)
    (tmp_path / checkpoint_name(6) / "state.json").unlink()
    (tmp_path / checkpoint_name(4) / MANIFEST).write_bytes(b"{")
    for _ in range(2):  # the second time, nothing is left to remove
        prune(tmp_path, 2)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [checkpoint_name(step) for step in (3, 4, 5, 6)]
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, 0)


def test_saving_after_a_fall_back_is_not_undone_by_prune(tmp_path):
    # Sample Factory sorts the new checkpoint before the damaged newer ones and deletes it at once.
    for step in (1, 20, 30, 40):
        save_step(tmp_path, step)
    for step in (20, 30, 40):
        model = tmp_path / checkpoint_name(step) / "model.safetensors"
        model.write_bytes(b"x" + model.read_bytes()[1:])  # visible to the hash only
    found = newest(tmp_path)
    assert found is not None
    quarantine(tmp_path, found.damaged)
    assert sorted(os.listdir(tmp_path / "corrupt")) == [checkpoint_name(step) for step in (20, 30, 40)]
    for step in (2, 3, 4):
        save_step(tmp_path, step)
        prune(tmp_path, 3)
    assert sorted(entry.name for entry in tmp_path.glob("ckpt_*")) == [checkpoint_name(step) for step in (2, 3, 4)]
    save_step(tmp_path, 40)
    quarantine(tmp_path, (Damaged(tmp_path / checkpoint_name(40), "again"),))
    assert len(list((tmp_path / "corrupt").iterdir())) == 4


@pytest.mark.slow
def test_a_reader_beside_saves_and_prunes_always_gets_a_whole_checkpoint(tmp_path):
    def small(step: int) -> dict[str, bytes]:
        return {"model": bytes([step % 256]) * 20_000, "state": str(step).encode()}

    save(tmp_path, checkpoint_name(0), small(0))
    failures: list[BaseException] = []
    ended = threading.Event()

    def write() -> None:
        try:
            for step in range(1, 151):
                save(tmp_path, checkpoint_name(step - step % 2), small(step))  # every second one replaces
                prune(tmp_path, 1)
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads, last = 0, 0
    while not ended.is_set() or reads < 100:
        loaded = load(tmp_path)
        assert loaded is not None
        step = int(loaded.files["state"])
        assert loaded.files == small(step)
        assert loaded.found.damaged == ()
        assert step >= last
        reads, last = reads + 1, step
    writer.join()
    assert failures == []
    newest = load(tmp_path)  # the last of those reads may have begun before the last save
    assert newest is not None
    assert newest.files == small(150)


def test_no_checkpoint_is_of_a_step_that_no_reader_finds(tmp_path):
    save(tmp_path, checkpoint_name(7), {"a": b"good"})
    (tmp_path / "ckpt_-00000053000").mkdir()
    (tmp_path / "ckpt_12.bak").mkdir()
    assert [step for step, _ in listed(tmp_path)] == [7]
    assert newest(tmp_path).step == 7
    with pytest.raises(ValueError, match="a checkpoint cannot be of step -53000"):
        checkpoint_name(-53000)
