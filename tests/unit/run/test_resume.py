"""What a start does with a folder that is there already, without any process."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms import cli
from appo.algorithms.run.config import Config, parse_train
from appo.algorithms.run.directory.taking import old_run_out_of_the_way, refuse_unwritable, remove_old
from appo.algorithms.run.folder import find_source, journal, saved_flags
from appo.algorithms.run.resume import (
    begin_from,
    changes,
    finished_before,
    measured_before,
    seed_of_resumed,
    seed_of_segment,
)
from appo.algorithms.run.trust import marked
from appo.algorithms.run.tuning.choice import Costs
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.memory.arena import Arena
from appo.algorithms.runtime.memory.learner_state import LearnerState, ModelDescription, StateBlock, StateLayout, Vector
from appo.algorithms.runtime.memory.state_files import encode
from appo.utils import checkpoint_files
from appo.utils.errors import CheckpointError, DirectoryInUse, ResourceError, UsageError
from appo.utils.lock import RunLock
from appo.utils.run_folder import RunFolder, write_json_atomic
from tests.states import adam_layout, adam_state, stacked

MODEL = ModelDescription([("w", (2, 2)), ("b", (2,))], 1, adam_layout(6, 3))


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("refuses", ["write_json_atomic", "append_json_line"])
def test_a_full_disk_forbids_a_first_start_and_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("appo.algorithms.run.folder.write_json_atomic", no_room)
        with pytest.raises(ResourceError, match="No space left"):
            journal(run.path, {"gamma": 0.5}, [], [0])
    journal(run.path, {"gamma": 0.5}, [], [0])
    before = run.config.read_bytes(), run.history.read_bytes()
    monkeypatch.setattr(f"appo.algorithms.run.folder.{refuses}", no_room)
    journal(run.path, {"gamma": 0.5}, [], [100])
    assert "training goes on, and the flags of this start are not written down" in caplog.text
    assert (run.config.read_bytes(), run.history.read_bytes()) == before


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def flags(*words: str) -> Config:
    return parse_train(["--env=CartPole-v1", "--experiment=a", *words])


def error_of(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        flags(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def started(*words: str, env_steps: int = 0) -> Config:
    """A run that has been started with these flags."""
    config = flags(*words)
    directory = config.run.run_directory
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    (directory / ".lock").touch()
    write_json_atomic(directory / "status.json", {"state": "starting"})
    write_down(config, changes(config), [env_steps])
    return config


def write_down(
    config: Config, changed: list[str], env_steps: list[int], measured: dict[str, Any] | None = None
) -> None:
    journal(config.run.run_directory, marked(config.to_flat() | {"seed": 5}), changed, env_steps, measured)


def state_at(env_steps: int, returns: tuple[float, ...] = ()) -> LearnerState:
    vectors = np.random.default_rng(env_steps).standard_normal((3, 6)).astype(np.float32)
    meta: dict[str, Any] = {"version": 7, "updates": 3, "adam_steps": 3.0, "learning_rate": 0.1, "generator": "AAE="}
    meta |= {"env_steps": env_steps, "samples": env_steps, "discarded": 1}
    progress = {"episodes": len(returns), "windows": {"reward": list(returns)}}
    return adam_state(vectors, np.array([1.0, 2.0, 3.0]), {**meta, "progress": progress})


def save(config: Config, env_steps: int, returns: tuple[float, ...] = (), place: str = "checkpoint_p0") -> Path:
    files = encode(state_at(env_steps, returns), MODEL.table)
    return checkpoint_files.save(config.run.run_directory / place, checkpoint_files.checkpoint_name(env_steps), files)


# ---- resume, restart, overwrite


def begun() -> bool:
    return True


def never_begun() -> bool:
    return False


def contents() -> dict[Path, object]:
    """All runs; who has locked them last is no matter."""
    paths = sorted(Path("train_dir").rglob("*"))
    return {path: path.is_file() and path.name != ".lock" and path.read_bytes() for path in paths}


def test_resuming_touches_nothing(tmp_path: Path) -> None:
    directory = started().run.run_directory
    before = sorted(directory.rglob("*"))
    with old_run_out_of_the_way(directory, "resume", begun):
        assert sorted(directory.rglob("*")) == before
    with old_run_out_of_the_way(Path("train_dir/new"), "overwrite", begun):
        assert not Path("train_dir/new").exists()


def test_a_restart_renames_the_old_run_and_overwriting_removes_it() -> None:
    for number in (1, 2):
        directory = started().run.run_directory
        with old_run_out_of_the_way(directory, "restart", begun):
            assert not directory.exists()
            started()
        assert json.loads(Path(f"train_dir/a.bak{number}/config.json").read_text())["experiment"] == "a"
    for other in (".removed-a-b-0123abcd", ".removed-a-0123abcde"):
        Path("train_dir", other).mkdir()
    Path("train_dir/.removed-a-0123abcd").mkdir()  # a crash has left it
    with old_run_out_of_the_way(directory, "overwrite", begun):
        assert not directory.exists()
        started("--gamma=0.5")
        remove_old(directory)
    assert sorted(path.name for path in Path("train_dir").iterdir()) == [
        ".removed-a-0123abcde", ".removed-a-b-0123abcd", "a", "a.bak1", "a.bak2"
    ]  # fmt: skip
    assert json.loads(Path("train_dir/a/config.json").read_text())["gamma"] == 0.5


@pytest.mark.parametrize("behavior", ["restart", "overwrite"])
@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("has_incident", [False, True])
def test_a_start_that_never_trains_brings_the_old_run_back(
    behavior: str, has_config: bool, has_incident: bool, caplog: pytest.LogCaptureFixture
) -> None:
    directory = started("--gamma=0.5").run.run_directory
    (directory / "checkpoint_p0").mkdir()
    before = contents()
    incident = directory / "incidents" / "env-1"

    def start() -> None:
        with old_run_out_of_the_way(directory, behavior, never_begun):
            (directory / "logs").mkdir(parents=True)
            (directory / "logs" / "actor_0.log").write_text("my last words\n")
            if has_config:
                started("--gamma=0.25")
            if has_incident:
                incident.mkdir(parents=True)
                (incident / "actions.npy").write_bytes(b"1")
            raise UsageError("the environment cannot be made")

    caplog.set_level("INFO")
    with pytest.raises(UsageError, match="cannot be made"):
        start()
    if has_incident:
        assert (incident / "actions.npy").read_bytes() == b"1"
        shutil.rmtree(directory / "incidents")
    assert contents() == before
    assert "my last words" in caplog.text


@pytest.mark.parametrize("place", ["", "logs", "logs/main.log", "metrics.jsonl", "checkpoint_p0"])
def test_a_run_that_cannot_be_written_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = started().run.run_directory
    (directory / "checkpoint_p0").mkdir()
    for file in ("logs/main.log", "metrics.jsonl"):
        (directory / file).touch()
    refuse_unwritable(directory)
    monkeypatch.setattr(os, "access", lambda path, _: path != directory / place)
    with pytest.raises(
        UsageError, match=f"cannot write the run to train_dir/a: no permission for {directory / place}$"
    ):
        refuse_unwritable(directory)


@pytest.mark.parametrize("behavior", ["restart", "overwrite"])
def test_a_run_that_is_in_use_stays(behavior: str) -> None:
    directory = started().run.run_directory
    before = sorted(directory.rglob("*"))
    with (
        RunLock(directory / ".lock"),
        pytest.raises(DirectoryInUse),
        old_run_out_of_the_way(directory, behavior, begun),
    ):
        pytest.fail("entered")
    assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize("behavior", ["restart", "overwrite"])
def test_a_run_that_has_begun_in_the_old_place_stays(behavior: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = started().run.run_directory
    with contextlib.ExitStack() as other:
        with contextlib.suppress(DirectoryInUse), old_run_out_of_the_way(directory, behavior, never_begun):
            directory.mkdir()
            (directory / "config.json").write_text("theirs")
            other.enter_context(RunLock(directory / ".lock"))
            raise DirectoryInUse("another start was quicker")
        assert (directory / "config.json").read_text() == "theirs"
        assert "the old run is " in caplog.text
        assert "is in use by pid" in caplog.text


@pytest.mark.parametrize("behavior", ["restart", "overwrite"])
def test_nobody_else_can_take_the_old_folder_meanwhile(behavior: str) -> None:
    directory = started().run.run_directory
    with (
        (directory / ".lock").open() as opened_before,
        old_run_out_of_the_way(directory, behavior, begun),
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(opened_before, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("behavior", ["restart", "overwrite"])
def test_what_is_no_run_is_not_touched(behavior: str) -> None:
    directory = Path("train_dir/a")
    directory.mkdir(parents=True)
    (directory / "status.json").write_text("{}")
    Path("link").symlink_to(started("--train_dir=elsewhere").run.run_directory)
    Path("file").touch()
    for path in (directory, Path("link"), Path("file")):
        with (
            pytest.raises(UsageError, match="is not the folder of a run; not touched"),
            old_run_out_of_the_way(path, behavior, begun),
        ):
            pytest.fail("entered")
    assert (directory / "status.json").exists()
    assert Path("link").is_symlink()
    assert Path("elsewhere/a/config.json").exists()


def test_a_new_run_takes_no_flags_of_the_old_one_and_its_own_intent_is_not_saved() -> None:
    started("--gamma=0.5")
    assert flags("--restart_behavior=restart", "--hidden_size=8").learning.gamma == 0.99
    assert flags().learning.gamma == 0.5
    started("--restart_behavior=overwrite")
    assert flags().run.restart_behavior == "resume"
    with pytest.raises(UsageError, match=r"--env is required.*; --restart_behavior=restart begins a new run"):
        parse_train(["--experiment=a", "--restart_behavior=restart"])


def test_a_config_file_may_overwrite_a_run_of_another_algorithm() -> None:
    started()
    Path("f.toml").write_text('restart_behavior = "overwrite"\n')
    assert error_of("--algo=PPO").startswith("run a cannot change algo APPO -> PPO")
    assert flags("--algo=PPO", "--config=f.toml").run.algo == "PPO"
    assert error_of("--algo=PPO", "--config=f.toml", "--restart_behavior=resume").startswith("run a cannot change algo")


def test_the_run_that_a_config_file_names_decides_the_flags(capfd: pytest.CaptureFixture[str]) -> None:
    started("--algo=SAC")
    Path("f.toml").write_text('experiment = "a"\n')
    assert parse_train(["--config=f.toml", "--updates_per_step=2"]).learning.updates_per_step == 2
    assert cli.run_command(lambda: cli.run("train", ["--config=f.toml", "--vtrace_lambda=0.9"])) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: unknown flag --vtrace_lambda")


# ---- the journal


def test_every_start_is_written_down_with_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    started("--learning_rate=0.001")
    with caplog.at_level("INFO"):
        config = flags("--learning_rate=0.0005", "--gamma=0.9", "--train_dir=./train_dir")
        write_down(config, changes(config), [1234])
    assert caplog.messages == ["changed: learning_rate 0.001 -> 0.0005, gamma 0.99 -> 0.9"]
    lines = (config.run.run_directory / "config_history.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert (first["changed"], first["env_steps"]) == ([], [0])
    assert (second["changed"], second["env_steps"]) == (["learning_rate 0.001 -> 0.0005", "gamma 0.99 -> 0.9"], [1234])
    assert second["flags"] == saved_flags(config.run.run_directory)
    assert second["flags"]["seed"] == 5
    assert changes(flags()) == []


def test_what_was_measured_is_kept_beside_the_flags_and_used_for_the_same_work() -> None:
    costs, machine = Costs(((1, 0.5),), ((4, 0.25),), ((1, 1.0),), 7), {"cores": 2, "processor": "p"}
    config = started()
    assert measured_before(config, machine) is None
    write_down(config, [], [0], {"machine": machine, "costs": costs.plain()})
    assert measured_before(flags(), machine) == costs
    assert measured_before(flags("--learning_rate=0.5", "--num_workers=3"), machine) == costs
    assert measured_before(flags("--num_envs_per_worker=4"), machine) is None  # whose larger groups are not the same
    assert measured_before(flags(), {**machine, "cores": 3}) is None
    for other in ("--ppo_epochs=1", "--batch_size=64", "--reward_scale=2"):
        assert measured_before(flags(other), machine) is None
    assert "measured" not in saved_flags(config.run.run_directory)
    assert changes(flags()) == []


@pytest.mark.parametrize("measured", [None, 5, {}, {"costs": {"env": [[1, 0.5]]}}, {"costs": 1}])
def test_a_measurement_that_was_edited_is_made_again(measured: object) -> None:
    config, machine = started(), {"cores": 2}
    path = config.run.run_directory / "config.json"
    kept = {"machine": machine, **measured} if isinstance(measured, dict) else measured
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured": kept}))
    assert measured_before(flags(), machine) is None


def test_a_disk_that_refuses_the_journal_is_one_line() -> None:
    config = flags()
    with pytest.raises(ResourceError, match="cannot write the configuration to train_dir/a: No such file"):
        write_down(config, [], [0])


def test_each_resuming_start_has_a_seed_of_its_own_that_follows_from_the_first() -> None:
    directory = started().run.run_directory
    seeds = []
    for _ in range(3):
        seeds.append([seed_of_resumed(directory, seed) for seed in (5, 6)])
        assert seeds[-1] == [seed_of_resumed(directory, seed) for seed in (5, 6)]
        started()
    assert len({seed for pair in seeds for seed in (*pair, 5, 6)}) == 8
    assert all(0 <= seed < 2**63 for pair in seeds for seed in pair)
    seed_of_resumed(Path("nowhere"), 5)


def test_the_seed_of_a_leg_follows_from_what_was_learned_and_not_from_the_starts() -> None:
    seeds = [seed_of_segment(seed, env_steps) for seed in (5, 6) for env_steps in (0, 100, 101)]
    assert seeds[0] == 5
    assert seeds[3] == 6
    assert len(set(seeds)) == 6
    started()
    assert [seed_of_segment(seed, env_steps) for seed in (5, 6) for env_steps in (0, 100, 101)] == seeds
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---- nothing left to do


def test_a_run_is_finished_when_its_newest_checkpoint_has_the_budget() -> None:
    config = started("--train_for_env_steps=1000")
    assert finished_before(config) is None
    save(config, 999)
    assert finished_before(config) is None
    save(config, 1010)
    assert finished_before(config) == "every policy has learned from 1010 env steps"
    assert finished_before(flags("--train_for_env_steps=1011")) is None
    assert finished_before(flags("--sampler_only")) is None


def test_every_policy_counts() -> None:
    config = started("--train_for_env_steps=1000", "--num_policies=2")
    save(config, 1010)
    assert finished_before(config) is None
    save(config, 1020, place="checkpoint_p1")
    assert finished_before(config) == "every policy has learned from 1010 env steps"


def test_a_return_that_was_reached_stays_reached_by_the_same_budget() -> None:
    config = started("--train_until_return=10", "--stats_avg=2")
    save(config, 500, (9.0, 11.0))
    assert finished_before(config) == "the mean return has reached 10.00"
    save(config, 600, (9.0, 10.0))  # while the workers stopped
    assert finished_before(config) is None
    budget = Budget.of(config.run, config.sampling, 1).plain()
    status = {"state": "finished", "reason": "because", "budget": budget, "seconds": 60.0}
    write_json_atomic(config.run.run_directory / "status.json", status)
    assert finished_before(config) == "because"
    assert finished_before(flags("--train_until_return=11")) is None
    assert finished_before(flags("--train_for_seconds=50")) is None
    write_json_atomic(config.run.run_directory / "status.json", status | {"state": "interrupted"})
    assert finished_before(config) is None


def test_what_was_only_sampled_is_not_trained() -> None:
    config = started()
    save(config, 1)
    budget = Budget.of(config.run, config.sampling, 1).plain()  # that of a start with --sampler_only, too
    status = {"state": "finished", "reason": "300 steps are collected", "budget": budget, "seconds": 60.0}
    write_json_atomic(config.run.run_directory / "status.json", status)
    assert finished_before(config) is None


def test_a_run_that_has_had_its_seconds_says_so_until_there_are_more() -> None:
    config = started("--train_for_seconds=50")
    save(config, 600)
    path, budget = config.run.run_directory / "status.json", Budget.of(config.run, config.sampling, 1).plain()
    status = {"state": "finished", "reason": "50 seconds are over", "budget": budget, "seconds": 50.1}
    write_json_atomic(path, status)
    assert finished_before(config) == "50 seconds are over"
    assert finished_before(flags()) == "50 seconds are over"  # the flags of the run
    assert finished_before(flags("--train_for_seconds=40")) == "50 seconds are over"
    assert finished_before(flags("--train_for_env_steps=700")) == "50 seconds are over"
    assert finished_before(flags("--train_for_seconds=51")) is None
    assert finished_before(flags("--sampler_only")) is None  # to measure anew
    for other in ({"state": "interrupted"}, {"seconds": 49.9}, {"seconds": None}, {"budget": None}):
        write_json_atomic(path, status | other)
        assert finished_before(flags("--train_for_seconds=40", "--train_for_env_steps=700")) is None


def test_damaged_checkpoints_are_for_resuming_to_complain_of() -> None:
    config = started("--train_for_env_steps=1000")
    (save(config, 1010) / "state.json").unlink()
    assert finished_before(config) is None


# ---- the weights of another run


def blocks_of(count: int) -> list[StateBlock]:
    arena = Arena.create([f for policy in range(count) for f in StateBlock.declare(policy, MODEL.layout.vectors)])
    return [StateBlock(arena, policy) for policy in range(count)]


def test_sources_are_named_by_run_policy_and_kind(tmp_path: Path) -> None:
    config = started()
    for place in ("checkpoint_p0", "checkpoint_p1", "checkpoint_p1/best"):
        save(config, 100, place=place)
    group, run = Path("train_dir"), config.run.run_directory
    for text, place in [
        ("a", "checkpoint_p0"),
        ("a:1", "checkpoint_p1"),
        ("a:1:best", "checkpoint_p1/best"),
        (f"{tmp_path}/train_dir/a:1", "checkpoint_p1"),
        ("train_dir/a", "checkpoint_p0"),
    ]:
        assert find_source(text, group).checkpoints.resolve() == (run / place).resolve()


def test_a_chosen_checkpoint_is_found_whatever_kind_it_is() -> None:
    config = started()
    for env_steps, place in ((200, "checkpoint_p0"), (100, "checkpoint_p0/milestones"), (7, "checkpoint_p1/best")):
        save(config, env_steps, place=place)
    group, run = Path("train_dir"), config.run.run_directory
    for text, place in [
        ("a:ckpt_200", "checkpoint_p0"),
        ("a:ckpt_000000000100", "checkpoint_p0/milestones"),
        ("a:1:ckpt_7", "checkpoint_p1/best"),
    ]:
        found = find_source(text, group)
        assert found.checkpoints.resolve() == (run / place).resolve()
        assert found.env_steps == int(text.rpartition("_")[2])
    with pytest.raises(UsageError) as caught:
        find_source("a:ckpt_150", group)
    assert str(caught.value) == (
        "--init_from=a:ckpt_150: there is no such checkpoint in train_dir/a/checkpoint_p0;"
        " there are: ckpt_100, ckpt_200"
    )


def test_the_weights_of_a_chosen_checkpoint_are_taken_and_of_no_other() -> None:
    config = started()
    save(config, 100)
    damaged = save(config, 200)
    (block,) = blocks_of(1)
    begin_from(flags("--experiment=new", "--init_from=a:ckpt_100"), [block], [MODEL])
    taken = block.read()
    assert taken is not None
    assert taken.weights.tobytes() == state_at(100).weights.tobytes()
    (damaged / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"ckpt_000000000200"):
        begin_from(flags("--experiment=new", "--init_from=a:ckpt_200"), blocks_of(1), [MODEL])


def test_weights_are_taken_from_a_learner_with_other_vectors() -> None:
    state = state_at(100)
    (theirs, ours), moments = ("ring", "advantages"), state.vectors
    vectors = {name: moments[name] for name in ("weights", "statistics")} | {theirs: np.ones(4)}
    files = encode(LearnerState(vectors, state.meta), MODEL.table)
    place = started().run.run_directory / "checkpoint_p0"
    checkpoint_files.save(place, checkpoint_files.checkpoint_name(100), files)
    layout = adam_layout(6, 3)
    model = replace(MODEL, layout=StateLayout({**layout.vectors, ours: Vector(2, inherited=True)}, layout.numbers))
    block = StateBlock(Arena.create([*StateBlock.declare(0, model.layout.vectors)]), 0)
    begin_from(flags("--experiment=new", "--init_from=a"), [block], [model])
    taken = block.read()
    assert taken is not None
    assert taken.weights.tobytes() == state.weights.tobytes()
    assert taken.vectors["statistics"].tolist() == [1.0, 2.0, 3.0]
    assert [taken.vectors[name].tolist() for name in ("exp_avg", ours)] == [[0.0] * 6, [0.0] * 2]
    with pytest.raises(UsageError, match=r"^--init_from=a: .* is missing"):
        begin_from(
            flags("--experiment=other", "--init_from=a", "--init_whole"),
            [StateBlock(Arena.create([*StateBlock.declare(0, model.layout.vectors)]), 0)],
            [model],
        )


def test_a_whole_checkpoint_is_gone_on_from() -> None:
    config = started()
    save(config, 100, (1.0, 3.0))
    save(config, 200)
    words = ("--experiment=new", "--init_from=a:ckpt_100", "--init_whole")
    block, *others = blocks_of(3)
    taken = begin_from(flags(*words), [block], [MODEL])
    state = block.read()
    assert state is not None
    expected = state_at(100, (1.0, 3.0))
    for name, vector in expected.vectors.items():
        assert state.vectors[name].tobytes() == vector.tobytes()
    plain = {name: value for name, value in expected.meta.items() if name != "progress"}
    assert state.meta == plain | {"format": 1}
    assert taken["progress"]["windows"] == {"reward": [1.0, 3.0]}
    # A rate that the flags of the new run change takes the place of the one in the state.
    model = replace(MODEL, layout=adam_layout(6, 3, learning_rate=0.25))
    for other, word in zip(others, ("--learning_rate=0.25", "--per_policy=learning_rate=0.25"), strict=True):
        begin_from(flags(*words, word), [other], [model])
        changed = other.read()
        assert changed is not None
        assert (changed.meta["learning_rate"], changed.meta["adam_steps"]) == (0.25, 3.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--init_whole",), "--init_whole takes over the checkpoint of --init_from, which is not given"),
        (
            ("--init_from=a", "--init_whole", "--num_policies=2"),
            "--init_whole goes on with one policy, which does not go with --num_policies=2",
        ),
    ],
)
def test_what_cannot_be_taken_over_whole_is_refused(words: tuple[str, ...], message: str) -> None:
    save(started(), 100)
    assert error_of("--experiment=new", *words) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b", "--init_from=b: no run b, neither in train_dir nor as a path"),
        ("a:best", "--init_from=a:best: there is no checkpoint in train_dir/a/checkpoint_p0/best"),
        ("a:2", "--init_from=a:2: there is no checkpoint in train_dir/a/checkpoint_p2"),
        ("a:x", "--init_from=a:x: no run a:x, neither in train_dir nor as a path"),
    ],
)
def test_a_source_that_is_missing_is_one_line(text: str, message: str) -> None:
    save(started(), 100)
    assert error_of("--experiment=new", f"--init_from={text}") == message


def test_weights_and_statistics_are_taken_and_all_else_is_new() -> None:
    save(started(), 100)
    config = flags("--experiment=new", "--init_from=a")
    blocks = blocks_of(2)
    blocks[1].write(replace(state_at(7), meta={"env_steps": 7}))
    begin_from(config, blocks, [replace(MODEL, layout=adam_layout(6, 3, learning_rate=0.25)), MODEL])
    first, second = (block.read() for block in blocks)
    assert first is not None
    assert second is not None
    assert second.meta == {"env_steps": 7}  # it goes on with what it has
    assert first.weights.tobytes() == state_at(100).weights.tobytes()
    assert not stacked(first)[1:].any()
    assert first.vectors["statistics"].tolist() == [1.0, 2.0, 3.0]
    counters = dict.fromkeys(("version", "updates", "env_steps", "samples", "discarded", "adam_steps"), 0)
    assert first.meta == counters | {"learning_rate": 0.25}
    begin_from(flags("--experiment=new"), blocks_of(1), [MODEL])


def test_every_policy_begins_with_the_numbers_of_its_own_flags() -> None:
    save(started(), 100)
    blocks = blocks_of(2)
    models = [replace(MODEL, layout=adam_layout(6, 3, learning_rate=rate)) for rate in (0.25, 0.5)]
    begin_from(flags("--experiment=new", "--init_from=a"), blocks, models)
    states = [block.read() for block in blocks]
    assert [state.meta["learning_rate"] for state in states if state is not None] == [0.25, 0.5]


def test_of_two_best_ones_the_better_one_is_taken() -> None:
    directory = started().run.run_directory
    for env_steps, value in ((100, 8.5), (200, 2.5)):
        state = state_at(env_steps)
        state.meta["best"] = {"metric": "reward/mean", "value": value}
        parent = directory / "checkpoint_p0" / "best"
        checkpoint_files.save(parent, checkpoint_files.checkpoint_name(env_steps), encode(state, MODEL.table))
    (block,) = blocks_of(1)
    begin_from(flags("--experiment=new", "--init_from=a:best"), [block], [MODEL])
    taken = block.read()
    assert taken is not None
    assert taken.weights.tobytes() == state_at(100).weights.tobytes()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            replace(MODEL, table=[("w", (2, 3)), ("b", (2,))]),
            "1 weights differ, first w: saved (2, 2), expected (2, 3)",
        ),
        (replace(MODEL, layout=adam_layout(6, 4)), "it has 3 statistics, expected 4"),
    ],
)
def test_weights_of_another_model_are_refused(model: ModelDescription, message: str) -> None:
    save(started(), 100)
    with pytest.raises(UsageError) as caught:
        begin_from(flags("--experiment=new", "--init_from=a"), blocks_of(1), [model])
    assert str(caught.value) == f"--init_from=a: the checkpoint belongs to another model; {message}"


def test_only_a_new_run_can_begin_with_the_weights_of_another() -> None:
    save(started(), 100)
    assert "run a cannot change init_from empty -> b" in error_of("--init_from=b")
    started("--experiment=new", "--init_from=a")
    assert flags("--experiment=new", "--init_from=a").run.init_from == "a"  # the same command resumes
    assert flags("--experiment=new").run.init_from == "a"
    for behavior in ("restart", "overwrite"):
        message = error_of("--init_from=a:0", f"--restart_behavior={behavior}")
        assert message.startswith(f"--init_from=a:0 is the run that --restart_behavior={behavior} takes away")


@pytest.mark.parametrize("metric", ["reward", "/mean", "reward/median", "rewards/mean", "foo/mean", ""])
def test_the_metric_of_the_best_is_checked(metric: str) -> None:
    assert error_of(f"--save_best_metric={metric}").startswith("--save_best_metric=")
