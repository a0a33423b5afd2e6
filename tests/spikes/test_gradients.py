"""Gradients computed beside the actors are applied and counted once, whatever is killed, and a later start goes on."""

import json
import signal
from pathlib import Path

import pytest

from algorithms.runtime.learning.gradients import PLACES
from algorithms.tools.selftest.invariants import find_falling, find_unaccounted, lost_checkpoints, read_saves, tolerance
from algorithms.tools.selftest.killer import Killer, KillerError
from tests.chaos.runs import START_SECONDS, TrainingRun
from tests.chaos.witness import BONUS, EPISODE_STEPS
from tests.spikes.witness import ALGORITHM, TESTIMONY
from utils.metrics import read_metrics

STEPS = 2000
STOPPED = 128 + signal.SIGINT
FLAGS = (
    f"--algo={ALGORITHM}",
    "--inference=local",
    "--worker_num_splits=1",
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    "--normalize_input=False",
    "--normalize_returns=False",
    "--learning_rate=0.003",
    f"--train_until_return={BONUS + 0.7 * EPISODE_STEPS}",
)


def entries(testimony: Path, word: str) -> dict[tuple[int, int], int]:
    """Samples of each entry, by actor and number; what a successor says once more is of the same entry."""
    found: dict[tuple[int, int], int] = {}
    for line in testimony.read_text().splitlines():
        said, actor, number, samples = json.loads(line)
        if said == word:
            assert found.setdefault((actor, number), samples) == samples
    return found


def check_counts(testimony: Path, totals: dict[str, int], before: int) -> int:
    """Every entry has been applied once, in order, and counted; return the samples of this start."""
    committed, applied = entries(testimony, "committed"), entries(testimony, "applied")
    assert applied.keys() <= committed.keys()
    for actor in (0, 1):
        numbers = sorted(number for of, number in applied if of == actor)
        assert numbers == list(range(1, len(numbers) + 1))
    samples = sum(committed[entry] for entry in applied)
    assert totals["samples"] - before == totals["env_steps"] - before == samples
    assert len(committed) - len(applied) <= 2 * PLACES
    return samples


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_gradients_are_applied_once_whatever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    gate, words = tmp_path / "gate", (*FLAGS, "--env_kwargs", f"gate={tmp_path / 'gate'}")
    monkeypatch.setenv(TESTIMONY, str(tmp_path / "first"))
    with TrainingRun(tmp_path, *words, env="tests.chaos.witness:Clues") as run:
        run.wait_until(lambda: read_saves(run.stdout), "checkpoint")
        killer = Killer(
            run.marker, run.process.pid, lambda: len(read_saves(run.stdout)), seed=1, only=("actor", "learner")
        )
        try:
            killer.kill_burst(kills)
        except KillerError as error:
            raise AssertionError(f"{error}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}") from None
        run.wait_for_env_steps(STEPS)
        run.interrupt()
        ended = run.wait(START_SECONDS)
        assert (ended.exit_code, run.left_behind()) == (STOPPED, []), ended.stderr
    status = run.directory / "status.json"
    totals = json.loads(status.read_text())["totals"]
    before = check_counts(tmp_path / "first", totals, 0)
    assert before >= STEPS
    assert {role.partition("_")[0] for role in killer.kills} == {"actor", "learner"}
    assert find_falling(read_metrics(run.directory / "metrics.jsonl")) == []
    assert find_unaccounted({}, totals, slack=tolerance(kills)) == []
    assert lost_checkpoints(path for path, _ in read_saves(ended.stdout)) == []

    monkeypatch.setenv(TESTIMONY, str(tmp_path / "second"))
    gate.touch()
    with TrainingRun(tmp_path, *words, env="tests.chaos.witness:Clues") as run:
        ended = run.wait(START_SECONDS)
    assert ended.exit_code == 0, ended.stderr
    assert check_counts(tmp_path / "second", json.loads(status.read_text())["totals"], before) > 0
    print(f"{kills} kills {killer.kills}: {before} samples, {totals['restarts']} restarts, {totals['lost']} lost")
