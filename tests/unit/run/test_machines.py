"""What must be equal on all machines, and the user's modules that travel."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.machines import machine
from appo.algorithms.run.machines.forecast import sample_bytes
from appo.algorithms.run.machines.same import difference, user_modules, versions
from appo.algorithms.runtime.machines.packing import SlotPacking
from tests.unit.runtime.worlds import SPEC, TOPOLOGY, world_of


def test_the_first_difference_is_named() -> None:
    ours = {"python": "3.11", "torch": "2.13.0", "ale-py": "0.12.1", "appo": "found", "minigrid": ""}
    assert difference(ours, ours) == ""
    assert difference(ours, {**ours, "minigrid": "3.2.0"}) == ""  # not used here
    assert difference(ours, {**ours, "torch": "2.12.0"}) == "torch is 2.12.0 in place of 2.13.0"
    assert difference(ours, {**ours, "ale-py": ""}) == "ale-py 0.12.1 is missing"
    assert difference(ours, {"python": "3.11", "torch": "2.13.0", "ale-py": "0.12.1"}) == "appo is missing"


def test_versions_are_of_what_acts_in_the_environment() -> None:
    assert versions("CartPole-v1").keys() == {"python", "appo", "torch", "numpy", "gymnasium"}
    assert "ale_py" in versions("ALE/Pong-v5")
    assert all(versions("CartPole-v1").values())


def test_modules_of_the_user_travel_and_installed_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maze.py").write_text("Maze = None")
    (tmp_path / "nets").mkdir()
    monkeypatch.chdir(tmp_path)
    common = ["--seed=1", f"--train_dir={tmp_path / 'runs'}"]
    own = parse_train(["--env=maze:Maze", "--encoder_custom=nets.own:Net", *common])
    assert sorted(user_modules(own)) == [str(tmp_path / "maze.py"), str(tmp_path / "nets")]
    assert user_modules(parse_train(["--env=CartPole-v1", *common])) == []
    assert user_modules(parse_train(["--env=gymnasium.envs.classic_control:CartPoleEnv", *common])) == []


def test_a_sample_has_the_bytes_of_its_packed_slot() -> None:
    for counts in ({}, {"rnn_state_size": 6}, {"slots_per_group": 5}):
        world = world_of(**counts)  # type: ignore[arg-type]
        nbytes = SlotPacking(world.trajectories, SPEC.action).nbytes
        assert sample_bytes(world.arena.fields, world.topology) == nbytes / (TOPOLOGY.rows * TOPOLOGY.rollout)


HOLDER = "from appo.algorithms.run.machines import machine; print(machine._locked_folder(), flush=True); input()"


def test_folders_of_killed_machines_go_with_the_next_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock decides: the number of the killed process may be another process's by then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old = tmp_path / f"{machine.PREFIX}{os.getpid()}-killed"
    (old / "machine").mkdir(parents=True)
    command, pipe = [sys.executable, "-c", HOLDER], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as it:
        assert it.stdout is not None
        in_use = Path(it.stdout.readline().strip())
        machine._remove_old_folders()
        assert list(tmp_path.iterdir()) == [in_use]
        it.kill()
    machine._remove_old_folders()
    assert not list(tmp_path.iterdir())
