"""A replay, its pace and its counts outlive whatever is killed in a run of Ape-X."""

import json
import signal
from pathlib import Path

import pytest

from algorithms.tools.selftest.invariants import find_falling, find_unaccounted, lost_checkpoints, read_saves, tolerance
from algorithms.tools.selftest.killer import Killer, KillerError
from tests.chaos.runs import SMALL, TrainingRun
from utils.metrics import read_metrics

RATIO, STARTS, CAPACITY, BATCH = 4, 200, 4000, 32
FLAGS = (
    "--algo=APEX",
    "--inference=central",
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    f"--batch_size={BATCH}",
    f"--replay_ratio={RATIO}",
    f"--learning_starts={STARTS}",
    f"--replay_capacity={CAPACITY}",
)
OTHERS = ("--batch_size", "--num_batches_per_iteration", "--ppo_epochs")
FEW = tuple(word for word in SMALL if word.partition("=")[0] not in OTHERS)
STOPPED = 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [20, 100])
def test_every_step_is_inserted_and_counted_once_whatever_is_killed(tmp_path: Path, kills: int) -> None:
    with TrainingRun(tmp_path, *FLAGS, small=FEW) as run:
        run.wait_until(lambda: read_saves(run.stdout), "checkpoint")
        killer = Killer(run.marker, run.process.pid, lambda: len(read_saves(run.stdout)), seed=1)
        try:
            killer.kill_burst(kills)
        except KillerError as error:
            raise AssertionError(f"{error}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}") from None
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
    print(f"{kills} kills {killer.kills}: {totals}, {uses[-1]} uses per step")
