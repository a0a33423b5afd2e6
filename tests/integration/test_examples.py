"""What `examples/` shows works as it stands there: the environment, the networks, the algorithm."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from appo.algorithms import cli
from examples.custom_env import STEPS, GridWalk
from examples.custom_model import LeakyCore, LinearPolicy, ResidualEncoder
from examples.replay import AGE
from tests.integration.runs import ROOT, Run, command_line, record, run_command
from tests.integration.test_learning import GOAL, MEMORY
from tests.patience import HANG_SECONDS
from tests.unit.models import custom_parts

GRID = f"{GridWalk.__module__}:{GridWalk.__name__}"
NEARLY_BEST = 0.78  # of 0.833; who takes two steps too many in every episode gets 0.73
SMALL: dict[str, object] = {
    "inference": "serial",
    "use_rnn": False,
    "encoder_mlp_layers": "64,64",
    "hidden_size": 32,
    "rollout": 16,
    "batch_size": 512,
    "ppo_epochs": 2,
    "learning_rate": 0.003,
    "num_envs_per_worker": 32,
}


def path_of(part: type) -> str:
    return f"{part.__module__}:{part.__name__}"


def play_shortest(env: GridWalk, seed: int) -> tuple[float, int, dict[str, object]]:
    """Return, length and last info of an episode that goes to the goal's row, then to its column."""
    obs, info = env.reset(seed=seed)
    total = 0.0
    for length in itertools.count(1):
        way = np.rint((obs[2:] - obs[:2]) * (env.size - 1))
        step = np.sign(way) * [1, way[0] == 0]
        obs, reward, terminated, truncated, info = env.step(np.int64((step == STEPS).all(axis=1).argmax()))
        total += reward
        if terminated or truncated:
            return total, length, info
    raise AssertionError


def test_grid_walk_keeps_the_contract_of_gymnasium() -> None:
    env = GridWalk()
    check_env(env, skip_render_check=True)
    for seed in range(50):
        total, length, info = play_shortest(env, seed)
        assert total == pytest.approx(1.0 - GridWalk.STEP_COST * length)
        assert info == {"episode_extra_stats": {"arrived": 1.0, "detour": 0}, "true_reward": 1.0}


def test_the_best_return_of_grid_walk_is_that_of_all_pairs_of_cells() -> None:
    env = GridWalk(size=4)
    cells = list(itertools.product(range(env.size), repeat=2))
    ways = [abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in itertools.permutations(cells, 2)]
    assert env.best_return == pytest.approx(1.0 - GridWalk.STEP_COST * fmean(ways))


def test_grid_walk_reports_who_does_not_arrive() -> None:
    env = GridWalk(max_steps=3)
    env.reset(seed=next(seed for seed in range(99) if play_shortest(GridWalk(), seed)[1] > 3))
    rewards, infos = [], []
    for action in (0, 1, 0):
        _, reward, terminated, truncated, info = env.step(np.int64(action))
        rewards.append(reward)
        infos.append(info)
    assert (terminated, truncated) == (False, True)
    assert rewards == [-GridWalk.STEP_COST] * 3
    assert infos[:2] == [{}, {}]
    assert infos[2]["true_reward"] == infos[2]["episode_extra_stats"]["arrived"] == 0.0


def test_grid_walk_is_learned_nearly_to_its_optimum(tmp_path: Path) -> None:
    run = record(tmp_path / "run", **SMALL, env=GRID, train_until_return=NEARLY_BEST, train_for_env_steps=100_000)
    assert NEARLY_BEST <= run.reached_return <= GridWalk().best_return + 0.05
    assert run.series("stats/arrived/max")[-1] == 1.0
    assert 0.8 <= run.series("stats/true_reward/mean")[-1] <= 1.0


@pytest.mark.parametrize(
    ("part", "flags"),
    [
        (ResidualEncoder, {"use_rnn": True}),
        (ResidualEncoder, {"actor_critic_share_weights": False}),
        (LeakyCore, {"recurrence": 8}),
        (LeakyCore, {"actor_critic_share_weights": False}),
        (LinearPolicy, {}),
    ],
)
def test_custom_networks_reproduce_in_learning_what_they_did_in_acting(
    tmp_path: Path, part: type, flags: dict[str, object]
) -> None:
    frozen = {"learning_rate": 0.0, "verify_reproduction": True, "train_for_env_steps": 2_000, "env": "toy/Memory-v0"}
    run = record(tmp_path / "run", **SMALL | frozen | flags, encoder_custom=path_of(part))
    assert run.reported("train/reproduction_error")[-1] < 1e-5
    assert run.reported("train/reproduction_steps")[-1] == run.learners[0]["samples"] > 0


@pytest.mark.slow
def test_a_custom_model_acts_in_processes_of_its_own_and_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = SMALL | {"inference": "central", "num_workers": 1, "train_for_env_steps": 2_000, "env": GRID}
    run = record(tmp_path / "run", **flags, encoder=path_of(LinearPolicy))
    assert set(run.weights()) == {
        "policy.weight", "policy.bias", "critic.0.weight", "critic.0.bias", "value_head.weight", "value_head.bias",
        "scalings.0.mean", "scalings.0.inv_std", "return_mean", "return_std",
    }  # fmt: skip
    capsys.readouterr()
    played = ["--experiment=run", f"--train_dir={tmp_path}", "--max_num_episodes=3", "--seed=1", "--json"]
    assert cli.run("enjoy", played) == 0
    assert json.loads(capsys.readouterr().out)["num_episodes"] == 3


def test_a_network_that_breaks_its_contract_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    path = path_of(custom_parts.SumFromZero)
    run = run_command(tmp_path / "run", **SMALL, env="CartPole-v1", encoder_custom=path)
    assert run.returncode == 2
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: --encoder_custom={path} failed: ValueError: its output of unroll differs by ")
    assert "Traceback" not in run.stdout + run.stderr
    assert not list(run.directory.glob("checkpoint_*"))


@pytest.mark.slow
def test_the_leaky_core_solves_a_memory_task(tmp_path: Path) -> None:
    run = record(
        tmp_path / "run",
        **MEMORY,
        encoder_custom=path_of(LeakyCore),
        train_until_return=GOAL,
        train_for_env_steps=150_000,
    )
    assert run.reached_return >= GOAL


@pytest.mark.slow
@pytest.mark.parametrize("part", [ResidualEncoder, LinearPolicy])
def test_custom_networks_learn_cart_pole(tmp_path: Path, part: type) -> None:
    flags = {"env": "CartPole-v1", "inference": "serial", "hidden_size": 64, "encoder_custom": path_of(part)}
    run = record(tmp_path / "run", **flags, train_until_return=195, train_for_env_steps=300_000)
    assert run.reached_return >= 195


@pytest.mark.slow
def test_replay_trains_twice_on_every_batch_but_the_youngest(tmp_path: Path) -> None:
    flags = SMALL | {"env": GRID, "train_for_env_steps": 20_000, "num_batches_per_iteration": 2}
    done = subprocess.run(
        [sys.executable, "train_appo.py", "--algo=examples.replay:Replay", *command_line(tmp_path / "run", **flags)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    totals = Run(tmp_path / "run").totals
    per_batch = 2 * 2  # minibatches and epochs
    assert totals["batches"] > AGE
    assert totals["updates"] == per_batch * (2 * totals["batches"] - AGE)
    assert totals["samples"] <= totals["batches"] * 2 * 512
