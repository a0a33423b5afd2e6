"""Real environments through all processes: all scenarios of VizDoom, many Atari games, one of each other family."""

import importlib
import random
from pathlib import Path

import gymnasium
import pytest

from appo.envs.make import FAMILIES
from tests import shared_memory
from tests.integration.runs import run_command

SHORT: dict[str, object] = {
    "num_workers": 2,
    "num_envs_per_worker": 1,
    "rollout": 16,
    "batch_size": 64,
    "num_batches_per_iteration": 1,
    "ppo_epochs": 1,
    "hidden_size": 32,
    "inference": "central",
    "decorrelate_experience_max_seconds": 0,
}
# Two actors of 112 steps each and more: batches are full only when both have handed over.
NUM_SAMPLES = 256


def ids_of(package: str, prefix: str, suffix: str) -> list[str]:
    """The ids that a package registers; none where it is not installed, so that its tests are skipped."""
    try:
        importlib.import_module(package)
    except ImportError:
        return []
    return sorted(name for name in gymnasium.registry if name.startswith(prefix) and name.endswith(suffix))


SCENARIOS = ids_of("vizdoom.gymnasium_wrapper", "Vizdoom", "-v1")
GAMES = random.Random(1).sample(games, 20) if (games := ids_of("ale_py", "ALE/", "-v5")) else []
ONE_OF_EACH = {
    **{family.examples[0]: family.package for family in FAMILIES},
    "MiniGrid-MemoryS7-v0": "minigrid",
    "classic/rps-v2": "pettingzoo",
    "dm_control/walker-walk-v0": "dm_control",
    "envpool:CheetahRun-v1": "envpool",
    "envpool:CartPole-v1": "envpool",
}


QUICK = ("ale_py",)


def run_through_all_processes(directory: Path, env: str) -> None:
    frames = 4 if env.startswith(("ALE/", "Vizdoom", "envpool:Pong")) else 1
    before = shared_memory.names()
    run = run_command(directory, env=env, train_for_env_steps=NUM_SAMPLES * frames, **SHORT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert run.totals["samples"] >= NUM_SAMPLES
    assert run.totals["env_steps"] == run.totals["samples"] * frames
    assert run.checkpoint()
    shared_memory.assert_none_abandoned(before, seconds=10.0)


@pytest.mark.parametrize(
    ("env", "package"),
    [
        pytest.param(env, package, marks=[] if package in QUICK else pytest.mark.slow)
        for env, package in ONE_OF_EACH.items()
    ],
)
def test_one_of_each_family(env: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    run_through_all_processes(tmp_path / "run", env)


@pytest.mark.slow
@pytest.mark.parametrize("env", SCENARIOS)
def test_every_scenario_of_vizdoom(env: str, tmp_path: Path) -> None:
    run_through_all_processes(tmp_path / "run", env)


@pytest.mark.slow
@pytest.mark.parametrize("env", GAMES)
def test_random_games_of_atari(env: str, tmp_path: Path) -> None:
    run_through_all_processes(tmp_path / "run", env)
