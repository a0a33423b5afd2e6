"""A run that learns from a file has no actor, counts every step it reads, and goes on where a dead learner was."""

import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from appo.algorithms import cli
from appo.utils import checkpoint_files
from appo.utils.metrics import read_metrics
from tests.chaos.invariants import (
    LASTING,
    find_falling,
    find_unaccounted,
    lost_checkpoints,
    read_saves,
)
from tests.chaos.runs import TrainingRun, kill
from tests.integration.enjoying import enjoyed
from tests.spikes.training import totals_of, train

STEPS = 64  # of a batch of `SMALL`
BATCHES = 400
END_SECONDS = 100.0  # until a run has ended, however many others want the cores
GOOD = 150.0  # return that random actions never come near
ALGORITHM = "--algo=tests.spikes.from_file:Cloning"
FLAGS = ("--learning_rate=0.003", f"--train_for_env_steps={BATCHES * STEPS}", "--save_every_sec=1")
SLOW = "learner.batch:sleep=0.2"
"""A learner that can be killed before its budget is spent, however fast the machine is."""


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag that names 2001 steps of CartPole, balanced by a rule."""
    env = gymnasium.make("CartPole-v1")
    obs, first, action, begins = [], [], [], True
    now, _ = env.reset(seed=0)
    for _ in range(2001):
        obs.append(now)
        first.append(begins)
        action.append([int(now[2] + 0.3 * now[3] + 0.05 * now[1] > 0)])
        now, _, terminated, truncated, _ = env.step(action[-1][0])
        if begins := terminated or truncated:
            now, _ = env.reset()
    path = tmp_path_factory.mktemp("recording") / "cartpole.npz"
    np.savez(path, obs=np.array(obs, np.float32), first=np.array(first), action=np.array(action, np.int64))
    return f"--recording={path}"


def newest(directory: Path) -> tuple[dict[str, Any], bytes]:
    """Plain state and weights of the newest checkpoint."""
    loaded = checkpoint_files.load(directory / "checkpoint_p0")
    assert loaded is not None
    return json.loads(loaded.files["state.json"]), loaded.files["model.safetensors"]


@pytest.mark.parametrize("placement", [pytest.param(place, marks=pytest.mark.slow) for place in ("serial", "central")])
def test_a_run_from_a_file_trains_to_its_budget(
    tmp_path: Path, recording: str, placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = train(tmp_path, ALGORITHM, recording, *FLAGS, f"--inference={placement}")
    assert "no actors, learning on cpu" in "".join(capfd.readouterr())
    logs = {path.stem for path in (directory / "logs").iterdir()} - {"probe", "model_probe"}
    assert logs == ({"learner_0"} if placement == "central" else set())
    totals = totals_of(directory)
    assert find_unaccounted({}, totals) == []
    expected = {"samples": BATCHES * STEPS, "used": BATCHES * STEPS, "batches": BATCHES, "updates": BATCHES, "lost": 0}
    assert {name: totals[name] for name in expected} == expected
    final = read_metrics(directory / "metrics.jsonl")[-1]
    assert final["train/loss"] < math.log(2)  # that of a policy that has learned nothing
    assert "train/policy_lag_mean" not in final
    assert "reward/mean" not in final
    played = enjoyed(capfd, tmp_path / "train_dir", "--experiment=run", "--max_num_episodes=10", "--seed=1")
    assert played["mean"] > GOOD


def test_a_later_start_reads_on_where_the_last_one_ended(tmp_path: Path, recording: str) -> None:
    """Two starts make the weights of one: each step is read once per epoch, in the same order."""
    ends = {}
    for name, budgets in (("whole", (6_400,)), ("halves", (3_200, 6_400))):
        for budget in budgets:
            flags = (ALGORITHM, recording, "--inference=serial", f"--train_for_env_steps={budget}")
            directory = train(tmp_path / name, *flags)
        ends[name] = newest(directory)[1]
    assert ends["halves"] == ends["whole"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # of which nearly all is for restarts on a machine that is busy
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_learners_that_are_killed_read_no_step_twice(
    tmp_path: Path, recording: str, kills: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same command goes on after kills and Ctrl-C; the books are exact whoever has died."""
    budget = BATCHES * STEPS * (1 + kills // 5)
    flags = (ALGORITHM, recording, *FLAGS, "--inference=central", f"--train_for_env_steps={budget}")
    with TrainingRun(tmp_path, *flags, failpoints=SLOW) as run:
        for killed in range(kills):
            run.wait_for_env_steps(run.env_steps() + STEPS)
            kill(run.pid_of("learner_0"))
            run.wait_until(lambda killed=killed: totals_of(run.directory)["restarts"] > killed, "restart")
        run.wait_for_env_steps(run.env_steps() + STEPS)
        run.interrupt()
        interrupted = run.wait(END_SECONDS)
    assert interrupted.exit_code == 130, interrupted.stderr
    first, state = totals_of(run.directory), newest(run.directory)[0]
    assert first["samples"] == first["batches"] * STEPS == state["samples"] < budget
    assert 0 <= first["batches"] - first["updates"] <= kills  # a learner dies between counting a batch and its update
    with TrainingRun(tmp_path, *flags) as run:
        resumed = run.wait(END_SECONDS)
    assert resumed.exit_code == 0, resumed.stderr
    assert f"resuming policy 0 at env step {first['samples']} from " in resumed.stdout
    totals = totals_of(run.directory)
    assert totals["samples"] == totals["env_steps"] == budget
    assert totals["batches"] == (budget - first["samples"]) // STEPS == totals["updates"] - first["updates"]
    assert find_unaccounted({}, totals) == []
    assert find_falling(read_metrics(run.directory / "metrics.jsonl"), LASTING) == []
    promised = [path for ended in (interrupted, resumed) for path, _ in read_saves(ended.stdout)]
    assert lost_checkpoints(path for path in promised if path.exists()) == []
    played = enjoyed(capfd, tmp_path / "train_dir", "--experiment=run", "--max_num_episodes=10", "--seed=1")
    assert played["mean"] > GOOD


@pytest.mark.parametrize("flag", ["--train_until_return=475", "--sampler_only=True", "--self_play=True"])
def test_what_needs_a_played_environment_is_refused(
    recording: str, flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [ALGORITHM, recording, "--env=CartPole-v1", flag]
    assert cli.run_command(lambda: cli.run("train", words)) == 2
    name = flag.partition("=")[0]
    assert capfd.readouterr().err == f"error: {name}: no environment is played with {ALGORITHM}, which has no actors\n"
