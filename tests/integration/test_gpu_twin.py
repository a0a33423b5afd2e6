"""Whole runs through the code paths of a GPU, with the CPU behind them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appo.algorithms.run import main
from appo.algorithms.runtime.devices import Device
from appo.algorithms.runtime.learning.gpu_batches import DeviceStaging
from appo.algorithms.runtime.sampling.gpu_policy_worker import GpuEngine
from appo.algorithms.runtime.sampling.policy_worker import HostEngine
from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.cases import GROUPS
from benchmarks.gpu_check.report import Failed
from benchmarks.gpu_check.twin import BufferedBlueprint, TwinRun
from benchmarks.gpu_check.world_checks import check_chance
from tests.integration import runs
from tests.integration.runs import record
from tests.integration.test_reproduction import COMMON, ENVS, MODELS, TOLERANCE


@pytest.mark.parametrize(("model", "env"), [("gru", "discrete"), ("mlp", "box"), ("lstm", "same-step")])
def test_in_one_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, env: str) -> None:
    monkeypatch.setattr(runs, "Blueprint", BufferedBlueprint)
    flags: dict[str, Any] = COMMON | MODELS[model] | ENVS[env] | {"train_for_env_steps": 1500}
    run = runs.SerialRun(tmp_path / "run", **flags)
    for _ in run.turns():
        pass
    worker, policy_worker = run.worker("learner"), run.worker("policy_worker")
    assert isinstance(policy_worker.engine, GpuEngine)
    assert isinstance(worker.batches.staging, DeviceStaging)
    assert worker.learner.learner.quick._steps
    assert worker.learner.compared == worker.totals["samples"] >= 1500
    assert worker.learner.largest <= TOLERANCE


def test_a_gpu_that_cannot_read_the_slots_acts_through_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "Blueprint", BufferedBlueprint)
    monkeypatch.setattr(Device, "register", lambda device, arena: False)
    run = runs.SerialRun(tmp_path / "run", **COMMON | MODELS["mlp"] | ENVS["box"] | {"train_for_env_steps": 300})
    for _ in run.turns():
        pass
    worker = run.worker("learner")
    assert type(run.worker("policy_worker").engine) is HostEngine
    assert worker.learner.compared == worker.totals["samples"] >= 300
    assert worker.learner.largest <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "env", "more"),
    [
        ("gru", "discrete", {}),
        ("lstm", "box", {"gpu_colocate": True}),
        ("mlp", "same-step", {"gpu_colocate": True}),
        ("gru", "discrete", {"num_policies": 2}),
        ("mlp", "box", {"num_minibatches_to_accumulate": 0}),
    ],
)
def test_the_learner_reproduces_what_was_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, env: str, more: dict[str, object]
) -> None:
    monkeypatch.setattr(main, "Run", TwinRun)
    flags: dict[str, Any] = COMMON | MODELS[model] | ENVS[env] | {"inference": "central", "num_workers": 2} | more
    run = record(tmp_path / "run", **flags)
    for policy in range(flags.get("num_policies", 1)):
        samples = run.learners[policy]["samples"]
        assert run.series("train/reproduction_steps", policy)[-1] == samples >= 3000
        assert run.series("train/reproduction_error", policy)[-1] <= TOLERANCE
        totals = run.learners[policy]
        collected = sum(worker["collected"] for worker in run.workers.values())
        if flags.get("num_policies", 1) == 1:  # every step is trained, discarded or on its way
            assert totals["samples"] + totals["discarded"] + totals["in_flight"] <= collected
    assert (tmp_path / "run" / "logs" / "policy_worker_0.0.log").exists() != bool(more.get("gpu_colocate"))


@pytest.mark.slow
def test_the_check_of_a_gpu_passes_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device=cpu", f"--out={tmp_path / 'check.json'}"]) == 0, capsys.readouterr().out
    results = json.loads((tmp_path / "check.json").read_text())
    names = [check["name"] for check in results["checks"]]
    assert names == [name for name, _ in gpu_check.checks(short=True)]
    assert results["figures"]["CartPole, vector, batch 16,384, samples/s"] > 0


def test_without_a_gpu_the_check_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)


def test_actions_that_are_repeated_are_not_those_of_chance() -> None:
    random = np.random.default_rng(0).integers(0, 2, size=(6, 8, 24, 1))
    check_chance(random)
    with pytest.raises(Failed, match=r"^100% of the actions are those of the pass before"):
        check_chance(np.concatenate([random[:, :GROUPS]] * 3, axis=1))
    with pytest.raises(Failed, match="with shares"):
        check_chance(np.zeros((6, 8, 24, 1), np.int64))
