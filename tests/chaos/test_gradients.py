"""Gradients of A3C are applied or dropped once, and counted, whatever is killed, and a later start goes on."""

import json
import signal
from pathlib import Path

import pytest

from appo.algorithms.runtime.learning.gradients import PLACES
from appo.utils.metrics import read_metrics
from tests.chaos.gradients import ALGORITHM, TESTIMONY
from tests.chaos.invariants import (
    find_falling,
    find_unaccounted,
    lost_checkpoints,
    read_saves,
    tolerance,
)
from tests.chaos.killer import Killer, KillerError
from tests.chaos.runs import SMALL, START_SECONDS, TrainingRun
from tests.chaos.witness import BONUS, EPISODE_STEPS

STEPS = 2000
OF_BATCHES = ("--batch_size", "--num_batches_per_iteration", "--ppo_epochs")
FEW = tuple(word for word in SMALL if word.partition("=")[0] not in OF_BATCHES)
STOPPED = 128 + signal.SIGINT
FLAGS = (
    f"--algo={ALGORITHM}",
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    "--normalize_input=False",
    "--learning_rate=0.01",
    "--optimizer=adam",
    "--grads_per_step=10",
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


def check_counts(testimony: Path, totals: dict[str, int], before: dict[str, int], kills: int) -> None:
    """Every entry has been taken off once, in order, and counted."""
    committed, applied, dropped = (entries(testimony, word) for word in ("committed", "applied", "dropped"))
    taken = applied.keys() | dropped.keys()
    assert taken <= committed.keys()
    for actor in (0, 1):
        numbers = sorted(number for of, number in taken if of == actor)
        assert numbers == list(range(1, len(numbers) + 1))
    # Where a learner was killed between word and deed, its successor has newer weights and may decide otherwise.
    twice = applied.keys() & dropped.keys()
    assert len(twice) <= kills
    samples, discarded = (totals[name] - before.get(name, 0) for name in ("samples", "discarded"))
    assert totals["env_steps"] == totals["samples"]
    assert samples + discarded == sum(committed[entry] for entry in taken)
    assert samples <= sum(committed[entry] for entry in applied)
    assert discarded <= sum(committed[entry] for entry in dropped)
    assert len(committed) - len(taken) <= 2 * PLACES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.timeout(900))])
def test_gradients_are_applied_once_whatever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    gate, words = tmp_path / "gate", (*FLAGS, "--env_kwargs", f"gate={tmp_path / 'gate'}")
    monkeypatch.setenv(TESTIMONY, str(tmp_path / "first"))
    with TrainingRun(tmp_path, *words, env="tests.chaos.witness:Clues", small=FEW) as run:
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
    first = json.loads(status.read_text())["totals"]
    check_counts(tmp_path / "first", first, {}, kills)
    assert first["samples"] >= STEPS
    assert {role.partition("_")[0] for role in killer.kills} == {"actor", "learner"}
    assert find_falling(read_metrics(run.directory / "metrics.jsonl")) == []
    assert find_unaccounted({}, first, slack=tolerance(kills)) == []
    assert lost_checkpoints(path for path, _ in read_saves(ended.stdout)) == []

    monkeypatch.setenv(TESTIMONY, str(tmp_path / "second"))
    gate.touch()
    with TrainingRun(tmp_path, *words, env="tests.chaos.witness:Clues", small=FEW) as run:
        ended = run.wait(START_SECONDS)
    assert ended.exit_code == 0, ended.stderr
    totals = json.loads(status.read_text())["totals"]
    check_counts(tmp_path / "second", totals, first, 0)
    assert totals["samples"] > first["samples"]
    print(
        f"{kills} kills {killer.kills}: {first['samples']} samples, {first['restarts']} restarts, {first['lost']} lost"
    )
