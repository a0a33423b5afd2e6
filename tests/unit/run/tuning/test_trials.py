"""Trials leave a run as it is: they tune, probe, check or print, and open nothing of its folder to write."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appo.algorithms import cli
from appo.algorithms.apex.algorithm import APEX
from appo.algorithms.run.config import Config
from appo.algorithms.run.defaults import completed
from appo.algorithms.run.folder import journal
from appo.algorithms.run.plan import RunPlan
from appo.algorithms.run.trust import marked
from appo.algorithms.run.tuning import measure, network
from appo.algorithms.run.tuning.network import NetworkTimer, probe
from appo.algorithms.run.workers.networks import make_learner
from appo.algorithms.runtime.algorithm import Context
from appo.algorithms.runtime.budget import Budget
from appo.algorithms.runtime.learning.learner_worker import LearnerWorker
from appo.algorithms.runtime.memory.arena import Field
from appo.algorithms.runtime.messages import Address
from appo.algorithms.runtime.roles import LEARNER
from appo.algorithms.runtime.topology import Topology

SMALL = {"encoder_mlp_layers": [8], "use_rnn": False, "rollout": 4}
ALGORITHMS: dict[str, dict[str, object]] = {
    "APPO": {},
    "PPO": {},
    "APEX": {"save_replay": True, "learning_starts": 8, "replay_capacity": 64},
    "examples.rnd:RND": {},
    "tests.unit.run.tuning.test_trials:Writing": {"save_replay": True, "learning_starts": 8, "replay_capacity": 64},
}


class Writing(APEX):
    """Keeps something of its own in the run's folder from every method that is given one."""

    def _write(self, context: Context, name: str) -> None:
        if context.directory is not None:
            (context.directory / f"own_{name}").write_text("new")
            with suppress(FileNotFoundError):
                (context.directory / "own").unlink()

    def make_model(self, context: Context) -> Any:
        self._write(context, "model")
        return super().make_model(context)

    def make_policy(self, context: Context, flat: Any) -> Any:
        self._write(context, "policy")
        return super().make_policy(context, flat)

    def layout(self, context: Context, flat: Any) -> Any:
        self._write(context, "layout")
        return super().layout(context, flat)

    def fields(self, context: Context, topology: Topology, num_weights: int) -> Sequence[Field]:
        self._write(context, "fields")
        return super().fields(context, topology, num_weights)

    def make_source(self, context: Context, *rest: Any) -> Any:
        self._write(context, "source")
        return super().make_source(context, *rest)

    def make_learner(self, context: Context, *rest: Any) -> Any:
        self._write(context, "learner")
        return super().make_learner(context, *rest)


def run_of(tmp_path: Path, algo: str, **flags: object) -> Config:
    """A run with everything in its folder that there can be, though it holds nothing that can be read."""
    own = {**SMALL, **ALGORITHMS[algo], **flags}
    config = Config.from_flat(
        {"env": "toy/Counter-v0", "algo": algo, "train_dir": str(tmp_path), "experiment": "run", **own}
    )
    folder = config.run.folder
    for path in (folder.replay(0), folder.replay(0, 1), folder.path / "own", folder.incidents / "x", folder.metrics):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"kept")
    config = completed(config, probe(config).spec)
    journal(folder.path, marked(config.to_flat() | {"seed": 1}), [], [0])
    return config


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Name -> content and time of change of all that lies in a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.run.tuning.environment.STEPPING_SECONDS", 0.0)
    for name in ("ACTING_SECONDS", "TRAINING_SECONDS", "SLOWEST_SECONDS"):
        monkeypatch.setattr(network, name, 0.0)
    monkeypatch.setattr(measure, "enter", lambda name, log_path: None)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_measuring_and_planning_leave_a_run_as_it_is(tmp_path: Path, algo: str) -> None:
    config = run_of(tmp_path, algo)
    before = snapshot(tmp_path)
    sent: list[Any] = []
    pipe = SimpleNamespace(send=sent.append, poll=lambda seconds: True, recv=lambda: 2)
    measure.measure_environment(pipe, tmp_path, config, True)  # type: ignore[arg-type]
    measure.measure_network(pipe, tmp_path, config, sent[0], True)  # type: ignore[arg-type]
    assert isinstance(sent[-1], float)  # the last answer: nothing has failed
    found = probe(config)
    for placement, actors in (("serial", 1), ("local", 2), ("central", 2)):  # as tuning asks how large each would be
        topology = Topology(placement, actors, 1, 1, 1, 1, 2, config.learning.rollout)  # type: ignore[arg-type]
        plan = RunPlan(config, found.spec, found.models, topology, Budget(9, 9, 0.0, None, None), "cpu", 0)
        assert plan.fields()
        assert plan.context(0, "cpu").directory is None
    assert snapshot(tmp_path) == before


def test_a_learner_that_is_timed_has_no_folder_for_incidents(tmp_path: Path) -> None:
    config = run_of(tmp_path, "PPO")
    blueprint, arena, _ = NetworkTimer(config, probe(config).spec)._world(config, 2)
    learner = cast(LearnerWorker, make_learner(blueprint, arena, Address(LEARNER.name, 0)))
    assert learner.plan.incidents is None


@pytest.mark.parametrize("algo", ["APPO", "APEX", "tests.unit.run.tuning.test_trials:Writing"])
@pytest.mark.parametrize("words", [["--print_config"], ["--print_config=json"], ["--help"]])
def test_printing_leaves_a_run_as_it_is(
    tmp_path: Path, algo: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, algo)
    before = snapshot(tmp_path)
    given = [f"--train_dir={tmp_path}", "--experiment=run", "--train_for_env_steps=10", *words]
    with suppress(SystemExit):
        assert cli.run("train", given) == 0
    assert capsys.readouterr().out
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_doctor_leaves_a_run_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, algo := "tests.unit.run.tuning.test_trials:Writing")
    before = snapshot(tmp_path)
    given = [f"--train_dir={tmp_path}", "--experiment=run", f"--algo={algo}", "--env=toy/Counter-v0"]
    assert cli.run("doctor", [*given, "--use_rnn=False"]) == 0
    assert "nothing is in the way" in capsys.readouterr().out
    assert snapshot(tmp_path) == before
