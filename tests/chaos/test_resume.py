"""Interrupted at any moment and started again, many times: nothing that was said to be saved is lost."""

import json
import math
import re
import signal
import struct
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from safetensors.numpy import load
from tensorboardX.proto.event_pb2 import Event

from appo.utils import checkpoint_files
from appo.utils.metrics import read_metrics, without_lost
from tests.chaos.runs import TrainingRun, kill
from tests.integration.runs import record

BUDGET, RATE = 10_000_000, 0.001
FLAGS = (
    "--inference=local",
    "--save_every_sec=1",
    "--lr_schedule=linear",
    f"--learning_rate={RATE}",
    f"--train_for_env_steps={BUDGET}",
)
GAMES = {"CartPole-v1": (), "ALE/Pong-v5": ("--hidden_size=16", "--horizon=20")}
FIRST_EPISODES = 20 * 4 * 4 + 4 * 64  # env steps by which the first ones of all four envs of Pong are trained on
BATCH_ENV_STEPS = 4 * 64  # at most: of a batch of SMALL, four frames a step in Pong
NUMBERS = {"ctrl_c": signal.SIGINT, "sigterm": signal.SIGTERM, "kill9": signal.SIGKILL}


def saved_steps(stdout: str) -> list[int]:
    """Env steps of all that the run has said to be saved."""
    return [int(digits) for digits in re.findall(r"^saved \S*/ckpt_(\d{12})$", stdout, re.MULTILINE)]


def resumed_at(stdout: str) -> int:
    (digits,) = re.findall(r"^resuming policy 0 at env step (\d+) from ", stdout, re.MULTILINE)
    return int(digits)


def newest_state(directory: Path) -> tuple[dict[str, Any], float]:
    """Plain state of the newest checkpoint, and the samples in its observation statistics."""
    loaded = checkpoint_files.load(directory / "checkpoint_p0")
    assert loaded is not None
    assert not loaded.found.damaged
    return json.loads(loaded.files["state.json"]), float(load(loaded.files["optimizer.safetensors"])["statistics"][0])


def check_state(directory: Path) -> int:
    """What belongs together was saved together, since the first start; the env steps."""
    state, samples = newest_state(directory)
    assert state["adam_steps"] == state["updates"] > 0
    assert samples == state["samples"] > 0
    # That of the last batch, as it was before the batch was counted.
    used = BUDGET * (1 - state["learning_rate"] / RATE)
    assert state["env_steps"] - BATCH_ENV_STEPS - 1 < used < state["env_steps"] + 1
    return int(state["env_steps"])


def shown_on_tensorboard(directory: Path) -> list[int]:
    """The steps that TensorBoard shows of all files: a START takes back what lies beyond it."""
    shown: list[int] = []
    for path in sorted(directory.iterdir()):
        content, place = path.read_bytes(), 0
        while place + 12 <= len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            if place + 16 + size > len(content):
                break  # torn by a kill; readers stop here, too
            event = Event.FromString(content[place + 12 : place + 12 + size])
            if event.HasField("session_log"):
                shown = [step for step in shown if step < event.step]
            elif event.HasField("summary"):
                shown.append(event.step)
            place += 16 + size
    return shown


def interrupted(folder: Path, number: int, promised: int, env: str = "CartPole-v1") -> int:
    """A start that resumes if something is promised, and is interrupted later; env steps of what it has saved."""
    metrics = folder / "train_dir" / "run" / "metrics.jsonl"
    before = len(read_metrics(metrics))
    with TrainingRun(folder, *FLAGS, *GAMES[env], env=env) as run:
        if number == signal.SIGKILL:
            run.wait_until(lambda: max(saved_steps(run.stdout), default=0) > promised, "new checkpoint")
            kill(run.process.pid, number)
        else:
            more = promised + 500
            run.wait_until(lambda: any(r["env_steps"] >= more for r in read_metrics(metrics)[before:]), "progress")
            run.interrupt(number)
        ended = run.wait()
        run.seconds_until_gone(30)
    assert ended.exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(number)]
    assert "Traceback" not in ended.stderr
    if promised:
        begun = resumed_at(ended.stdout)
        assert begun >= promised
        assert begun == promised or number == signal.SIGKILL  # saved, and killed before it could say so
        first = read_metrics(metrics)[before]
        assert first["env_steps"] == begun
        if promised > FIRST_EPISODES or env == "CartPole-v1":
            assert math.isfinite(first["reward/mean"])
            assert first["perf/episodes"] > 0
        assert first["elapsed_seconds"] > 0
    saved = saved_steps(ended.stdout)
    assert saved == sorted(saved)
    assert check_state(run.directory) >= saved[-1]
    return saved[-1]


@pytest.mark.parametrize(
    ("env", "how", "times"),
    [
        pytest.param("CartPole-v1", "ctrl_c", 2, marks=pytest.mark.slow),
        pytest.param("CartPole-v1", "kill9", 2, marks=pytest.mark.slow),
        *(
            pytest.param(env, how, 10, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for env in GAMES
            for how in NUMBERS
            if (env, how) != ("CartPole-v1", "kill9")
        ),
        pytest.param("CartPole-v1", "kill9", 100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_interrupted_again_and_again(tmp_path: Path, env: str, how: str, times: int) -> None:
    if env.startswith("ALE/"):
        pytest.importorskip("ale_py")
    promised = [0]
    for _ in range(times):
        promised.append(interrupted(tmp_path, NUMBERS[how], promised[-1], env))
        assert promised[-1] > promised[-2]
    print(f"{env} {how}: saved {promised[1:]}")
    directory = tmp_path / "train_dir" / "run"
    records = without_lost(read_metrics(directory / "metrics.jsonl"))
    for name in ("env_steps", "samples", "elapsed_seconds", "perf/episodes", "perf/version"):
        values = [record[name] for record in records]
        assert values == sorted(values), name
    shown = shown_on_tensorboard(directory / ".summary" / "p0")
    assert shown == sorted(shown)
    assert len(set(shown)) >= times  # something of every start, even if it was killed as soon as it had saved
    rates = [record["train/learning_rate"] for record in records if "train/learning_rate" in record]
    assert rates == sorted(rates, reverse=True)
    # The same flags again are no change; each start is written down, with where it began.
    history = [json.loads(line) for line in (directory / "config_history.jsonl").read_text().splitlines()]
    assert [start["changed"] for start in history] == [[]] * times
    assert [start["env_steps"] for start in history] == sorted(start["env_steps"] for start in history)


PLACES = ("open", "write", "fsync", "manifest", "dirsync", "rename", "parentsync", "prune")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_while_it_saves_goes_on_from_what_it_has_saved(tmp_path: Path, place: str) -> None:
    # Of the third checkpoint; the first one may be from before anything was learned.
    passage = {"open": 11, "write": 12, "fsync": 11, "dirsync": 5}.get(place, 3)
    flags = (*FLAGS, "--keep_checkpoints=1")
    with TrainingRun(tmp_path, *flags, failpoints=f"ckpt.{place}:kill9@{passage}") as run:
        ended = run.wait()
        run.seconds_until_gone(30)
    assert ended.exit_code == -signal.SIGKILL
    promised = saved_steps(ended.stdout)
    assert promised
    newest = check_state(run.directory)
    assert newest >= promised[-1]
    assert interrupted(tmp_path, signal.SIGINT, newest) > newest
    assert not list((run.directory / "checkpoint_p0").glob(".tmp-*"))


# Few environments: those that play when a run is interrupted begin anew, and their returns come that much later.
CARTPOLE: dict[str, Any] = {"env": "CartPole-v1", "inference": "serial", "num_workers": 1, "num_envs_per_worker": 8}
GOAL = 400


def samples_to_goal(directory: Path, seed: int, *budgets: int) -> int:
    """Samples until the mean return is reached, in as many starts as there are budgets, and a last one without."""
    for budget in budgets:
        record(directory, **CARTPOLE, seed=seed, train_for_env_steps=budget)
    run = record(directory, **CARTPOLE, seed=seed, train_until_return=GOAL, train_for_env_steps=1_000_000)
    assert run.reached_return >= GOAL
    return run.totals["samples"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_learning_after_an_interruption_takes_no_longer(tmp_path: Path) -> None:
    extra = []
    for seed in range(1, 10):
        straight = samples_to_goal(tmp_path / f"straight_{seed}", seed)
        resumed = samples_to_goal(tmp_path / f"resumed_{seed}", seed, straight // 2)
        extra.append(resumed / straight - 1)
        print(f"seed {seed}: {straight} samples, interrupted {resumed}, {extra[-1]:+.1%}")
    assert median(extra) <= 0.05, extra
