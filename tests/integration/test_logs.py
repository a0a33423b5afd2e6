"""What is logged where, by --log_level."""

from pathlib import Path

import pytest

from tests.integration.runs import train

COUNTER = {
    "env": "toy/Counter-v0",
    "env_vectorization": "python",
    "use_rnn": False,
    "encoder_mlp_layers": "16",
    "rollout": 8,
    "batch_size": 64,
    "num_envs_per_worker": 4,
    "worker_num_splits": 1,
    "train_for_env_steps": 600,
}


@pytest.mark.slow
def test_the_level_holds_for_main_and_workers(tmp_path: Path) -> None:
    common = COUNTER | {"inference": "local", "num_workers": 2, "max_parallel_starts": 1}
    loud = train(tmp_path / "loud", **common, log_level="debug")
    for actor in (0, 1):
        log = (loud.directory / f"logs/actor_{actor}.log").read_text()
        assert [log.count(f"env {env} of 4 has begun, with seed ") for env in range(4)] == [1] * 4
    assert "finished: " in loud.stdout
    quiet = train(tmp_path / "quiet", **common, log_level="warning")
    assert quiet.stdout == quiet.stderr == ""
    assert "has begun" not in (quiet.directory / "logs/actor_0.log").read_text()


@pytest.mark.slow
def test_statistics_of_the_environment_are_warned_of_once(tmp_path: Path) -> None:
    env = "tests.unit.envs.test_wrappers:normalized_both"
    done = train(tmp_path / "own", **COUNTER | {"env": env}, inference="serial", log_level="warning")
    [line] = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if "normalizes" in line]
    assert "(NormalizeReward, NormalizeObservation)" in line
