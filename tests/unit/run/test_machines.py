"""What must be equal on all machines, the user's modules that travel, and what the doctor says about machines."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appo.algorithms.run.config import parse_train
from appo.algorithms.run.machines import examine, machine
from appo.algorithms.run.machines.cluster import Cluster
from appo.algorithms.run.machines.forecast import sample_bytes
from appo.algorithms.run.machines.ray_wire import cause_of, connect
from appo.algorithms.run.machines.same import difference, digest, packages, user_modules, versions
from appo.algorithms.runtime.machines.packing import SlotPacking
from appo.utils.errors import UsageError
from tests.unit.runtime.worlds import SPEC, TOPOLOGY, world_of


def test_the_first_difference_is_named() -> None:
    ours = {"python": "3.11", "torch": "2.13.0", "ale-py": "0.12.1", "appo": "found", "minigrid": ""}
    assert difference(ours, ours) == ""
    assert difference(ours, {**ours, "minigrid": "3.2.0"}) == ""  # not used here
    assert difference(ours, {**ours, "torch": "2.12.0"}) == "torch is 2.12.0 in place of 2.13.0"
    assert difference(ours, {**ours, "ale-py": ""}) == "ale-py 0.12.1 is missing"
    assert difference(ours, {"python": "3.11", "torch": "2.13.0", "ale-py": "0.12.1"}) == "appo is missing"


def test_versions_are_of_what_acts_in_the_environment() -> None:
    everywhere = ["python", "appo", "appo's source", "torch", "numpy", "gymnasium"]
    assert packages(parse_train(["--env=CartPole-v1"])) == everywhere
    assert packages(parse_train(["--env=ALE/Pong-v5"])) == [*everywhere, "ale_py"]
    assert all(versions(everywhere).values())
    assert versions(["no.such", "no_such"]) == {"no.such": "", "no_such": ""}


def test_packages_of_installed_modules_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    for package, module in {"my-game": "my_game", "other": "other"}.items():
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0+local\n")
        (info / "top_level.txt").write_text(module)
        (site / f"{module}.py").write_text("Maze = None")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    config = parse_train(["--env=my_game:Maze"])
    assert packages(config)[6:] == ["my-game"]
    assert versions(["my-game"]) == {"my-game": "1.0"}
    (tmp_path / "my_game.py").write_text("Maze = None")  # this one is imported, and travels
    assert packages(config)[6:] == []


def test_a_digest_is_of_python_files_and_their_places(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.py").write_text("1")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "link").symlink_to(tmp_path / "real")
    before = digest(tmp_path / "package")
    (tmp_path / "real" / "a.pyc").write_text("1")
    assert digest(tmp_path / "package") == before
    (tmp_path / "real" / "a.py").write_text("2")
    changed = digest(tmp_path / "package")
    (tmp_path / "real" / "a.py").rename(tmp_path / "real" / "b.py")
    assert len({before, changed, digest(tmp_path / "package")}) == 3


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


class FakeRay:
    """Calls a function at once, in place of a node; the test says what nodes answer."""

    def __init__(self, answers: dict[str, Callable[..., Any]]) -> None:
        self.answers = answers

    def remote(self, num_cpus: int, scheduling_strategy: str) -> Callable[..., Any]:
        answer = self.answers[scheduling_strategy]
        return lambda function: SimpleNamespace(remote=partial(partial, answer, function))

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        return call()

    def shutdown(self) -> None:
        pass


def test_the_doctor_names_every_machine_that_is_not_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(function: Callable[..., Any], argument: object) -> None:
        raise RuntimeError("System error: No module named 'appo'\ntraceback: Traceback (most recent call last):")

    def hangs(function: Callable[..., Any], argument: object) -> None:
        raise TimeoutError("Get timed out: some object(s) not ready.")

    def differs(function: Callable[..., Any], argument: object) -> Any:
        return {**function(argument), "torch": "0.1"}

    answers = {"10.0.0.2": lacks, "10.0.0.3": hangs, "10.0.0.4": differs}
    monkeypatch.setattr(examine, "check_machines", lambda _: None)  # needs Ray itself
    monkeypatch.setattr(examine, "cluster_of", lambda *_: nullcontext())
    monkeypatch.setattr(examine, "connect", lambda *_: FakeRay(answers))
    monkeypatch.setattr(examine, "nodes_of", lambda *_: [(name, name, 8) for name in answers])
    monkeypatch.setattr(examine, "on_node", lambda node: node)
    config = parse_train(["--env=CartPole-v1", "--ray=10.0.0.1:6379"])
    unused: Any = None
    torch = versions(["torch"])["torch"]
    assert list(examine.examine(config, unused, 2, unused, unused)) == [
        ("machine", "bad", "10.0.0.2: appo is missing"),
        ("machine", "bad", "10.0.0.3: no answer in 60 s"),
        ("machine", "bad", f"10.0.0.4: torch is 0.1 in place of {torch}"),
    ]


def test_auto_without_a_cluster_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Please specify the one to connect to by setting `--address` flag")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(UsageError, match=r"^--ray=auto: no cluster answers: start one by `ray start"):
        connect(Cluster("auto"), [])


def test_a_long_cause_ends_at_a_word() -> None:
    assert cause_of(RuntimeError("word " * 100)) == "word " * 59 + "..."
