"""Any process but main is killed, at any moment, again and again: the run goes on, and what it leaves is right."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from algorithms.tools.selftest.invariants import find_falling, find_unaccounted, lost_checkpoints, read_saves, tolerance
from tests.chaos.runs import TrainingRun, outlive
from tests.chaos.witness import ALGORITHM, BONUS, EPISODE_STEPS, TESTIMONY
from utils.metrics import read_metrics

GONE_SECONDS = 25.0
FLAGS = (
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    "--normalize_input=False",
    "--learning_rate=0.003",
    f"--train_until_return={BONUS + 0.8 * EPISODE_STEPS}",
)


def check_testimony(path: Path, totals: dict[str, int]) -> int:
    """What the learners say they have trained on: everything once, nothing torn, versions that rise; their number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    used = Counter(tuple(column) for line in lines for column in line["columns"])
    assert [column for column, times in used.items() if times > 1] == []
    assert sum(line["broken"] for line in lines) == 0
    assert all(later["version"] > earlier["version"] for earlier, later in pairwise(lines))
    # A learner that is killed between the two has counted a batch and not yet begun to train on it.
    lives, largest = len({line["pid"] for line in lines}), max(line["samples"] for line in lines)
    assert 0 <= totals["samples"] - sum(line["samples"] for line in lines) <= lives * largest
    return lives


@pytest.mark.parametrize(
    ("placement", "kills"),
    [
        ("central", 6),
        pytest.param("central", 200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param("local", 100, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_a_run_outlives_a_storm_of_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, kills: int
) -> None:
    testimony, gate = tmp_path / "testimony", tmp_path / "gate"
    monkeypatch.setenv(TESTIMONY, str(testimony))
    words = (f"--inference={placement}", *FLAGS, "--env_kwargs", f"gate={gate}")
    with TrainingRun(tmp_path, *words, f"--algo={ALGORITHM}", env="tests.chaos.witness:Clues") as run:
        ended, killer = outlive(run, gate, kills, GONE_SECONDS)
    records = read_metrics(run.directory / "metrics.jsonl")
    totals = json.loads((run.directory / "status.json").read_text())["totals"]
    lives = check_testimony(testimony, totals)
    assert find_falling(records) == []
    assert find_unaccounted({}, totals, slack=tolerance(kills)) == []
    promised = read_saves(ended.stdout)
    assert lost_checkpoints(path for path, _ in promised) == []
    print(
        f"{kills} kills {Counter(killer.kills)}: {totals['restarts']} restarts, {lives} learners, {len(promised)} saves"
        f", recovered within {killer.longest_recovery_seconds:.1f} s, {totals['lost']} of {totals['samples']} lost, "
        f"books: {find_unaccounted({}, totals) or 'exact'}"
    )
