"""Learning from datasets beside what is played, Q-learning from datasets alone, episodes that a function changes."""

from pathlib import Path

import numpy as np
import pytest

from appo.algorithms import cli
from tests.integration.balancing import STEPS
from tests.integration.enjoying import enjoyed
from tests.integration.runs import Run, command_line
from tests.integration.test_offline import INPUT, refused
from tests.integration.test_offline import SMALL as CLONING

SMALL: dict[str, object] = {
    "env": "CartPole-v1",
    "inference": "serial",
    "num_workers": 1,
    "num_envs_per_worker": 8,
    "worker_num_splits": 1,
    "rollout": 16,
    "batch_size": 128,
    "encoder_mlp_layers": 32,
    "device": "cpu",
}
OF_ALGORITHM: dict[str, dict[str, object]] = {
    "APPO": {"num_batches_per_iteration": 1, "ppo_epochs": 1},
    "APEX": {"learning_starts": 500, "replay_capacity": 5_000, "replay_ratio": 2, "target_update_interval": 50},
}
Q_LEARNING: dict[str, object] = {
    "algo": "APEX",
    "input": INPUT,
    "inference": "serial",
    "encoder_mlp_layers": 32,
    "rollout": 16,
    "batch_size": 128,
    "learning_rate": 3e-3,
    "adam_eps": 1e-6,
    "target_update_interval": 20,
    "device": "cpu",
}


def train(directory: Path, **flags: object) -> Run:
    """Train as `appo train` does, in this process."""
    assert cli.run_command(lambda: cli.run("train", command_line(directory, **flags))) == 0
    return Run(directory)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that a run has written, with no column that is not needed."""
    folder = tmp_path_factory.mktemp("played")
    flags = SMALL | OF_ALGORITHM["APPO"] | {"output": folder / "set", "train_for_env_steps": 2_000}
    flags |= {"output_columns": "logits,log_prob"}
    train(folder / "run", **flags)
    return folder / "set"


@pytest.mark.parametrize("algo", ["APPO", "APEX"])
def test_batches_are_mixed_with_what_is_played(tmp_path: Path, played: Path, algo: str) -> None:
    """Samples are what is played; of what is used a half is read. A later start goes on."""
    flags = SMALL | OF_ALGORITHM[algo] | {"algo": algo, "input": f"{{sampler:0.5,{played}:0.5}}"}
    for budget in (1_500, 3_000):
        run = train(tmp_path / "run", **flags | {"train_for_env_steps": budget})
        assert budget <= run.totals["samples"] < budget + 200
    totals = run.totals
    assert run.metrics[-1]["input/share"] == pytest.approx(0.5, abs=0.06)  # a column has steps that are none
    assert totals["samples"] == totals["env_steps"]
    if algo == "APPO":  # what is played is used once
        assert totals["used"] == pytest.approx(2 * totals["samples"], rel=0.1)
    else:
        assert run.metrics[-1]["input/share"] == 0.5
        assert 1.7 < run.metrics[-1]["replay/uses_per_step"] <= 2  # of those that were played
    assert np.isfinite(run.metrics[-1]["train/loss"])


@pytest.mark.parametrize("cql_alpha", [0, 1])
def test_a_q_network_learns_from_a_dataset_alone(
    tmp_path: Path, cql_alpha: float, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", **Q_LEARNING | {"cql_alpha": cql_alpha, "train_for_env_steps": 40_000})
    assert "no actors, learning on cpu" in "".join(capfd.readouterr())
    totals = run.totals
    assert 40_000 <= totals["samples"] == totals["used"] == totals["env_steps"] < 40_128
    assert totals["updates"] == totals["batches"] == -(-40_000 // 128)
    assert "replay/size" not in run.metrics[-1]
    gap = run.metrics[-1]["train/conservative_gap"]
    if not cql_alpha:
        assert gap == 0
        return
    assert 0 < gap < 0.6
    play = ("--experiment=run", "--env=CartPole-v1", "--max_num_episodes=10", "--seed=1")
    assert enjoyed(capfd, tmp_path, *play)["mean"] > 100


def test_a_later_start_of_a_q_network_reads_on(tmp_path: Path) -> None:
    ends = {}
    for name, budgets in (("whole", (3_200,)), ("halves", (1_600, 3_200))):
        for budget in budgets:
            flags = {"shuffle_buffer_size": 700, "cql_alpha": 0.5, "train_for_env_steps": budget * 2}
            run = train(tmp_path / name, **Q_LEARNING | flags)
        ends[name] = run.weights()
        assert run.totals["samples"] > 2 * STEPS
    for name, weights in ends["whole"].items():
        np.testing.assert_array_equal(weights, ends["halves"][name])


def test_episodes_are_learned_as_a_function_leaves_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = CLONING | {"algo": "BC", "train_for_env_steps": 6_400}
    flags |= {"postprocess_inputs": "tests.integration.balancing:reversed_actions"}
    run = train(tmp_path / "run", **flags)
    assert run.metrics[-1]["train/agreement"] > 0.8  # with the other action
    capfd.readouterr()
    play = ("--experiment=run", "--env=CartPole-v1", "--max_num_episodes=10", "--seed=1")
    assert enjoyed(capfd, tmp_path, *play)["mean"] < 15  # the pole is pushed over
    words = [f"--train_dir={tmp_path}", "--algo=BC", f"--input={INPUT}", "--train_for_env_steps=100"]
    assert refused(capfd, *words, "--postprocess_inputs=nowhere:at_all").startswith("--postprocess_inputs=nowhere")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("--algo=APPO", f"--input={INPUT}"),
            "--input: APPO learns from what it plays too: mix with sampler, or clone",
        ),
        (("--algo=APPO", f"--input=sampler:0.5,{INPUT}:0.5"), "--env is required with --algo=APPO"),
        (
            ("--env=toy/Counter-v0", "--env_kwargs=autoreset_mode=SameStep", f"--input=sampler:0.5,{INPUT}:0.5"),
            "--input: this vector environment resets in the step that ends an episode",
        ),
        (("--algo=APEX", f"--input=sampler,{INPUT}"), "--input: say what share of a batch comes from where"),
        (("--algo=APEX", f"--input={INPUT}", "--output=there"), "--output: no environment is played with --algo=APEX"),
    ],
)
def test_input_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(capfd, f"--train_dir={tmp_path}", *words).startswith(error)


def test_probabilities_are_needed_where_they_are_learned_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = SMALL | OF_ALGORITHM["APPO"] | {"input": f"sampler:0.5,{INPUT}:0.5", "train_for_env_steps": 500}
    assert cli.run_command(lambda: cli.run("train", command_line(tmp_path / "run", **flags))) == 2
    assert "--input: an episode lacks the column logits" in capfd.readouterr().err
