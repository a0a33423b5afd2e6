import errno
import json
import logging
import math
import os
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from appo.algorithms.runtime import checkpointing as module
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.checkpointing import Checkpointing, resume
from appo.algorithms.runtime.config import LoggingConfig, RunConfig
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import LearnerState, ModelDescription, StateBlock, Table
from appo.algorithms.runtime.memory.state_files import decode, encode
from appo.algorithms.runtime.messages import PolicyTraits, SaveState, StateSaved, WorkerRestarted
from appo.algorithms.runtime.monitor.monitor import Monitor
from appo.algorithms.runtime.monitor.policy_progress import PolicyProgress
from appo.utils import checkpoint_files, failpoints
from appo.utils.errors import AppoError, CheckpointError, NumericsError, UsageError
from tests.patience import HANG_SECONDS
from tests.states import NAMES, adam_layout, adam_state, stacked

TABLE: Table = [("z.weight", (2, 3)), ("a.bias", (2,)), ("scale", ())]
SIZE, MOMENTS = 9, 4
LAYOUT = adam_layout(SIZE, MOMENTS)
MODEL = ModelDescription(TABLE, 0, LAYOUT)
STATS_AVG = 2


def state_of(env_steps: int) -> LearnerState:
    vectors = np.random.default_rng(env_steps).standard_normal((3, SIZE)).astype(np.float32)
    meta = {
        "version": 5, "updates": 7, "adam_steps": 6.0, "learning_rate": 0.1, "generator": "AAE=",
        "env_steps": env_steps, "samples": env_steps // 4, "discarded": 0,
    }  # fmt: skip
    return adam_state(vectors, np.array([1.0, np.pi, -1e300, 5e-324]), meta)


def assert_same(found: LearnerState | None, expected: LearnerState) -> None:
    assert found is not None
    assert stacked(found).tobytes() == stacked(expected).tobytes()
    assert found.vectors["statistics"].tobytes() == expected.vectors["statistics"].tobytes()
    assert {name: found.meta[name] for name in expected.meta} == expected.meta


def blocks_of(count: int = 1) -> list[StateBlock]:
    arena = Arena.create([f for p in range(count) for f in StateBlock.declare(p, LAYOUT.vectors)])
    return [StateBlock(arena, policy) for policy in range(count)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


class Saving:
    """Checkpointing of a run in a directory, the blocks it reads, and the clock it looks at."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, policies: int = 1, **flags: object) -> None:
        self.directory, self.blocks, self.now = directory, blocks_of(policies), 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        logging_config = LoggingConfig(tensorboard=False, stats_avg=STATS_AVG)
        self.monitor = Monitor(directory, logging_config, [{}] * policies, Budget(10**6))
        config = RunConfig(**flags)  # type: ignore[arg-type]
        self.checkpointing = Checkpointing(directory, config, self.blocks, [TABLE] * len(self.blocks), self.monitor)

    def learned(self, env_steps: int, policy: int = 0) -> None:
        """The learner has written its state and said so; wait for the writer."""
        self.blocks[policy].write(state_of(env_steps))
        self.checkpointing.handle(StateSaved(policy))
        self.checkpointing._pending[policy].result(HANG_SECONDS)

    def played(self, *returns: float, env_steps: int, policy: int = 0) -> None:
        """Episodes have ended, and the policy has learned from so many env steps."""
        self.monitor.policies[policy].episode_return.append(returns)
        self.monitor.policies[policy].totals["env_steps"] = env_steps

    def asked(self, seconds: float) -> list[SaveState]:
        self.now += seconds
        return list(self.checkpointing.tick(self.now))  # type: ignore[arg-type]


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_encoding_and_decoding_is_exact() -> None:
    state = state_of(40)
    files = encode(state, TABLE)
    assert sorted(files) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert json.loads(files["state.json"])["format"] == 1
    decoded, table = decode(files, TABLE, LAYOUT)
    assert_same(decoded, state)
    assert table == TABLE


def test_weights_are_found_by_name_whatever_their_order() -> None:
    decoded, table = decode(encode(state_of(40), TABLE), None, LAYOUT)
    assert table == sorted(TABLE)
    start = {name: 0 for name, _ in table}
    for place, (name, shape) in zip(np.cumsum([0] + [int(np.prod(s)) for _, s in table]), table, strict=False):
        start[name] = int(place)
        assert shape == dict(TABLE)[name]
    assert np.array_equal(stacked(decoded)[:, start["a.bias"] : start["a.bias"] + 2], stacked(state_of(40))[:, 6:8])
    assert np.array_equal(stacked(decoded)[:, start["scale"]], stacked(state_of(40))[:, 8])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [("z.weight", (3, 2)), ("a.bias", (2,)), ("scale", ())],
            r"1 weights differ, first z.weight: saved \(2, 3\), expected \(3, 2\)",
        ),
        ([*TABLE, ("new", (1,))], r"1 weights differ, first new: saved none, expected \(1,\)"),
        (TABLE[:1], r"2 weights differ, first a.bias: saved \(2,\), expected none"),
        ([("z.weight", (2, 3)), ("b.bias", (2,)), ("scale", ())], "2 weights differ, first b.bias"),
    ],
)
def test_the_weights_of_another_model_are_refused(table: Table, message: str) -> None:
    with pytest.raises(UsageError, match=f"the checkpoint belongs to another model; {message}"):
        decode(encode(state_of(40), TABLE), table, LAYOUT)


@pytest.mark.parametrize(
    ("renamed", "error", "message"),
    [
        ({"statistics": "other"}, UsageError, "belongs to another model; it has other and no statistics"),
        ({"statistics": ""}, CheckpointError, "optimizer.safetensors holds no statistics"),
    ],
)
def test_a_missing_array_is_of_another_model_if_another_stands_in_its_place(
    renamed: dict[str, str], error: type[Exception], message: str
) -> None:
    files = encode(state_of(40), TABLE)
    arrays = safetensors.numpy.load(files["optimizer.safetensors"])
    named = {renamed.get(name, name): array for name, array in arrays.items()}
    files["optimizer.safetensors"] = safetensors.numpy.save({name: array for name, array in named.items() if name})
    with pytest.raises(error, match=message):
        decode(files, TABLE, LAYOUT)


LARGE = np.zeros(1 << 22, np.float32)
"""16 MiB, which nobody has declared."""


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        ("optimizer.safetensors", "advantages", "belongs to another algorithm; it has advantages"),
        ("optimizer.safetensors", "statistics", f"another model; it has {LARGE.size} statistics, expected {MOMENTS}"),
        ("model.safetensors", "new", rf"1 weights differ, first new: saved \({LARGE.size},\), expected none"),
        ("model.safetensors", "scale", rf"1 weights differ, first scale: saved \({LARGE.size},\), expected \(\)"),
    ],
)
def test_names_and_sizes_that_are_not_declared_are_refused_before_anything_is_allocated(
    file: str, name: str, message: str
) -> None:
    files = encode(state_of(40), TABLE)
    large = LARGE.astype(np.float64) if name == "statistics" else LARGE
    files[file] = safetensors.numpy.save({**safetensors.numpy.load(files[file]), name: large})
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=message):
            decode(files, TABLE, LAYOUT)
        assert tracemalloc.get_traced_memory()[1] < LARGE.nbytes / 10
        tracemalloc.reset_peak()
        assert safetensors.numpy.load(files[file])[name].size == LARGE.size  # which takes what is refused
        assert tracemalloc.get_traced_memory()[1] > LARGE.nbytes
    finally:
        tracemalloc.stop()


def test_a_state_that_was_saved_is_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, policies=2)
    saving.learned(100)
    saving.learned(300)
    saving.learned(250, policy=1)
    blocks = blocks_of(2)
    assert [state["env_steps"] for state in resume(tmp_path, blocks, [MODEL] * len(blocks))] == [300, 250]
    assert_same(blocks[0].read(), state_of(300))
    assert_same(blocks[1].read(), state_of(250))
    saving.checkpointing.finish()


def test_without_checkpoints_a_run_starts_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_p1").mkdir()
    blocks = blocks_of(2)
    assert resume(tmp_path, blocks, [MODEL] * len(blocks)) == [{}, {}]
    assert [block.read() for block in blocks] == [None, None]


def test_resuming_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.learned(100)
    saving.checkpointing.finish()
    with pytest.raises(UsageError, match="another model"):
        resume(tmp_path, blocks_of(), [ModelDescription(TABLE[:2], 0, LAYOUT)])


def test_a_damaged_checkpoint_is_skipped_and_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.learned(100)
    saving.learned(200)
    saving.checkpointing.finish()
    parent = tmp_path / "checkpoint_p0"
    file = parent / "ckpt_000000000200" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    blocks = blocks_of()
    with caplog.at_level(logging.WARNING):
        assert [state["env_steps"] for state in resume(tmp_path, blocks, [MODEL] * len(blocks))] == [100]
    assert_same(blocks[0].read(), state_of(100))
    assert "damaged checkpoint skipped" in caplog.text
    assert names(parent) == ["ckpt_000000000100", "corrupt"]


@pytest.mark.parametrize("place", [0, 1, 2, "statistics"], ids=["weights", "means", "squares", "statistics"])
def test_a_checkpoint_that_is_not_finite_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: int | str
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.learned(100)
    saving.checkpointing.finish()
    parent, state = tmp_path / "checkpoint_p0", state_of(200)
    if place == "statistics":
        state.vectors["statistics"][1] = np.nan
    else:
        state.vectors[NAMES[place]][1] = np.nan
    checkpoint_files.save(
        parent, checkpoint_files.checkpoint_name(200), encode(state, TABLE)
    )  # as no run of ours would
    blocks = blocks_of()
    with caplog.at_level(logging.WARNING):
        assert [state["env_steps"] for state in resume(tmp_path, blocks, [MODEL] * len(blocks))] == [100]
    assert_same(blocks[0].read(), state_of(100))
    assert "ckpt_000000000200: weights, moments or statistics are not finite" in caplog.text
    assert names(parent) == ["ckpt_000000000100", "corrupt"]


def test_without_a_finite_checkpoint_nothing_is_started(tmp_path: Path) -> None:
    state = state_of(200)
    state.weights[0] = np.inf
    checkpoint_files.save(tmp_path / "checkpoint_p0", checkpoint_files.checkpoint_name(200), encode(state, TABLE))
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints can be used: .* are not finite") as caught:
        resume(tmp_path, blocks_of(), [MODEL])
    assert caught.value.exit_code == 6
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000200"]


def test_nothing_is_started_from_scratch_when_all_checkpoints_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.learned(100)
    saving.checkpointing.finish()
    (tmp_path / "checkpoint_p0" / "ckpt_000000000100" / "state.json").unlink()
    with pytest.raises(CheckpointError):
        resume(tmp_path, blocks_of(), [MODEL])


def test_states_are_asked_for_when_they_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, policies=2, save_every_sec=60)
    assert saving.asked(59.0) == []
    assert saving.asked(1.0) == [SaveState(0), SaveState(1)]
    assert saving.asked(0.1) == []
    assert saving.asked(60.0) == [SaveState(0), SaveState(1)]


def test_a_state_that_comes_during_a_write_is_written_after_that_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch, save_every_sec=60)
    read, has_read, goes_on = saving.blocks[0].read, threading.Event(), threading.Event()

    def read_and_wait() -> LearnerState | None:
        state = read()
        has_read.set()
        assert goes_on.wait(HANG_SECONDS)
        return state

    monkeypatch.setattr(saving.blocks[0], "read", read_and_wait)
    saving.blocks[0].write(state_of(100))
    assert saving.asked(60.0) == [SaveState(0)]
    saving.checkpointing.handle(StateSaved(0))
    assert has_read.wait(HANG_SECONDS)
    saving.checkpointing.ask()
    assert saving.asked(1.0) == [SaveState(0)]
    saving.blocks[0].write(state_of(200))
    saving.checkpointing.handle(StateSaved(0))
    assert saving.asked(1.0) == []  # the disk is not free yet
    goes_on.set()
    saving.checkpointing._pending[0].result(HANG_SECONDS)
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100"]
    assert saving.checkpointing.busy
    assert saving.asked(1.0) == []  # the state is in the block already
    saving.checkpointing._pending[0].result(HANG_SECONDS)
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100", "ckpt_000000000200"]
    assert not saving.checkpointing.busy
    saving.checkpointing.finish()


def test_the_answer_to_an_earlier_request_does_not_end_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch, save_every_sec=60)
    assert saving.asked(60.0) == [SaveState(0)]
    saving.checkpointing.ask()
    assert saving.asked(1.0) == [SaveState(0)]
    saving.learned(100)
    assert saving.checkpointing.busy
    saving.learned(200)
    assert not saving.checkpointing.busy
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100", "ckpt_000000000200"]
    saving.checkpointing.finish()


@pytest.mark.parametrize("deterministic_resume", [False, True])
def test_a_new_learner_is_asked_again_for_the_states_that_the_dead_one_did_not_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic_resume: bool
) -> None:
    flags = {"deterministic_resume": deterministic_resume, "save_every_env_steps": 100}
    saving = Saving(tmp_path, monkeypatch, policies=2, save_milestones_sec=60, **flags)
    assert saving.asked(60.0) == [SaveState(0), SaveState(1)]
    saving.learned(100)
    for process in ("actor_1", "learner_0"):  # which have nothing to send
        saving.checkpointing.handle(WorkerRestarted(process, "killed"))
    assert saving.asked(1.0) == []
    saving.checkpointing.handle(WorkerRestarted("learner_1", "killed"))
    assert saving.asked(1.0) == [SaveState(1)]
    assert saving.checkpointing.busy
    saving.learned(100, policy=1)
    assert not saving.checkpointing.busy
    assert names(tmp_path / "checkpoint_p1" / "milestones") == ["ckpt_000000000100"]
    saving.checkpointing.finish()


def test_between_barriers_only_the_best_and_milestones_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"save_every_sec": 60, "save_milestones_sec": 90, "deterministic_resume": True, "save_every_env_steps": 100}
    saving = Saving(tmp_path, monkeypatch, save_best_after=0, **flags)
    assert saving.asked(60.0) == []
    saving.played(1.0, 2.0, env_steps=10)
    assert saving.asked(10.0) == [SaveState(0)]
    saving.learned(10)
    assert saving.asked(20.0) == [SaveState(0)]  # the milestone
    saving.learned(20)
    saving.learned(30)  # whatever a learner says
    saving.checkpointing.finish(regular=False)
    parent = tmp_path / "checkpoint_p0"
    assert names(parent) == ["best", "milestones"]
    assert names(parent / "milestones") == ["ckpt_000000000020"]
    saving.checkpointing.finish()  # a barrier
    assert names(parent) == ["best", "ckpt_000000000030", "milestones"]
    saving.learned(40)  # of the next segment
    saving.checkpointing.finish()
    assert names(parent) == ["best", "ckpt_000000000030", "ckpt_000000000040", "milestones"]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, keep_checkpoints=2)
    for env_steps in (100, 200, 300, 400):
        saving.learned(env_steps)
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000300", "ckpt_000000000400"]
    saving.checkpointing.finish()


def test_milestones_are_kept_for_ever_one_of_every_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, policies=2, keep_checkpoints=1, save_every_sec=1000, save_milestones_sec=100)
    for policy in range(2):
        saving.learned(10, policy)
    assert saving.asked(100.0) == [SaveState(0), SaveState(1)]
    assert saving.asked(0.1) == []  # asked once, however long the learners take
    for env_steps in (20, 30):
        for policy in range(2):
            saving.learned(env_steps, policy)
    assert saving.asked(100.0) == [SaveState(0), SaveState(1)]
    saving.learned(40, 1)
    for policy in range(2):
        milestones = names(tmp_path / f"checkpoint_p{policy}" / "milestones")
        assert milestones == ["ckpt_000000000020", "ckpt_000000000040"][: 1 + policy]
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000030", "milestones"]
    saving.checkpointing.finish()


def test_without_milestones_none_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, save_every_sec=10)
    saving.asked(10_000.0)
    saving.learned(10)
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000010"]


def test_a_state_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.learned(100)
    directory = tmp_path / "checkpoint_p0" / "ckpt_000000000100"
    inode = directory.stat().st_ino
    saving.checkpointing.handle(StateSaved(0))
    saving.checkpointing.finish()
    assert directory.stat().st_ino == inode


def test_other_weights_at_the_same_env_steps_replace_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.learned(100)
    other = replace(state_of(7), meta={**state_of(100).meta, "version": 30})
    saving.blocks[0].write(other)
    saving.checkpointing.handle(StateSaved(0))
    saving.checkpointing.finish()
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100"]
    blocks = blocks_of()
    resume(tmp_path, blocks, [MODEL])
    assert_same(blocks[0].read(), other)


def test_the_end_saves_what_was_learned_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, policies=3)
    saving.learned(100)
    saving.blocks[0].write(state_of(170))
    saving.blocks[1].write(state_of(60))
    saving.checkpointing.finish()
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100", "ckpt_000000000170"]
    assert names(tmp_path / "checkpoint_p1") == ["ckpt_000000000060"]
    assert names(tmp_path / "checkpoint_p2") == []  # it never had a state


def test_a_checkpoint_that_cannot_be_saved_at_the_end_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch, policies=2)
    for policy, block in enumerate(saving.blocks):
        block.write(state_of(100 + policy))
    (tmp_path / "checkpoint_p0").touch()
    with pytest.raises(AppoError, match="checkpoint_p0"):
        saving.checkpointing.finish()
    assert names(tmp_path / "checkpoint_p1") == ["ckpt_000000000101"]


def test_a_full_disk_costs_one_checkpoint_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, disarm: None
) -> None:
    saving = Saving(tmp_path, monkeypatch, save_milestones_sec=100)
    saving.learned(100)
    failpoints.arm("ckpt.rename:enospc")
    with caplog.at_level(logging.WARNING):
        saving.asked(100.0)
        saving.learned(200)
    assert "checkpoint of policy 0 not saved, will be tried again" in caplog.text
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100"]
    failpoints.arm("")
    saving.learned(300)
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100", "ckpt_000000000300", "milestones"]
    assert checkpoint_files.load(tmp_path / "checkpoint_p0" / "milestones") is not None  # owed since the disk was full
    saving.checkpointing.finish()


@pytest.mark.parametrize("end", [False, True])
def test_a_checkpoint_that_was_removed_is_written_again_though_nothing_was_learned_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bool
) -> None:
    saving = Saving(tmp_path, monkeypatch, save_best_after=0)
    saving.played(1.0, 3.0, env_steps=100)
    saving.asked(1000.0)
    saving.learned(100)
    assert names(tmp_path / "checkpoint_p0") == ["best", "ckpt_000000000100"]
    os.rename(tmp_path / "checkpoint_p0", tmp_path / "away")
    saving.checkpointing.lost()
    saving.checkpointing._writer.finish("a look")
    if end:
        saving.checkpointing.finish()
    else:
        saving.asked(2000.0)
        saving.learned(100)
    assert names(tmp_path / "checkpoint_p0") == ["best", "ckpt_000000000100"]
    assert names(tmp_path / "checkpoint_p0" / "best") == ["ckpt_000000000100"]


def test_a_best_checkpoint_that_was_removed_alone_is_forgotten_and_one_out_of_reach_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch, save_best_after=0)
    saving.played(1.0, 3.0, env_steps=100)
    saving.asked(1000.0)
    saving.learned(100)
    (best,) = saving.checkpointing._best
    folder = tmp_path / "checkpoint_p0" / "best"
    with monkeypatch.context() as patched:
        patched.setattr("os.lstat", lambda path: (_ for _ in ()).throw(PermissionError(errno.EACCES, "denied")))
        best.forget_what_is_gone()
    assert best.value == 2.0
    (folder / "notes").mkdir()
    os.rename(folder / "ckpt_000000000100", tmp_path / "away")
    best.forget_what_is_gone()
    assert best.value == -math.inf
    saving.checkpointing.finish()


def test_a_frozen_policy_has_no_best_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, save_best_after=0)
    (progress,), (best,) = saving.monitor.policies, saving.checkpointing._best
    saving.played(1.0, 3.0, env_steps=0)
    assert best.better(progress) == 2.0
    progress.frozen = True
    assert best.better(progress) is None


def test_a_copy_beside_the_best_checkpoint_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is named as a checkpoint is one."""
    saving = Saving(tmp_path, monkeypatch, save_best_after=0)
    folder = tmp_path / "checkpoint_p0" / "best"
    copies = ["ckpt_000000000001 (copy)", "ckpt_000000000100.bak", "ckpt_best"]
    for name in copies:
        (folder / name).mkdir(parents=True)
    for env_steps in (100, 200):
        saving.played(float(env_steps), 2.0 * env_steps, env_steps=env_steps)
        saving.asked(10.0 * env_steps)
        saving.learned(env_steps)
    assert names(folder) == sorted([*copies, "ckpt_000000000200"])
    saving.checkpointing.finish()


def test_what_other_weights_have_played_is_no_merit_of_those_that_were_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner has gone on from another policy and saved that; main has not heard of it yet."""
    saving = Saving(tmp_path, monkeypatch, save_best_after=0)
    saving.played(1.0, 3.0, env_steps=100)
    state = state_of(100)
    saving.blocks[0].write(replace(state, meta={**state.meta, "traits": PolicyTraits(changes=1, adoptions=1).plain()}))
    saving.checkpointing.finish()
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100"]  # and no best one
    (resumed,) = resume(tmp_path, blocks_of(), [MODEL])
    progress = PolicyProgress(STATS_AVG)
    progress.restore(resumed)
    assert (progress.adoptions, progress.episode_return.count) == (1, 0)
    resumed["progress"]["adoptions"] = 1
    progress.restore(resumed)
    assert progress.episode_return.values() == [1.0, 3.0]
    of_a_new_run = {name: value for name, value in resumed.items() if name != "traits"}  # by --init_whole
    progress = PolicyProgress(STATS_AVG)
    progress.restore(of_a_new_run)
    assert (progress.adoptions, progress.episode_return.values()) == (0, [1.0, 3.0])


def test_what_main_knows_is_kept_with_the_state_and_not_given_to_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.played(1.0, 3.0, 5.0, env_steps=100)
    saving.now += 4.0
    saving.learned(100)
    saving.checkpointing.finish()
    blocks, anew = blocks_of(), adam_layout(SIZE, MOMENTS, learning_rate=0.5)
    (state,) = resume(tmp_path, blocks, [ModelDescription(TABLE, 0, anew)], {"learning_rate"})
    windows = {"reward": [3.0, 5.0], "len": []}
    assert state["progress"] == {"elapsed_seconds": 4.0, "episodes": 0, "adoptions": 0, "windows": windows}
    found = blocks[0].read()
    assert found is not None
    assert found.meta == {"format": 1, **state_of(100).meta, "learning_rate": 0.5}


def test_a_bug_in_the_writer_does_not_pass_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.checkpointing.tables = [[("z.weight", (1000, 1000))]]
    with pytest.raises(ValueError, match="reshape"):
        saving.learned(100)
    with pytest.raises(ValueError, match="reshape"):
        saving.checkpointing.handle(StateSaved(0))


@pytest.mark.parametrize("where", ["exp_avg_sq", "statistics"])
def test_what_is_not_finite_is_refused_and_the_last_good_checkpoint_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    saving = Saving(tmp_path, monkeypatch, keep_checkpoints=1)
    saving.learned(100)
    bad = state_of(200)
    bad.vectors[where][-1] = np.nan
    saving.blocks[0].write(bad)
    saving.checkpointing.handle(StateSaved(0))
    saving.checkpointing._pending[0].result(HANG_SECONDS)
    assert "not finite; older checkpoints are kept" in caplog.text
    with pytest.raises(NumericsError) as error:
        saving.checkpointing.finish()
    assert error.value.exit_code == 4
    assert names(tmp_path / "checkpoint_p0") == ["ckpt_000000000100"]
