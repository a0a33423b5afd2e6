"""Playing against past versions: whole runs, resumed ones, and matches between checkpoints."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from appo.algorithms import cli
from appo.algorithms.run.config import parse_train
from appo.algorithms.run.placement import Sampling, topology_of
from appo.algorithms.runtime.messages import MatchResults
from appo.algorithms.runtime.topology import Topology
from appo.utils import checkpoint_files
from appo.utils.errors import UsageError
from benchmarks.scores import self_play
from tests.integration.enjoying import copied
from tests.integration.runs import Recorded, record

ROCK = "toy/RockPaperScissors-v0"
ROUNDS, POOL = 3, 2
GAMES: dict[str, Any] = {
    "env": ROCK,
    "env_kwargs": json.dumps({"num_rounds": ROUNDS}),
    "self_play": True,
    "self_play_period_env_steps": 200,
    "self_play_pool_size": POOL,
    "self_play_past_share": 0.8,
    "self_play_opponents": "hard",
    "use_rnn": True,
    "hidden_size": 8,
    "encoder_mlp_layers": 8,
    "rollout": 8,
    "batch_size": 64,
    "num_envs_per_worker": 8,
    "num_workers": 1,
    "train_for_env_steps": 1200,
}


def versions_of(directory: Path) -> list[int]:
    """Env steps of the past versions on disk."""
    return sorted(int(path.name[5:]) for path in (directory / "checkpoint_p0" / "past").glob("ckpt_*"))


def results_of(run: Recorded) -> tuple[list[int], np.ndarray, int]:
    """Versions, differences and steps of all games against the past."""
    done = [m for m in run.reports if isinstance(m, MatchResults)]
    played = [version for m in done for version in m.version.tolist()]
    return played, np.concatenate([m.difference for m in done]), sum(m.past_steps for m in done)


@pytest.mark.parametrize(
    ("inference", "env_steps"),
    [
        ("serial", 1200),
        pytest.param("local", 8000, marks=pytest.mark.slow),
        pytest.param("central", 8000, marks=pytest.mark.slow),
    ],
)
def test_past_versions_play_and_only_the_learner_learns(tmp_path: Path, inference: str, env_steps: int) -> None:
    flags = GAMES | {"inference": inference, "learning_rate": 0, "verify_reproduction": True}
    flags |= {"train_for_env_steps": env_steps, "self_play_period_env_steps": env_steps // 6}
    run = record(tmp_path / "run", **flags)
    assert max(run.reported("train/reproduction_error")) < 1e-5  # its steps, recurrent states and versions are its own
    played, differences, past_steps = results_of(run)
    assert set(np.abs(differences).tolist()) <= {2.0 * wins for wins in range(ROUNDS + 1)}
    assert len(set(played)) > POOL  # the pool has changed, and all have played
    collected = sum(totals["collected"] for totals in run.workers.values())
    (learned,) = run.learners.values()
    assert collected == learned["samples"] + learned["discarded"] + learned["in_flight"] + past_steps
    assert 0.15 < past_steps / collected < 0.5
    kept = versions_of(run.directory)
    assert len(kept) == POOL
    assert kept[-1] >= env_steps // 2
    last = run.metrics[-1]
    assert (last["selfplay/pool"], last["selfplay/games"], last["selfplay/past_steps"]) == (
        POOL, len(played), past_steps
    )  # fmt: skip
    assert last["selfplay/win_rate_min"] <= last["selfplay/win_rate"] <= 1


@pytest.mark.slow
def test_a_run_goes_on_with_its_pool(tmp_path: Path) -> None:
    flags = GAMES | {"inference": "serial"}
    before = record(tmp_path / "run", **flags)
    kept = versions_of(before.directory)
    newer = before.directory / "checkpoint_p0" / "past"
    files = {**checkpoint_files.contents(newer / checkpoint_files.checkpoint_name(kept[-1]))}
    state = json.loads(checkpoint_files.read(newer / checkpoint_files.checkpoint_name(kept[-1]), "state.json", 1 << 20))
    files["state.json"] = json.dumps(state | {"env_steps": 10**9}).encode()
    checkpoint_files.save(
        newer, checkpoint_files.checkpoint_name(10**9), files
    )  # a crash has taken back that it was ever learned
    after = record(tmp_path / "run", **(flags | {"train_for_env_steps": before.state()["env_steps"] + 50}))
    assert versions_of(after.directory) == kept
    played, _, _ = results_of(after)
    assert set(played) <= set(kept)
    assert played


@pytest.mark.slow
def test_the_past_of_rock_paper_scissors_chooses_evenly(tmp_path: Path) -> None:
    run = record(tmp_path / "run", **{**self_play.FLAGS, **self_play.CONTENDERS["past"]})
    strategies = np.array(self_play.strategies(run.directory))  # of the second half
    assert strategies.shape == (self_play.VERSIONS, 3)
    assert np.abs(strategies.mean(axis=0) - 1 / 3).max() <= self_play.TOLERANCE


def test_what_cannot_play_against_itself_is_refused() -> None:
    config = parse_train(["--env=CartPole-v1", "--self_play"])
    with pytest.raises(UsageError, match="--self_play needs an environment of several agents; CartPole-v1 has one"):
        topology_of(config, Sampling("serial", 1, 32, 1), num_agents=1)


def test_past_versions_share_a_process() -> None:
    topology = Topology("central", 1, 1, 2, 1, 2, 4, 8, num_past=3)
    names = {name: [str(worker) for worker in workers] for name, workers in topology.processes().items()}
    assert names == {
        "learner_0": ["learner_0"],
        "policy_worker_0.0": ["policy_worker_0.0"],
        "policy_worker_0.1": ["policy_worker_0.1"],
        "policy_worker_1.0": ["policy_worker_1.0", "policy_worker_2.0", "policy_worker_3.0"],
        "actor_0": ["actor_0"],
    }


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose policies always choose the same: `rock`, and `both`: first rock, at 99 env steps paper."""
    train_dir = tmp_path_factory.mktemp("players")
    flags = {**GAMES, "self_play": False, "use_rnn": False, "inference": "serial", "train_for_env_steps": 64}
    run = record(train_dir / "rock", **flags)
    saved = run.checkpoint()
    shutil.rmtree(run.directory / "checkpoint_p0")
    shutil.copytree(run.directory, train_dir / "both")
    for name, env_steps, choice in (("rock", 64, 0), ("both", 64, 0), ("both", 99, 1)):
        _choose(saved, train_dir / name / "checkpoint_p0", env_steps, choice)
    return train_dir


def _choose(saved: Mapping[str, bytes], parent: Path, env_steps: int, choice: int) -> None:
    """Save a checkpoint that always makes the same choice."""
    weights = load(saved["model.safetensors"])
    (bias,) = [name for name in weights if name.startswith("policy_head") and name.endswith("bias")]
    weights[bias] = np.where(np.arange(3) == choice, 100.0, 0.0).astype(np.float32)
    state = json.loads(saved["state.json"]) | {"env_steps": env_steps}
    files = {
        **saved, "model.safetensors": save(weights), "state.json": json.dumps(state).encode()
    }  # fmt: skip
    checkpoint_files.save(parent, checkpoint_files.checkpoint_name(env_steps), files)


def matched(capfd: pytest.CaptureFixture[str], train_dir: Path, *words: str) -> dict[str, Any]:
    assert cli.run("match", [*words, f"--train_dir={train_dir}", "--episodes=10", "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_paper_beats_rock(players: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = matched(capfd, players, "both", "rock", "--seed=3")
    assert (found["wins"], found["draws"], found["losses"], found["seed"], found["env"]) == (10, 0, 0, 3, ROCK)
    assert found["difference"] == {"mean": 2.0 * ROUNDS, "low": 2.0 * ROUNDS, "high": 2.0 * ROUNDS}
    assert found["win_rate"] == pytest.approx({"mean": 1.0, "low": 0.7225, "high": 1.0}, abs=1e-4)
    assert (found["a"]["env_steps"], found["a"]["checkpoint"]) == (
        99, str(players / "both" / "checkpoint_p0" / "ckpt_000000000099")
    )  # fmt: skip
    assert matched(capfd, players, "rock", "both")["losses"] == 10
    for near in (0, 64, 80):  # kept are 64, both rock, and 99
        found = matched(capfd, players, f"both:{near}", "rock")
        assert (found["draws"], found["a"]["env_steps"]) == (10, 64)


def test_a_match_is_said_in_words(players: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run("match", ["rock", "both:99", f"--train_dir={players}", "--episodes=4", "--seed=1"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[1:] == [
        "B: both at 99 env steps",
        f"4 episodes of {ROCK}, seed 1: A wins 0, draws 0, loses 4",
        "win rate of A 0.000 [0.000, 0.490], return of A minus that of B -6.000 [-6.000, -6.000] (95 % intervals)",
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("rock", "rock"),
        ("rock", "rock:3000"),
        ("rock:1", "rock:latest"),
        ("rock", "{}/rock/../rock:7"),
        ("linked", "rock"),
        ("linked:best", "linked/../rock:3000"),
    ],
)
def test_a_policy_does_not_play_itself(
    players: Path, tmp_path: Path, a: str, b: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rock, linked = tmp_path / "rock", tmp_path / "linked"
    shutil.copytree(players / "rock", rock)
    shutil.copytree(players / "rock" / "checkpoint_p0", rock / "checkpoint_p0" / "best")
    linked.symlink_to(rock)
    words = [a, b.format(tmp_path), f"--train_dir={tmp_path}", "--policy_b=0"]
    assert cli.run_command(lambda: cli.run("match", words)) == UsageError.exit_code
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("error: A and B have the same weights, and a match against itself says nothing: ")
    assert "ckpt_000000000064" in printed.err


def test_who_cannot_play_is_refused(
    players: Path, runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shifts, alone = copied(runs, "shifts", tmp_path, "/600"), copied(runs, "counter", tmp_path, "/600")
    rock = str(players / "rock")
    for words, said in (
        ([rock, str(shifts)], "have different observations"),
        ([str(alone), rock], "a match needs an environment of several agents; toy/Counter-v0 has one"),
        ([rock, "nobody"], "there is no run nobody"),
    ):
        assert cli.run_command(lambda words=words: cli.run("match", words)) == UsageError.exit_code  # type: ignore[misc]
        assert said in capfd.readouterr().err
