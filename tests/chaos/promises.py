"""The promises of docs/reliability.md, checked on a toy whose main and other processes are killed."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from appo.utils.metrics import read_metrics, without_lost
from appo.utils.run_folder import RunFolder
from tests import shared_memory
from tests.chaos.invariants import LASTING, find_falling, find_unaccounted, lost_checkpoints, read_saves, tolerance
from tests.chaos.killer import kill
from tests.chaos.runs import ROOT, TRAIN, TrainingRun, storm

TOY = (
    "--inference=central",
    "--device=cpu",
    "--num_workers=2",
    "--num_envs_per_worker=4",
    "--worker_num_splits=1",
    "--rollout=8",
    "--batch_size=64",
    "--num_batches_per_iteration=1",
    "--ppo_epochs=1",
    "--use_rnn=False",
    "--encoder_mlp_layers=32",
    "--learning_rate=0.002",
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    "--experiment_summaries_interval=0.2",
    "--report_interval_seconds=1",
)
GOAL = 0.9  # random actions return about 0.6, the best policy 1
GONE_SECONDS = 5.0


def train_toy(
    folder: Path, seconds: float, seed: int = 1, program: Sequence[str] = TRAIN, cwd: Path = ROOT
) -> TrainingRun:
    """Start or resume the run of the toy in `folder/train_dir/run`."""
    flags = (f"--seed={seed}", f"--train_for_seconds={seconds}")
    return TrainingRun(folder, *flags, env="toy/Corridor-v0", small=TOY, program=program, cwd=cwd)


def check_promises(start: Callable[[], TrainingRun], kills: int) -> None:
    """Kill main; resume; kill other processes again and again; end with Ctrl-C; check what is left."""
    names = shared_memory.names()
    with start() as first:
        first.wait_until(lambda: len(read_saves(first.stdout)) >= 2, "checkpoint")
        kill(first.process.pid)
        print(f"main killed: all processes gone after {first.seconds_until_gone(GONE_SECONDS):.2f} s")
        shared_memory.assert_none_abandoned(names, GONE_SECONDS)
        promised = read_saves(first.stdout)
    folder = RunFolder(first.directory)
    before = len(read_metrics(folder.metrics))
    with start() as second:
        second.wait_until(lambda: read_saves(second.stdout), "checkpoint of the resumed run")
        assert read_metrics(folder.metrics)[before]["env_steps"] >= promised[-1][1]
        killer = storm(second, kills)
        print(f"{kills} kills {Counter(killer.kills)}, recovered within {killer.longest_recovery_seconds:.1f} s")
        second.wait_until(lambda: best_return(folder, before) >= GOAL, f"mean return of {GOAL}")
        os.kill(second.process.pid, signal.SIGINT)
        ended = second.wait()
        assert ended.exit_code == 130, ended.stderr
        second.seconds_until_gone(GONE_SECONDS)
    assert lost_checkpoints(path for path, _ in [*promised, *read_saves(ended.stdout)]) == []
    records = read_metrics(folder.metrics)[before:]
    assert find_falling(records) == []
    assert find_falling(without_lost(read_metrics(folder.metrics)), LASTING) == []
    assert find_unaccounted(records[0], folder.read_status()["totals"], tolerance(kills)) == []


def best_return(folder: RunFolder, before: int) -> float:
    """Return the highest mean return after the first `before` records."""
    return max((record.get("reward/mean") or 0.0 for record in read_metrics(folder.metrics)[before:]), default=0.0)
