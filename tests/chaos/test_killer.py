"""Any process but main is killed, at any moment, again and again: the run goes on, and what it leaves is right."""

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from appo.utils.metrics import read_metrics
from tests import shared_memory
from tests.chaos.invariants import (
    find_falling,
    find_unaccounted,
    lost_checkpoints,
    read_saves,
    tolerance,
)
from tests.chaos.runs import TrainingRun, outlive, storm
from tests.chaos.witness import ALGORITHM, BONUS, EPISODE_STEPS, TESTIMONY

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
        pytest.param("central", 6, marks=pytest.mark.slow),
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


KILLS = int(os.environ.get("APPO_STORM_KILLS", "25"))
STORMS = {
    "population": ("CartPole-v1", "--inference=central", "--num_policies=2", "--with_pbt=True"),
    "evaluator": ("CartPole-v1", "--inference=local", "--eval_every_sec=1", "--eval_episodes=2"),
    "games": ("VizdoomBasic-v1", "--inference=central", "--hidden_size=16"),
}


@pytest.mark.slow
@pytest.mark.timeout(60 + 12 * KILLS)
@pytest.mark.parametrize("kind", STORMS)
def test_populations_evaluators_and_games_outlive_storms_of_kills(tmp_path: Path, kind: str) -> None:
    """After each burst all are back, the evaluator beside training among them; APPO_STORM_KILLS says how many die."""
    names = shared_memory.names()
    env, *flags = STORMS[kind]
    if kind == "games":
        pytest.importorskip("vizdoom")
    with TrainingRun(tmp_path, "--save_every_sec=1", "--keep_checkpoints=1000000", *flags, env=env) as run:
        if kind == "evaluator":
            run.wait_until(lambda: "evaluator" in run.roles().values(), "evaluator")
        killer = storm(run, KILLS)
        run.interrupt()
        ended = run.wait()
        run.seconds_until_gone(GONE_SECONDS)
        assert run.left_behind() == list(run.temporary.glob("vizdoom-*")) == []
    assert ended.exit_code == 130, ended.stderr
    records = read_metrics(run.directory / "metrics.jsonl")
    for policy in {record["policy"] for record in records}:
        assert find_falling([record for record in records if record["policy"] == policy]) == []
    assert lost_checkpoints(path for path, _ in read_saves(ended.stdout)) == []
    shared_memory.assert_none_abandoned(names, GONE_SECONDS)
    if kind == "evaluator":
        assert "evaluator" in killer.kills
        assert killer.longest_recovery_seconds < 30.0
    print(f"{KILLS} kills {Counter(killer.kills)}, recovered within {killer.longest_recovery_seconds:.1f} s")
