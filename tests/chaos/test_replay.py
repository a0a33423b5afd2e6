"""A replay, its pace and its counts outlive whatever is killed in a run of Ape-X or SAC."""

import json
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from appo.utils.metrics import read_metrics
from tests.chaos.invariants import (
    find_falling,
    find_unaccounted,
    lost_checkpoints,
    read_saves,
    tolerance,
)
from tests.chaos.runs import SMALL, TrainingRun, kill, storm

RATIO, STARTS, CAPACITY, BATCH = 4, 200, 4000, 32
COMMON = (
    "--train_for_env_steps=100000000",  # the preset ends sooner than many kills
    "--inference=central",
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    f"--batch_size={BATCH}",
    f"--learning_starts={STARTS}",
    f"--replay_capacity={CAPACITY}",
)
FLAGS = ("--algo=APEX", f"--replay_ratio={RATIO}", *COMMON)
SAC = ("--algo=SAC", f"--updates_per_step={RATIO / BATCH}", "--rollout=8", *COMMON)
OTHERS = ("--batch_size", "--num_batches_per_iteration", "--ppo_epochs")
FEW = tuple(word for word in SMALL if word.partition("=")[0] not in OTHERS)
STOPPED = 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "shards", "algo"),
    [(20, 0, "APEX"), (100, 0, "APEX"), (20, 2, "APEX"), (100, 2, "APEX"), (40, 0, "SAC"), (40, 2, "SAC")],
)
def test_every_step_is_inserted_and_counted_once_whatever_is_killed(
    tmp_path: Path, kills: int, shards: int, algo: str
) -> None:
    """With shards only they, learner and actors are killed: who else there is knows nothing of them."""
    only = ("replay", "learner", "actor") if shards else ("",)
    flags, env = (FLAGS, "CartPole-v1") if algo == "APEX" else (SAC, "Pendulum-v1")
    with TrainingRun(tmp_path, *flags, f"--num_replay_shards={shards}", env=env, small=FEW) as run:
        killer = storm(run, kills, only)
        run.interrupt()
        ended = run.wait()
    assert ended.exit_code == STOPPED, ended.stderr
    records = read_metrics(run.directory / "metrics.jsonl")
    totals = json.loads((run.directory / "status.json").read_text())["totals"]
    assert find_falling(records) == []
    assert find_unaccounted({}, totals, slack=tolerance(kills)) == []
    assert lost_checkpoints(path for path, _ in read_saves(ended.stdout)) == []
    assert totals["env_steps"] == totals["samples"]
    assert totals["discarded"] == 0
    uses = [record["replay/uses_per_step"] for record in records if "replay/uses_per_step" in record]
    assert uses[-1] == pytest.approx(RATIO, rel=0.02)
    assert max(record.get("replay/size", 0) for record in records) <= CAPACITY
    assert not shards or {"replay_0", "replay_1", "learner_0"} <= set(killer.kills)
    print(f"{kills} kills {killer.kills}: {totals}, {uses[-1]} uses per step")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_again_and_again_goes_on_with_the_replay_that_was_saved(tmp_path: Path) -> None:
    """Learners and whole runs are killed while they write; every start has what was saved last, and counts go on."""
    flags = (*FLAGS, "--save_replay", "--save_replay_every_sec=1", "--batch_replay")
    samples = 0
    for number in range(4):
        with TrainingRun(tmp_path, *flags, small=FEW) as run:
            log = run.directory / "logs" / "learner_0.log"
            begun = len(log.read_text()) if log.exists() else 0

            def said(pattern: str, log: Path = log, begun: int = begun) -> list[int]:
                return [int(digits) for digits in re.findall(pattern, log.read_text()[begun:] if log.exists() else "")]

            run.wait_until(lambda: said(r"saved (\d+) steps of the replay"), "replay in its file")
            if number % 2:
                # A process that dies before all are ready ends the run, and what was resumed is saved before that.
                run.wait_until(lambda: len(read_saves(run.stdout)) > 1, "checkpoint of this start")
                kill(run.pid_of("learner_0"))
                written = len(said(r"saved (\d+) steps of the replay"))
                run.wait_until(partial(more_than, written, said), "successor that saves")
            saves = len(read_saves(run.stdout))
            run.wait_until(partial(saved_more, run, max(1, saves)), "checkpoints")
            found = said(r"the replay goes on with (\d+) steps")
            assert len(found) == (number > 0)
            assert all(0 < steps <= CAPACITY for steps in found)
            totals = [record["samples"] for record in read_metrics(run.directory / "metrics.jsonl")]
            assert totals[-1] > samples
            samples = max(checkpoint_samples(run.directory))
            kill(run.process.pid)
            run.wait()


def saved_more(run: TrainingRun, count: int) -> bool:
    """Whether a run has saved more checkpoints than that."""
    return len(read_saves(run.stdout)) > count


def more_than(count: int, said: Callable[[str], list[int]]) -> bool:
    """Whether a learner has saved the replay more often."""
    return len(said(r"saved (\d+) steps of the replay")) > count


def checkpoint_samples(directory: Path) -> list[int]:
    """Samples in the checkpoints of policy 0."""
    return [
        json.loads((path / "state.json").read_text())["samples"]
        for path in (directory / "checkpoint_p0").iterdir()
        if path.name.startswith("ckpt_")
    ]
