"""Playing checkpoints: which one of a run is played, and what is said where there is none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appo.algorithms import cli
from appo.algorithms.playing.player import load_player
from appo.algorithms.playing.saved_run import find_run
from appo.envs.make import make_alone
from appo.utils.errors import CheckpointError, UsageError
from appo.utils.lock import RunLock
from tests.integration.enjoying import copied, enjoyed, evaluation, spoil

CHECKPOINTS = ("700", "600", "best/400=8.5", "best/450=2.5", "milestones/100", "milestones/300", "milestones/500")


@pytest.mark.slow
def test_a_run_without_a_usable_checkpoint_exits_6(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, copy = runs / "counter", tmp_path / "counter"
    copy.mkdir()
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    config = evaluation(tmp_path, "counter")
    with pytest.raises(CheckpointError, match="has no checkpoint of policy 0 yet"):
        find_run(config)
    (newest,) = (source / "checkpoint_p0").glob("ckpt_*")
    damaged = copy / "checkpoint_p0" / newest.name
    damaged.mkdir(parents=True)
    for file in newest.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    spoil(damaged)
    flags = [f"--train_dir={tmp_path}", "--experiment=counter", "--no_render"]
    assert cli.run_command(lambda: cli.run("enjoy", flags)) == 6
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[0].startswith("error: none of 1 checkpoints can be used")


def test_a_checkpoint_of_another_model_is_refused(runs: Path) -> None:
    config = evaluation(runs, "memory")
    run = find_run(config)
    other = run._replace(config=replace(run.config, model=replace(run.config.model, hidden_size=8)))
    envs = make_alone(other.config.env, window=config.window)
    with pytest.raises(UsageError, match="the checkpoint belongs to another model"):
        load_player(other, envs.spec, config, seed=1)
    envs.close()


@pytest.mark.parametrize(
    ("flags", "env_steps"),
    [
        ((), 700),
        (("--load_checkpoint_kind=latest",), 700),
        (("--load_checkpoint_kind=best",), 400),
        (("--load_checkpoint_kind=milestone",), 500),
        (("--load_checkpoint_kind=milestone", "--milestone=500"), 500),
        (("--milestone=499",), 300),
        (("--milestone=300",), 300),
        (("--milestone=100",), 100),
        (("--milestone=1e9",), 500),
    ],
)
def test_the_checkpoint_that_is_asked_for_plays(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], env_steps: int
) -> None:
    directory = copied(runs, "counter", tmp_path, *CHECKPOINTS)
    result = enjoyed(capfd, tmp_path, "--experiment=counter", "--max_num_episodes=1", *flags)
    assert result["env_steps"] == env_steps
    folder = {700: ".", 400: "best"}.get(env_steps, "milestones")
    path = directory / "checkpoint_p0" / folder / f"ckpt_{env_steps:012d}"
    assert Path(result["checkpoint"]) == path


@pytest.mark.parametrize(
    ("flags", "exit_code", "text"),
    [
        (("--load_checkpoint_kind=best",), 6, "run counter has no best checkpoint of policy 0 yet"),
        (("--load_checkpoint_kind=milestone",), 6, "run counter has no milestone of policy 0 yet"),
        (("--milestone=5",), 6, "run counter has no milestone of policy 0 yet"),
        (
            ("--load_checkpoint_kind=worst",),
            2,
            "--load_checkpoint_kind=worst is not one of latest, best, best_evaluated, milestone",
        ),
        (("--load_checkpoint_kind=best", "--milestone=5"), 2, "--milestone=5 needs --load_checkpoint_kind=milestone"),
        (("--milestone=-1",), 2, "--milestone must be at least 0"),
    ],
)
def test_a_checkpoint_that_is_not_there(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], exit_code: int, text: str
) -> None:
    copied(runs, "counter", tmp_path, "700")
    argv = [f"--train_dir={tmp_path}", "--experiment=counter", *flags]
    assert cli.run_command(lambda: cli.run("enjoy", argv)) == exit_code
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(f"error: {text}")


def test_no_milestone_is_as_early_as_that(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copied(runs, "counter", tmp_path, *CHECKPOINTS)
    argv = [f"--train_dir={tmp_path}", "--experiment=counter", "--milestone=99"]
    assert cli.run_command(lambda: cli.run("enjoy", argv)) == 2
    assert capfd.readouterr().err == "error: --milestone=99: the first milestone is at 100 env steps\n"


@pytest.mark.parametrize(
    ("folder", "flags", "newest", "older"),
    [
        ("", (), 700, 600),
        ("best", ("--load_checkpoint_kind=best",), 400, 450),  # a crash has left a worse one
        ("milestones", ("--load_checkpoint_kind=milestone",), 500, 300),
        ("milestones", ("--milestone=400",), 300, 100),
    ],
)
def test_damaged_checkpoints_are_skipped_with_a_warning(
    runs: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    folder: str,
    flags: tuple[str, ...],
    newest: int,
    older: int,
) -> None:
    directory = copied(runs, "counter", tmp_path, *CHECKPOINTS)
    parent = directory / "checkpoint_p0" / folder
    spoiled = parent / f"ckpt_{newest:012d}"
    spoil(spoiled)
    argv = [f"--train_dir={tmp_path}", "--experiment=counter", "--json", "--max_num_episodes=1", *flags]
    assert cli.run("enjoy", argv) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["env_steps"] == older
    assert printed.err.startswith(f"warning: damaged checkpoint skipped: {spoiled}: ")
    for path in parent.glob("ckpt_*"):
        if path.name <= f"ckpt_{older:012d}" and path != spoiled:
            spoil(path)
    assert cli.run_command(lambda: cli.run("enjoy", argv)) == 6
    assert "checkpoints can be used" in capfd.readouterr().err


def test_a_run_that_is_still_training_is_played(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is written into its directory, and its lock is not touched."""
    directory = copied(runs, "counter", tmp_path, "700")
    with RunLock(directory / ".lock"):
        before = sorted(directory.rglob("*"))
        assert enjoyed(capfd, tmp_path, "--experiment=counter")["num_episodes"] == 10
        assert sorted(directory.rglob("*")) == before
