"""What those count on who come from Sample Factory, in whole runs; docs/from_sample_factory.md says it."""

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from appo.algorithms.run import main
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.resume import finished_before
from appo.algorithms.runtime import budget
from appo.utils.errors import UsageError
from tests.integration.runs import Run, command_line, record, run_command

SMALL: dict[str, Any] = {
    "env": "toy/Counter-v0",
    "rollout": 8,
    "batch_size": 64,
    "num_batches_per_iteration": 1,
    "encoder_mlp_layers": 8,
    "use_rnn": False,
    "num_envs_per_worker": 4,
    "train_for_env_steps": 500,
}


class Seeing(gymnasium.Env[Any, Any]):
    """Notes in a folder, once per process, which GPUs it sees; by the name of the process."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)

    def __init__(self, folder: str) -> None:
        import multiprocessing

        name = multiprocessing.current_process().name
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        Path(folder, name).write_text(seen)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


def seen_by_actors(tmp_path: Path, **flags: Any) -> dict[str, str]:
    """What the processes of actors have seen."""
    folder = tmp_path / "seen"
    folder.mkdir()
    env = {"env": f"{__name__}:Seeing", "env_kwargs": json.dumps({"folder": str(folder)})}
    record(tmp_path / "run", **SMALL | env | {"num_envs_per_worker": 2} | flags)
    return {path.name: path.read_text() for path in folder.iterdir() if path.name.startswith(("actor", "Main"))}


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["local", "central"])
def test_actors_see_one_gpu_each_in_turn(tmp_path: Path, inference: str) -> None:
    seen = seen_by_actors(tmp_path, inference=inference, num_workers=3, actor_worker_gpus="3,5")
    assert {name: gpus for name, gpus in seen.items() if name != "MainProcess"} == {
        "actor_0": "3", "actor_1": "5", "actor_2": "3"
    }  # fmt: skip


def test_in_one_process_actors_see_the_gpus_of_all_of_them(tmp_path: Path) -> None:
    before = os.environ["CUDA_VISIBLE_DEVICES"]
    assert seen_by_actors(tmp_path, inference="serial", actor_worker_gpus="3,5") == {"MainProcess": "3"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == before


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["local", "central"])
def test_without_the_flag_actors_see_none(tmp_path: Path, inference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    seen = seen_by_actors(tmp_path, inference=inference, num_workers=2)
    assert {name: gpus for name, gpus in seen.items() if name != "MainProcess"} == {"actor_0": "", "actor_1": ""}


def test_one_process_has_the_gpu_that_its_learner_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appo.algorithms.run.config.choose_device", lambda wanted: "cuda")
    with pytest.raises(UsageError, match="--actor_worker_gpus=1 with --inference=serial: actors and learner are one"):
        parse_train(["--env=toy/Counter-v0", "--actor_worker_gpus=1", "--inference=serial"])


def test_a_benchmark_counts_all_policies_since_this_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budget.BENCHMARK, "samples", 700)
    flags = SMALL | {"inference": "serial", "num_policies": 2, "benchmark": True, "train_for_env_steps": 10**9}
    for start in (1, 2):
        run = record(tmp_path / "run", **flags)
        assert run.reason.startswith("the benchmark is over: ")
        assert sum(totals["samples"] for totals in run.learners.values()) >= 700 * start


def test_a_run_that_has_had_its_seconds_does_nothing_until_there_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = budget.Budget.spent

    def once_trained(self: budget.Budget, policies: Any, collected: int, elapsed_seconds: float) -> str | None:
        """The clock of the budget, from the first trained batch on: on a slow machine that one may be late."""
        return spent(self, policies, collected, elapsed_seconds) if policies[0].since_start("samples") else None

    monkeypatch.setattr(budget.Budget, "spent", once_trained)
    flags = SMALL | {"inference": "serial", "train_for_env_steps": 10**9}
    first = record(tmp_path / "run", **flags, train_for_seconds=0.5)
    env_steps = first.state()["env_steps"]
    assert first.reason == "0.5 seconds are over"
    with main.Run(parse_train(command_line(tmp_path / "run", **flags, train_for_seconds=0.5))) as again:
        assert finished_before(again.config) == "0.5 seconds are over"
        assert again.train() == 0
    assert first.state()["env_steps"] == env_steps
    longer = record(tmp_path / "run", **flags, train_for_seconds=0.6)
    assert longer.state()["env_steps"] > env_steps


def begun_at(run: Run) -> list[int]:
    """Env steps of the policies at the only start of a run."""
    (start,) = (json.loads(line) for line in (run.directory / "config_history.jsonl").read_text().splitlines())
    return start["env_steps"]


@pytest.mark.slow
def test_a_chosen_checkpoint_is_gone_on_from_with_its_optimizer(tmp_path: Path) -> None:
    """As the run itself would have: with lockstep and the same seeds, the weights are the same to the last bit."""
    flags = SMALL | {"inference": "serial", "seed": 3, "lr_schedule": "linear"}
    flags |= {"deterministic_resume": True, "save_every_env_steps": 200, "keep_checkpoints": 10}
    flags |= {"train_for_env_steps": 1000}
    whole = record(tmp_path / "whole", **flags)
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "whole" / "checkpoint_p0").glob("ckpt_*"))
    assert len(steps) > 3
    flags |= {"init_from": f"whole:ckpt_{steps[1]}"}
    part = record(tmp_path / "part", **flags, init_whole=True)
    assert part.checkpoint()["model.safetensors"] == whole.checkpoint()["model.safetensors"]
    assert part.checkpoint()["optimizer.safetensors"] == whole.checkpoint()["optimizer.safetensors"]
    assert part.state()["adam_steps"] == whole.state()["adam_steps"]
    assert begun_at(part) == [steps[1]]
    weights_alone = record(tmp_path / "weights", **flags)
    assert begun_at(weights_alone) == [0]
    assert weights_alone.checkpoint()["model.safetensors"] != whole.checkpoint()["model.safetensors"]
    missing = run_command(tmp_path / "missing", **flags | {"init_from": "whole:ckpt_1"})
    assert missing.returncode == 2
    assert f"there are: ckpt_{steps[0]}, " in missing.stderr


def test_a_run_keeps_the_commit_of_its_code(tmp_path: Path) -> None:
    """Of this repository, where the tests run in one; elsewhere there is nothing to keep."""
    run = record(tmp_path / "run", **SMALL, inference="serial")
    starts = run.directory / "code" / "starts.jsonl"
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        assert not starts.exists()
        return
    (start,) = (json.loads(line) for line in starts.read_text().splitlines())
    found = {one["root"]: one for one in start["repositories"]}[str(root)]
    assert len(found["commit"]) == 40
    assert found["diff"] is None or (run.directory / "code" / found["diff"]).stat().st_size > 0
