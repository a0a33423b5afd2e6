"""How runs get their folders: names of their own, and none for a start that is refused."""

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from appo import Training, train
from appo.algorithms.run import main
from appo.algorithms.run.directory.taking import lock_run_folder
from appo.utils.errors import AppoError, DirectoryInUse, ResourceError
from appo.utils.lock import RunLock
from tests.integration.runs import ROOT, SMALL, run_command

pytestmark = pytest.mark.slow  # processes, seconds each

HOSTILE = "tests.chaos.hostile_env:Hostile"
FLAGS = {**SMALL, "plot": False, "train_for_env_steps": 200}


def test_unnamed_runs_whose_names_were_chosen_at_the_same_moment_have_folders_of_their_own(tmp_path: Path) -> None:
    """Both chose the first free number; who comes second takes the next one, and trains."""
    first, second = (Training(FLAGS, train_dir=tmp_path) for _ in range(2))
    assert first.directory == second.directory == tmp_path / "Counter-v0_1"
    for run in (first, second):
        with run:
            list(run)
    assert [run.result.directory.name for run in (first, second)] == ["Counter-v0_1", "Counter-v0_2"]
    assert second.config.run.experiment == "Counter-v0_2"
    for run in (first, second):
        assert {"config.json", "checkpoint_p0", "status.json"} <= {path.name for path in run.directory.iterdir()}


def test_a_run_that_was_named_is_that_run_and_no_other(tmp_path: Path) -> None:
    for _ in range(2):
        with Training(FLAGS, train_dir=tmp_path, experiment="Counter-v0_1") as run:
            list(run)
    assert [path.name for path in tmp_path.iterdir()] == ["Counter-v0_1"]


def test_folders_of_unnamed_runs_are_made_by_one_start_each(tmp_path: Path) -> None:
    found, ready, leave = list[str](), threading.Barrier(9), threading.Event()

    def start() -> None:
        ready.wait()
        with lock_run_folder(tmp_path / "runs" / "Env_1", "resume", unnamed=True) as lock:
            found.append(lock.path.parent.name)
            leave.wait()

    starts = [threading.Thread(target=start) for _ in range(8)]
    for one in starts:
        one.start()
    ready.wait()
    leave.set()
    for one in starts:
        one.join()
    assert sorted(found) == sorted(f"Env_{number}" for number in range(1, 9))


@pytest.mark.slow
def test_commands_started_at_the_same_moment(tmp_path: Path) -> None:
    flags = [f"--{name}={value}" for name, value in FLAGS.items() if name != "encoder_mlp_layers"]
    command = [sys.executable, str(ROOT / "train_appo.py"), f"--train_dir={tmp_path}", *flags]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(4)]
    assert [(one.communicate()[1], one.returncode) for one in started] == [(b"", 0)] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"Counter-v0_{number}" for number in range(1, 5)]


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "an environment that raises": (
        {"env": HOSTILE, "env_kwargs": {"fault": "raise", "where": "init"}},
        "out of cheese",
    ),
    "one that raises in its first reset": (
        {"env": HOSTILE, "env_kwargs": {"fault": "raise", "where": "reset"}},
        "out of cheese",
    ),
    "spaces": ({"env": HOSTILE, "env_kwargs": {"space": "text"}}, "observation space Text"),
    "arguments": ({"env_kwargs": {"colour": "green"}}, "--env_kwargs"),
    "a plan of workers": ({"batch_mode": "complete_episodes"}, "--batch_mode"),
    "memory": ({"memory_limit_mb": 1, "rollout": 2048, "batch_size": 1 << 17, "num_envs_per_worker": 64}, "memory"),
    "a network": ({"encoder_custom": "tests.unit.models.custom_encoders:Raises"}, "encoder_custom"),
    "callbacks": ({"callbacks": "tests.nothing:Nothing"}, "callbacks"),
    "weights of another model": ({"init_from": "other"}, "--init_from"),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("reason", REFUSED)
def test_a_start_that_is_refused_leaves_no_folder(tmp_path: Path, reason: str, named: bool) -> None:
    flags, said = REFUSED[reason]
    other = flags.get("init_from")
    if other:
        train({**FLAGS, "encoder_mlp_layers": (8,)}, train_dir=tmp_path / "runs", experiment=other)
    name = {"experiment": "mine"} if named else {}
    with pytest.raises(AppoError, match=said), Training({**FLAGS, **flags}, train_dir=tmp_path / "runs", **name) as run:
        list(run)
    assert [path.name for path in tmp_path.glob("runs/*")] == ([other] if other else [])
    assert (tmp_path / "runs").exists() == bool(other)


@pytest.mark.parametrize("placement", ["local", pytest.param("central", marks=pytest.mark.slow)])
def test_nor_does_one_that_a_probe_refuses(tmp_path: Path, placement: str) -> None:
    """What the environment printed to its log is said, as the log goes with the folder."""
    flags = {"inference": placement, "env_kwargs": '{"fault": "raise", "where": "init"}'}
    refused = run_command(tmp_path / "runs" / "a", **{**FLAGS, "encoder_mlp_layers": 16, **flags, "env": HOSTILE})
    assert refused.returncode == 3
    assert refused.stderr.startswith(f"error: {HOSTILE} raised HostileError: out of cheese\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["by the probe", "after its flags were written down"])
@pytest.mark.parametrize("behavior", ["restart", "overwrite"])
def test_the_run_that_was_to_be_replaced_is_there_after_a_refusal(
    tmp_path: Path, behavior: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Training(FLAGS, train_dir=tmp_path, experiment="a") as run:
        list(run)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "a").iterdir()}
    flags: dict[str, Any] = {**FLAGS, "restart_behavior": behavior}
    if when == "by the probe":
        flags |= {"env": HOSTILE, "env_kwargs": {"fault": "raise", "where": "init"}}
    else:
        monkeypatch.setattr(main, "start_tracking", Mock(side_effect=ResourceError("no more of something")))
    with pytest.raises(AppoError), Training(flags, train_dir=tmp_path, experiment="a") as run:
        list(run)
    assert {path.name: path.stat().st_ino for path in (tmp_path / "a").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_run_that_goes_on_is_there_after_a_refusal(tmp_path: Path) -> None:
    with Training(FLAGS, train_dir=tmp_path, experiment="a") as run:
        list(run)
    more = {**FLAGS, "train_for_env_steps": 400, "encoder_mlp_layers": (8,)}
    with pytest.raises(AppoError), Training(more, train_dir=tmp_path, experiment="a") as run:
        list(run)
    assert (tmp_path / "a" / "checkpoint_p0").is_dir()


@pytest.mark.slow
def test_what_led_an_environment_to_fail_is_kept(tmp_path: Path) -> None:
    """The probe has played it; in the actor it fails, and `appo replay` can repeat that."""
    kwargs = f'{{"fault": "raise", "where": "reset", "process": "actor_0", "at": -1, "stamp": "{tmp_path}/stamp"}}'
    flags = {**FLAGS, "env": HOSTILE, "env_kwargs": kwargs, "inference": "local", "encoder_mlp_layers": 16}
    assert run_command(tmp_path / "a", **flags).returncode == 3
    assert list((tmp_path / "a" / "incidents").glob("*.json"))


def test_one_that_is_interrupted_before_it_begins_leaves_none(tmp_path: Path) -> None:
    with Training(FLAGS, train_dir=tmp_path / "runs") as run:
        assert run.directory.is_dir()
    assert run.result.exit_code == 128 + signal.SIGINT
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_folder_has_gone_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start was refused, and removed its folder, between our opening the lock and taking it."""
    import fcntl

    def remove_and_lock(descriptor: int, how: int) -> None:
        (tmp_path / "a" / ".lock").unlink()

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with pytest.raises(DirectoryInUse, match="run a has just been removed by its own start"), ExitStack() as stack:
        stack.enter_context(RunLock(tmp_path / "a" / ".lock"))


def test_above_the_folder_only_what_was_made_for_it_goes(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with lock_run_folder(tmp_path / "mine" / "b" / "c" / "d", "resume", begun=lambda: False):
        (tmp_path / "mine" / "b" / "other").mkdir()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "mine", "other"]
