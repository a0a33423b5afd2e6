"""Batches of PPO that stream outlive whatever is killed inside them: nothing of a gradient that was begun is left."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from appo.algorithms.run.folder import saved_flags
from appo.algorithms.runtime.learning.batches import Batch
from appo.utils import checkpoint_files
from appo.utils.metrics import read_metrics
from tests import shared_memory
from tests.chaos.invariants import (
    find_falling,
    find_unaccounted,
    lost_checkpoints,
    read_saves,
    tolerance,
)
from tests.chaos.runs import Ended, TrainingRun, outlive
from tests.chaos.streaming import ALGORITHM, TESTIMONY, Replay, read_lives
from tests.chaos.witness import BONUS, EPISODE_STEPS, broken_steps, columns, traces

GONE_SECONDS = 25.0
PARTS, BATCH = 16, 256  # eight rounds of the four environments
FLAGS = (
    f"--algo={ALGORITHM}",
    f"--batch_size={BATCH}",
    "--save_every_sec=1",
    "--keep_checkpoints=1000000",
    "--save_best_after=-1",
    "--normalize_input=False",
    "--learning_rate=0.01",
    f"--train_until_return={BONUS + 0.7 * EPISODE_STEPS}",
)
STREAM = (f"--microbatch_size={BATCH // PARTS}", "--normalize_advantages=running")
POLICIES = 2
POPULATION = (
    f"--num_policies={POLICIES}",
    "--with_pbt",
    "--pbt_start_mutation=300",
    "--pbt_period_env_steps=500",
    "--pbt_min_episodes=2",
    "--pbt_replace_reward_gap=0",
    "--stats_avg=5",
)
WHOLE = ("--ppo_epochs=2", "--batch_size=64", "--num_batches_per_iteration=4")


def check_columns(batches: Iterable[Batch]) -> None:
    """Nothing is trained on twice, and nothing is torn."""
    used: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        trace, valid = traces(batch.obs["obs"].numpy()), batch.valid.numpy()
        assert broken_steps(trace, batch.first.numpy(), valid) == 0
        used.update(columns(trace, valid))
    assert [column for column, times in used.items() if times > 1] == []


def versions_of(parts: Iterable[Batch]) -> set[int]:
    """The versions that acted in a batch."""
    return {version for part in parts for version in part.policy_version[part.valid].unique().tolist()}


def storm(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
    *flags: str,
    only: tuple[str, ...] = ("",),
    copies: int = 0,
) -> tuple[Path, Ended, Counter[str]]:
    """A run to its goal, that many of whose processes are killed before; its folder, its end, and who was killed."""
    gate, names = folder / "gate", shared_memory.names()
    folder_of_witnesses(folder).mkdir()
    monkeypatch.setenv(TESTIMONY, str(folder_of_witnesses(folder)))
    with TrainingRun(folder, *FLAGS, *flags, "--env_kwargs", f"gate={gate}", env="tests.chaos.witness:Clues") as run:
        ended, killer = outlive(run, gate, kills, GONE_SECONDS, only, copies)
    shared_memory.assert_none_abandoned(names, GONE_SECONDS)
    records = read_metrics(run.directory / "metrics.jsonl")
    for policy in {record["policy"] for record in records}:
        assert find_falling([record for record in records if record["policy"] == policy]) == []
    assert lost_checkpoints(path for path, _ in read_saves(ended.stdout)) == []
    return run.directory, ended, Counter(killer.kills)


def folder_of_witnesses(folder: Path) -> Path:
    return folder / "testimony"


def replay_of(folder: Path, directory: Path, policy: int = 0) -> Replay:
    """Learn again what a policy was told, and compare every checkpoint of it with that."""
    replay = Replay(saved_flags(directory))
    for life in read_lives(folder_of_witnesses(folder), policy):
        replay.live(life)
    check_columns(part for parts in (*replay.whole, *replay.broken_off) for part in parts)
    found = sorted((directory / f"checkpoint_p{policy}").glob("ckpt_*"))
    assert len(found) > 1
    for path in found:
        files = checkpoint_files.contents(path)
        expected = replay.files(json.loads(files["state.json"])["version"])
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert files[name] == expected[name], (path, name)
    return replay


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("placement", "only", "kills", "flags"),
    [
        ("local", ("learner",), 4, STREAM),
        ("central", ("",), 60, STREAM),
        ("local", ("",), 60, STREAM),
        ("central", ("",), 30, WHOLE),
    ],
)
def test_what_was_begun_when_a_process_is_killed_is_dropped_and_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    only: tuple[str, ...],
    kills: int,
    flags: tuple[str, ...],
) -> None:
    directory, _, killed = storm(tmp_path, monkeypatch, kills, f"--inference={placement}", *flags, only=only)
    totals = json.loads((directory / "status.json").read_text())["totals"]
    replay = replay_of(tmp_path, directory)
    assert find_unaccounted({}, totals, slack=tolerance(kills)) == []
    # Every batch that was whole counts, once; one counts besides whose learner died before it said that it had it.
    sizes = [sum(int(part.valid.sum()) for part in parts) for parts in replay.whole]
    assert 0 <= totals["samples"] - sum(sizes) <= kills * BATCH
    assert totals["samples"] - totals["lost"] == replay.reached[max(replay.reached)].samples
    assert [versions_of(parts) for parts in replay.whole if len(versions_of(parts)) > 1] == []
    assert bool(replay.broken_off) == (flags is STREAM)
    assert replay.adopted == 0
    print(
        f"{kills} kills {killed}: {totals['restarts']} restarts, {len(replay.whole)} batches,"
        f" {len(replay.broken_off)} broken off, {totals['lost']} of {totals['samples']} lost,"
        f" {totals['discarded']} discarded, books: {find_unaccounted({}, totals) or 'exact'}"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_that_adopts_the_weights_of_another_drops_the_gradient_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are added while orders of main arrive: what is adopted is trained on from its first part on."""
    flags = "--inference=local", *STREAM, *POPULATION
    directory, _, _ = storm(tmp_path, monkeypatch, 8, *flags, only=("learner",), copies=3)
    replays = [replay_of(tmp_path, directory, policy) for policy in range(POLICIES)]
    assert sum(replay.adopted for replay in replays) >= 2
    assert all(replay.broken_off for replay in replays)
